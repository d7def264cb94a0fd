"""The tail of every topic: which entries leave first, and what a live reader can rely on."""

import random
from collections.abc import Iterator

import pytest
from bindery_broker.managed_ledger.caching.tail import ENTRY_OVERHEAD, TailReader, TailSegment, TopicTail
from bindery_pulsar.message_id import Position

UNIT = ENTRY_OVERHEAD + 56
"""Bytes of an entry of these tests: 256."""


def add(tail: TopicTail, first: int, count: int = 1, *, ledger: int = 1) -> None:
    tail.add(ledger, first, [b"%56d" % entry for entry in range(first, first + count)], size=56 * count)


def held(tail: TopicTail, *ledgers: int) -> list[tuple[int, int]]:
    """Return the entries in memory, as (ledger, entry)."""
    runs = [(ledger, tail.run_of(ledger)) for ledger in ledgers or (1,)]
    return [(ledger, entry) for ledger, run in runs if run is not None for entry in run.payloads]


def at(tail: TopicTail, entry: int, *, ledger: int = 1) -> TailReader:
    reader = tail.reader()
    reader.move(Position(ledger, entry))
    return reader


def test_the_oldest_entries_leave_first() -> None:
    segment = TailSegment(size_max=3 * UNIT)
    tail = segment.topic()
    for entry in range(10):
        add(tail, entry)
        assert segment.size == tail.size == min(entry + 1, 3) * UNIT
    assert held(tail) == [(1, 7), (1, 8), (1, 9)]
    assert (segment.count, segment.evicted) == (3, 7)


def test_entries_that_no_live_reader_needs_leave_before_those_of_other_topics() -> None:
    segment = TailSegment(size_max=8 * UNIT)
    needed, passed, unread = segment.topic(), segment.topic(), segment.topic()
    at(needed, 0)
    reader = at(passed, 0)
    add(needed, 0, 3)
    add(passed, 0, 3)
    reader.move(Position(1, 2))
    add(unread, 0, 2)
    add(needed, 3)
    assert (held(passed), len(held(unread))) == ([(1, 1), (1, 2)], 2)
    add(needed, 4)
    assert (held(passed), len(held(unread))) == ([(1, 2)], 2)
    add(needed, 5, 2)
    assert (held(passed), len(held(needed)), held(unread)) == ([(1, 2)], 7, [])


def test_a_topic_without_readers_keeps_entries_while_there_is_room() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    tail, other = segment.topic(), segment.topic()
    add(tail, 0, 4)
    assert len(held(tail)) == 4
    at(other, 0)
    add(other, 0, 3)
    assert held(tail) == [(1, 3)]


def test_one_busy_topic_leaves_the_others_their_share() -> None:
    segment = TailSegment(size_max=16 * UNIT)
    quiet = [segment.topic() for _ in range(3)]
    busy = segment.topic()
    for tail in quiet:
        at(tail, 0)
        add(tail, 0, 2)
    at(busy, 0)
    for entry in range(100):
        add(busy, entry)
    assert [len(held(tail)) for tail in quiet] == [2, 2, 2]
    assert held(busy) == [(1, entry) for entry in range(90, 100)]


def test_a_reader_keeps_nothing_once_the_entries_it_needs_have_left() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    tail, other = segment.topic(), segment.topic()
    at(tail, 0)
    add(tail, 0, 5)  # entry 0 leaves, and the reader is behind
    near = at(tail, 4)
    near.move(Position(1, 5))
    near.move(Position(1, 5))
    tail.next_round()
    at(other, 0)
    add(other, 0, 3)
    assert held(tail) == [(1, 4)]


def test_a_reader_at_the_end_of_a_ledger_has_everything_in_the_next_one() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    tail, other = segment.topic(), segment.topic()
    at(tail, 2)
    add(tail, 0, 2)
    tail.shed(2 * UNIT, only_passed=True)
    segment.drop(tail, 2, 2 * UNIT)
    add(tail, 0, 2, ledger=5)
    add(other, 0, 4)
    assert (held(tail, 5), len(held(other))) == ([(5, 0), (5, 1)], 2)


def test_ledgers_leave_in_order() -> None:
    segment = TailSegment(size_max=3 * UNIT)
    tail = segment.topic()
    add(tail, 0, 2)
    add(tail, 0, 2, ledger=2)
    assert held(tail, 1, 2) == [(1, 1), (2, 0), (2, 1)]
    add(tail, 2, 1, ledger=2)
    assert held(tail, 1, 2) == [(2, 0), (2, 1), (2, 2)]
    add(tail, 0, 3, ledger=9)
    assert held(tail, 1, 2, 9) == [(9, 0), (9, 1), (9, 2)]


@pytest.mark.parametrize(("ledger", "first"), [(1, 5), (2, 1)])
def test_a_gap_ends_the_tail(ledger: int, first: int) -> None:
    segment = TailSegment(size_max=9 * UNIT)
    tail = segment.topic()
    add(tail, 0, 3)
    add(tail, first, 2, ledger=ledger)
    assert held(tail, 1, 2) == [(ledger, first), (ledger, first + 1)]
    assert segment.size == 2 * UNIT


def test_the_slowest_live_reader_decides() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    tail, other = segment.topic(), segment.topic()
    fast, slow = at(tail, 0), at(tail, 0)
    add(tail, 0, 4)
    for reader, entry in [(fast, 4), (slow, 2), (fast, 4)]:
        reader.move(Position(1, entry))
    at(other, 0)
    add(other, 0)
    add(other, 1)
    assert held(tail) == [(1, 2), (1, 3)]
    slow.close()
    slow.close()
    add(other, 2)
    assert (held(tail), len(held(other))) == ([(1, 3)], 3)


def test_a_reader_that_moves_back_keeps_the_entries_again() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    tail, other = segment.topic(), segment.topic()
    others = [at(tail, 4) for _ in range(5)]
    reader = at(tail, 4)
    add(tail, 0, 4)
    for each in (*others, reader):
        each.move(Position(1, 3))
    reader.move(Position(1, 0))
    at(other, 0)
    add(other, 0, 2)
    add(tail, 4)
    assert len(held(tail)) + len(held(other)) == 4
    assert held(tail)[0] == (1, 2), "a topic of the largest size class sheds, because no entry is passed"


def test_readers_that_make_no_progress_keep_nothing_after_two_rounds() -> None:
    segment = TailSegment(size_max=4 * UNIT)
    stopped, waiting, busy = segment.topic(), segment.topic(), segment.topic()
    at(stopped, 0)
    at(waiting, 1)
    add(stopped, 0)
    add(waiting, 0)
    for _ in range(2):
        for tail in (stopped, waiting):
            tail.next_round()
    add(waiting, 1)
    at(busy, 0)
    add(busy, 0, 3)
    assert (held(stopped), held(waiting)) == ([], [(1, 1)]), "what the reader at the end has not read stays"


def test_a_stopped_reader_counts_again_from_its_next_read_on() -> None:
    segment = TailSegment(size_max=2 * UNIT)
    tail, other = segment.topic(), segment.topic()
    reader = at(tail, 0)
    add(tail, 0)
    for _ in range(2):
        tail.next_round()
    reader.move(Position(1, 0))
    add(other, 0)
    add(other, 1)
    assert (held(tail), held(other)) == ([(1, 0)], [(1, 1)])


def test_a_closed_topic_has_no_entries_and_takes_none() -> None:
    segment = TailSegment(size_max=9 * UNIT)
    tail, other = segment.topic(), segment.topic()
    add(tail, 0, 3)
    add(other, 0, 2)
    tail.close()
    tail.close()
    add(tail, 3)
    tail.reader().move(Position(1, 1))
    assert (held(tail), segment.size, segment.count) == ([], 2 * UNIT, 2)


def test_the_slack_is_evicted_at_once() -> None:
    segment = TailSegment(size_max=6 * UNIT, slack=2 * UNIT)
    tail = segment.topic()
    add(tail, 0, 6)
    assert segment.evicted == 0
    add(tail, 6)
    assert (held(tail)[0], segment.evicted) == ((1, 3), 3)
    add(tail, 7, 2)
    assert segment.evicted == 3


@pytest.mark.parametrize("size_max", [0, UNIT - 1])
def test_an_entry_that_does_not_fit_is_not_kept(size_max: int) -> None:
    segment = TailSegment(size_max=size_max)
    tail = segment.topic()
    at(tail, 0)
    add(tail, 0, 3)
    assert (held(tail), segment.size, segment.count, segment.evicted) == ([], 0, 0, 3)


class Model:
    """Random topics and readers, with a plain list of what must be in memory for whom."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size_max = self.rng.randrange(4, 60) * UNIT
        self.slack = self.rng.choice([0, UNIT, 2 * UNIT])
        self.segment = TailSegment(size_max=self.size_max, slack=self.slack)
        self.tails = [self.segment.topic() for _ in range(self.rng.randrange(1, 6))]
        self.sizes: dict[int, list[tuple[Position, int]]] = {index: [] for index in range(len(self.tails))}
        """The bytes of every entry that was written, by topic."""
        self.ends = {index: Position(index, 0) for index in range(len(self.tails))}
        self.readers: list[tuple[int, TailReader]] = []

    def step(self) -> None:
        self.rng.choice([self._write, self._write, self._write, self._read, self._read, self._join, self._roll])()

    def _write(self) -> None:
        index = self.rng.randrange(len(self.tails))
        ledger, first = self.ends[index]
        payloads = [bytes(self.rng.randrange(300)) for _ in range(self.rng.randrange(1, 6))]
        guarded = [one for one in self.readers if self._behind(*one) is not None]
        self.tails[index].add(ledger, first, payloads, size=sum(map(len, payloads)))
        self.ends[index] = Position(ledger, first + len(payloads))
        self.sizes[index] += [
            (Position(ledger, first + i), len(payload) + ENTRY_OVERHEAD) for i, payload in enumerate(payloads)
        ]
        self._check(guarded)

    def _roll(self) -> None:
        index = self.rng.randrange(len(self.tails))
        if self.ends[index].entry_id:
            self.ends[index] = Position(self.ends[index].ledger_id + 10, 0)

    def _join(self) -> None:
        if len(self.readers) < 12:
            index = self.rng.randrange(len(self.tails))
            reader = self.tails[index].reader()
            reader.move(self.ends[index])
            self.readers.append((index, reader))

    def _read(self) -> None:
        if self.readers:
            index, reader = self.rng.choice(self.readers)
            needed = [position for position, _ in self.sizes[index] if position >= reader.position]
            chosen = self.rng.randrange(len(needed) + 1)
            reader.move(needed[chosen] if chosen < len(needed) else self.ends[index])

    def _behind(self, index: int, reader: TailReader) -> int | None:
        """Return the bytes that the reader still needs, if all of them are in memory; else None."""
        needed = [(position, size) for position, size in self.sizes[index] if position >= reader.position]
        return sum(size for _, size in needed) if all(self._has(index, position) for position, _ in needed) else None

    def _has(self, index: int, position: Position) -> bool:
        run = self.tails[index].run_of(position.ledger_id)
        return run is not None and position.entry_id in run.payloads

    def _check(self, guarded: list[tuple[int, TailReader]]) -> None:
        segment, kept = self.segment, list(self._kept())
        assert segment.size == sum(size for _, size in kept) <= self.size_max
        assert segment.count == len(kept)
        for index, tail in enumerate(self.tails):
            mine = [position for position, _ in self.sizes[index] if self._has(index, position)]
            assert mine == [position for position, _ in self.sizes[index]][-len(mine) :] or not mine, "a gap"
            assert tail.size == sum(size for at_index, size in kept if at_index == index)
        share = (self.size_max - self.slack) / (2 * len(self.tails))
        for index, reader in guarded:
            behind = sum(size for position, size in self.sizes[index] if position >= reader.position)
            if behind <= share:
                assert self._behind(index, reader) is not None, "a live reader misses an entry"

    def _kept(self) -> Iterator[tuple[int, int]]:
        for index, rows in self.sizes.items():
            yield from ((index, size) for position, size in rows if self._has(index, position))


@pytest.mark.parametrize("seed", range(60))
def test_a_live_reader_within_its_share_never_misses(seed: int) -> None:
    """The invariants hold for random writes and readers, whatever the sizes and the order."""
    model = Model(seed)
    for _ in range(300):
        model.step()
