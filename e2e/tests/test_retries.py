"""Goal: a broker that loses, repeats or changes a retry or a dead letter is judged BAD; a correct one is accepted."""

from typing import Any

import pytest
from bindery_e2e.judging.retries import Retries, judge_retries
from bindery_e2e.traffic.retries import step_of
from histories import TOPIC, Story, digest

RETRY, DEAD = f"{TOPIC}-s-RETRY", f"{TOPIC}-s-DLQ"
LIMIT = 2
PROPERTIES = {
    "digest": 3,
    "published": 4,
    "key": 5,
    "times": 6,
    "origin": 7,
    "subscription": 8,
    "real_topic": 9,
    "others": 10,
}


class Retried(Story):
    """Four messages of one subscription. Message 0 is acknowledged; message 1 is retried and then acknowledged; message
    2 is retried until it is a dead letter; message 3 is returned until it is one. `skip` leaves messages out."""

    def __init__(self, *, skip: tuple[int, ...] = ()) -> None:
        super().__init__()
        names = {"subscription": "s", "retry": RETRY, "dead_letters": DEAD}
        self.add("observation", what="retries", topic=TOPIC, **names)
        numbers = [number for number in range(4) if number not in skip]
        self.source = {number: self.row(number, f"1:{number}:-1:-1") for number in numbers}
        self.stored: dict[str, list[list[Any]]] = {TOPIC: list(self.source.values()), RETRY: [], DEAD: []}
        n = self.begin(
            "produce",
            "p0",
            sequences=numbers,
            sizes=[1] * len(numbers),
            digests=[digest("p0", number) for number in numbers],
            keys=["k"] * len(numbers),
        )
        self.add("ok", n, ids=[line[0] for line in self.source.values()])
        if 0 in self.source:
            self.came(self.source[0])
            self.ack(self.source[0])
        if 1 in self.source:
            self.ack(self.came(self.retry(self.came(self.source[1]))))
        if 2 in self.source:
            line = self.source[2]
            for _ in range(3):
                line = self.retry(self.came(line), limit=LIMIT)
        if 3 in self.source:
            for count in range(3):
                self.came(self.source[3], count=count)
                self.nack(self.source[3])
            self.copy(self.source[3], "", DEAD)
        self.wait(1)

    def row(self, number: int, message_id: str) -> list[Any]:
        return [message_id, "p0", number, digest("p0", number), self.now // 10**6, "k", "", "", "", "", []]

    def new(self, number: int) -> list[Any]:
        """Store a message that was left out, without an answer to its producer."""
        line = self.row(number, f"1:{number}:-1:-1")
        self.stored[TOPIC].append(line)
        return line

    def came(self, line: list[Any], count: int = 0) -> list[Any]:
        n = self.begin("receive", "s-0", subscription="s", kind="shared", max_redeliver=LIMIT)
        self.add("ok", n, messages=[[*line, count]])
        return line

    def copy(self, line: list[Any], times: str, topic: str) -> list[Any]:
        """Store a copy."""
        copy = self.row(line[2], f"{2 if topic == RETRY else 3}:{len(self.stored[topic])}:-1:-1")
        copy[6:10] = [times, f"1:{line[2]}:-1", "s", f"persistent://{TOPIC}"]
        self.stored[topic].append(copy)
        return copy

    def retry(
        self, line: list[Any], *, outcome: str = "ok", limit: int = 16, stores: bool = True, moves: bool = True
    ) -> list[Any]:
        """Retry a message; return its copy. `moves`: whether the answer says that it was moved."""
        n = self.begin("retry", "s-0", subscription="s", ids=[line[0]], max_redeliver=limit, delay_ms=0)
        times = int(line[6] or 0) + 1
        topic = DEAD if times > limit else RETRY
        copy = self.copy(line, str(times), topic) if stores else ["2:99:-1:-1"]
        if outcome != "ok":
            self.add(outcome, n, error="cut")
        else:
            moved = [[line[0], topic, copy[0], times]]
            self.add("ok", n, moved=moved if moves else [], acknowledged=[] if moves else [line[0]], failed=[])
        return copy

    def ack(self, line: list[Any], outcome: str = "ok") -> None:
        n = self.begin("ack", "s-0", subscription="s", ids=[line[0]])
        self.add(outcome, n, **({} if outcome == "ok" else {"error": "cut"}))

    def nack(self, line: list[Any]) -> None:
        n = self.begin("nack", "s-0", subscription="s", ids=[line[0]], delay_ms=0)
        self.add("ok", n, returned=[line[0]])

    def kill(self, name: str) -> None:
        self._count += 1
        n = self._count
        self.add("fault-begin", n, fault="kill -9", target=name)
        self.add("fault-end", n, outcome="ok", killed_at=self.now)

    def judged(self, *, complete: bool = True, end: bool = True) -> Retries:
        self.add("observation", what="ending")
        self.kill("broker-0")
        self.add("observation", what="drained", topic=TOPIC, subscription="s", complete=complete)
        for topic, rows in self.stored.items():
            n = self._begin_read(topic)
            self.add("ok", n, messages=rows, end=False)
            n = self._begin_read(topic, start="9:9:-1:-1")
            self.add("ok", n, messages=[], end=end)
        return judge_retries(self.records)

    def _begin_read(self, topic: str, start: str = "earliest") -> int:
        self._count += 1
        self.add("invoke", self._count, op="read", process="reader", topic=topic, start=start, round=1)
        return self._count

    def found(self, **options: bool) -> dict[str, int]:
        return dict(self.judged(**options).errors)


def test_a_correct_history_is_good_and_counted() -> None:
    story = Retried()
    story.kill("bookie-1")
    found = story.judged()
    assert found.verdict == "GOOD", found.examples
    values = {"messages": 4, "acked": 2, "copies": 3, "moved": 4, "by_retry": 1, "by_returns": 1, "deliveries": 9}
    assert {name: getattr(found, name) for name in values} == values
    assert found.kills == {"broker-0": 1, "bookie-1": 1}
    assert "2 kills; 1 of the broker, 1 of bookies; 4 messages" in str(found)


@pytest.mark.parametrize("skipped", [(1, 2), (2,), (3,)])
def test_a_run_without_retries_or_dead_letters_is_incomplete(skipped: tuple[int, ...]) -> None:
    assert Retried(skip=skipped).judged().verdict == "INCOMPLETE"


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_retry_of_unknown_outcome_was_done_or_not(is_done: bool, is_repeated: bool) -> None:
    story = Retried(skip=(1,))
    line = story.new(1)
    copy = story.retry(story.came(line), outcome="unknown", stores=is_done)
    if is_repeated and is_done:
        story.retry(line, stores=False, moves=False)
    elif not is_done:
        copy = story.retry(story.came(line))
    story.ack(story.came(copy))
    found = story.judged()
    assert not found.errors, found.examples
    assert found.unanswered == is_done


def test_a_message_whose_only_retry_is_unknown_and_has_no_copy_is_lost() -> None:
    story = Retried(skip=(1,))
    line = story.new(1)
    story.retry(story.came(line), outcome="unknown", stores=False)
    assert story.found() == {"lost": 1}


def test_a_copy_that_nobody_received_is_lost() -> None:
    story = Retried(skip=(1,))
    line = story.new(1)
    story.retry(story.came(line))
    assert story.found() == {"lost": 1}


def test_a_message_that_is_missing_in_the_topic_is_lost() -> None:
    story = Retried()
    del story.stored[TOPIC][0]
    assert story.found()["lost"] == 1


def test_an_acknowledgement_of_unknown_outcome_may_have_been_done() -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    story.ack(story.came(line), outcome="unknown")
    assert story.found() == {}


def test_a_refused_acknowledgement_does_not_count() -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    story.ack(story.came(line), outcome="failed")
    assert story.found() == {"lost": 1}


@pytest.mark.parametrize("topic", [RETRY, DEAD])
def test_a_second_copy_is_found(topic: str) -> None:
    story = Retried()
    again = story.stored[topic][0]
    story.stored[topic].append(["7:7:-1:-1", *again[1:]])
    assert story.found() == {"two-copies": 1}


def test_a_dead_letter_after_an_answered_acknowledgement_is_found() -> None:
    story = Retried()
    story.copy(story.source[0], "", DEAD)
    assert story.found()["two-places"] == 1


def test_an_answered_retry_without_its_copy_is_found() -> None:
    story = Retried()
    del story.stored[RETRY][0]
    assert story.found()["no-copy"] == 1


@pytest.mark.parametrize(
    ("name", "value"), [("origin", "1:3:-1"), ("times", "2")], ids=["of another message", "of another retry"]
)
def test_a_copy_that_is_not_the_answered_one_is_found(name: str, value: str) -> None:
    story = Retried()
    story.stored[RETRY][0][PROPERTIES[name]] = value
    assert story.found()["no-copy"] == 1


def test_a_copy_of_no_message_is_a_phantom() -> None:
    story = Retried()
    story.copy(story.row(8, "1:8:-1:-1"), "1", RETRY)
    assert story.found() == {"phantom": 1}


@pytest.mark.parametrize("outcome", ["failed", None])
def test_a_copy_that_no_retry_can_have_written_is_a_phantom(outcome: str | None) -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    story.came(line)
    copy = story.copy(line, "1", RETRY) if outcome is None else story.retry(line, outcome=outcome)
    story.ack(story.came(copy))
    assert story.found() == {"phantom": 1}


def test_a_delivery_of_what_is_not_stored_is_a_phantom() -> None:
    story = Retried()
    story.came(story.row(8, "1:8:-1:-1"))
    assert story.found() == {"phantom": 1}


def test_a_gap_in_the_number_of_retries_is_found() -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    story.ack(story.came(line))
    story.copy(line, "2", RETRY)
    assert story.found() == {"gap": 1}


@pytest.mark.parametrize("times", ["", "1", "4"])
def test_a_dead_letter_that_does_not_continue_its_retries_is_found(times: str) -> None:
    story = Retried()
    story.stored[DEAD][0][PROPERTIES["times"]] = times
    assert story.found()["gap"] == 1


@pytest.mark.parametrize("topic", [RETRY, DEAD])
@pytest.mark.parametrize("name", ["digest", "key", "subscription", "real_topic", "others"])
def test_a_changed_copy_is_found(topic: str, name: str) -> None:
    """A copy in the retry topic was delivered unchanged, so that its delivery differs from what is stored, too."""
    story = Retried()
    story.stored[topic][1][PROPERTIES[name]] = "other"
    assert story.found() == {"changed": 2 if topic == RETRY else 1}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_delivery_after_the_message_is_done_is_found(number: int) -> None:
    """After an answered acknowledgement, an answered retry, and the write of the dead letter."""
    story = Retried()
    story.came(story.source[number])
    assert story.found() == {"again": 1}


def test_a_delivery_after_a_copy_by_a_retry_of_unknown_outcome_is_found() -> None:
    story = Retried(skip=(1,))
    line = story.new(1)
    copy = story.retry(story.came(line), outcome="unknown")
    story.ack(story.came(copy))
    story.wait(1)
    story.came(line)
    assert story.found() == {"again": 1}


def test_a_dead_letter_that_was_returned_too_seldom_is_found() -> None:
    story = Retried(skip=(3,))
    line = story.new(3)
    for count in range(2):
        story.came(line, count=count)
        story.nack(line)
    story.copy(line, "", DEAD)
    assert story.found() == {"wrong-limit": 1}


def test_a_delivery_whose_response_was_lost_counts_as_one_that_may_have_been_returned() -> None:
    story = Retried(skip=(3,))
    line = story.new(3)
    for count in range(2):
        story.came(line, count=count)
        story.nack(line)
    n = story.begin("receive", "s-0", subscription="s", kind="shared", max_redeliver=LIMIT)
    story.add("unknown", n, error="cut")
    story.copy(line, "", DEAD)
    assert story.found() == {}


def test_a_delivery_beyond_the_limit_of_returns_is_found() -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    story.ack(story.came(line, count=3))
    assert story.found() == {"wrong-limit": 1}


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_retry_against_its_limit_is_found(is_dead: bool) -> None:
    story = Retried(skip=(0,))
    line = story.new(0)
    n = story.begin("retry", "s-0", subscription="s", ids=[line[0]], max_redeliver=1 if is_dead else 0, delay_ms=0)
    story.came(line)
    copy = story.copy(line, "1", DEAD if is_dead else RETRY)
    story.add("ok", n, moved=[[line[0], DEAD if is_dead else RETRY, copy[0], 1]], acknowledged=[], failed=[])
    if not is_dead:
        story.ack(story.came(copy))
    assert story.found() == {"wrong-limit": 1}


def test_what_is_not_drained_or_not_read_is_found() -> None:
    assert Retried().found(complete=False) == {"undrained": 1}
    assert Retried().found(end=False) == {"undrained": 3}


def test_the_longest_time_without_an_answer_ends_with_the_load() -> None:
    story = Retried()
    story.wait(5)
    story.came(story.source[0])
    story.wait(1)
    found = story.judged()
    assert 6 < found.silence_s["receive"] < 6.1
    assert found.silence_s["retry"] < 1


def test_a_plan_is_the_same_for_each_delivery_and_ends() -> None:
    ends: set[str] = set()
    for sequence in range(200):
        properties = {"producer": "p0", "sequence": str(sequence)}
        steps: list[str] = []
        for times in range(4):
            message = {"properties": {**properties, "RECONSUMETIMES": str(times)}}
            assert step_of(7, "shared", message) == step_of(7, "shared", message)
            steps.append(step_of(7, "shared", message))
        ends.add(next((step for step in steps if step != "retry"), "retry"))
    assert ends == {"ack", "dead", "nack"}
