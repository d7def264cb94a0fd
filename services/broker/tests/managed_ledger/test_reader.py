"""Reading across ledgers, from the cache and from bookies; searching; waiting; trimming; deleting."""

import asyncio
from collections.abc import Sequence

import pytest
import structlog
from bindery_broker.managed_ledger import EntryCache, ManagedLedger, reader
from bindery_broker.managed_ledger.reader import UNSIZED_ENTRIES_MAX
from bindery_broker.managed_ledger.time_search import BEFORE_ENTRIES_MAX
from bindery_core.errors import (
    BookieUnavailable,
    Corrupt,
    MetadataUnavailable,
    NoSuchEntry,
    NoSuchLedger,
    NoSuchTopic,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import LedgerId
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import TOPIC, Cluster, read_all


async def three_ledgers(cluster: Cluster, **settings: object) -> ManagedLedger:
    """Return a topic with entries 0 to 29, ten in each of ledgers 0, 1 and 2. Ledger 2 is the current one."""
    topic = await cluster.open(**settings)
    for ledger in range(3):
        await topic.add_many([b"%d" % (10 * ledger + i) for i in range(10)])
        if ledger < 2:
            await topic.roll()
    return topic


@pytest.mark.parametrize("cache_size_max", [0, 10**6])
async def test_one_read_continues_in_the_next_ledger(cluster: Cluster, cache_size_max: int) -> None:
    topic = await three_ledgers(cluster, cache_size_max=cache_size_max)
    found = await topic.read(Position(0, 8), entries_max=14, size_max=10**6)
    assert [int(payload) for _, payload in found] == list(range(8, 22))
    assert found[0][0] == Position(0, 8)
    assert found[-1][0] == Position(2, 1)
    assert topic.entries_count == 30
    assert (topic.cache.hits > 0) == (cache_size_max > 0)


async def test_a_new_owner_reads_the_entries_of_the_old_one(cluster: Cluster) -> None:
    await (await three_ledgers(cluster)).crash()
    topic = await cluster.open()
    assert [int(payload) for payload in (await read_all(topic)).values()] == list(range(30))


@pytest.mark.parametrize("cache_size_max", [0, 10**6])
async def test_a_read_is_limited_in_size_but_returns_at_least_one_entry(cluster: Cluster, cache_size_max: int) -> None:
    topic = await cluster.open(cache_size_max=cache_size_max)
    await topic.add_many([bytes(100) for _ in range(10)])
    for size_max, count in [(1, 1), (100, 1), (199, 1), (200, 2), (1000, 10), (10**6, 10)]:
        assert len(await topic.read(EARLIEST, entries_max=100, size_max=size_max)) == count


async def test_a_read_from_a_missing_position_begins_at_the_next_existing_one(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    assert (await topic.read(Position(0, 99), entries_max=1, size_max=99))[0][0] == Position(1, 0)
    assert (await topic.read(EARLIEST, entries_max=1, size_max=99))[0][0] == Position(0, 0)
    assert await topic.read(LATEST, entries_max=1, size_max=99) == []
    assert await topic.read(Position(2, 10), entries_max=1, size_max=99) == []


async def test_reading_continues_while_the_current_ledger_is_recovered(cluster: Cluster) -> None:
    topic = await cluster.open(cache_size_max=0)
    await topic.add_many([b"0", b"1"])
    cluster.ledgers.fail_next("add", BookieUnavailable("made up"))
    cluster.ledgers.fail_next("open", BookieUnavailable("made up"), count=1)
    adding = asyncio.ensure_future(topic.add_many([b"2"]))
    await asyncio.sleep(0.001)
    assert list((await read_all(topic)).values())[:2] == [b"0", b"1"]
    await adding


async def test_a_read_raises_the_error_of_the_bookies(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, cache_size_max=0)
    cluster.ledgers.fail_next("read", BookieUnavailable("made up"))
    with pytest.raises(BookieUnavailable):
        await topic.read(EARLIEST, entries_max=1, size_max=1)
    assert len(await topic.read(EARLIEST, entries_max=1, size_max=1)) == 1


async def test_all_entries_are_read_with_a_limited_number_of_open_ledgers(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, cache_size_max=0, read_handles_max=1)
    for _ in range(2):
        assert len(await read_all(topic)) == 30


async def test_a_waiting_reader_is_woken_by_the_next_entry(cluster: Cluster) -> None:
    topic = await cluster.open()
    heard: list[Position] = []
    remove = topic.on_new_entries(lambda: heard.append(topic.last_confirmed))
    waiting = asyncio.ensure_future(topic.wait_for_entry(Position(0, 1), timeout_s=30))
    await topic.add_many([b"0"])
    assert not waiting.done()
    await topic.add_many([b"1"])
    assert await waiting
    assert heard == [Position(0, 0), Position(0, 1)]
    remove()
    await topic.add_many([b"2"])
    assert len(heard) == 2
    assert not await topic.wait_for_entry(Position(0, 3), timeout_s=0.01)


async def test_a_waiting_reader_gets_an_error_when_the_topic_is_lost(cluster: Cluster) -> None:
    topic = await cluster.open()
    waiting = asyncio.ensure_future(topic.wait_for_entry(Position(0, 0), timeout_s=30))
    await asyncio.sleep(0)
    await cluster.open()
    with pytest.raises(TopicFenced):
        await topic.add_many([b"x"])
    with pytest.raises(TopicFenced):
        await waiting


# --- trimming


async def test_a_ledger_is_trimmed_when_every_subscription_has_acknowledged_all_of_it(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    one = await topic.open_cursor("one", start=EARLIEST)
    two = await topic.open_cursor("two", start=EARLIEST)
    await one.ack_cumulative(Position(1, 9))
    await two.ack_many([Position(0, i) for i in range(9)])
    assert await topic.trim() == 0
    await two.ack_many([Position(0, 9)])
    await asyncio.sleep(0.01)  # the cursor's move starts trimming
    assert topic.first_position == Position(1, 0)
    assert LedgerId(0) not in cluster.ledgers.ledgers
    assert two.backlog_entries == 20
    assert [int(entry.payload) for entry in (await two.read_unacked(EARLIEST, entries_max=1, size_max=9)).entries] == [
        10
    ]
    assert await two.ack_many([Position(0, 3)]) == []


async def test_entries_whose_acknowledgement_is_not_durable_are_not_trimmed(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    cursor = await topic.open_cursor("s", start=EARLIEST)
    await cursor.ack_many([Position(0, 0)])
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_cumulative(Position(1, 9)))
    await asyncio.sleep(0.001)
    assert cursor.mark_delete == Position(1, 9)
    assert await topic.trim() == 0
    cluster.ledgers.release_adds()
    await acking
    await asyncio.sleep(0.01)
    assert topic.first_position == Position(2, 0)


async def test_without_a_subscription_ledgers_are_kept_for_a_week(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    cluster.now_ms += 7 * 24 * 3600 * 1000 - 1
    assert await topic.trim() == 0
    cluster.now_ms += 1
    assert await topic.trim() == 2
    assert topic.entries_count == 10
    assert list(cluster.ledgers.ledgers) == [2]


async def test_nothing_is_deleted_before_the_metadata_is_updated(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, operation_timeout_s=0.3)
    cluster.now_ms += 8 * 24 * 3600 * 1000
    cluster.tree.suspend(cluster.stores[-1])
    with pytest.raises(Exception, match="metadata"):
        await topic.trim()
    assert len(cluster.ledgers.ledgers) == 3
    assert topic.entries_count == 30


async def test_the_deletion_of_a_ledger_is_retried_by_the_next_trim(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    cluster.now_ms += 8 * 24 * 3600 * 1000
    cluster.ledgers.fail_next("delete", MetadataUnavailable("made up"))
    assert await topic.trim() == 2
    assert sorted(cluster.ledgers.ledgers) == [0, 2]
    assert await topic.trim() == 0
    assert sorted(cluster.ledgers.ledgers) == [2]


async def test_the_deletion_of_a_ledger_is_retried_when_the_topic_closes(cluster: Cluster) -> None:
    """The metadata no longer names the ledger, so the next owner would not find it."""
    topic = await three_ledgers(cluster)
    cluster.now_ms += 8 * 24 * 3600 * 1000
    cluster.ledgers.fail_next("delete", MetadataUnavailable("made up"), count=2)
    assert await topic.trim() == 2
    assert list(cluster.ledgers.ledgers) == [0, 1, 2]
    await topic.close()
    assert list(cluster.ledgers.ledgers) == [2]


async def test_a_roll_does_not_restore_ledgers_that_are_being_trimmed(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, store=cluster.tree.connect(latency_s=0.01))
    cluster.now_ms += 8 * 24 * 3600 * 1000
    trimming = asyncio.ensure_future(topic.trim())
    await asyncio.sleep(0)
    await asyncio.gather(topic.roll(), topic.add_many([b"30"]))
    assert await trimming == 2
    await topic.crash()
    payloads = [int(payload) for payload in (await read_all(await cluster.open())).values()]
    assert payloads == list(range(20, 31))


async def test_entries_are_kept_for_a_subscription_that_is_being_created(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, store=cluster.tree.connect(latency_s=0.01))
    cluster.now_ms += 8 * 24 * 3600 * 1000
    making = asyncio.ensure_future(topic.open_cursor("s", start=EARLIEST))
    await asyncio.sleep(0)
    assert await topic.trim() == 0
    assert (await making).backlog_entries == 30


async def test_deleting_a_topic_removes_its_znodes_and_ledgers(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    cursor = await topic.open_cursor("s", start=EARLIEST)
    await cursor.ack_many([Position(0, 0)])
    await topic.delete()
    assert not cluster.ledgers.ledgers
    assert await cluster.tree.connect().exists(f"/managed-ledgers/{TOPIC}") is None
    for call in (
        topic.add_many([b"x"]),
        cursor.ack_many([Position(0, 1)]),
        topic.read(EARLIEST, entries_max=1, size_max=1),
    ):
        with pytest.raises(NoSuchTopic):
            await call
    assert (await cluster.open()).entries_count == 0


async def test_trimming_fences_a_stale_owner(cluster: Cluster) -> None:
    old = await three_ledgers(cluster)
    await cluster.open()
    cluster.now_ms += 8 * 24 * 3600 * 1000
    with pytest.raises(TopicFenced):
        await old.trim()
    assert not old.is_open
    assert len(cluster.ledgers.ledgers) == 3


async def test_a_failed_deletion_keeps_the_topic_and_closes_the_object(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster, operation_timeout_s=0.3)
    for _ in range(1000):
        cluster.stores[-1].fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await topic.delete()
    assert not topic.is_open
    assert (await cluster.open()).entries_count == 30


async def test_a_stale_owner_cannot_delete_the_topic(cluster: Cluster) -> None:
    old = await three_ledgers(cluster)
    await cluster.open()
    with pytest.raises(TopicFenced):
        await old.delete()
    assert len(cluster.ledgers.ledgers) == 3


async def test_topics_may_share_a_cache(cluster: Cluster) -> None:
    cache = EntryCache(size_max=10**6)
    opened = [
        await ManagedLedger.open(
            f"t/n/persistent/{name}",
            client=cluster.ledgers_client(),
            store=cluster.tree.connect(),
            clock=lambda: 1,
            cache=cache,
        )
        for name in "ab"
    ]
    for topic in opened:
        await topic.add_many([topic.name.encode()])
    for topic in opened:
        assert list((await read_all(topic)).values()) == [topic.name.encode()]
    assert len(cache) == 2
    for topic in opened:
        await topic.crash()
    assert (len(cache), cache.size) == (0, 0)


@pytest.mark.parametrize(("failures", "left"), [(10**6, [[0, 1]]), (0, [])])
async def test_a_close_logs_the_trimmed_ledgers_that_are_not_deleted(
    cluster: Cluster, failures: int, left: list[list[int]]
) -> None:
    topic = await three_ledgers(cluster)
    cluster.now_ms += 8 * 24 * 3600 * 1000
    if failures:
        cluster.ledgers.fail_next("delete", MetadataUnavailable("made up"), count=failures)
    assert await topic.trim() == 2
    with structlog.testing.capture_logs() as logs:
        await topic.close()
    assert [row["ledger_ids"] for row in logs if row["event"] == "trimmed_ledgers_left"] == left


async def reads_of(topic: ManagedLedger, monkeypatch: pytest.MonkeyPatch, *at: Position, size_max: int) -> list[str]:
    """Read from the positions. Returns the ranges that were read from bookies."""
    reads: list[str] = []
    read = topic._reader._read

    async def recorded(ledger_id: int, ids: Sequence[int]) -> object:
        reads.append(f"{ids[0]}-{ids[-1]}")
        return await read(ledger_id, ids)

    with monkeypatch.context() as patch:
        patch.setattr(topic._reader, "_read", recorded)
        for position in at:
            await topic.read(position, entries_max=100, size_max=size_max)
    return reads


async def some(
    topic: ManagedLedger, monkeypatch: pytest.MonkeyPatch, *ids: int, size_max: int = 10**6, ledger_id: int = 0
) -> tuple[list[int], list[int], list[list[int]]]:
    """Read single entries. Returns the ids of those found, of the rest, and what was read from bookies."""
    reads: list[list[int]] = []
    read = topic._reader._read

    async def recorded(ledger_id: int, ids: Sequence[int]) -> object:
        reads.append(list(ids))
        return await read(ledger_id, ids)

    with monkeypatch.context() as patch:
        patch.setattr(topic._reader, "_read", recorded)
        found, rest = await topic.read_some([Position(ledger_id, entry_id) for entry_id in ids], size_max=size_max)
    for position, payload in found:
        assert [(position, payload)] == await topic.read(position, entries_max=1, size_max=1)
    return [position.entry_id for position, _ in found], [position.entry_id for position in rest], reads


async def test_single_entries_are_read_with_one_request(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await cluster.open(cache_size_max=0, entries_max=10**6)
    await topic.add_many([b"%d" % number for number in range(400)])
    ids = [1, 2, 7, 90, *range(100, 200), 399]
    assert await some(topic, monkeypatch, *ids) == (ids, [], [ids])
    assert await some(topic, monkeypatch) == ([], [], [])


async def test_of_single_entries_only_those_that_are_not_cached_are_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await cluster.open(entries_max=10**6)
    await topic.add_many([b"%d" % number for number in range(40)])
    assert await some(topic, monkeypatch, 3, 5, 39) == ([3, 5, 39], [], [])
    topic = await cluster.open()  # after a restart, with another cache
    assert (await some(topic, monkeypatch, 3, 5))[2] == [[3, 5]]
    assert (await some(topic, monkeypatch, 2, 3, 5, 8))[2] == [[2, 8]]
    assert (await some(topic, monkeypatch, 2, 3, 5, 8))[2] == []


async def test_single_entries_of_several_ledgers_and_those_that_do_not_exist(cluster: Cluster) -> None:
    topic = await three_ledgers(cluster)
    last = topic.last_confirmed
    positions: list[Position] = []
    at = topic.first_position
    while at <= last:
        positions.append(at)
        at = topic.next_position(at)
    wanted = [Position(-1, 3), *positions, Position(last.ledger_id, last.entry_id + 1), Position(10**6, 0)]
    found, rest = await topic.read_some(sorted(wanted), size_max=10**6)
    assert list(rest) == []
    assert found == await topic.read(topic.first_position, entries_max=100, size_max=10**6)
    assert await topic.read_some([Position(10**6, 0)], size_max=10**6) == ([], [])


async def test_single_entries_end_at_the_limit_of_bytes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await cluster.open(cache_size_max=0)
    await topic.add_many([bytes(100)] * 10)
    assert (await some(topic, monkeypatch, 0, 2, 4, 6, size_max=250))[:2] == ([0, 2], [4, 6])
    assert (await some(topic, monkeypatch, 0, 2, 4, 6, size_max=1))[:2] == ([0], [2, 4, 6])


async def small_and_large(cluster: Cluster) -> ManagedLedger:
    """Return a topic without a cache: 3,000 entries of one byte, then 100 of 10,000 bytes."""
    topic = await cluster.open(cache_size_max=0, entries_max=10**6)
    await topic.add_many([b"x"] * 3_000)
    for _ in range(100):
        await topic.add_many([bytes(10_000)])
    return topic


async def test_single_entries_of_a_large_ledger_are_read_in_small_groups_unless_their_size_is_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the ledger says nothing about these entries."""
    topic = await small_and_large(cluster)
    monkeypatch.setattr(reader, "UNSIZED_BYTES_MAX", 10**5)
    large = list(range(3_000, 3_100, 2))
    *_, reads = await some(topic, monkeypatch, *large, size_max=50_000)
    assert max(map(len, reads)) <= UNSIZED_ENTRIES_MAX
    small = list(range(0, 100, 2))
    assert (await some(topic, monkeypatch, *small, size_max=50_000))[2] == [[98], [0], small]


async def test_large_entries_after_many_small_ones_are_read_in_small_groups(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await small_and_large(cluster)
    found = await topic.read(Position(0, 3_000), entries_max=100, size_max=50_000)
    assert 1 <= len(found) <= 5
    ranges = await reads_of(topic, monkeypatch, Position(0, 3_000), size_max=50_000)
    assert max(int(text.split("-")[1]) - int(text.split("-")[0]) for text in ranges) < UNSIZED_ENTRIES_MAX


async def test_the_size_of_a_range_is_found_with_one_read_if_it_continues_the_last_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await cluster.open(cache_size_max=0, entries_max=10**6)
    await topic.add_many([b"x" * 100] * 500)
    positions = [Position(0, 0), Position(0, 100), Position(0, 300)]
    ranges = await reads_of(topic, monkeypatch, *positions, size_max=10**6)
    assert ranges == ["99-99", "0-0", "0-99", "199-199", "100-199", "399-399", "300-300", "300-399"]


async def test_few_entries_are_read_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await cluster.open(cache_size_max=0)
    await topic.add_many([b"x"] * UNSIZED_ENTRIES_MAX)
    assert await reads_of(topic, monkeypatch, Position(0, 0), size_max=10**6) == [f"0-{UNSIZED_ENTRIES_MAX - 1}"]


# --- searching by publish time


def entry_at(time_ms: int) -> bytes:
    return encode_message(OutgoingMessage(payload=b"m"), producer_name="p", publish_time_ms=time_ms, sequence_id=0)


async def timed(cluster: Cluster, *ledgers: Sequence[int], **settings: object) -> ManagedLedger:
    """Return a topic whose ledgers have entries with these publish times. Each is closed at its last time."""
    topic = await cluster.open(cache_size_max=0, **settings)
    for i, times in enumerate(ledgers):
        await topic.add_many([entry_at(time) for time in times])
        cluster.now_ms = times[-1]
        if i + 1 < len(ledgers):
            await topic.roll()
    return topic


async def test_a_time_is_found_with_logarithmically_many_reads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1_000
    parts = [range(10_000 * i, 10_000 * i + 2 * count, 2) for i in range(1, 7)]
    topic = await timed(cluster, *parts)
    assert topic.entries_count == 6 * count
    reads: list[int] = []
    read = topic._reader._read

    async def counted(ledger_id: int, ids: Sequence[int]) -> object:
        reads.append(len(ids))
        return await read(ledger_id, ids)

    monkeypatch.setattr(topic._reader, "_read", counted)
    for ledger, times in enumerate(parts):
        for entry in (0, 1, 500, 999):
            for at_ms in (times[entry], times[entry] - 1):
                reads.clear()
                assert await topic.find_published(at_ms) == Position(ledger, entry)
                assert reads.count(1) <= 10 + 3 + 1  # log2(1000), the hints, and a single entry before the result
                assert len([each for each in reads if each > 1]) <= 2
                assert sum(reads) <= 14 + BEFORE_ENTRIES_MAX
    assert await topic.find_published(0) == Position(0, 0)
    assert await topic.find_published(10**12) == Position(5, count)


async def test_a_late_entry_out_of_order_does_not_hide_the_ones_before_it(cluster: Cluster) -> None:
    topic = await timed(cluster, [10, 20, 30], [40, 60, 35, 70])
    assert await topic.find_published(50) == Position(1, 1)  # a search alone may stop behind the 35
    assert await topic.find_published(65) == Position(1, 3)


async def test_an_owner_with_a_slow_clock_does_not_hide_entries(cluster: Cluster) -> None:
    topic = await timed(cluster, [1000, 1100, 1200], [900, 1000, 1300])
    assert await topic.find_published(1100) == Position(0, 1)
    assert await topic.find_published(1250) == Position(1, 2)


async def test_damaged_and_lost_entries_do_not_fail_a_search(cluster: Cluster) -> None:
    topic = await timed(cluster, range(100, 200), range(200, 300), range(300, 400))
    for error in (NoSuchEntry("made up"), Corrupt("made up")):
        for at_ms, ledger in ((150, 0), (250, 1), (399, 2)):
            for failures in range(1, 4):
                cluster.ledgers.fail_next("read", error, count=failures)
                found = await topic.find_published(at_ms)
                assert Position(0, 0) <= found <= Position(ledger, at_ms % 100)
    cluster.ledgers.fail_next("open", NoSuchLedger("made up"))
    assert await topic.find_published(150) == Position(0, 50)


async def test_an_entry_that_is_no_message_does_not_fail_a_search(cluster: Cluster) -> None:
    topic = await timed(cluster, [10, 20])
    await topic.add_many([b"?", entry_at(30), entry_at(40)])
    assert await topic.find_published(40) == Position(0, 4)
    assert await topic.find_published(20) == Position(0, 1)


async def test_a_search_fails_if_bookies_do_not_answer_or_the_topic_is_lost(cluster: Cluster) -> None:
    topic = await timed(cluster, [10, 20], [30, 40])
    cluster.ledgers.fail_next("read", BookieUnavailable("made up"))
    with pytest.raises(BookieUnavailable):
        await topic.find_published(20)
    assert await topic.find_published(20) == Position(0, 1)
    await topic.close()
    with pytest.raises(TryAgain):
        await topic.find_published(20)
