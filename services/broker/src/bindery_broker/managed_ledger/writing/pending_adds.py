"""The adds of one topic that are not answered yet: which to send next, and what to answer. Pure.

    queue -> (grouped) -> in flight in the current ledger -> confirmed, in order

| event                               | answer to an add                                                               |
|-------------------------------------|--------------------------------------------------------------------------------|
| its group and all before are stored | the positions                                                                  |
| the ledger failed and was recovered | the positions if recovery found all its entries, else none yet: the missing    |
|                                     | entries return to the head of the queue                                        |
| its deadline passes in flight       | AddTimeout: unknown whether it is stored                                       |
| its deadline passes in the queue    | AddTimeout if part of it is stored or may be stored, else a TryAgain           |
| the topic ends                      | AddTimeout or the reason, see `fail_all`                                       |
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from bindery_core.errors import AddTimeout, BinderyError, MetadataUnavailable, TopicFenced, TryAgain
from bindery_pulsar.message_id import Position

GROUP_SIZE_MAX: Final = 4 * 2**20
"""Maximum payload bytes sent in one call to the ledger, unless one add alone has more."""

_NOTHING: Final[deque[Any]] = deque(maxlen=0)
"""Stands for an empty queue until something is added: most topics are idle, and an empty deque takes 760 bytes."""


class StoredEntries(NamedTuple):
    """Consecutive entries of one add that are durable."""

    positions: list[Position]
    payloads: Sequence[bytes]
    size: int
    """Payload bytes."""
    queued_at: float
    """When they were queued, in loop time."""


class _Add:
    """One call of `add_many`, or the part of it that is not stored yet."""

    __slots__ = ("deadline", "future", "payloads", "positions", "queued_at", "sent", "size")

    def __init__(
        self,
        payloads: Sequence[bytes],
        size: int,
        future: "asyncio.Future[list[Position]]",
        *,
        queued_at: float,
        deadline: float,
    ) -> None:
        self.payloads = payloads
        self.size = size
        self.future = future
        self.queued_at = queued_at
        self.deadline = deadline
        self.positions: list[Position] = []
        """Positions of the part that is stored."""
        self.sent = False
        """Whether part of it is stored, or may be in a ledger that has not been recovered yet."""

    def take_stored(self, first: Position, count: int) -> StoredEntries:
        """Record that the first `count` entries are stored, from `first` on. Answers the call if no entry is left."""
        ledger_id, entry_id = first
        positions = [Position(ledger_id, i) for i in range(entry_id, entry_id + count)]
        if count < len(self.payloads):
            payloads, self.payloads = self.payloads[:count], self.payloads[count:]
            stored = StoredEntries(positions, payloads, sum(map(len, payloads)), self.queued_at)
            self.positions += positions
            self.size -= stored.size
            return stored
        stored = StoredEntries(positions, self.payloads, self.size, self.queued_at)
        self.payloads, self.size = (), 0
        if not self.future.done():
            self.future.set_result(self.positions + positions if self.positions else positions)
        return stored


class Group:
    """Adds that are sent in one call."""

    __slots__ = ("adds", "count", "first", "is_stored")

    def __init__(self, first: int, adds: list[_Add], count: int) -> None:
        self.first = first
        """Entry id of the first entry."""
        self.adds = adds
        self.count = count
        """Number of entries."""
        self.is_stored = False

    def payloads(self) -> list[bytes]:
        return [payload for add in self.adds for payload in add.payloads]


class PendingAdds:
    """Owns the queue and the groups in flight. Invariant: entries keep the order of the calls."""

    def __init__(self) -> None:
        self.size = 0
        """Payload bytes that are queued or in flight."""
        self._queue: deque[_Add] = _NOTHING
        self._in_flight: deque[Group] = _NOTHING

    @property
    def count(self) -> int:
        """Number of calls that are queued or in flight."""
        return len(self._queue) + sum(len(group.adds) for group in self._in_flight)

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._in_flight)

    def append(
        self,
        payloads: Sequence[bytes],
        future: "asyncio.Future[list[Position]]",
        *,
        queued_at: float,
        deadline: float,
    ) -> None:
        """Queue an add. Both times are in loop time."""
        add = _Add(payloads, sum(map(len, payloads)), future, queued_at=queued_at, deadline=deadline)
        self.size += add.size
        if self._queue is _NOTHING:
            self._queue, self._in_flight = deque(), deque()
        self._queue.append(add)

    def next_group(self, first: int) -> Group | None:
        """Put the next queued adds in flight, with entry ids from `first` on. None: the queue is empty."""
        adds: list[_Add] = []
        size = count = 0
        while self._queue and (not adds or size + self._queue[0].size <= GROUP_SIZE_MAX):
            add = self._queue.popleft()
            if add.future.done():  # the caller was cancelled
                self.size -= add.size
                continue
            add.sent = True
            adds.append(add)
            size += add.size
            count += len(add.payloads)
        if not adds:
            return None
        group = Group(first, adds, count)
        self._in_flight.append(group)
        return group

    def confirm(self, ledger_id: int) -> list[StoredEntries]:
        """Answer the groups at the head that are stored. Returns their entries, in order."""
        stored: list[StoredEntries] = []
        while self._in_flight and self._in_flight[0].is_stored:
            group = self._in_flight.popleft()
            entry_id = group.first
            for add in group.adds:
                count = len(add.payloads)
                stored.append(add.take_stored(Position(ledger_id, entry_id), count))
                entry_id += count
        self.size -= sum(entries.size for entries in stored)
        return stored

    def settle(self, ledger_id: int, entries: int) -> list[StoredEntries]:
        """The ledger is closed and has `entries` entries: answer what is stored and queue the rest again, in order.

        Returns the entries in flight that are stored.
        """
        stored: list[StoredEntries] = []
        unstored: list[_Add] = []
        for group in self._in_flight:
            entry_id = group.first
            for add in group.adds:
                count = len(add.payloads)
                found = min(max(entries - entry_id, 0), count)
                if found:
                    stored.append(add.take_stored(Position(ledger_id, entry_id), found))
                if found < count:
                    unstored.append(add)
                entry_id += count
        self._in_flight.clear()
        self.size -= sum(entries.size for entries in stored)
        for add in reversed(unstored):
            add.sent = bool(add.positions)
            if add.future.done():  # the caller was cancelled, or failed because the outcome is unknown
                self.size -= add.size
            else:
                self._queue.appendleft(add)
        return stored

    def next_deadline(self) -> float | None:
        """The earliest deadline in loop time; None: no add waits."""
        deadlines = [add.deadline for group in self._in_flight for add in group.adds if not add.future.done()]
        if self._queue:
            deadlines.append(self._queue[0].deadline)
        return min(deadlines, default=None)

    def expire(self, error: BinderyError, *, now: float, ledger_has_failed: bool) -> None:
        """Fail the adds whose deadline has passed. `error`: the error that delayed them.

        Adds in flight in a working ledger do not fail here: the ledger has time limits of its own.
        """
        for group in self._in_flight if ledger_has_failed else ():
            for add in group.adds:
                if add.deadline <= now and not add.future.done():
                    add.future.set_exception(_unknown(error))
        while self._queue and self._queue[0].deadline <= now:
            add = self._queue.popleft()
            self.size -= add.size
            if not add.future.done():
                add.future.set_exception(_unknown(error) if add.sent else _not_stored(error))

    def fail_all(self, error: BinderyError) -> None:
        """Fail all adds because the topic ends with `error`.

        Adds that may be stored fail with AddTimeout, all others with `error`. If `error` is TopicFenced, which itself
        means an unknown outcome, all adds fail with it.
        """
        adds = [add for group in self._in_flight for add in group.adds] + list(self._queue)
        self._in_flight.clear()
        self._queue.clear()
        self.size = 0
        for add in adds:
            if not add.future.done():
                is_unknown = add.sent and not isinstance(error, TopicFenced)
                add.future.set_exception(_unknown(error) if is_unknown else copy_error(error))


def copy_error(error: BinderyError) -> BinderyError:
    """Return a copy of `error` for another caller. One object raised for all would collect all their tracebacks."""
    return type(error)(error.message, **error.facts)


def _unknown(cause: BinderyError) -> AddTimeout:
    return AddTimeout("whether the entries were stored is not known", cause=str(cause))


def _not_stored(cause: BinderyError) -> BinderyError:
    return copy_error(cause) if isinstance(cause, TryAgain) else MetadataUnavailable(cause.message, **cause.facts)
