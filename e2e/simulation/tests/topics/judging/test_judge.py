"""The judge reports each kind of bad history under its name, and accepts the good one beside it.

After an unknown outcome, a message need not be delivered any more, and may be.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bindery_simulation.topics.judging.history import (
    WHOLE_ENTRY,
    Acknowledge,
    Call,
    Copied,
    Delivered,
    History,
    Instant,
    Key,
    Kind,
    Leave,
    Outcome,
    Payload,
    Produce,
    ReadCopies,
    Receive,
    Request,
    Retry,
    Return,
    Rules,
    Seek,
    Subscribe,
    SubscriptionId,
    Trimmed,
    Unsubscribe,
    Written,
)
from bindery_simulation.topics.judging.judge import INVARIANTS, judge

TOPIC = "t"
SUB = SubscriptionId(TOPIC, "s")
DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN
FIRST, SECOND, THIRD = (0, 0, WHOLE_ENTRY), (0, 1, WHOLE_ENTRY), (0, 2, WHOLE_ENTRY)


class Story:
    """Writes a history: calls that are sent, started and settled one after the other, `step_s` seconds apart."""

    def __init__(self, kind: Kind = Kind.SHARED) -> None:
        self.now_s = 0.0
        self.step_s = 1.0
        self.history = History(lambda: self.now_s)
        self.kind = kind
        self.incarnation = 1
        self.subscribed = self.call(Subscribe(SUB), result=True)

    def begin(self, request: Request) -> Call:
        self.now_s += self.step_s
        call = self.history.begin("client", request)
        call.broker, call.incarnation = "broker", self.incarnation
        call.started = self.history.instant()
        return call

    def end(self, call: Call, outcome: Outcome = DONE, result: object = None) -> Call:
        call.outcome, call.result = outcome, result
        if outcome is not UNKNOWN:
            call.settled = self.history.instant()
        return call

    def call(self, request: Request, outcome: Outcome = DONE, result: object = None) -> Call:
        return self.end(self.begin(request), outcome, result)

    def open(self, incarnation: int) -> None:
        self.history.topic_opened(TOPIC, incarnation, "broker")
        self.incarnation = incarnation

    def produce(
        self, *keys: Key, outcome: Outcome = DONE, routing: str | None = None, due_s: float | None = None
    ) -> Call:
        messages = tuple(Payload(name(key), routing, due_s) for key in keys)
        return self.call(Produce(TOPIC, messages), outcome, keys if outcome is DONE else None)

    def receive(self, *keys: Key, consumer: str = "c", counts: Sequence[int] = (), **fields: Any) -> Call:
        fields = {"ack_timeout_s": 100.0, "session_ttl_s": 1.0, **fields}
        found = tuple(
            Delivered(key, name(key), count) for key, count in zip(keys, counts or [0] * len(keys), strict=True)
        )
        return self.call(Receive(SUB, consumer, self.kind, **fields), result=found)

    def ack(self, *keys: Key, outcome: Outcome = DONE, cumulative: bool = False) -> Call:
        return self.call(Acknowledge(SUB, keys, cumulative), outcome)

    def move(self, *keys: Key, outcome: Outcome = DONE) -> Call:
        return self.call(Retry(SUB, keys), outcome, keys if outcome is DONE else None)

    def copies(self, *keys: Key, stored_at_s: float = 1000.0, texts: Sequence[str] = ()) -> Call:
        found = tuple(Copied(key, text, stored_at_s) for key, text in zip(keys, texts or map(name, keys), strict=True))
        return self.call(ReadCopies(SUB), result=found)

    def seek(self, to: Key | None, outcome: Outcome = DONE, *, earliest: bool = True, result: Any = None) -> Call:
        position = result or (to[:2] if to is not None else (0, 0))
        return self.call(Seek(SUB, to, earliest), outcome, position if outcome is DONE else None)

    def trim(self, *ledgers: int) -> None:
        self.history.trimmed.append(Trimmed(self.history.instant(), TOPIC, ledgers))

    def breaches(self, **rules: Any) -> list[str]:
        """Return the names of the violated invariants."""
        return list(dict.fromkeys(breach.invariant for breach in judge(self.history, Rules(**rules))))


def name(key: Key) -> str:
    return "m" + ".".join(map(str, key))


def told(story: Story) -> Story:
    """Receive and acknowledge three messages."""
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST, SECOND, THIRD)
    story.ack(FIRST, SECOND, THIRD)
    return story


@pytest.mark.parametrize("kind", Kind)
def test_a_good_history_has_no_breach(kind: Kind) -> None:
    assert told(Story(kind)).breaches() == []


def test_every_invariant_has_a_rule_with_its_meaning() -> None:
    assert len(INVARIANTS) == 18
    assert all(rule.__doc__ for rule in INVARIANTS.values())


# --- acknowledged-is-delivered ----------------------------------------------------------------------------------------


def test_a_stored_message_must_be_delivered() -> None:
    story = told(Story())
    story.produce((0, 3, WHOLE_ENTRY))
    assert story.breaches() == ["acknowledged-is-delivered"]


def test_a_message_of_unknown_outcome_need_not_be_delivered() -> None:
    story = told(Story())
    story.produce((0, 3, WHOLE_ENTRY), outcome=UNKNOWN)
    assert story.breaches() == []


def test_a_message_must_be_delivered_until_its_acknowledgement_is_attempted() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST)
    assert story.breaches() == ["acknowledged-is-delivered"]
    story.ack(FIRST, outcome=UNKNOWN)
    assert story.breaches() == []


def test_a_deleted_subscription_is_owed_nothing() -> None:
    story = Story()
    story.produce(FIRST)
    story.call(Unsubscribe(SUB), UNKNOWN)
    assert story.breaches() == []


def test_a_subscription_without_an_answer_to_its_creation_is_owed_nothing() -> None:
    story = Story()
    story.subscribed.outcome = UNKNOWN
    story.produce(FIRST)
    assert story.breaches() == []


def test_a_subscription_at_the_end_is_not_owed_what_was_sent_before() -> None:
    story = Story()
    late = SubscriptionId(TOPIC, "late")
    story.produce(FIRST)
    story.call(Subscribe(late, earliest=False), result=True)
    story.receive(FIRST)
    story.ack(FIRST)
    assert story.breaches() == []
    early = SubscriptionId(TOPIC, "early")
    story.call(Subscribe(early), result=True)
    assert story.breaches() == ["acknowledged-is-delivered"]


def test_a_seek_forwards_may_skip_messages() -> None:
    story = Story()
    story.produce(FIRST, SECOND)
    story.seek(SECOND, UNKNOWN)
    story.receive(SECOND)
    story.ack(SECOND)
    assert story.breaches() == []


# --- no-delivery-after-durable-ack ------------------------------------------------------------------------------------


def test_an_acknowledged_message_must_not_be_delivered_again() -> None:
    story = told(Story())
    story.receive(SECOND)
    assert story.breaches() == ["no-delivery-after-durable-ack"]


def test_a_later_owner_must_not_deliver_it_either() -> None:
    story = told(Story())
    story.open(2)
    story.receive(SECOND)
    assert story.breaches() == ["no-delivery-after-durable-ack"]


def test_a_stale_owner_may_deliver_what_its_successor_has_acknowledged() -> None:
    story = Story()
    story.produce(FIRST)
    story.open(2)
    story.receive(FIRST)
    story.ack(FIRST)
    story.incarnation = 1
    story.receive(FIRST)
    assert story.breaches() == []


def test_an_acknowledgement_of_unknown_outcome_forbids_nothing() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST, ack_timeout_s=0.5)
    story.ack(FIRST, outcome=UNKNOWN)
    story.receive(FIRST)
    assert story.breaches() == []


def test_a_cumulative_acknowledgement_covers_earlier_messages_and_batch_indexes() -> None:
    story = Story(Kind.EXCLUSIVE)
    batch = [(0, 1, index) for index in range(3)]
    story.produce(FIRST, *batch)
    story.receive(FIRST, *batch)
    story.ack(batch[1], cumulative=True)
    story.call(Return(SUB, (batch[2],)))
    story.receive(batch[2])
    story.ack(batch[2])
    assert story.breaches() == []
    story.receive(batch[1])
    assert "no-delivery-after-durable-ack" in story.breaches()


def test_a_seek_allows_another_delivery() -> None:
    story = told(Story())
    story.seek(SECOND)
    story.receive(SECOND, THIRD)
    story.ack(SECOND, THIRD)
    assert story.breaches() == []


# --- nothing-invented -------------------------------------------------------------------------------------------------


def test_a_message_that_nobody_sent_is_reported() -> None:
    story = told(Story())
    story.receive((0, 9, WHOLE_ENTRY))
    assert story.breaches() == ["nothing-invented"]


def test_a_refused_message_must_not_appear() -> None:
    story = Story()
    story.produce(FIRST, outcome=REFUSED)
    story.receive(FIRST)
    assert story.breaches() == ["nothing-invented"]


def test_a_message_has_one_id() -> None:
    story = told(Story())
    twice = Delivered((5, 0, WHOLE_ENTRY), name(FIRST))
    story.call(Receive(SUB, "c", Kind.SHARED), result=(twice,))
    assert story.breaches() == ["nothing-invented"]


def test_an_id_has_one_message() -> None:
    story = Story()
    story.produce(FIRST)
    story.produce(SECOND, outcome=UNKNOWN)
    story.call(Receive(SUB, "c", Kind.SHARED), result=(Delivered(FIRST, name(SECOND)),))
    story.ack(FIRST)
    assert story.breaches() == ["nothing-invented"]


# --- order ------------------------------------------------------------------------------------------------------------


def test_an_exclusive_consumer_must_not_miss_a_message() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST)
    story.receive(THIRD)
    story.ack(FIRST, SECOND, THIRD)
    assert story.breaches() == ["order-exclusive", "acknowledged-is-delivered"]


def test_an_answer_must_be_in_the_order_of_the_topic() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND)
    story.receive(SECOND, FIRST)
    story.ack(FIRST, SECOND)
    assert story.breaches() == ["order-exclusive"]


def test_an_exclusive_consumer_goes_back_for_a_reason_only() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND)
    story.receive(FIRST, SECOND)
    story.receive(FIRST, SECOND)
    story.ack(FIRST, SECOND)
    assert story.breaches() == ["order-exclusive"]


@pytest.mark.parametrize(
    "reason",
    [Return(SUB, (SECOND,)), Leave(SUB, "c"), Seek(SUB, FIRST), Receive(SUB, "c", Kind.EXCLUSIVE, redeliver=True)],
)
def test_reasons_to_go_back(reason: Request) -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND)
    story.receive(FIRST, SECOND)
    story.call(reason, result=() if isinstance(reason, Receive) else FIRST[:2])
    story.receive(FIRST, SECOND)
    story.ack(FIRST, SECOND)
    assert story.breaches() == []


def test_the_end_of_a_lease_and_a_failed_acknowledgement_are_reasons_to_go_back() -> None:
    for outcome, timeout_s in [(DONE, 0.5), (UNKNOWN, 100.0)]:
        story = Story(Kind.EXCLUSIVE)
        story.produce(FIRST, SECOND)
        story.receive(FIRST, SECOND, ack_timeout_s=timeout_s)
        if outcome is UNKNOWN:
            story.ack(FIRST, outcome=UNKNOWN)
        story.receive(FIRST, SECOND)
        story.ack(FIRST, SECOND)
        assert story.breaches() == []


def test_a_rewind_begins_with_the_first_unacknowledged_message() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST, SECOND, THIRD)
    story.call(Return(SUB, (FIRST,)))
    story.receive(SECOND, THIRD)
    story.ack(FIRST, SECOND, THIRD)
    assert story.breaches() == ["order-exclusive"]


def test_a_repeated_request_gets_its_messages_again() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST, SECOND, request_id="r")
    story.receive(FIRST, SECOND, request_id="r")
    story.receive(THIRD)
    story.ack(FIRST, SECOND, THIRD)
    assert story.breaches() == []


def test_messages_of_a_key_keep_their_order() -> None:
    story = Story(Kind.KEY_SHARED)
    story.produce(FIRST, SECOND, routing="k")
    story.receive(SECOND)
    story.receive(FIRST)
    story.ack(FIRST, SECOND)
    assert story.breaches() == ["order-per-key"]


def test_a_key_is_held_by_one_consumer() -> None:
    story = Story(Kind.KEY_SHARED)
    story.produce(FIRST, SECOND, routing="k")
    story.produce(THIRD, routing="other")
    story.receive(FIRST, consumer="a")
    story.receive(THIRD, consumer="b")
    story.receive(SECOND, consumer="b")
    story.ack(FIRST, SECOND, THIRD)
    assert story.breaches() == ["order-per-key"]


def test_a_key_moves_once_its_messages_are_acknowledged_or_returned() -> None:
    story = Story(Kind.KEY_SHARED)
    story.produce(FIRST, SECOND, THIRD, routing="k")
    story.receive(FIRST, consumer="a")
    story.ack(FIRST)
    story.receive(SECOND, consumer="b")
    story.call(Leave(SUB, "b"))
    story.receive(SECOND, THIRD, consumer="a")
    story.ack(SECOND, THIRD)
    assert story.breaches() == []


def test_a_returned_message_comes_before_later_ones_of_its_key() -> None:
    for returned_first, expected in [(True, []), (False, ["order-per-key"])]:
        story = Story(Kind.KEY_SHARED)
        story.produce(FIRST, SECOND, routing="k")
        story.receive(FIRST)
        story.call(Return(SUB, (FIRST,)), result=(FIRST,))
        if returned_first:
            story.receive(FIRST, SECOND, counts=(1, 0))
        else:
            story.receive(SECOND)
            story.receive(FIRST, counts=(1,))
        story.ack(FIRST, SECOND)
        assert story.breaches() == expected


# --- consumers and leases ---------------------------------------------------------------------------------------------


def test_a_second_consumer_must_wait_for_the_end_of_the_session() -> None:
    for ttl_s, expected in [(50.0, ["one-active-consumer"]), (0.5, [])]:
        story = Story(Kind.EXCLUSIVE)
        story.produce(FIRST, SECOND)
        story.receive(FIRST, consumer="a", session_ttl_s=ttl_s, ack_timeout_s=0.1)
        story.ack(FIRST)
        story.receive(SECOND, consumer="b")
        story.ack(SECOND)
        assert story.breaches() == expected


def test_a_consumer_that_left_is_not_active() -> None:
    story = Story(Kind.FAILOVER)
    story.produce(FIRST, SECOND)
    story.receive(FIRST, consumer="a", session_ttl_s=50.0)
    story.ack(FIRST)
    story.call(Leave(SUB, "a"))
    story.receive(SECOND, consumer="b")
    story.ack(SECOND)
    assert story.breaches() == []


def test_a_failover_consumer_that_joins_may_replace_one_that_stays() -> None:
    for was_there, expected in [(False, []), (True, ["one-active-consumer"])]:
        story = Story(Kind.FAILOVER)
        story.produce(FIRST, SECOND)
        if was_there:
            story.receive(consumer="b", session_ttl_s=50.0)
        story.receive(FIRST, consumer="a", session_ttl_s=50.0)
        story.ack(FIRST)
        story.receive(SECOND, consumer="b")
        story.ack(SECOND)
        assert story.breaches() == expected


def test_what_a_replaced_failover_consumer_held_is_delivered_again() -> None:
    for again, expected in [((FIRST, SECOND), []), ((SECOND,), ["order-exclusive"])]:
        story = Story(Kind.FAILOVER)
        story.produce(FIRST, SECOND)
        story.receive(FIRST, consumer="a", session_ttl_s=50.0)
        story.receive(*again, consumer="b")
        story.ack(FIRST, SECOND)
        assert story.breaches() == expected


def test_a_rewind_for_a_consumer_that_was_active_meanwhile() -> None:
    for joins, expected in [(True, []), (False, ["order-exclusive"])]:
        story = Story(Kind.FAILOVER)
        story.produce(FIRST)
        story.receive(FIRST, consumer="a", session_ttl_s=50.0)
        if joins:
            story.receive(consumer="b")
        story.receive(FIRST, consumer="a", session_ttl_s=50.0)
        story.ack(FIRST)
        assert story.breaches() == expected


RETURNS: dict[str, Callable[[Story], object]] = {
    "nothing": lambda story: None,
    "return": lambda story: story.call(Return(SUB, (SECOND,))),
    "leave": lambda story: story.call(Leave(SUB, "a")),
    "seek": lambda story: story.seek(FIRST),
    "failed": lambda story: story.ack(SECOND, outcome=REFUSED),
    "redeliver": lambda story: story.receive(consumer="a", redeliver=True),
    "stays": lambda story: story.receive(consumer="b"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_a_consumer_that_becomes_active_waits_for_the_former_one(what: str) -> None:
    story = Story(Kind.FAILOVER)
    story.produce(FIRST, SECOND)
    story.receive(FIRST, SECOND, consumer="a", session_ttl_s=50.0)
    story.step_s = 0.1
    RETURNS[what](story)
    story.receive(FIRST, SECOND, consumer="b")
    story.ack(FIRST, SECOND)
    assert story.breaches() == (["handover-waits"] if what in ("nothing", "stays") else [])


def test_a_lease_that_ends_ends_the_wait_for_the_former_consumer() -> None:
    for timeout_s, expected in [(0.15, []), (0.5, ["handover-waits"])]:
        story = Story(Kind.FAILOVER)
        story.produce(FIRST, SECOND)
        story.step_s = 0.1
        story.receive(FIRST, consumer="a", ack_timeout_s=timeout_s)
        story.receive(SECOND, consumer="a", session_ttl_s=50.0)
        story.receive(FIRST, SECOND, consumer="b", counts=[int(timeout_s < 0.2), 0])
        story.ack(FIRST, SECOND)
        assert story.breaches() == expected


def test_a_message_has_one_lease() -> None:
    for timeout_s, expected in [(100.0, ["one-lease"]), (0.5, [])]:
        story = Story()
        story.produce(FIRST)
        story.receive(FIRST, consumer="a", ack_timeout_s=timeout_s)
        story.receive(FIRST, consumer="b")
        story.ack(FIRST)
        assert story.breaches() == expected


def test_a_returned_message_has_no_lease() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST, consumer="a")
    story.call(Return(SUB, (FIRST,)))
    story.receive(FIRST, consumer="b", counts=[1])
    story.ack(FIRST)
    assert story.breaches() == []


def test_a_delayed_message_must_not_be_early() -> None:
    for due_s, expected in [(100.0, ["never-early"]), (1.0, [])]:
        story = Story()
        story.produce(FIRST, due_s=due_s)
        story.receive(FIRST)
        story.ack(FIRST)
        assert story.breaches() == expected
        assert story.breaches(early_s_max=100.0) == []


def test_a_consumer_that_keeps_the_order_of_the_topic_ignores_delays() -> None:
    story = Story(Kind.EXCLUSIVE)
    story.produce(FIRST, due_s=100.0)
    story.receive(FIRST)
    story.ack(FIRST)
    assert story.breaches() == []


def test_delayed_messages_of_a_key_have_no_order() -> None:
    story = Story(Kind.KEY_SHARED)
    story.produce(FIRST, due_s=4.0, routing="k")
    story.produce(SECOND, routing="k")
    story.receive(SECOND)
    story.receive(FIRST)
    story.ack(FIRST, SECOND)
    assert story.breaches() == []


# --- redelivery counts ------------------------------------------------------------------------------------------------


def returned_twice(story: Story, *counts: int) -> Story:
    story.produce(FIRST)
    for count in counts:
        story.receive(FIRST, counts=[count])
        story.call(Return(SUB, (FIRST,)), result=())  # the lease may have ended before
    story.ack(FIRST)
    return story


def test_a_redelivery_count_must_not_go_down() -> None:
    assert returned_twice(Story(), 0, 1, 0).breaches() == ["redelivery-counts-never-go-down"]
    assert returned_twice(Story(), 0, 1, 1, 3).breaches() == []


def test_a_redelivery_count_must_not_exceed_the_returns() -> None:
    assert returned_twice(Story(), 0, 2).breaches() == ["redelivery-counts-match-returns"]
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST, consumer="a")
    story.call(Leave(SUB, "a"))
    story.receive(FIRST, consumer="b", counts=[1])
    story.ack(FIRST)
    assert story.breaches() == ["redelivery-counts-match-returns"]


def test_each_return_that_was_answered_must_count() -> None:
    story = Story()
    story.produce(FIRST)
    for count in (0, 0):
        story.receive(FIRST, counts=[count])
        story.call(Return(SUB, (FIRST,)), result=(FIRST,))
    story.ack(FIRST)
    assert story.breaches() == ["redelivery-counts-match-returns"]


def test_the_end_of_a_lease_counts() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST, ack_timeout_s=0.5)
    story.receive(FIRST, counts=[1])
    story.ack(FIRST)
    assert story.breaches() == []


def test_counts_survive_a_change_of_the_owner_only_if_they_are_durable() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST)
    story.call(Return(SUB, (FIRST,)))
    story.receive(FIRST, counts=[1])
    story.open(2)
    story.receive(FIRST, counts=[0])
    story.ack(FIRST)
    assert story.breaches() == []
    assert story.breaches(durable_counts=True) == ["redelivery-counts-never-go-down"]


def test_a_seek_may_reset_counts() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST)
    story.call(Return(SUB, (FIRST,)))
    story.receive(FIRST, counts=[1])
    story.seek(FIRST)
    story.receive(FIRST)
    story.ack(FIRST)
    assert story.breaches() == []


# --- seek-delivers-again ----------------------------------------------------------------------------------------------


def test_a_seek_delivers_acknowledged_messages_again() -> None:
    story = told(Story())
    story.seek(SECOND)
    story.receive(SECOND)
    story.ack(SECOND)
    assert story.breaches() == ["seek-delivers-again"]


def test_a_seek_delivers_nothing_before_its_answer() -> None:
    story = told(Story())
    story.seek(None, result=(0, 2))
    story.receive(THIRD)
    story.ack(THIRD)
    assert story.breaches() == []


def test_a_seek_of_unknown_outcome_demands_nothing() -> None:
    story = told(Story())
    story.seek(FIRST, UNKNOWN)
    assert story.breaches() == []


def test_a_later_seek_forwards_skips_the_messages_before_it() -> None:
    story = told(Story())
    story.seek(FIRST)
    story.seek(None, earliest=False, result=(0, 3))
    assert story.breaches() == []
    story.seek(FIRST)
    assert story.breaches() == ["seek-delivers-again"]


# --- stale-owner-changes-nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (Produce(TOPIC, (Payload("late"),)), ((0, 9, WHOLE_ENTRY),)),
        (Acknowledge(SUB, (THIRD,)), None),
        (Seek(SUB, None, earliest=False), (0, 3)),
        (Unsubscribe(SUB), None),
        (Subscribe(SubscriptionId(TOPIC, "other")), True),
    ],
)
def test_a_stale_owner_must_not_change_anything(request_: Request, result: object) -> None:
    story = Story()
    story.produce(FIRST, SECOND, THIRD)
    story.open(2)
    story.receive(FIRST, SECOND, THIRD)
    story.incarnation = 1
    story.call(request_, result=result)
    story.incarnation = 2
    story.ack(FIRST, SECOND, THIRD)
    assert story.breaches()[0] == "stale-owner-changes-nothing"


def test_a_request_that_began_before_the_change_of_the_owner_may_succeed() -> None:
    story = told(Story())
    call = story.begin(Produce(TOPIC, (Payload("late"),)))
    story.open(2)
    story.end(call, result=((0, 3, WHOLE_ENTRY),))
    assert story.breaches() == ["acknowledged-is-delivered"]


def test_a_stale_owner_may_confirm_what_is_stored() -> None:
    story = told(Story())
    story.open(2)
    story.incarnation = 1
    story.ack(SECOND)
    story.call(Subscribe(SUB), result=False)
    assert story.breaches() == []


@pytest.mark.parametrize(("to", "breaches"), [(SECOND, []), (FIRST, ["stale-owner-changes-nothing"])])
def test_a_stale_owner_may_confirm_what_a_seek_has_skipped(to: Key, breaches: list[str]) -> None:
    story = Story()
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST, SECOND, THIRD)
    story.seek(to)
    story.open(2)
    story.incarnation = 1
    story.ack(FIRST)
    story.incarnation = 2
    story.receive(FIRST, SECOND, THIRD)
    story.ack(FIRST, SECOND, THIRD)
    assert [one for one in story.breaches() if one.startswith("stale")] == breaches


def test_only_the_process_that_wrote_the_topic_last_may_write_its_cursors() -> None:
    story = told(Story())

    def write(cursor: str | None, process: str) -> None:
        story.history.written.append(Written(story.history.instant(), TOPIC, cursor, process))

    write(None, "a")
    write("s", "a")
    write(None, "b")
    assert story.breaches() == []
    write("s", "a")
    assert story.breaches() == ["stale-owner-changes-nothing"]


# --- trim-keeps-unacknowledged ----------------------------------------------------------------------------------------


def test_an_unacknowledged_message_must_not_be_trimmed() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST)
    story.trim(0)
    story.ack(FIRST)
    assert story.breaches() == ["trim-keeps-unacknowledged"]


def test_what_may_be_acknowledged_may_be_trimmed() -> None:
    story = Story()
    story.produce(FIRST)
    story.receive(FIRST)
    story.ack(FIRST, outcome=UNKNOWN)
    story.trim(0)
    assert story.breaches() == []


def test_a_seek_back_protects_messages_from_being_trimmed() -> None:
    story = told(Story())
    story.seek(SECOND)
    story.trim(0)
    story.receive(SECOND, THIRD)
    story.ack(SECOND, THIRD)
    assert story.breaches() == ["trim-keeps-unacknowledged"]


def test_a_new_subscription_does_not_get_what_was_trimmed_before() -> None:
    story = told(Story())
    story.trim(0)
    story.call(Subscribe(SubscriptionId(TOPIC, "new")), result=True)
    assert story.breaches() == []


def test_instants_are_ordered_by_time_and_number() -> None:
    assert Instant(1.0, 5) < Instant(2.0, 1) < Instant(2.0, 2)


# --- one-copy ---------------------------------------------------------------------------------------------------------


def moved(*keys: Key, outcome: Outcome = DONE) -> Story:
    """Receive three messages, and move some of them to the retry topic."""
    story = Story()
    story.produce(FIRST, SECOND, THIRD)
    story.receive(FIRST, SECOND, THIRD)
    story.move(*keys, outcome=outcome)
    story.ack(*(key for key in (FIRST, SECOND, THIRD) if key not in keys))
    return story


def test_moved_messages_have_one_copy() -> None:
    story = moved(FIRST, SECOND)
    story.copies(FIRST, SECOND)
    assert story.breaches() == []


@pytest.mark.parametrize("copies", [(FIRST,), (FIRST, SECOND, SECOND), (FIRST, SECOND, THIRD)])
def test_a_missing_second_or_invented_copy_is_reported(copies: Sequence[Key]) -> None:
    story = moved(FIRST, SECOND)
    story.copies(*copies)
    assert "one-copy" in story.breaches()


def test_a_copy_has_the_payload_of_its_original() -> None:
    story = moved(FIRST)
    story.copies(FIRST, texts=["other"])
    assert story.breaches() == ["one-copy"]


def test_a_move_of_unknown_outcome_may_have_made_a_copy_but_not_two() -> None:
    story = moved(FIRST, outcome=UNKNOWN)
    story.copies(FIRST)
    assert story.breaches() == []
    story = moved(FIRST, outcome=UNKNOWN)
    story.move(FIRST, outcome=UNKNOWN)
    story.copies(FIRST, FIRST)
    assert story.breaches() == ["one-copy"]


def test_the_copies_in_both_targets_of_a_subscription_count() -> None:
    story = moved(FIRST)
    story.copies(FIRST)
    story.call(ReadCopies(SUB, is_dead=True), result=(Copied(FIRST, name(FIRST), 1000.0),))
    assert story.breaches() == ["one-copy"]
    story = moved(FIRST)
    story.call(ReadCopies(SUB, is_dead=True), result=(Copied(FIRST, name(FIRST), 1000.0),))
    assert story.breaches() == []


def test_a_refused_move_makes_no_copy() -> None:
    story = moved(FIRST, outcome=REFUSED)
    story.ack(FIRST)
    story.copies(FIRST)
    assert story.breaches() == ["one-copy"]


def test_after_a_seek_a_message_may_be_moved_again() -> None:
    story = moved(FIRST)
    story.seek(FIRST)
    story.receive(FIRST, SECOND, THIRD)
    story.move(FIRST)
    story.ack(SECOND, THIRD)
    story.copies(FIRST, FIRST)
    assert story.breaches() == []


# --- move-loses-nothing, copies-in-order, moved-is-not-delivered ------------------------------------------------------


def test_a_message_without_a_copy_must_be_acknowledged_by_somebody_else() -> None:
    story = moved(FIRST, outcome=UNKNOWN)
    story.copies()
    assert story.breaches() == ["move-loses-nothing"]
    story = moved(FIRST, outcome=UNKNOWN)
    story.receive(FIRST, counts=[1], ack_timeout_s=0.0)
    story.ack(FIRST)
    story.copies()
    assert "move-loses-nothing" not in story.breaches()


def test_the_copies_of_a_request_are_in_its_order() -> None:
    story = moved(SECOND, FIRST)
    story.copies(SECOND, FIRST)
    assert story.breaches() == []
    story = moved(SECOND, FIRST)
    story.copies(FIRST, SECOND)
    assert story.breaches() == ["copies-in-order"]


def test_a_message_is_not_delivered_after_its_copy_is_stored() -> None:
    story = moved(FIRST, outcome=UNKNOWN)
    stored_at_s = story.now_s
    story.open(2)
    story.receive(FIRST)
    story.ack(FIRST)
    story.copies(FIRST, stored_at_s=stored_at_s)
    assert story.breaches() == ["moved-is-not-delivered"]
    story = moved(FIRST, outcome=UNKNOWN)
    story.open(2)
    story.receive(FIRST)
    story.move(FIRST)
    story.copies(FIRST, stored_at_s=story.now_s)
    assert story.breaches() == []


def test_a_move_after_whose_end_the_message_was_delivered_makes_no_copy() -> None:
    """Not even a copy that is stored later than all deliveries."""
    story = moved(FIRST, outcome=UNKNOWN)
    story.open(2)
    story.receive(FIRST)
    story.ack(FIRST)
    story.copies(FIRST)
    assert story.breaches() == ["moved-is-not-delivered"]
    story = moved(FIRST, outcome=UNKNOWN)
    story.receive(FIRST)
    story.ack(FIRST)
    story.copies(FIRST)
    assert story.breaches() == []  # the delivery may be older than the move, which was never settled
    story = moved(FIRST, outcome=UNKNOWN)
    story.open(2)
    story.receive(FIRST)
    story.move(FIRST, outcome=UNKNOWN)
    story.copies(FIRST)
    assert story.breaches() == []  # the copy is that of the second move
