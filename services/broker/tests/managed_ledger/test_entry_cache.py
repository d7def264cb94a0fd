"""The cache of recent entries: limited in bytes, and the oldest entries are evicted first."""

from bindery_broker.managed_ledger.entry_cache import ENTRY_OVERHEAD, EntryCache


def test_the_cache_returns_entries_up_to_the_first_missing_one() -> None:
    cache = EntryCache(size_max=10**6)
    cache.put_many([((1, i), b"%d" % i) for i in (0, 1, 2, 4)])
    assert cache.run(1, 0, 9) == [b"0", b"1", b"2"]
    assert cache.run(1, 3, 9) == []
    assert cache.run(2, 0, 9) == []
    assert cache.run(1, 1, 2) == [b"1", b"2"]
    assert (cache.hits, cache.misses) == (5, 3)


def test_the_cache_evicts_the_oldest_entries_at_its_limit() -> None:
    cache = EntryCache(size_max=3 * (ENTRY_OVERHEAD + 10))
    for i in range(10):
        cache.put_many([((1, i), bytes(10))])
        assert cache.size <= 3 * (ENTRY_OVERHEAD + 10)
    assert len(cache) == 3
    assert cache.run(1, 6, 6) == []
    assert len(cache.run(1, 7, 9)) == 3


def test_the_same_entry_counts_once() -> None:
    cache = EntryCache(size_max=10**6)
    cache.put_many([((1, 0), b"x")])
    cache.put_many([((1, 0), b"x")])
    assert cache.size == ENTRY_OVERHEAD + 1


def test_a_cache_of_size_0_keeps_nothing() -> None:
    cache = EntryCache(size_max=0)
    cache.put_many([((1, 0), b"x"), ((1, 1), b"y")])
    assert (len(cache), cache.size) == (0, 0)
