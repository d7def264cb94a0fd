"""Keep the tail of every topic: the entries that were written last. Pure.

The tails of all topics share a limit in bytes. Above it, entries leave in this order:

| first to leave                                                   | reason                                            |
|------------------------------------------------------------------|---------------------------------------------------|
| 1 passed entries: no live reader of the topic needs them         | only redeliveries and new readers would use them  |
| 2 the oldest entries of a topic whose tail is among the largest  | a busy topic must not evict the tails of others   |

A reader is *live* while its position is in the cached tail of its topic or at the end, and it makes progress. A reader
farther behind must read from bookies in any case, so it keeps no entry in memory. A topic without live readers has
passed entries only.

Invariants
- size <= size_max after every call, and it is the sum over the topics.
- Entries leave only because entries were written. No read evicts anything.
- A topic's entries leave in the order of their positions, so its tail has no gaps within a ledger.
- With n topics in memory, an entry that a live reader still needs leaves only while its topic has more than
  (size_max - slack) / 2n bytes. Hence a live reader that is at most that far behind finds every entry here.

Rule 2 finds a topic by its size class (powers of two): the topic has more than half the bytes of the largest one, which
has at least the mean. At the limit, `slack` more bytes are evicted than needed, so that few adds evict anything. The
lowest position of the live readers is a lower bound that is renewed once per as many moves as there are readers, so
that a move takes constant time on average; so does adding or evicting an entry.
Source: Pulsar evicts up to the slowest active reader, too (ManagedLedgerImpl.doCacheEviction), but after one second
whatever the topic, and it caches what catch-up readers read in the same place.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from bindery_pulsar.message_id import Position

ENTRY_OVERHEAD: Final = 200
"""Approximate bytes of memory per entry in addition to its payload: key, dict slot, bytes object."""
_NOWHERE: Final = Position(-1, -1)
"""The position of a reader that has not read."""
_START: Final = Position(-1, 0)
"""A position before all entries."""
_EVERYTHING: Final = Position(2**63, 0)
"""A position after all entries."""


class TailReader:
    """The position of one reader of a topic, such as a cursor."""

    __slots__ = ("_tail", "has_moved", "position")

    def __init__(self, tail: "TopicTail") -> None:
        self._tail = tail
        self.position = _NOWHERE
        """The next entry that the reader needs."""
        self.has_moved = False
        """Whether the reader has read since the last round."""

    def move(self, position: Position) -> None:
        """Record that the reader needs the entries from `position` on, and none before it. It may also move back."""
        if position != self.position or not self.has_moved:
            self.has_moved = True
            self.position = position
            self._tail.moved(self)

    def close(self) -> None:
        """Forget the reader. Idempotent."""
        self._tail.forget(self)


class _Run:
    """Consecutive entries of one ledger, from `first` up to but excluding `end`."""

    __slots__ = ("end", "first", "ledger_id", "payloads")

    def __init__(self, ledger_id: int, first: int) -> None:
        self.ledger_id = ledger_id
        self.first = first
        self.end = first
        self.payloads: dict[int, bytes] = {}


class TopicTail:
    """The last entries of one topic. Created by `TailSegment.topic`."""

    __slots__ = (
        "_floor", "_moves", "_readers", "_runs", "_segment", "is_open", "oldest", "passed", "size", "size_class",
    )  # fmt: skip

    def __init__(self, segment: "TailSegment") -> None:
        self.size = 0
        """Bytes of payloads and overhead."""
        self.size_class = 0
        """The bits of `size`."""
        self.oldest = _EVERYTHING
        """The first entry in memory."""
        self.passed = _EVERYTHING
        """No live reader needs an entry before this position."""
        self.is_open = True
        self._segment = segment
        self._runs: dict[int, _Run] = {}
        """By ledger id, in the order of writing. No run is empty after a call."""
        self._readers: dict[TailReader, None] = {}
        """Those that read recently, or are at the end."""
        self._floor = _START
        """Readers before this position need entries that are not in memory."""
        self._moves = 0
        """Moves of readers since `passed` was renewed."""

    def add(self, ledger_id: int, first: int, payloads: Sequence[bytes], *, size: int) -> None:
        """Add the entries that were written after all others. `size`: bytes of `payloads`."""
        if not self.is_open or not payloads:
            return
        run = self._runs.get(ledger_id)
        if run is None or run.end != first:
            run = self._begin(ledger_id, first)
        count = len(payloads)
        if count == 1:
            run.payloads[first] = payloads[0]
        else:
            run.payloads.update(zip(range(first, first + count), payloads, strict=True))
        run.end = first + count
        self._segment.grow(self, count, size + count * ENTRY_OVERHEAD)

    def _begin(self, ledger_id: int, first: int) -> _Run:
        """Return a new run. A ledger begins with entry 0; if entries are missing, those before them are dropped."""
        if self._runs and (first or ledger_id in self._runs):
            self._segment.drop(self, *self._clear())
        floor = self._floor
        if not self._runs and not (floor == (ledger_id, first) or (_START < floor < (ledger_id, 0) and not first)):
            self._floor = Position(ledger_id, first)
        run = self._runs[ledger_id] = _Run(ledger_id, first)
        if len(self._runs) == 1:
            self.oldest = Position(ledger_id, first)
        return run

    def run_of(self, ledger_id: int) -> _Run | None:
        return self._runs.get(ledger_id)

    def reader(self) -> TailReader:
        """Return a new reader. It counts from its first `move` on."""
        return TailReader(self)

    def forget(self, reader: TailReader) -> None:
        if reader in self._readers:
            del self._readers[reader]
            self._renew()

    def moved(self, reader: TailReader) -> None:
        """Count a reader that moved."""
        if reader not in self._readers:
            self._readers[reader] = None
        self._moves += 1
        if self._moves >= len(self._readers):
            self._renew()
        elif self._floor <= reader.position < self.passed:
            self.passed = reader.position
            self._segment.mark(self)

    @property
    def needs_round(self) -> bool:
        """Whether a reader has moved since the last round, or is behind the end."""
        end = self._end
        return any(reader.has_moved or reader.position < end for reader in self._readers)

    @property
    def _end(self) -> Position:
        end = _START
        for run in self._runs.values():
            end = Position(run.ledger_id, run.end)
        return end

    def next_round(self) -> None:
        """Forget the readers behind the end that did not move since the last call, until they move. Call it from a
        timer: readers without a consumer keep entries for two rounds at most."""
        end = self._end
        for reader in list(self._readers):
            if not reader.has_moved and reader.position < end:
                del self._readers[reader]
            reader.has_moved = False
        self._renew()

    def _renew(self) -> None:
        self._moves = 0
        floor, passed = self._floor, _EVERYTHING
        for reader in self._readers:
            if floor <= reader.position < passed:
                passed = reader.position
        self.passed = passed
        self._segment.mark(self)

    def shed(self, excess: int, *, only_passed: bool) -> tuple[int, int]:
        """Evict the oldest entries until `excess` bytes are free. Returns the number of entries and the bytes evicted.

        Stops before an entry that a live reader needs if `only_passed`, else once the topic is in a lower size class.
        """
        count = freed = 0
        freed_max = excess if only_passed else min(excess, self.size - (1 << self.size_class >> 1) + 1)
        passed = self.passed
        while freed < freed_max and self._runs:
            run = next(iter(self._runs.values()))
            stop = run.end
            if only_passed and run.ledger_id >= passed.ledger_id:
                stop = min(stop, passed.entry_id) if run.ledger_id == passed.ledger_id else run.first
            entry_id, pop = run.first, run.payloads.pop
            while entry_id < stop and freed < freed_max:
                freed += len(pop(entry_id)) + ENTRY_OVERHEAD
                entry_id += 1
            count += entry_id - run.first
            run.first = entry_id
            self._floor = self.oldest = Position(run.ledger_id, entry_id)
            if entry_id < run.end:
                break
            del self._runs[run.ledger_id]
            self._find_oldest()
        return count, freed

    def _find_oldest(self) -> None:
        for run in self._runs.values():
            self.oldest = Position(run.ledger_id, run.first)
            return
        self.oldest = _EVERYTHING

    def close(self) -> None:
        """Drop everything, and keep nothing from now on. Idempotent."""
        self.is_open = False
        self._segment.drop(self, *self._clear())

    def _clear(self) -> tuple[int, int]:
        """Forget all entries. Returns their number and bytes."""
        count = sum(run.end - run.first for run in self._runs.values())
        for run in self._runs.values():
            self._floor = Position(run.ledger_id, run.end)
        self._runs.clear()
        self.oldest = _EVERYTHING
        return count, self.size


class TailSegment:
    """The tails of all topics, limited in bytes together."""

    def __init__(self, *, size_max: int, slack: int = 0) -> None:
        """`size_max`: maximum bytes of payloads and overhead; 0: keep nothing. `slack`: bytes that are evicted at the
        limit in addition to what is needed."""
        self.size = 0
        self.count = 0
        """Number of entries."""
        self.evicted = 0
        """Number of entries that left because of the limit."""
        self._size_max = size_max
        self._slack = slack
        self._classes: list[OrderedDict[TopicTail, None]] = []
        """The topics that have entries, by the bits of their size."""
        self._classes_used = 0
        """Bit i set: class i has a topic."""
        self._passed: OrderedDict[TopicTail, None] = OrderedDict()
        """The topics that have passed entries."""

    def topic(self) -> TopicTail:
        """Return the tail of another topic, empty at first."""
        return TopicTail(self)

    def grow(self, tail: TopicTail, count: int, size: int) -> None:
        """Count the entries that were added to `tail`, then evict what is too much."""
        self._change(tail, count, size)
        if self.size <= self._size_max:
            return
        kept_max = self._size_max - self._slack
        while self.size > kept_max:
            only_passed = bool(self._passed)
            candidates = self._passed if only_passed else self._classes[self._classes_used.bit_length() - 1]
            victim = next(iter(candidates))
            count, size = victim.shed(self.size - kept_max, only_passed=only_passed)
            self.evicted += count
            self._change(victim, -count, -size)

    def drop(self, tail: TopicTail, count: int, size: int) -> None:
        """Count the entries that `tail` no longer has."""
        self._change(tail, -count, -size)

    def _change(self, tail: TopicTail, count: int, size: int) -> None:
        self.count += count
        self.size += size
        tail.size += size
        if tail.size.bit_length() != tail.size_class:
            self._classify(tail)
        self.mark(tail)

    def _classify(self, tail: TopicTail) -> None:
        before, now = tail.size_class, tail.size.bit_length()
        tail.size_class = now
        if before:
            del self._classes[before][tail]
            if not self._classes[before]:
                self._classes_used &= ~(1 << before)
        if now:
            while len(self._classes) <= now:
                self._classes.append(OrderedDict())
            self._classes[now][tail] = None
            self._classes_used |= 1 << now

    def mark(self, tail: TopicTail) -> None:
        """Record whether `tail` has passed entries."""
        if tail.oldest < tail.passed:
            self._passed[tail] = None
        elif tail in self._passed:
            del self._passed[tail]
