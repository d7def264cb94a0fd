"""Build histories for tests: one call per line; the clock advances by a millisecond per line."""

from typing import Any, Final

from bindery_e2e.judging.history import Record

MS: Final = 1_000_000
TOPIC: Final = "public/default/t"


def digest(producer: str, sequence: int) -> str:
    return f"{producer}-{sequence}"


class Story:
    """Records in order. Each method adds one or two lines to the history."""

    def __init__(self, *, topic: str = TOPIC) -> None:
        self.topic = topic
        self.records: list[Record] = []
        self.now = 0
        self._count = 0
        self.add("run", version=1, seed=1)

    def add(self, kind: str, n: int = 0, /, **values: Any) -> None:
        self.now += MS
        self.records.append(Record(kind, self.now, self.now // MS, n, values))

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    def begin(self, op: str, process: str, **values: Any) -> int:
        self._count += 1
        self.add("invoke", self._count, op=op, process=process, topic=self.topic, **values)
        return self._count

    def send(self, producer: str, *sequences: int) -> int:
        """Invoke a produce and return its number. End it with `add("ok", n, ids=[...])` or another outcome."""
        digests = [digest(producer, sequence) for sequence in sequences]
        return self.begin("produce", producer, sequences=list(sequences), sizes=[1] * len(digests), digests=digests)

    def sent(self, producer: str, sequences: list[int], ids: list[str]) -> None:
        self.add("ok", self.send(producer, *sequences), ids=ids)

    def subscribed(self, name: str, kind: str = "shared") -> None:
        self.add("observation", what="subscribed", topic=self.topic, subscription=name, kind=kind)

    def received(self, name: str, *rows: list[Any], kind: str = "shared") -> None:
        n = self.begin("receive", f"{name}-0", subscription=name, kind=kind)
        self.add("ok", n, messages=[[*row, 0] for row in rows])

    def receive_lost(self, name: str, kind: str = "shared") -> None:
        self.add("unknown", self.begin("receive", f"{name}-0", subscription=name, kind=kind), error="cut")

    def acked(self, name: str, *ids: str) -> None:
        self.add("ok", self.begin("ack", f"{name}-0", subscription=name, ids=list(ids)))

    def drained(self, name: str, *, complete: bool = True) -> None:
        self.add("observation", what="drained", topic=self.topic, subscription=name, complete=complete)

    def read(self, *rows: list[Any], end: bool = True, number: int = 1) -> None:
        n = self.begin("read", "reader", start="earliest", round=number)
        self.add("ok", n, messages=list(rows), end=end)


def row(message_id: str, producer: str = "p0", sequence: int = 0, payload: str | None = None) -> list[Any]:
    return [message_id, producer, sequence, digest(producer, sequence) if payload is None else payload]


def good(*, deliver: bool = True) -> Story:
    """Two producers: five messages acknowledged, one of them in a batch, one unknown and stored, one refused. An
    exclusive and a shared subscription received all of them."""
    story = Story()
    story.subscribed("shared")
    story.subscribed("ordered", "exclusive")
    story.sent("p0", [0], ["1:0:-1:-1"])
    story.sent("p0", [1, 2], ["1:1:-1:0", "1:1:-1:1"])
    story.sent("p1", [0], ["1:2:-1:-1"])
    story.add("unknown", story.send("p0", 3), error="time-out")
    story.add("failed", story.send("p1", 1), error="503")
    story.sent("p0", [4], ["2:0:-1:-1"])
    if deliver:
        for name, kind in (("shared", "shared"), ("ordered", "exclusive")):
            story.received(name, *TRUTH[:3], kind=kind)
            story.acked(name, *(line[0] for line in TRUTH[:3]))
            story.received(name, *TRUTH[3:], kind=kind)
            story.acked(name, *(line[0] for line in TRUTH[3:]))
            story.drained(name)
    return story


TRUTH: Final = (
    row("1:0:-1:-1", "p0", 0),
    row("1:1:-1:0", "p0", 1),
    row("1:1:-1:1", "p0", 2),
    row("1:2:-1:-1", "p1", 0),
    row("1:3:-1:-1", "p0", 3),
    row("2:0:-1:-1", "p0", 4),
)
"""The content of the topic of `good`."""
