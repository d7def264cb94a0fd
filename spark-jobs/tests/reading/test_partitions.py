"""Tasks: they respect their limits, contain each entry once, and alternate between bookies."""

import pickle
import random

import pytest
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, LedgerId
from bindery_spark.reading.blocks import span_of
from bindery_spark.reading.fragments import Fragment, Ledger
from bindery_spark.reading.partitions import FRAGMENT_COST, Task, cost_of, tasks_of


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
