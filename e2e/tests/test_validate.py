"""Goal: every kind of error is found, and allowed behaviour is never reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bindery_e2e.judging.history import HistoryError
from bindery_e2e.judging.validate import judge
from bindery_e2e.judging.verdict import EXAMPLES_MAX, KINDS, Judgement
from histories import TRUTH, Story, good, row


def found(story: Story, **options: Any) -> dict[str, int]:
    return {finding.kind: finding.count for finding in judge(story.records, **options).findings}


def with_truth(*rows: list[Any]) -> Story:
    story = good(deliver=False)
    story.read(*rows)
    return story


def ended(story: Story) -> Story:
    story.read(*TRUTH)
    return story


def test_a_good_history_is_good() -> None:
    story = good()
    story.read(*TRUTH)
    judgement = judge(story.records)
    assert judgement.verdict == "GOOD", judgement
    assert judgement.counts == {
        "produced": 7,
        "acknowledged": 5,
        "refused": 1,
        "unknown": 1,
        "delivered": 12,
        "acks": 12,
    }


def test_an_unknown_message_may_be_missing_or_come_later() -> None:
    unknown = TRUTH[4]
    others = [line for line in TRUTH if line is not unknown]
    for truth in (others, [*others, unknown]):
        assert found(with_truth(*truth)) == {}


def test_the_last_complete_reading_counts() -> None:
    """A repeated reading counts from its start; an incomplete reading does not count."""
    story = good()
    story.read(*TRUTH[:2], end=False)
    story.read(*TRUTH[:1], end=False, number=2)
    story.read(*TRUTH[1:], end=False, number=2)
    story.read(end=True, number=2)
    story.read(*TRUTH[:1], end=False, number=3)
    assert judge(story.records).verdict == "GOOD"


# -- kinds of errors ---------------------------------------------------------------------------------------------------


def test_an_acknowledged_message_that_is_missing_is_lost() -> None:
    story = with_truth(*TRUTH[1:])
    judgement = judge(story.records)
    assert {finding.kind for finding in judgement.findings} == {"lost"}
    assert "1:0:-1:-1 of p0 #0" in judgement.findings[0].examples[0]


def test_a_delivered_message_that_is_missing_is_lost_if_acknowledged_and_otherwise_a_phantom() -> None:
    for at, kind in ((0, "lost"), (4, "phantom")):
        story = good()
        story.read(*(line for line in TRUTH if line is not TRUTH[at]))
        assert found(story) == {kind: 1 if kind == "lost" else 2}  # two subscriptions had it


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        (row("3:0:-1:-1", "p9", 0), "phantom"),
        (["3:0:-1:-1", "", -1, "abc"], "phantom"),
        (row("3:0:-1:-1", "p1", 1), "phantom"),
        (row("3:0:-1:-1", "p0", 4), "duplicate"),
        (row("3:0:-1:-1", "p0", 3), "duplicate"),
        (row("2:0:-1:-1", "p0", 4), "duplicate"),
    ],
    ids=["nobody sent it", "not ours", "refused", "acknowledged twice there", "unknown twice there", "one id twice"],
)
def test_messages_that_should_not_exist(extra: list[Any], kind: str) -> None:
    assert found(with_truth(*TRUTH, extra)) == {kind: 1}


def test_a_message_of_another_topic_is_a_phantom() -> None:
    story = good(deliver=False)
    story.read(*TRUTH)
    story.topic = "public/default/other"
    story.sent("p2", [0], ["5:0:-1:-1"])
    story.read(row("5:0:-1:-1", "p2", 0), row("5:1:-1:-1", "p0", 0))
    assert found(story) == {"phantom": 1}


def test_a_changed_payload_or_id_is_found() -> None:
    changed = row("1:0:-1:-1", "p0", 0, payload="other")
    assert found(with_truth(changed, *TRUTH[1:])) == {"changed": 1}
    swapped = [row("1:0:-1:-1", "p1", 0), *TRUTH[1:3], row("1:2:-1:-1", "p0", 0), *TRUTH[4:]]
    assert found(with_truth(*swapped))["changed"] == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 3), (1, 2), (3, 5), (0, 4)],
    ids=["one producer", "one request", "two producers", "unknown"],
)
def test_messages_in_the_wrong_order_are_found(first: int, second: int) -> None:
    """A message of unknown outcome must not precede messages that were acknowledged when it was sent."""
    truth = list(TRUTH)
    truth[first], truth[second] = truth[second], truth[first]
    assert found(with_truth(*truth)).keys() == {"reordered"}


def test_one_id_for_two_messages_is_found() -> None:
    story = good(deliver=False)
    story.sent("p1", [2], ["2:0:-1:-1"])
    story.read(*TRUTH)
    assert found(story).keys() == {"duplicate", "changed"}


def test_a_message_sent_twice_may_be_stored_twice() -> None:
    story = Story()
    story.add("unknown", story.send("p0", 0), error="time-out")
    story.sent("p0", [0], ["1:1:-1:-1"])
    story.sent("p0", [1], ["1:2:-1:-1"])
    copies = [row("1:0:-1:-1"), row("1:1:-1:-1"), row("1:2:-1:-1", "p0", 1)]
    story.read(*copies)
    assert found(story) == {}
    story.read(*copies, row("1:3:-1:-1"), number=2)
    assert found(story) == {"duplicate": 1}


def test_a_message_refused_and_then_sent_again_may_be_stored_once() -> None:
    story = Story()
    story.add("failed", story.send("p0", 0), error="503")
    story.sent("p0", [0], ["1:0:-1:-1"])
    story.read(row("1:0:-1:-1"))
    assert found(story) == {}
    story.read(row("1:0:-1:-1"), row("1:1:-1:-1"), number=2)
    assert found(story) == {"duplicate": 1}


def test_207_has_an_outcome_for_each_message() -> None:
    story = Story()
    story.add("ok", story.send("p0", 0, 1, 2), ids=["1:0:-1:-1", "unknown", "failed"])
    story.read(row("1:0:-1:-1"), row("1:1:-1:-1", "p0", 1))
    assert found(story) == {}
    story.read(row("1:0:-1:-1"), row("1:1:-1:-1", "p0", 2), number=2)
    assert found(story) == {"phantom": 1}


# -- subscriptions -----------------------------------------------------------------------------------------------------


def test_undelivered_messages_are_found() -> None:
    for complete in (True, False):
        story = good(deliver=False)
        story.received("shared", *TRUTH[:3])
        story.drained("shared", complete=complete)
        judgement = judge(ended(story).records)
        (finding,) = judgement.findings
        assert (finding.kind, finding.count) == ("undelivered", 2)  # the message of unknown outcome may be missing
        assert ("did not drain it in time" in finding.examples[0]) is not complete


def test_messages_sent_before_a_subscription_may_be_missing() -> None:
    story = Story()
    story.sent("p0", [0], ["1:0:-1:-1"])
    story.subscribed("late")
    story.drained("late")
    story.read(row("1:0:-1:-1"))
    assert judge(story.records).verdict == "GOOD"


def test_a_delivery_after_the_acknowledgement_is_found() -> None:
    story = good()
    story.received("shared", TRUTH[0])
    assert found(ended(story)) == {"redelivered": 1}


def test_redelivery_before_the_acknowledgement_and_to_a_receive_in_flight_is_allowed() -> None:
    story = good(deliver=False)
    story.received("shared", TRUTH[0])
    story.received("shared", TRUTH[0])
    under_way = story.begin("receive", "shared-1", subscription="shared", kind="shared")
    story.acked("shared", TRUTH[0][0])
    story.add("ok", under_way, messages=[[*TRUTH[0], 1]])
    assert found(ended(story)) == {}


def test_an_acknowledgement_of_unknown_outcome_allows_redelivery() -> None:
    story = good(deliver=False)
    story.received("shared", TRUTH[0])
    story.add("unknown", story.begin("ack", "shared-0", subscription="shared", ids=[TRUTH[0][0]]), error="cut")
    story.received("shared", TRUTH[0])
    assert found(ended(story)) == {}


def test_an_exclusive_subscription_keeps_the_order() -> None:
    story = good(deliver=False)
    story.received("ordered", *TRUTH[:2], TRUTH[3], kind="exclusive")
    story.received("ordered", TRUTH[2], kind="exclusive")
    assert found(ended(story)) == {"reordered": 1}


def test_a_shared_subscription_need_not_keep_the_order() -> None:
    story = good(deliver=False)
    story.received("shared", TRUTH[3], TRUTH[0])
    assert found(ended(story)) == {}


def test_messages_of_a_lost_response_may_come_later() -> None:
    for pause_s, expected in ((1, {}), (200, {"reordered": 1})):
        story = good(deliver=False)
        story.received("ordered", TRUTH[0], kind="exclusive")
        story.receive_lost("ordered", kind="exclusive")
        story.wait(pause_s)
        story.received("ordered", TRUTH[2], kind="exclusive")
        story.received("ordered", TRUTH[1], TRUTH[2], kind="exclusive")
        assert found(ended(story)) == expected


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([row("9:9:-1:-1", "p0", 0)], {"phantom"}),
        ([row("1:0:-1:-1", "p7", 0)], {"phantom"}),
        ([row("1:0:-1:-1", "p0", 0, payload="other")], {"changed"}),
        ([row("1:0:-1:-1", "p0", 1)], {"changed"}),
        ([row("1:0:-1:-1", "p0", 0), row("1:0:-1:-1", "p0", 1)], {"changed"}),
    ],
    ids=["gone at the end", "nobody sent it", "payload", "another message", "two messages under one id"],
)
def test_deliveries_that_contradict_the_truth_are_found(rows: list[list[Any]], kinds: set[str]) -> None:
    story = good(deliver=False)
    story.received("shared", *rows)
    assert found(ended(story)).keys() == kinds


# -- the cluster -------------------------------------------------------------------------------------------------------


def fault(story: Story, n: int, outcome: str | None = "ok", **values: Any) -> None:
    limits = {name: values.pop(name) for name in ("gap_s_max", "entries_copied_max") if name in values}
    story.add("fault-begin", n, fault="kill", target="bookie-0", **limits)
    story.wait(1)
    if outcome is not None:
        story.add("fault-end", n, outcome=outcome, **values)


CLUSTER: list[tuple[Callable[[Story], None], str]] = [
    (
        lambda s: s.add("observation", what="replicas", compared=9, diverged=["entry 0: b2 lacks it"]),
        "diverged",
    ),
    (lambda s: s.add("observation", what="under-replicated", count=2), "under-replicated"),
    (lambda s: s.add("observation", what="ready", ready=2, wanted=3), "not-ready"),
    (lambda s: fault(s, 100, entries_copied_max=0, entries_copied=1), "copied-needlessly"),
    (lambda s: fault(s, 100, gap_s_max=0.5), "unavailable"),
    (lambda s: fault(s, 100, "failed", detail="no such pod"), "fault-failed"),
    (lambda s: fault(s, 100, None), "fault-failed"),
]


@pytest.mark.parametrize(("happen", "kind"), CLUSTER)
def test_errors_of_the_cluster_are_found(happen: Callable[[Story], None], kind: str) -> None:
    story = good()
    happen(story)
    story.sent("p1", [2], ["2:1:-1:-1"])
    for name, mode in (("shared", "shared"), ("ordered", "exclusive")):
        story.received(name, row("2:1:-1:-1", "p1", 2), kind=mode)
    story.read(*TRUTH, row("2:1:-1:-1", "p1", 2))
    assert found(story) == {kind: 1}


def test_only_the_last_observation_counts_and_faults_that_are_not_offered_do_not() -> None:
    story = good()
    for count in (3, 0):
        story.add("observation", what="under-replicated", count=count)
        story.add("observation", what="ready", ready=9 - count, wanted=9)
    fault(story, 100, "not offered", gap_s_max=0.1, entries_copied_max=0)
    story.add("failed", story.send("p1", 2), error="503")  # a second later: there was a gap
    story.add("observation", what="replicas", compared=5, diverged=[])
    judgement = judge(ended(story).records, required=("under-replicated", "not-ready", "diverged"))
    assert judgement.verdict == "GOOD", judgement


# -- incomplete histories ----------------------------------------------------------------------------------------------


def missing(story: Story, *required: str) -> str:
    judgement: Judgement = judge(story.records, required=required)
    assert judgement.verdict == "INCOMPLETE"
    return " ".join(judgement.missing)


def test_a_run_that_stopped_early_is_incomplete() -> None:
    assert "no complete reading of public/default/t" in missing(good())
    assert "not drained: public/default/t shared" in missing(ended(good(deliver=False)))
    empty = Story()
    empty.read()
    assert "proves nothing" in missing(empty)
    assert "no complete reading of any topic" in missing(Story())


@pytest.mark.parametrize("kind", ["diverged", "under-replicated", "not-ready", "copied-needlessly", "unavailable"])
def test_required_kinds_must_have_been_judged(kind: str) -> None:
    assert kind in missing(ended(good()), kind)


def test_a_comparison_of_no_entries_is_incomplete() -> None:
    story = ended(good())
    story.add("observation", what="replicas", compared=0, diverged=[])
    assert "no entry was compared" in missing(story, "diverged")


def test_a_fault_without_its_measurement_of_copied_entries_is_incomplete() -> None:
    story = ended(good())
    fault(story, 100, entries_copied_max=0)
    assert "without entries_copied" in missing(story, "copied-needlessly")


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such kind of verdict: losst; there are lost, phantom"):
        judge([], required=("losst",))


def test_records_that_contradict_one_another_are_refused() -> None:
    story = Story()
    story.add("ok", 7, ids=[])
    with pytest.raises(HistoryError, match="operation 7 ends and never began"):
        judge(story.records)
    story = Story()
    story.add("fault-end", 3, outcome="ok")
    with pytest.raises(HistoryError, match="fault 3 ends and never began"):
        judge(story.records)


def test_examples_are_limited_and_counts_are_complete() -> None:
    story = Story()
    for number in range(50):
        story.sent("p0", [number], [f"1:{number}:-1:-1"])
    story.read()
    (finding,) = judge(story.records).findings
    assert (finding.kind, finding.count, len(finding.examples)) == ("lost", 50, EXAMPLES_MAX)


def test_every_kind_has_a_test_that_catches_it() -> None:
    names = ("test_validate.py", "test_delivery_order.py", "test_durability.py")
    text = "".join(Path(__file__).with_name(name).read_text() for name in names)
    assert [kind for kind in KINDS if f'"{kind}"' not in text] == []
