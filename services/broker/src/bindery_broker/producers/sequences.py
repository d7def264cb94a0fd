"""Decide whether a message with a sequence id is stored already. Pure.

Each producer has two numbers: *pushed*, the highest sequence id that was given to the ledger, and *persisted*, the
highest that is durable.

| sequence id                 | verdict      | what the caller does                                              |
|-----------------------------|--------------|-------------------------------------------------------------------|
| <= persisted                | DUPLICATE    | answer with the id of the stored message, if it is still known    |
| > persisted, and <= pushed  | UNDETERMINED | wait for the end of the write in progress, then ask again         |
| > pushed                    | NEW          | `push` it and store it                                            |

A write that failed resets pushed to persisted, so only persisted messages count as duplicates. After a write with an
unknown outcome the caller finds out what was stored (`persist` for each entry), and then resets, too.

The number of producers is limited. A producer that was idle for `idle_ms_max` is forgotten. If there is no room, the
one that was idle longest is forgotten, but not within `kept_ms` of its last message: a new producer is refused then.
Invariant: persisted <= pushed.
Source: Pulsar's MessageDeduplication, which keeps the same two numbers and the same limits.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_id import MessageId, Position

NONE: Final = -1
"""The sequence id before the first one."""
PRODUCERS_MAX: Final = 10_000
"""Maximum number of producers of a topic. Source: Pulsar's brokerDeduplicationMaxNumberOfProducers."""
IDLE_MS_MAX: Final = 360 * 60_000
"""Milliseconds after which an idle producer is forgotten. Source: Pulsar's
brokerDeduplicationProducerInactivityTimeoutMinutes."""
KEPT_MS: Final = 5 * 60_000
"""Milliseconds for which a producer is remembered in any case."""
PLACES_MAX: Final = 4
"""Maximum number of last entries of a producer whose ids are remembered."""


class Verdict(Enum):
    NEW = auto()
    DUPLICATE = auto()
    UNDETERMINED = auto()


class Place(NamedTuple):
    """An entry with messages of one producer."""

    first: int
    """Sequence id of the first message."""
    last: int
    position: Position
    size: int
    """Number of messages; 1: the entry is no batch."""


class _Producer:
    __slots__ = ("active_ms", "persisted", "places", "pushed")

    def __init__(self, persisted: int, active_ms: int) -> None:
        self.pushed = self.persisted = persisted
        self.active_ms = active_ms
        self.places: tuple[Place, ...] = ()


class SequenceTable:
    """The producers of one topic. Times are in milliseconds since 1970."""

    def __init__(
        self, *, producers_max: int = PRODUCERS_MAX, idle_ms_max: int = IDLE_MS_MAX, kept_ms: int = KEPT_MS
    ) -> None:
        self._producers_max = producers_max
        self._idle_ms_max = idle_ms_max
        self._kept_ms = kept_ms
        self._producers: dict[str, _Producer] = {}
        """Those that were active last are at the end."""

    def __len__(self) -> int:
        return len(self._producers)

    def verdict(self, producer: str, sequence_id: int) -> Verdict:
        found = self._producers.get(producer)
        if found is None or sequence_id > found.pushed:
            return Verdict.NEW
        return Verdict.DUPLICATE if sequence_id <= found.persisted else Verdict.UNDETERMINED

    def last_persisted(self, producer: str) -> int:
        """Return the highest durable sequence id of a producer; -1: it is not known."""
        found = self._producers.get(producer)
        return NONE if found is None else found.persisted

    def last_pushed(self, producer: str) -> int:
        """Return the highest sequence id of a producer that is stored or being stored; -1: it is not known."""
        found = self._producers.get(producer)
        return NONE if found is None else found.pushed

    def message_id(self, producer: str, sequence_id: int, *, partition: int) -> MessageId | None:
        """Return the id of a stored message. None: it is not among the last ones that are remembered."""
        found = self._producers.get(producer)
        for first, last, (ledger_id, entry_id), size in () if found is None else found.places:
            if first <= sequence_id <= last and last - first == size - 1:  # no number is left out in the batch
                return MessageId(ledger_id, entry_id, sequence_id - first if size > 1 else -1, partition)
        return None

    def push(self, producer: str, sequence_id: int, *, now_ms: int) -> None:
        """A write of new messages begins; `sequence_id` is the highest. Raises TooManyRequests if there is no room."""
        found = self._producers.get(producer)
        if found is None:
            found = self._add(producer, now_ms)
        found.pushed = max(found.pushed, sequence_id)
        self._touch(producer, found, now_ms)

    def persist(self, producer: str, place: Place, *, now_ms: int) -> None:
        """An entry is durable. Entries of one producer may be given twice, and in any order."""
        found = self._producers.get(producer)
        if found is None:
            found = self._add(producer, now_ms, forced=True)
        if place not in found.places:
            found.places = (*found.places, place)[-PLACES_MAX:]
        found.persisted = max(found.persisted, place.last)
        found.pushed = max(found.pushed, found.persisted)
        self._touch(producer, found, now_ms)

    def reset(self, producer: str) -> None:
        """No write of the producer is in progress, and what was stored is known."""
        found = self._producers.get(producer)
        if found is not None:
            found.pushed = found.persisted
            if found.persisted == NONE:
                del self._producers[producer]

    def expire(self, now_ms: int) -> int:
        """Forget producers that were idle too long. Returns how many."""
        count = 0
        for producer, found in list(self._producers.items()):
            if now_ms - found.active_ms < self._idle_ms_max:
                break
            if found.pushed == found.persisted:
                del self._producers[producer]
                count += 1
        return count

    def persisted(self) -> dict[str, int]:
        """Return the highest durable sequence id of each producer."""
        return {name: found.persisted for name, found in self._producers.items() if found.persisted != NONE}

    def active_ms(self, producer: str) -> int:
        """Return when the producer was last active."""
        return self._producers[producer].active_ms

    def load(self, persisted: Mapping[str, int], active_ms: Mapping[str, int], *, now_ms: int) -> None:
        """Replace everything by a snapshot. A producer without a time counts as active now."""
        times = {name: min(active_ms.get(name, now_ms), now_ms) for name in persisted}
        self._producers = {
            name: _Producer(persisted[name], times[name]) for name in sorted(times, key=times.__getitem__)
        }
        self.expire(now_ms)
        self._make_room(now_ms, 0, forced=True)

    def _add(self, producer: str, now_ms: int, *, forced: bool = False) -> _Producer:
        self._make_room(now_ms, 1, forced=forced)
        found = self._producers[producer] = _Producer(NONE, now_ms)
        return found

    def _make_room(self, now_ms: int, count: int, *, forced: bool) -> None:
        while len(self._producers) + count > self._producers_max:
            oldest = next(iter(self._producers))
            if not forced and now_ms - self._producers[oldest].active_ms < self._kept_ms:
                raise TooManyRequests(
                    "the topic has the maximum number of producers with sequence ids; use fewer names",
                    producers=len(self._producers),
                )
            del self._producers[oldest]

    def _touch(self, producer: str, found: _Producer, now_ms: int) -> None:
        found.active_ms = max(found.active_ms, now_ms)
        del self._producers[producer]
        self._producers[producer] = found
