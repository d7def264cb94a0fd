"""Tasks: they respect their limits, contain each entry once, and alternate between bookies."""

import pickle
import random
from collections.abc import Sequence

import pytest
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, LedgerId
from bindery_spark.reading.blocks import span_of
from bindery_spark.reading.fragments import Fragment, Ledger
from bindery_spark.reading.partitions import FRAGMENT_COST, Task, cost_of, split, tasks_of


def fragment(
    bookie: str,
    *,
    ledger_id: int = 1,
    first: int = 0,
    last: int,
    entry_size: int = 1000,
    sizes: tuple[int, int] = (3, 3),
) -> Fragment:
    ledger = Ledger(LedgerId(ledger_id), DigestType.CRC32C, b"", *sizes, True, last, entry_size)
    return Fragment(ledger, BookieId(bookie), 0, (0,), first, last)


def copies(fragments: list[Fragment]) -> list[tuple[str, int, int]]:
    return sorted((str(f.bookie_id), f.ledger.ledger_id, entry_id) for f in fragments for entry_id in f.entry_ids())


@pytest.mark.parametrize("seed", range(20))
def test_tasks_cover_every_entry_once_and_respect_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    fragments = [
        fragment(
            rng.choice("abc"),
            ledger_id=number,
            last=rng.choice((0, 3, 50, 700)),
            entry_size=rng.choice((1, 100, 9000)),
            sizes=rng.choice(((3, 3), (4, 2))),
        )
        for number in range(25)
    ]
    fragments = [each for each in fragments if each.entry_count]
    tasks = tasks_of(fragments, bytes_max=200_000, entries_max=100)
    assert copies([f for task in tasks for f in task.fragments]) == copies(fragments)
    for task in tasks:
        assert {f.bookie_id for f in task.fragments} == {task.bookie_id}
        count = sum(f.entry_count for f in task.fragments)
        assert count <= 100
        assert count == 1 or sum(map(cost_of, task.fragments)) <= 200_000 + 3 * 10_000  # parts have uneven shares


def test_small_fragments_share_a_task_and_a_large_one_is_split() -> None:
    small = [fragment("a", ledger_id=n, last=9) for n in range(10)]
    assert len(tasks_of(small, bytes_max=1 << 26, entries_max=1000)) == 1
    large = tasks_of([fragment("a", last=99_999)], bytes_max=16 << 20, entries_max=10**6)
    assert [task.ledger_range for task in large] == [(1, 1)] * len(large)
    assert 6 <= len(large) <= 8


@pytest.mark.parametrize("sizes", [(3, 3), (5, 2)])
@pytest.mark.parametrize("first", [0, 1, 1023, 5000])
def test_parts_begin_at_a_block_on_all_bookies(first: int, sizes: tuple[int, int]) -> None:
    whole = fragment("a", first=first, last=99_999, sizes=sizes)
    tasks = tasks_of([whole], bytes_max=4 << 20, entries_max=10**6, span_of=span_of)
    parts = [part for task in tasks for part in task.fragments]
    assert len(parts) > 5
    assert copies(parts) == copies([whole])
    assert [part.first % span_of(whole.ledger) for part in parts[1:]] == [0] * (len(parts) - 1)
    assert max(map(cost_of, parts)) <= 2 * (4 << 20)


def test_tasks_of_bookies_alternate() -> None:
    tasks = tasks_of([fragment(b, ledger_id=n, last=9) for b in "aab" for n in (1, 2)], bytes_max=1, entries_max=100)
    assert [task.bookie_id for task in tasks][:4] == ["a", "b", "a", "b"]


def test_fragments_read_at_their_ends_are_not_split() -> None:
    huge = [fragment("a", ledger_id=n, last=10**9) for n in range(100)]
    (task,) = tasks_of(huge, bytes_max=100 * (FRAGMENT_COST + 3000), entries_max=1000, ends_only=True)
    assert task.fragments == tuple(huge)


def test_a_pickled_task_is_small() -> None:
    (task,) = tasks_of([fragment("a", ledger_id=n, last=9) for n in range(100)], bytes_max=1 << 26, entries_max=10**6)
    data = pickle.dumps(task)
    assert pickle.loads(data) == task
    assert len(data) < 20_000
    assert Task(BookieId("a"), (), (3, 9)).ledger_range == (3, 9)


def sizes_of(tasks: Sequence[Task]) -> list[list[tuple[int, int]]]:
    return [[(part.first, part.last) for part in task.fragments] for task in tasks]


def test_the_cost_of_a_fragment_is_4_kib_and_its_frames() -> None:
    assert cost_of(fragment("a", last=9, entry_size=100)) == 4_096 + 10 * (100 + 40)
    assert cost_of(fragment("a", last=9, entry_size=100, sizes=(5, 2))) == 4_096 + 4 * (100 + 40)


@pytest.mark.parametrize("ends_only", [False, True])
def test_a_task_is_full_when_the_next_fragment_exceeds_a_limit(ends_only: bool) -> None:
    """Each fragment has two entries of 100 bytes, so the ends are all entries."""
    two = [fragment("a", ledger_id=n, last=1, entry_size=60) for n in range(6)]
    cost = cost_of(two[0])
    assert cost == 4_096 + 2 * 100

    def count(bytes_max: int, entries_max: int) -> list[int]:
        tasks = tasks_of(two, bytes_max=bytes_max, entries_max=entries_max, ends_only=ends_only)
        return [len(task.fragments) for task in tasks]

    assert count(3 * cost, 100) == [3, 3]
    assert count(3 * cost - 1, 100) == [2, 2, 2]
    assert count(10**9, 6) == [3, 3]
    assert count(10**9, 5) == [2, 2, 2]
    assert count(10**9, 7) == [3, 3]


def test_a_fragment_is_split_evenly_by_the_smaller_limit() -> None:
    ten = fragment("a", first=5, last=14, entry_size=60)

    def parts(**limits: int) -> list[tuple[int, int]]:
        return [(part.first, part.last) for part in split(ten, **{"bytes_max": 10**9, "entries_max": 10**6, **limits})]

    assert parts(entries_max=10) == [(5, 14)]
    assert parts(entries_max=9) == [(5, 9), (10, 14)]
    assert parts(entries_max=5) == [(5, 9), (10, 14)]
    assert parts(entries_max=4) == [(5, 8), (9, 12), (13, 14)]
    assert parts(entries_max=1) == [(n, n) for n in range(5, 15)]
    assert parts(bytes_max=4_096 + 1_000) == [(5, 14)]
    assert parts(bytes_max=4_096 + 999) == [(5, 9), (10, 14)]
    assert parts(bytes_max=0) == [(n, n) for n in range(5, 15)], "one entry at least"
    assert parts(entries_max=4, span=10) == [(5, 14)], "one block at least"
    assert parts(entries_max=4, span=9) == [(5, 8), (9, 14)] or parts(entries_max=4, span=9)[0][1] % 9 == 8
    assert parts(entries_max=4, span=4) == [(5, 7), (8, 11), (12, 14)]


def test_a_fragment_of_one_entry_is_not_split() -> None:
    one = fragment("a", first=7, last=7, entry_size=10**6)
    assert list(split(one, bytes_max=1, entries_max=1)) == [one]
    assert sizes_of(tasks_of([one], bytes_max=1, entries_max=1)) == [[(7, 7)]]


def test_fragments_are_read_in_the_order_of_their_ledgers() -> None:
    mixed = [
        fragment("a", ledger_id=2, first=5, last=9),
        fragment("a", ledger_id=2, first=0, last=4),
        fragment("a", ledger_id=1, last=9),
    ]
    (task,) = tasks_of(mixed, bytes_max=1 << 26, entries_max=1000)
    assert [(part.ledger.ledger_id, part.first) for part in task.fragments] == [(1, 0), (2, 0), (2, 5)]
    assert task.ledger_range == (1, 2)
    (pair, single) = tasks_of(mixed, bytes_max=1 << 26, entries_max=15)
    assert [task.ledger_range for task in (pair, single)] == [(1, 2), (2, 2)]
