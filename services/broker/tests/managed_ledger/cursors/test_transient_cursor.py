"""Cursors that are stored nowhere: they hold back nothing, follow trimming, and end without a trace."""

import asyncio

import pytest
from bindery_broker.managed_ledger import BatchAck, Redelivered
from bindery_core.errors import Conflict, NoSuchSubscription, TopicFenced, TryAgain
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import Cluster, at, topic_of, unacked


async def test_a_transient_cursor_works_like_a_durable_one_and_writes_nothing(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster)
    znodes, ledgers = cluster.tree.connect(), set(cluster.ledgers.ledgers)
    cursor = await topic.open_transient_cursor("reader-1", start=Position(0, 2))
    assert await unacked(cursor) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert await cursor.ack_many(at(3, 5), batches=[BatchAck(Position(0, 6), 2, [0])]) == at(3, 5)
    await cursor.record_redeliveries([Redelivered(Position(0, 7), 1, 4)])
    await cursor.put_blobs({"a": b"1"})
    assert (cursor.redelivery_count(Position(0, 7)), dict(cursor.blobs)) == (4, {"a": b"1"})
    assert (cursor.remaining(Position(0, 6)), cursor.backlog_entries) == (2, 6)
    await cursor.ack_cumulative(Position(0, 4))
    assert cursor.mark_delete == cursor.durable_mark_delete == Position(0, 5)
    assert await cursor.seek(EARLIEST) == Position(0, 0)
    assert await unacked(cursor) == list(range(10))
    await cursor.skip(3)
    assert await unacked(cursor) == list(range(3, 10))
    await cursor.clear_backlog()
    assert await unacked(cursor) == []
    assert set(cluster.ledgers.ledgers) == ledgers
    assert await znodes.children(f"/managed-ledgers/{topic.name}") == ["s"]
    assert list(topic.cursors) == ["s"]
    assert topic.transient_cursors == {"reader-1": cursor}
    await topic.close()
    assert not (await cluster.open()).transient_cursors


async def test_a_transient_cursor_is_the_same_until_it_is_closed(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster)
    cursor = await topic.open_transient_cursor("r", start=LATEST)
    assert await topic.open_transient_cursor("r", start=EARLIEST) is cursor
    assert cursor.backlog_entries == 0
    await cursor.close()
    await cursor.close()
    with pytest.raises(NoSuchSubscription):
        await cursor.ack_many(at(0))
    assert not topic.transient_cursors
    again = await topic.open_transient_cursor("r", start=EARLIEST)
    assert again.backlog_entries == 10
    await topic.delete_cursor("r")
    assert not topic.transient_cursors


async def test_a_name_is_of_a_durable_or_of_a_transient_cursor(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster)
    with pytest.raises(Conflict, match="durable subscription"):
        await topic.open_transient_cursor("s", start=EARLIEST)
    reader = await topic.open_transient_cursor("r", start=EARLIEST)
    with pytest.raises(Conflict, match="non-durable"):
        await topic.open_cursor("r", start=EARLIEST)
    await reader.close()
    await topic.open_cursor("r", start=EARLIEST)


async def test_trimming_does_not_wait_for_a_transient_cursor_and_moves_it(cluster: Cluster) -> None:
    topic, durable = await topic_of(cluster, entries=4)
    reader = await topic.open_transient_cursor("r", start=EARLIEST)
    await reader.ack_many(at(1, 2))
    ahead = await topic.open_transient_cursor("ahead", start=EARLIEST)
    await ahead.ack_cumulative(Position(0, 3))
    await topic.roll()
    second = (await topic.add_many([b"4", b"5"]))[0]
    await durable.ack_cumulative(Position(0, 3))
    await topic.trim()
    assert topic.first_position == second
    assert (reader.skipped_entries, ahead.skipped_entries) == (2, 0)
    assert (reader.backlog_entries, ahead.backlog_entries) == (2, 2)
    assert await unacked(reader) == await unacked(ahead) == [4, 5]
    assert reader.ranges_count == 0
    await reader.ack_many([second])
    assert reader.mark_delete == second


@pytest.mark.parametrize("end", ["close", "fence"])
async def test_a_transient_cursor_ends_with_its_topic(cluster: Cluster, end: str) -> None:
    topic, durable = await topic_of(cluster)
    cursor = await topic.open_transient_cursor("r", start=EARLIEST)
    if end == "close":
        await topic.close()
    else:
        await cluster.open()
        with pytest.raises(TopicFenced):
            await durable.ack_many(at(0))
    with pytest.raises((TopicFenced, TryAgain)):
        await cursor.ack_many(at(0))
    assert not topic.transient_cursors
    await asyncio.sleep(0)
