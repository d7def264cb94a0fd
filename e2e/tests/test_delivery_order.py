"""Goal: a history in which a broker breaks an order is judged BAD with the right kind; a correct one is accepted."""

import itertools
from collections.abc import Callable

import pytest
from bindery_e2e.judging.delivery_order import merged, without
from bindery_e2e.judging.history import HistoryError
from bindery_e2e.judging.validate import judge
from consumers import DEFECTS, Consumers, Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = 8


def found(story: Consumers) -> dict[str, int]:
    return {finding.kind: finding.count for finding in judge(story.finish()).findings}


# -- allowed -----------------------------------------------------------------------------------------------------------


def test_keys_do_not_wait_for_one_another() -> None:
    story = Consumers()
    story.produce("a", "b", "a", "b")
    story.receive("c0", 1, 3)
    story.receive("c1", 0, 2)
    story.ack("c1", 2, 0)
    story.ack("c0", 3)
    story.ack("c0", 1)
    assert found(story) == {}


def test_a_consumer_may_keep_later_messages_of_a_key_when_it_returns_one() -> None:
    story = Consumers()
    story.produce("a", "a", "a")
    story.receive("c0", 0, 1)
    story.nack("c0", 0)
    story.receive("c0", 0, 2)
    story.ack("c0", 0, 1, 2)
    assert found(story) == {}


def test_a_key_moves_after_everything_of_it_was_acknowledged_or_returned() -> None:
    story = Consumers()
    story.produce("a", "a", "a")
    story.receive("c0", 0, 1, 2)
    story.ack("c0", 0)
    story.nack("c0", 2)
    story.leave("c0")
    story.receive("c1", 1, 2)
    story.ack("c1", 1, 2)
    assert found(story) == {}


def test_a_key_moves_at_the_end_of_the_lease() -> None:
    story = Consumers()
    story.produce("a", "a")
    story.receive("c0", 0, ack_timeout_ms=1_000)
    story.wait(1)
    story.receive("c1", 0, 1)
    story.ack("c0", 0)  # late, and still valid
    story.ack("c1", 0, 1)
    assert found(story) == {}


def test_a_response_may_arrive_after_its_lease_was_given_back() -> None:
    story = Consumers()
    story.produce("a", "a")
    n = story.begin_receive("c0")
    story.leave("c0")
    story.receive("c1", 0)
    story.end_receive(n, 0, 1)
    story.ack("c1", 0)
    story.ack("c0", 1)
    assert found(story) == {}


def test_messages_of_a_lost_response_are_not_missing() -> None:
    story = Consumers()
    story.produce("a", "a", "a")
    story.add("unknown", story.begin_receive("c0", ack_timeout_ms=60_000), error="cut")
    story.receive("c0", 2)
    story.poll("c0", seconds=10)
    story.ack("c0", 2)
    story.leave("c0")
    story.receive("c1", 0, 1)
    story.ack("c1", 0, 1)
    assert found(story) == {}


def test_an_acknowledgement_in_flight_counts_as_done_or_not() -> None:
    story = Consumers()
    story.produce("a", "a", "a")
    story.receive("c0", 0)
    n = story.begin_op("ack", "c0", ids=[story.id(0)])
    story.receive("c1", 1)
    story.add("ok", n)
    story.ack("c1", 1)
    story.receive("c1", 2)
    story.add("unknown", story.begin_op("ack", "c1", ids=[story.id(2)]), error="cut")
    assert found(story) == {}


def test_a_message_of_unknown_outcome_has_the_place_that_it_was_stored_at() -> None:
    story = Consumers()
    n = story.begin_send("a")
    story.add("unknown", n, error="cut")
    story.produce("a")
    story.receive("c0", 0, 1)
    story.ack("c0", 0, 1)
    assert found(story) == {}


def test_a_key_waits_as_long_as_a_member_has_no_demand() -> None:
    story = Consumers()
    story.receive("slow", session_ttl_ms=30_000)
    story.poll("c0", seconds=1)
    story.produce("a")
    story.poll("c0", seconds=20)
    story.receive("slow", 0)
    story.ack("slow", 0)
    assert found(story) == {}


def test_a_key_waits_for_a_consumer_that_disappeared_until_its_session_has_ended() -> None:
    story = Consumers()
    story.receive("gone", session_ttl_ms=5_000)
    story.produce("a")
    story.poll("c0", seconds=7)
    story.receive("c0", 0)
    story.ack("c0", 0)
    assert found(story) == {}


def test_full_responses_are_no_demand() -> None:
    story = Consumers()
    story.produce("a", *"bcdefghijklmno")
    for number in range(1, 15):
        story.receive("c0", number, count_max=1)
        story.ack("c0", number)
        story.wait(0.4)
    story.receive("c0", 0)
    story.ack("c0", 0)
    assert found(story) == {}


def test_messages_wait_for_their_turn_in_a_backlog() -> None:
    story = Consumers()
    story.produce(*(f"k{number}" for number in range(20)))
    for number in range(20):
        story.receive("c0", number)
        story.wait(0.3)
        story.ack("c0", number)
    assert found(story) == {}


def test_the_delay_of_a_negative_acknowledgement_is_no_wait() -> None:
    story = Consumers()
    story.produce("a", "a")
    story.receive("c0", 0)
    story.nack("c0", 0, delay_ms=5_000)
    story.poll("c0", seconds=6.5)
    story.receive("c0", 0, 1)
    story.ack("c0", 0, 1)
    assert found(story) == {}


def test_a_topic_is_delivered_again_from_the_returned_message_on() -> None:
    for kind in ("exclusive", "failover"):
        story = Consumers(kind=kind, order="topic")
        story.produce("a", "b", "c", "d")
        story.receive("c0", 0, 1, 2)
        story.nack("c0", 1)
        story.receive("c0", 0, 1, 2, 3)
        story.ack("c0", 0, 1, 2, 3)
        assert found(story) == {}, kind


def test_a_lease_that_ends_returns_the_whole_topic() -> None:
    story = Consumers(kind="exclusive", order="topic")
    story.produce("a", "b")
    story.receive("c0", 0, ack_timeout_ms=2_000)
    story.wait(1.9)
    story.receive("c0", 1, ack_timeout_ms=2_000)
    story.wait(0.1)
    story.receive("c0", 0, 1)
    story.ack("c0", 0, 1)
    assert found(story) == {}


def test_a_consumer_that_becomes_active_begins_at_the_lowest_message() -> None:
    story = Consumers(kind="failover", order="topic")
    story.produce("a", "b", "c")
    story.receive("c0", 0, 1)
    story.ack("c0", 0)
    story.receive("c1", 1, 2)
    story.ack("c1", 1)
    story.receive("c0", 2)
    story.ack("c0", 2)
    assert found(story) == {}


def test_shared_consumers_have_no_order() -> None:
    story = Consumers(kind="shared", order="none")
    story.produce("a", "a", "a")
    story.receive("c0", 2, 0)
    story.receive("c1", 1)
    story.nack("c0", 0)
    story.receive("c1", 0)
    story.ack("c1", 0, 1)
    story.ack("c0", 2)
    assert found(story) == {}


# -- errors ------------------------------------------------------------------------------------------------------------


def skips_a_message(story: Consumers) -> None:
    story.produce("a", "b", "a")
    story.receive("c0", 1, 2)
    story.receive("c0", 0)
    story.ack("c0", 0, 1, 2)


def swaps_messages_of_a_response(story: Consumers) -> None:
    story.produce("a", "a")
    story.receive("c0", 1, 0)
    story.ack("c0", 0, 1)


def overtakes_a_returned_message(story: Consumers) -> None:
    story.produce("a", "a", "a")
    story.receive("c0", 0, 1)
    story.nack("c0", 0)
    story.receive("c0", 2)
    story.receive("c0", 0)
    story.ack("c0", 0, 1, 2)


def redelivers_from_the_middle(story: Consumers) -> None:
    story.produce("a", "a", "a")
    story.receive("c0", 0, 1, 2)
    story.leave("c0")
    story.receive("c1", 1, 2)
    story.receive("c1", 0)
    story.ack("c1", 0, 1, 2)


def overtakes_a_lease_that_ended(story: Consumers) -> None:
    story.produce("a", "a")
    story.receive("c0", 0, ack_timeout_ms=1_000)
    story.wait(2.5)
    story.receive("c0", 1)
    story.receive("c0", 0)
    story.ack("c0", 0, 1)


def overtakes_what_a_consumer_of_the_same_name_held(story: Consumers) -> None:
    story.produce("a", "a")
    story.receive("c0", 0)
    story.leave("c0")
    story.receive("c0", 1)
    story.receive("c0", 0)
    story.ack("c0", 0, 1)


def overtakes_the_holder_whose_lease_may_have_ended(story: Consumers) -> None:
    """Whether c0 still holds 0 or not: c1 does not hold it."""
    story.produce("a", "a")
    story.receive("c0", 0, ack_timeout_ms=1_000)
    story.wait(1.2)
    story.receive("c1", 1)
    story.receive("c1", 0)
    story.ack("c1", 0, 1)


def delivers_new_messages_elsewhere_while_the_key_is_held(story: Consumers) -> None:
    story.produce("a", "a")
    story.receive("c0", 0)
    story.receive("c1", 1)
    story.ack("c0", 0)
    story.ack("c1", 1)


def delivers_a_returned_message_elsewhere_while_the_rest_is_held(story: Consumers) -> None:
    story.produce("a", "a")
    story.receive("c0", 0, 1)
    story.nack("c0", 0)
    story.receive("c1", 0)
    story.ack("c0", 1)
    story.ack("c1", 0)


def delivers_a_message_to_two_consumers(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.receive("c1", 0)
    story.ack("c0", 0)


def delivers_a_message_twice_to_one_consumer(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.receive("c0", 0)
    story.ack("c0", 0)


def ends_a_lease_early(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0, ack_timeout_ms=10_000)
    story.wait(9)
    story.receive("c1", 0)
    story.ack("c1", 0)


def delivers_while_a_long_call_is_open(story: Consumers) -> None:
    """The call began before 0 was delivered to c1. Its response came when c1 held 0, and c0 has 1 from then on."""
    story.produce("a", "a")
    n = story.begin_receive("c0")
    story.receive("c1", 0)
    story.end_receive(n, 1)
    story.ack("c1", 0)
    story.ack("c0", 1)


def delivers_again_after_the_acknowledgement(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.ack("c0", 0)
    story.receive("c0", 0)


def keeps_the_keys_of_a_consumer_that_left(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.leave("c0")
    story.poll("c1", "c2", seconds=3)
    story.receive("c1", 0)
    story.ack("c1", 0)


def keeps_the_keys_of_a_lost_response(story: Consumers) -> None:
    story.produce("a")
    story.add("unknown", story.begin_receive("c0"), error="killed")
    story.leave("c0")
    story.poll("c1", seconds=3)
    story.receive("c1", 0)
    story.ack("c1", 0)


def keeps_the_keys_after_the_session_ended(story: Consumers) -> None:
    story.receive("gone", session_ttl_ms=1_000, ack_timeout_ms=1_000)
    story.produce("a")
    story.poll("c1", seconds=6)
    story.receive("c1", 0)
    story.ack("c1", 0)


def does_not_deliver_a_new_message(story: Consumers) -> None:
    story.receive("c0")
    story.produce("a")
    story.poll("c0", seconds=4)
    story.receive("c0", 0)
    story.ack("c0", 0)


def passes_over_a_message(story: Consumers) -> None:
    story.produce("a", *(f"k{number}" for number in range(10)))
    for number in range(1, 11):
        story.receive("c0", number)
        story.wait(0.3)
        story.ack("c0", number)
    story.receive("c0", 0)
    story.ack("c0", 0)


def does_not_deliver_a_returned_message(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.nack("c0", 0, delay_ms=1_000)
    story.poll("c0", seconds=4)
    story.receive("c0", 0)
    story.ack("c0", 0)


def forgets_a_message_after_its_delivery(story: Consumers) -> None:
    story.produce("a", "b")
    story.receive("c0", 0, 1)
    story.ack("c0", 1)
    story.leave("c0")


def confirms_no_acknowledgement(story: Consumers) -> None:
    story.produce("a")
    story.receive("c0", 0)
    story.add("failed", story.begin_op("ack", "c0", ids=[story.id(0)]), error="503")
    story.leave("c0")


BAD: list[tuple[Callable[[Consumers], None], dict[str, int]]] = [
    (skips_a_message, {"out-of-order": 1}),
    (swaps_messages_of_a_response, {"out-of-order": 1}),
    (overtakes_a_returned_message, {"out-of-order": 1}),
    (redelivers_from_the_middle, {"out-of-order": 2}),
    (overtakes_a_lease_that_ended, {"out-of-order": 1}),
    (overtakes_what_a_consumer_of_the_same_name_held, {"out-of-order": 1}),
    (overtakes_the_holder_whose_lease_may_have_ended, {"out-of-order": 1}),
    (delivers_new_messages_elsewhere_while_the_key_is_held, {"held-twice": 1}),
    (delivers_a_returned_message_elsewhere_while_the_rest_is_held, {"held-twice": 1}),
    (delivers_a_message_to_two_consumers, {"held-twice": 1}),
    (delivers_a_message_twice_to_one_consumer, {"held-twice": 1}),
    (ends_a_lease_early, {"held-twice": 1}),
    (delivers_while_a_long_call_is_open, {"held-twice": 1}),
    (delivers_again_after_the_acknowledgement, {"redelivered": 1}),
    (keeps_the_keys_of_a_consumer_that_left, {"stuck": 1}),
    (keeps_the_keys_of_a_lost_response, {"stuck": 1}),
    (keeps_the_keys_after_the_session_ended, {"stuck": 1}),
    (does_not_deliver_a_new_message, {"stuck": 1}),
    (passes_over_a_message, {"stuck": 1}),
    (does_not_deliver_a_returned_message, {"stuck": 1}),
    (forgets_a_message_after_its_delivery, {"unacknowledged": 1}),
    (confirms_no_acknowledgement, {"unacknowledged": 1}),
]


@pytest.mark.parametrize(("tell", "errors"), BAD, ids=[tell.__name__ for tell, _ in BAD])
def test_a_bad_history_has_exactly_its_errors(tell: Callable[[Consumers], None], errors: dict[str, int]) -> None:
    story = Consumers()
    tell(story)
    assert found(story) == errors


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_a_topic_must_not_continue_behind_a_returned_message(kind: str) -> None:
    story = Consumers(kind=kind, order="topic")
    story.produce("a", "b", "c", "d")
    story.receive("c0", 0, 1, 2)
    story.nack("c0", 1)
    story.receive("c0", 1, 2, 3)  # 0 was returned with the others
    story.ack("c0", 0, 1, 2, 3)
    assert found(story) == {"out-of-order": 3}


def test_two_active_consumers_are_out_of_order() -> None:
    story = Consumers(kind="failover", order="topic")
    story.produce("a", "b", "c")
    story.receive("c0", 0)
    story.receive("c1", 1)
    story.receive("c0", 2)
    story.ack("c0", 0, 2)
    story.ack("c1", 1)
    assert found(story) == {"out-of-order": 2}


def test_two_consumers_of_an_exclusive_subscription_are_found() -> None:
    story = Consumers(kind="exclusive", order="topic")
    story.produce("a", "b")
    story.receive("c0", 0)
    story.receive("c1", 1)
    story.ack("c0", 0)
    story.ack("c1", 1)
    assert found(story) == {"held-twice": 1}


def test_a_shared_message_is_delivered_to_one_consumer_at_a_time() -> None:
    story = Consumers(kind="shared", order="none")
    story.produce("a", "b")
    story.receive("c0", 0)
    story.receive("c1", 0, 1)
    story.ack("c0", 0)
    story.ack("c1", 1)
    assert found(story) == {"held-twice": 1}


def test_a_fault_may_end_leases_that_were_granted_after_it_was_announced() -> None:
    story = Consumers()
    story.produce("a", "a")
    story.add("fault-begin", 1_000, fault="kill -9", target="broker-0")
    story.receive("c0", 0)  # answered before the process was dead
    story.wait(1)
    story.receive("c1", 0, 1)
    story.add("fault-end", 1_000, outcome="ok")
    story.ack("c1", 0, 1)
    assert found(story) == {}


def test_a_fault_of_the_cluster_may_end_leases() -> None:
    story = Consumers()
    story.produce("a")
    story.receive("c0", 0)
    story.add("fault-begin", 1_000, fault="kill -9", target="broker-0")
    story.add("fault-end", 1_000, outcome="ok")
    story.receive("c1", 0)
    story.ack("c1", 0)
    assert found(story) == {}


def test_what_a_subscription_without_an_order_does_is_not_judged() -> None:
    story = Consumers()
    story.records = [record for record in story.records if record.type != "observation"]
    story.subscribed("s", "shared")
    skips_a_message(story)
    judgement = judge(story.finish(), required=["stuck"])
    assert judgement.verdict == "INCOMPLETE"
    assert judgement.unjudged["stuck"] == "no subscription whose order is to be judged"


def test_an_unknown_order_is_refused() -> None:
    story = Consumers(order="reverse")
    with pytest.raises(HistoryError, match="unknown order 'reverse'"):
        judge(story.records)


# -- simulated brokers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_histories_of_a_correct_broker_are_good(seed: int) -> None:
    simulation = Simulation(seed, defect="none")
    judgement = judge(simulation.play(), required=["out-of-order", "held-twice", "unacknowledged"])
    assert judgement.verdict == "GOOD", f"seed {seed}: {judgement}"
    assert judgement.counts["delivered"] > judgement.counts["produced"], "nothing was delivered again"


@pytest.mark.parametrize("defect", DEFECTS)
def test_histories_of_a_broker_with_a_defect_are_bad(defect: str) -> None:
    kinds: set[str] = set()
    for seed in range(SEEDS):
        kinds |= {finding.kind for finding in judge(Simulation(seed, defect=defect).play()).findings}
        if DEFECTS[defect][0] in kinds:
            break
    assert DEFECTS[defect][0] in kinds
    assert kinds <= set(DEFECTS[defect])


# -- periods -----------------------------------------------------------------------------------------------------------

PERIODS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@settings(max_examples=300, deadline=None)
@given(periods=PERIODS, gone=PERIODS)
def test_periods_are_sets_of_times(periods: list[tuple[int, int]], gone: list[tuple[int, int]]) -> None:
    def times(rows: list[tuple[int, int]]) -> set[int]:
        return {at for begin, end in rows for at in range(begin, end)}

    left, right = merged(periods), merged(gone)
    assert times(left) == times(periods)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(left))
    rest = without(left, right)
    assert times(rest) == times(periods) - times(gone)
    assert all(begin < end for begin, end in rest)
