"""The cache of entries: limited in bytes, and catch-up reads evict nothing from the tail."""

from bindery_broker.managed_ledger.caching.entry_cache import CATCH_UP_PART, EntryCache, TopicCache
from bindery_broker.managed_ledger.caching.tail import ENTRY_OVERHEAD
from bindery_pulsar.message_id import Position

UNIT = ENTRY_OVERHEAD + 10


def write(topic: TopicCache, first: int, *payloads: bytes, ledger: int = 1) -> None:
    topic.add_written(ledger, first, payloads, size=sum(map(len, payloads)))


def test_the_cache_returns_entries_up_to_the_first_missing_one() -> None:
    cache = EntryCache(size_max=10**6)
    topic = cache.topic()
    topic.add_read(1, 0, [b"0", b"1", b"2"])
    topic.add_read(1, 4, [b"4"])
    assert topic.run(1, 0, 9) == [b"0", b"1", b"2"]
    assert topic.run(1, 3, 9) == []
    assert topic.run(2, 0, 9) == []
    assert topic.run(1, 1, 2) == [b"1", b"2"]
    assert (cache.hits, cache.misses) == (5, 3)


def test_one_read_continues_from_the_catch_up_segment_in_the_tail() -> None:
    cache = EntryCache(size_max=10**6)
    topic = cache.topic()
    write(topic, 2, b"2", b"3", b"4")
    topic.add_read(1, 0, [b"0", b"1"])
    assert topic.run(1, 0, 4) == [b"0", b"1", b"2", b"3", b"4"]
    assert topic.run(1, 1, 2) == [b"1", b"2"]
    assert topic.run(1, 3, 9) == [b"3", b"4"]
    assert topic.run(1, 5, 9) == []
    assert topic.run(2, 2, 2) == []
    assert (cache.hits, cache.misses) == (9, 3)


def test_entries_that_are_missing_before_the_tail_end_a_read() -> None:
    topic = EntryCache(size_max=10**6).topic()
    topic.add_read(1, 0, [b"0"])
    write(topic, 2, b"2")
    assert topic.run(1, 0, 2) == [b"0"]
    assert topic.run(1, 1, 2) == []


def test_the_same_entry_counts_once() -> None:
    cache = EntryCache(size_max=10**6)
    topic = cache.topic()
    write(topic, 2, b"2", b"3")
    topic.add_read(1, 0, [b"0", b"1", b"2", b"3"])
    topic.add_read(1, 1, [b"1", b"2"])
    topic.add_read(1, 3, [b"3"])
    assert (len(cache), cache.size, cache.inserted) == (4, 4 * (ENTRY_OVERHEAD + 1), 4)
    assert cache.catch_up_size == cache.tail_size == cache.size // 2


def test_catch_up_reads_evict_only_what_catch_up_readers_read() -> None:
    cache = EntryCache(size_max=CATCH_UP_PART * 3 * UNIT)
    live, backlog = cache.topic(), cache.topic()
    live.reader().move(Position(1, 0))
    write(live, 0, *[bytes(10)] * 9)
    for entry in range(100):
        backlog.add_read(7, entry, [bytes(10)])
        assert cache.catch_up_size <= 3 * UNIT
    assert len(live.run(1, 0, 8)) == 9
    assert len(backlog.run(7, 97, 99)) == 3
    assert backlog.run(7, 96, 96) == []
    assert (len(cache), cache.size, cache.evicted) == (12, 12 * UNIT, 97)


def test_writes_evict_nothing_that_catch_up_readers_share() -> None:
    cache = EntryCache(size_max=CATCH_UP_PART * 2 * UNIT)
    live, backlog = cache.topic(), cache.topic()
    backlog.add_read(7, 0, [bytes(10)] * 2)
    for entry in range(100):
        write(live, entry, bytes(10))
    assert len(backlog.run(7, 0, 1)) == 2
    assert len(live.run(1, 94, 99)) == 6
    assert cache.evicted == 94


def test_a_cache_of_size_0_keeps_nothing() -> None:
    cache = EntryCache(size_max=0)
    topic = cache.topic()
    topic.add_read(1, 0, [b"x", b"y"])
    write(topic, 2, b"z")
    assert (len(cache), cache.size, topic.run(1, 0, 2)) == (0, 0, [])


def test_a_closed_topic_leaves_no_tail() -> None:
    cache = EntryCache(size_max=10**6)
    topic = cache.topic()
    write(topic, 0, b"a")
    topic.close()
    write(topic, 1, b"b")
    assert (len(cache), cache.size, topic.run(1, 0, 1)) == (0, 0, [])
