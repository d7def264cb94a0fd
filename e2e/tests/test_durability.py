"""Goal: a subscription that loses counts or acknowledgements at a kill is judged BAD; a correct one is accepted."""

from typing import Any

import pytest
from bindery_e2e.judging.observed import Observed
from bindery_e2e.judging.validate import judge
from bindery_e2e.runs.kills import REQUIRED, figures_of
from histories import MS, Story, row

ROWS = [row(f"1:{number}:-1:-1", "p0", number) for number in range(4)]
IDS = [line[0] for line in ROWS]


class Killed(Story):
    """A subscription of four messages, and kills of its broker."""

    def __init__(self, kind: str = "exclusive") -> None:
        super().__init__()
        self.kind = kind
        self.subscribed("s", kind)
        self.sent("p0", [0, 1, 2, 3], IDS)

    def came(self, *numbers: int, count: int = 0) -> None:
        n = self.begin("receive", "s-0", subscription="s", kind=self.kind)
        self.add("ok", n, messages=[[*ROWS[number], count] for number in numbers])

    def ack(self, *numbers: int, outcome: str = "ok") -> None:
        n = self.begin("ack", "s-0", subscription="s", ids=[IDS[number] for number in numbers])
        self.add(outcome, n, **({} if outcome == "ok" else {"error": "cut"}))

    def ack_upto(self, number: int, outcome: str = "ok") -> None:
        n = self.begin("ack", "s-0", subscription="s", cumulative=IDS[number])
        self.add(outcome, n, **({} if outcome == "ok" else {"error": "cut"}))

    def kill(self) -> None:
        self._count += 1
        n = self._count
        self.add("fault-begin", n, fault="kill -9", target="broker-0")
        self.wait(1)
        self.add("fault-end", n, outcome="ok", killed_at=self.now - 500 * MS)

    def found(self, *, complete: bool = True) -> dict[str, int]:
        self.drained("s", complete=complete)
        self.read(*ROWS)
        return {finding.kind: finding.count for finding in judge(self.records).findings}


# -- redelivery counts -------------------------------------------------------------------------------------------------


def test_a_count_that_rises_or_stays_is_right() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.came(0, 1, count=1)
    story.kill()
    story.came(0, 1, count=1)
    story.came(0, 1, count=2)
    story.ack(0, 1, 2, 3)
    assert story.found() == {}


@pytest.mark.parametrize("count", [0, 1])
def test_a_count_that_falls_after_a_kill_is_found(count: int) -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.came(0, 1, count=2)
    story.kill()
    story.came(0, count=count)
    story.came(1, count=2)
    story.ack(0, 1, 2, 3)
    assert story.found() == {"count-fell": 1}


def test_a_count_that_falls_after_it_had_risen_again_is_found() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    for count in (1, 3, 2, 3):
        story.came(0, count=count)
    story.ack(0, 1, 2, 3)
    assert story.found() == {"count-fell": 1}


def test_responses_that_overtake_each_other_have_no_order() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    slow = story.begin("receive", "s-1", subscription="s", kind="shared")
    story.came(0, count=2)
    story.add("ok", slow, messages=[[*ROWS[0], 1]])
    story.ack(0, 1, 2, 3)
    assert story.found() == {}


def test_each_subscription_has_its_own_counts() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3, count=5)
    story.ack(0, 1, 2, 3)
    story.subscribed("other")
    story.received("other", *ROWS)
    story.acked("other", *IDS)
    story.drained("other")
    assert story.found() == {}


# -- acknowledgements of unknown outcome -------------------------------------------------------------------------------


@pytest.mark.parametrize("was_done", [True, False])
def test_an_acknowledgement_of_unknown_outcome_may_have_been_done_or_not(was_done: bool) -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2, 3, outcome="unknown")
    story.kill()
    if not was_done:
        story.came(0, 1, 2, 3)
        story.ack(0, 1, 2, 3)
    assert story.found() == {}


def test_an_acknowledgement_of_single_messages_may_be_done_in_part() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2, 3, outcome="unknown")
    story.kill()
    story.came(1, 2)
    story.ack(1, 2)
    assert story.found() == {}


def test_a_message_that_came_again_and_is_gone_without_another_acknowledgement_is_found() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2, 3, outcome="unknown")
    story.kill()
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2)
    assert story.found() == {"inconsistent": 1}


def test_an_acknowledgement_may_be_done_late_as_long_as_its_broker_lives() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2, 3, outcome="unknown")
    story.came(0, 1, 2, 3, count=1)
    story.kill()
    assert story.found() == {}


@pytest.mark.parametrize(("again", "errors"), [((0, 1, 2), {}), ((), {}), ((1, 2), {"inconsistent": 1})])
def test_a_cumulative_acknowledgement_of_unknown_outcome_is_done_as_a_whole(
    again: tuple[int, ...], errors: dict[str, int]
) -> None:
    story = Killed()
    story.came(0, 1, 2, 3)
    story.ack_upto(2, outcome="unknown")
    story.kill()
    story.came(*again, 3)
    story.ack_upto(3)
    assert story.found() == errors


def test_messages_with_another_acknowledgement_need_not_come_again() -> None:
    story = Killed()
    story.came(0, 1, 2, 3)
    story.ack(0)
    story.ack_upto(2, outcome="unknown")
    story.kill()
    story.came(1)
    story.kill()
    story.came(1, 2, 3)
    story.ack_upto(3)
    assert story.found() == {}


def test_before_the_end_nothing_is_missing() -> None:
    story = Killed("shared")
    story.came(0, 1, 2, 3)
    story.ack(0, 1, 2, 3, outcome="unknown")
    story.kill()
    story.came(0, 1, 2, 3)
    assert story.found(complete=False) == {}


# -- answered acknowledgements -----------------------------------------------------------------------------------------


def test_what_a_cumulative_acknowledgement_covers_does_not_come_again() -> None:
    story = Killed()
    story.came(0, 1, 2, 3)
    story.ack_upto(2)
    story.kill()
    story.came(2, 3)
    story.ack_upto(3)
    assert story.found() == {"redelivered": 1}


def test_a_cumulative_acknowledgement_covers_indexes_of_a_batch_up_to_its_own() -> None:
    story = Story()
    rows = [row(f"1:0:-1:{index}", "p0", index) for index in range(3)]
    story.subscribed("s", "exclusive")
    story.sent("p0", [0, 1, 2], [line[0] for line in rows])
    story.received("s", *rows, kind="exclusive")
    story.add("ok", story.begin("ack", "s-0", subscription="s", cumulative="1:0:-1:1"))
    story.received("s", rows[2], kind="exclusive")
    story.received("s", rows[1], kind="exclusive")
    story.acked("s", rows[2][0])
    story.drained("s")
    story.read(*rows)
    judgement = judge(story.records)
    assert [(finding.kind, finding.count) for finding in judgement.findings] == [("redelivered", 1)]
    assert judgement.counts["acks"] == 3


def test_a_run_without_kills_or_returns_is_incomplete() -> None:
    story = Killed()
    story.came(0, 1, 2, 3)
    story.ack_upto(3)
    assert story.found() == {}
    missing = judge(story.records, required=REQUIRED).missing
    assert any(text.startswith("inconsistent could not be judged") for text in missing)
    assert any(text.startswith("count-fell could not be judged") for text in missing)


def test_the_figures_are_those_of_the_history() -> None:
    story = Killed()
    story.came(0, 1, 2, 3)
    story.ack(0, 1)
    story.ack_upto(2, outcome="unknown")
    story.kill()
    story.came(2, 3, count=4)
    story.ack_upto(3)
    story.drained("s")
    figures = figures_of(Observed(story.records))
    values: dict[str, Any] = {"kills": 1, "acknowledged": 4, "delivered": 6, "unknown": 3, "count_max": 4}
    assert {name: getattr(figures, name) for name in values} == values
    assert figures.acks == {"whole": 2, "index": 0, "cumulative": 1}
    assert 1 < figures.silence_s["receive"] < 1.1
    assert "1 kills; 4 messages, 6 deliveries" in str(figures)
