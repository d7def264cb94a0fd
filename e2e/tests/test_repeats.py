"""Goal: a broker that loses, repeats or reorders a message of a repeated request is judged BAD."""

from typing import Any

import pytest
from bindery_e2e.judging.history import Record
from bindery_e2e.judging.repeats import UNKNOWN_ID, Repeats, judge_repeats


class Story:
    """Producer `p0` sends 0 and 1 in two requests, the first of them twice; `p1` sends 0, whose id is forgotten."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.rows: list[list[Any]] = [["1:0", "p0", 0], ["1:1", "p1", 0], ["1:2", "p0", 1]]
        self.attempt("p0", 1, [0], None)
        self.attempt("p0", 1, [0], ["1:0"])
        self.attempt("p1", 2, [0], None)
        self.attempt("p1", 2, [0], [UNKNOWN_ID])
        self.attempt("p0", 3, [1], ["1:2"])
        self.add("observation", 0, what="cuts", cuts={"pass": 3, "drop-answer": 2})

    def add(self, kind: str, n: int = 0, **values: Any) -> None:
        self.records.append(Record(kind, len(self.records), 0, n, values))

    def attempt(self, process: str, request: int, sequences: list[int], ids: list[str] | None) -> None:
        n = len(self.records) + 1
        self.add("invoke", n, op="produce", process=process, topic="t", request=request, sequences=sequences)
        if ids is None:
            self.add("unknown", n, error="cut")
        else:
            self.add("ok", n, ids=ids)

    def judge(self) -> Repeats:
        n = len(self.records) + 1
        self.add("invoke", n, op="read", process="reader", topic="t", start="earliest", round=0)
        self.add("ok", n, messages=self.rows, end=True)
        return judge_repeats(self.records)


def test_a_correct_broker_is_accepted() -> None:
    found = Story().judge()
    assert found.verdict == "GOOD", found.examples
    assert (found.messages, found.requests, found.attempts, found.unanswered, found.known_again) == (3, 3, 5, 2, 1)


def test_a_run_without_cuts_is_incomplete() -> None:
    story = Story()
    story.records.pop()
    assert story.judge().verdict == "INCOMPLETE"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda story: story.rows.append(["1:3", "p0", 0]), "twice"),
        (lambda story: story.rows.pop(), "lost"),
        (lambda story: story.rows.pop(1), "lost"),
        (lambda story: story.rows.reverse(), "order"),
        (lambda story: story.rows.append(["1:3", "p0", 7]), "phantom"),
        (lambda story: story.attempt("p0", 3, [1], ["1:9"]), "other-id"),
        (lambda story: story.rows.__setitem__(0, ["1:7", "p0", 0]), "other-id"),
        (lambda story: story.attempt("p0", 4, [2], None), "undone"),
        (lambda story: (story.attempt("p0", 3, [1], None), story.add("failed", story.records[-2].n, error="x")), None),
    ],
)
def test_a_wrong_broker_is_judged_bad(change: Any, error: str | None) -> None:
    story = Story()
    change(story)
    found = story.judge()
    assert set(found.errors) == ({error} if error else set()), found.examples


class PartitionedStory(Story):
    """`p0` sends 0 to 3, of keys `a` and `b`, which are in two partitions; both consumers get everything."""

    def __init__(self) -> None:
        super().__init__()
        self.records = self.records[-1:]
        self.attempt("p0", 1, [0, 1, 2, 3], None)
        self.attempt("p0", 1, [0, 1, 2, 3], ["1:0", "2:0", "1:1", "2:1"])
        self.parts = [
            [["1:0", "p0", 0, "a"], ["1:1", "p0", 2, "a"]],
            [["2:0", "p0", 1, "b"], ["2:1", "p0", 3, "b"]],
        ]
        self.got: dict[str, list[list[Any]]] = {}
        self.got["live"] = [self.parts[0][1], *self.parts[0], *self.parts[1]]
        self.got["afterwards"] = [*self.parts[1], *self.parts[0], self.parts[1][0]]

    def judge(self) -> Repeats:
        for partition, rows in enumerate(self.parts):
            n = len(self.records) + 1
            self.add("invoke", n, op="read", process="reader", topic="t", start="earliest", partition=partition)
            self.add("ok", n, messages=rows, end=True)
        for consumer, rows in self.got.items():
            n = len(self.records) + 1
            self.add("invoke", n, op="receive", process=consumer, topic="t")
            self.add("unknown", n, error="killed")
            self.add("invoke", n + 1, op="receive", process=consumer, topic="t")
            self.add("ok", n + 1, messages=rows)
        return judge_repeats(self.records)


def test_messages_of_other_partitions_may_overtake() -> None:
    found = PartitionedStory().judge()
    assert found.verdict == "GOOD", found.examples
    assert (found.messages, found.partitions, found.deliveries) == (4, 2, 10)


@pytest.mark.parametrize(
    ("change", "errors"),
    [
        (lambda story: story.parts[0].reverse(), {"order"}),
        (lambda story: story.parts[1].append(["2:2", "p0", 0, "a"]), {"twice", "missed"}),
        (lambda story: story.parts[1].pop(), {"lost", "delivered"}),
        (lambda story: story.got["live"].__delitem__(3), {"missed"}),
        (lambda story: story.got["afterwards"].pop(1), {"missed"}),
        (lambda story: story.got["afterwards"].reverse(), {"late"}),
        (lambda story: story.got["live"].append(["1:0", "p0", 2, "a"]), {"delivered"}),
    ],
)
def test_a_wrong_partitioned_topic_is_judged_bad(change: Any, errors: set[str]) -> None:
    story = PartitionedStory()
    change(story)
    found = story.judge()
    assert set(found.errors) == errors, found.examples


def test_a_refused_request_is_an_error() -> None:
    story = Story()
    story.add("invoke", 99, op="produce", process="p0", topic="t", request=3, sequences=[1])
    story.add("failed", 99, error="422")
    assert set(story.judge().errors) == {"refused"}


def test_a_topic_that_is_not_read_to_its_end_is_lost() -> None:
    assert judge_repeats(Story().records).errors == {"lost": 1}
