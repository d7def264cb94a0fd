"""The backlog in entries, bytes and messages."""

from bindery_broker.managed_ledger import BatchAck
from bindery_broker.statistics.topic import TopicStatistics
from bindery_broker.topics.backlog import Backlog, backlog_of
from bindery_pulsar.message_id import Position
from managed_ledger_cluster import Cluster, at, topic_of


async def test_no_backlog_has_no_messages() -> None:
    cluster = Cluster()
    topic, cursor = await topic_of(cluster, 0)
    assert backlog_of(cursor, topic, TopicStatistics()) == Backlog(0, 0, 0, True)
    await cluster.end()


async def test_the_number_of_messages_is_unknown_before_anything_is_published() -> None:
    cluster = Cluster()
    topic, cursor = await topic_of(cluster, 10)
    assert backlog_of(cursor, topic, TopicStatistics()) == Backlog(10, 10, None, False)
    await cluster.end()


async def test_messages_that_were_published_one_by_one_are_counted_exactly() -> None:
    cluster = Cluster()
    topic, cursor = await topic_of(cluster, 10)
    statistics = TopicStatistics()
    statistics.publish(8, 8, 8, now=1.0)
    assert backlog_of(cursor, topic, statistics) == Backlog(10, 10, 10, False), "two entries are older"
    await cursor.ack_many(at(0, 1, 5))
    assert backlog_of(cursor, topic, statistics) == Backlog(7, 7, 7, True)
    await cluster.end()


async def test_the_messages_of_batches_are_estimated_by_their_mean_size() -> None:
    cluster = Cluster()
    topic, cursor = await topic_of(cluster, 10)
    statistics = TopicStatistics()
    statistics.publish(25, 10, 10, now=1.0)
    await cursor.ack_many(at(0, 1, 2))
    assert backlog_of(cursor, topic, statistics) == Backlog(7, 7, 18, False)
    await cluster.end()


async def test_the_messages_left_in_partly_acknowledged_batches_are_counted() -> None:
    cluster = Cluster()
    topic, cursor = await topic_of(cluster, 3)
    await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 10, range(4)), BatchAck(Position(0, 2), 10, [9])])
    assert backlog_of(cursor, topic, TopicStatistics()) == Backlog(3, 3, None, False)
    statistics = TopicStatistics()
    statistics.publish(30, 3, 3, now=1.0)
    assert backlog_of(cursor, topic, statistics) == Backlog(3, 3, 6 + 10 + 9, False)
    await cursor.ack_many(at(1))
    assert backlog_of(cursor, topic, TopicStatistics()) == Backlog(2, 2, 6 + 9, True)
    await cluster.end()
