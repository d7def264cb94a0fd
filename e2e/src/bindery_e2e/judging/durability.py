"""Judge what a subscription keeps when its broker is killed: redelivery counts and acknowledgements. Pure.

1. `count-fell`. The redelivery count of a message never goes down. Two deliveries are compared if the second one was
   asked for after the response with the first one.
2. `inconsistent`. An acknowledgement without a definite response may have been done or not, but one of the two. The
   broker that starts after a kill has decided it before it answers anything. So

   - a message that this broker delivers was not acknowledged, and another acknowledgement must follow, since the
     subscription has no unacknowledged message at the end;
   - a cumulative acknowledgement is done as a whole: if this broker delivers one of its messages, it delivers all of
     them before another acknowledgement of them begins. Messages with another acknowledgement do not count.

The other rules are in `observed` and `validate`: what was acknowledged with an answer never comes again
(`redelivered`), and everything else comes (`undelivered`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import intern

from bindery_e2e.judging.history import Record

Case = tuple[str, str]
"""Kind of error, and description."""


@dataclass(frozen=True, slots=True)
class Acked:
    """An acknowledgement that did not definitely fail."""

    n: int
    begun: int
    ended: int
    is_sure: bool
    cumulative: tuple[str, ...] = ()
    """The messages of a cumulative acknowledgement."""


@dataclass(slots=True)
class Durability:
    """What the consumers of one subscription observed, in the order of the responses."""

    count_max: int = 0
    """The highest redelivery count."""
    counted: int = 0
    """Number of deliveries that were compared with one before."""
    unknown: int = 0
    """Number of acknowledged messages of unknown outcome."""
    _fell: list[str] = field(default_factory=list)
    _counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Message id -> its highest redelivery count, and the operation and the time of the first response with it."""
    _asked: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Message id -> (time, operation) of the receives that delivered it."""
    _acks: dict[str, list[Acked]] = field(default_factory=dict)
    _unsure: list[Acked] = field(default_factory=list)
    """Cumulative acknowledgements of unknown outcome."""

    def take(self, begun: Record, ended: Record) -> None:
        """Add an operation that has ended. An acknowledgement has `ids`, also if it is cumulative."""
        op = begun.values["op"]
        if op == "receive" and ended.type == "ok":
            for message_id, _, _, _, count in ended.values["messages"]:
                self._delivered(intern(message_id), count, begun, ended)
        elif op == "ack" and ended.type != "failed":
            ids = tuple(map(intern, begun.values["ids"]))
            is_cumulative, is_sure = "cumulative" in begun.values, ended.type == "ok"
            acked = Acked(begun.n, begun.at, ended.at, is_sure, ids if is_cumulative else ())
            for message_id in ids:
                self._acks.setdefault(message_id, []).append(acked)
            if not is_sure:
                self.unknown += len(ids)
                if is_cumulative:
                    self._unsure.append(acked)

    def _delivered(self, message_id: str, count: int, begun: Record, ended: Record) -> None:
        self.count_max = max(self.count_max, count)
        self._asked.setdefault(message_id, []).append((begun.at, begun.n))
        highest, n, at = self._counts.get(message_id, (-1, 0, 0))
        if highest >= 0 and begun.at > at:
            self.counted += 1
            if count < highest:
                self._fell.append(f"{message_id}: {count} in operation {begun.n}, {highest} in operation {n} before")
        if count > highest:
            self._counts[message_id] = count, begun.n, ended.at

    def find(self, kills: Sequence[int], *, drained: bool) -> Iterator[Case]:
        """Find all errors.

        `kills`: times at which the broker was dead, ascending. `drained`: whether all is acknowledged at the end.
        """
        for text in self._fell:
            yield "count-fell", text
        if not drained:  # what is missing may come later
            return
        yield from self._gone(kills)
        for acked in self._unsure:
            yield from self._torn(acked, kills)

    def _gone(self, kills: Sequence[int]) -> Iterator[Case]:
        for message_id, acks in self._acks.items():
            if any(acked.is_sure for acked in acks):
                continue  # whatever comes after it is `redelivered`
            decided = max(_next(kills, acked.ended) for acked in acks)
            for at, n in self._asked.get(message_id, ()):
                if at > decided:
                    yield (
                        "inconsistent",
                        f"{message_id} came in operation {n}, after operation {acks[-1].n} of unknown outcome, and was "
                        f"then gone without another acknowledgement",
                    )
                    break

    def _torn(self, acked: Acked, kills: Sequence[int]) -> Iterator[Case]:
        decided = _next(kills, acked.ended)
        came: list[str] = []
        missing: list[str] = []
        for message_id in acked.cumulative:
            others = [other for other in self._acks[message_id] if other is not acked]
            if any(other.begun <= decided for other in others):
                continue
            until = min((other.begun for other in others), default=None)
            is_again = any(decided < at and (until is None or at < until) for at, _ in self._asked[message_id])
            (came if is_again else missing).append(message_id)
        if came and missing:
            yield (
                "inconsistent",
                f"operation {acked.n} acknowledged {len(acked.cumulative)} messages with unknown outcome; {came[0]} "
                f"came again after the next kill, {missing[0]} did not",
            )


def _next(kills: Sequence[int], at: int) -> float:
    """Return the first time from `at` on at which the broker was dead; infinity if there is none."""
    index = bisect_left(kills, at)
    return kills[index] if index < len(kills) else float("inf")
