"""ReadCache: limited in bytes, the oldest entries are evicted first, and dropped entries leave nothing behind."""

from bindery_bookie.storage.memory.read_cache import ReadCache
from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD

SIZE = ENTRY_OVERHEAD + 10
"""Counted size of an entry with a body of ten bytes."""


def body(number: int) -> bytes:
    return b"%010d" % number


def test_entries_are_found_by_ledger_and_id() -> None:
    cache = ReadCache(1000)
    cache.put_many([((1, 2), body(2)), ((3, 4), body(4))])
    assert cache.get(1, 2) == body(2)
    assert cache.get(3, 4) == body(4)
    assert cache.get(1, 4) is None
    assert cache.get(2, 2) is None
    assert len(cache) == 2
    assert cache.size == 2 * SIZE


def test_a_full_cache_keeps_its_entries_and_the_next_entry_evicts_the_oldest() -> None:
    cache = ReadCache(3 * SIZE)
    cache.put_many(((1, number), body(number)) for number in range(3))
    assert len(cache) == 3
    cache.put_many([((2, 0), body(3))])
    assert [cache.get(1, number) for number in range(3)] == [None, body(1), body(2)]
    assert cache.get(2, 0) == body(3)
    assert (len(cache), cache.size) == (3, 3 * SIZE)


def test_a_replaced_entry_counts_once_with_its_new_size() -> None:
    cache = ReadCache(3 * SIZE)
    cache.put_many([((1, 0), b"x" * 10)])
    cache.put_many([((1, 0), b"y" * 4)])
    assert cache.get(1, 0) == b"yyyy"
    assert (len(cache), cache.size) == (1, ENTRY_OVERHEAD + 4)


def test_dropped_entries_free_their_bytes_and_unknown_ones_are_ignored() -> None:
    cache = ReadCache(10 * SIZE)
    cache.put_many(((1, number), body(number)) for number in range(3))
    cache.drop([(1, 1), (1, 7), (9, 9)])
    assert [cache.get(1, number) for number in range(3)] == [body(0), None, body(2)]
    assert (len(cache), cache.size) == (2, 2 * SIZE)
    cache.drop([(1, 0), (1, 2)])
    assert cache.ledgers == {}
    assert (len(cache), cache.size) == (0, 0)


def test_a_deleted_ledger_leaves_the_entries_of_the_others() -> None:
    cache = ReadCache(10 * SIZE)
    cache.put_many([((1, 0), body(0)), ((2, 0), body(1)), ((1, 1), body(2))])
    cache.drop_ledger(1)
    cache.drop_ledger(5)
    assert cache.ledgers == {2: {0: body(1)}}
    assert (len(cache), cache.size) == (1, SIZE)


def test_dropped_keys_do_not_protect_later_entries_from_eviction() -> None:
    cache = ReadCache(2 * SIZE)
    cache.put_many([((1, 0), body(0)), ((1, 1), body(1))])
    cache.drop([(1, 0)])
    cache.put_many([((1, 2), body(2)), ((1, 3), body(3))])
    assert [cache.get(1, number) for number in range(4)] == [None, None, body(2), body(3)]


def test_entries_that_stay_survive_any_number_of_dropped_ones() -> None:
    cache = ReadCache(10 * SIZE)
    cache.put_many([((1, 0), body(0))])
    for number in range(10_000):
        cache.put_many([((2, number), body(number))])
        cache.drop([(2, number)])
    assert cache.ledgers == {1: {0: body(0)}}
    assert (len(cache), cache.size) == (1, SIZE)
    cache.put_many(((3, number), body(number)) for number in range(10))
    assert len(cache) == 10
    assert cache.size == 10 * SIZE
