"""WriteCache and WriteCaches: sizes, order, freeing in steps, and lookups during a flush."""

from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD, WriteCache, WriteCaches


def test_a_cache_is_full_when_bodies_and_overhead_reach_its_size() -> None:
    cache = WriteCache(2 * ENTRY_OVERHEAD + 10)
    cache.put(1, 0, b"12345")
    assert not cache.is_full
    cache.put(1, 1, b"1234")
    assert (cache.size, cache.entries, cache.is_full) == (2 * ENTRY_OVERHEAD + 9, 2, False)
    full = WriteCache(ENTRY_OVERHEAD + 5)
    full.put(1, 0, b"12345")
    assert full.is_full


def test_the_last_body_of_an_entry_is_found() -> None:
    cache = WriteCache(1000)
    cache.put(1, 0, b"old")
    cache.put(1, 0, b"new")
    assert cache.get(1, 0) == b"new"
    assert cache.get(1, 1) is None
    assert cache.get(2, 0) is None
    assert cache.entries == 2


def test_ledgers_and_entries_are_sorted_and_a_ledger_dropped_meanwhile_is_left_out() -> None:
    cache = WriteCache(1000)
    for ledger_id, entry_id in ((3, 1), (1, 5), (1, 2), (2, 0)):
        cache.put(ledger_id, entry_id, b"%d" % entry_id)
    found = cache.sorted_ledgers()
    assert next(found) == (1, [2, 5], {5: b"5", 2: b"2"})
    cache.drop_ledger(2)
    cache.drop_ledger(9)
    assert list(found) == [(3, [1], {1: b"1"})]
    assert cache.size == 4 * (ENTRY_OVERHEAD + 1)


def test_entries_are_freed_in_steps_until_none_is_left() -> None:
    cache = WriteCache(1000)
    for ledger_id in (1, 2):
        for entry_id in range(3):
            cache.put(ledger_id, entry_id, b"")

    def left() -> int:
        return sum(map(len, cache.ledgers.values()))

    assert cache.release(2)
    assert left() == 4
    assert cache.release(2)
    assert left() == 2
    assert not cache.release(2)
    assert cache.ledgers == {}
    assert not cache.release(2)


def test_a_swap_makes_the_active_cache_the_flushing_one() -> None:
    caches = WriteCaches(50)
    first = caches.active
    first.put(1, 0, b"")
    assert caches.flushing is None
    assert caches.swap() is first is caches.flushing
    assert caches.active is not first
    assert (caches.active.size, caches.active.size_max) == (0, 50)


def test_an_entry_is_held_while_either_cache_has_it() -> None:
    caches = WriteCaches(50)
    caches.active.put(1, 0, b"")
    assert caches.holds(1, 0)
    assert not caches.holds(1, 1)
    caches.swap()
    caches.active.put(2, 0, b"")
    assert caches.holds(1, 0)
    assert caches.holds(2, 0)
    assert not caches.holds(2, 1)
    caches.flushing = None
    assert not caches.holds(1, 0)


def test_a_deleted_ledger_is_dropped_from_both_caches() -> None:
    caches = WriteCaches(50)
    caches.active.put(1, 0, b"")
    caches.drop_ledger(7)
    caches.swap().put(2, 0, b"")
    caches.active.put(1, 1, b"")
    caches.active.put(2, 1, b"")
    caches.drop_ledger(1)
    assert [caches.holds(*key) for key in ((1, 0), (1, 1), (2, 0), (2, 1))] == [False, False, True, True]
