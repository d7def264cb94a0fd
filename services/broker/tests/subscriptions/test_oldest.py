"""The publish time of the oldest unacknowledged message: read when somebody asks, once per entry."""

from bindery_broker.subscriptions.oldest import OldestMessage
from bindery_core.errors import BookieUnavailable
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import EARLIEST
from managed_ledger_cluster import Cluster, at


def entry(time_ms: int) -> bytes:
    return encode_message(OutgoingMessage(payload=b"x"), producer_name="p", publish_time_ms=time_ms, sequence_id=0)


async def test_the_time_is_read_once_for_each_oldest_entry(cluster: Cluster) -> None:
    topic = await cluster.open()
    cursor = await topic.open_cursor("s", start=EARLIEST)
    oldest = OldestMessage(cursor, topic)
    assert (oldest.must_read, oldest.publish_time_ms) == (False, None)
    await topic.add_many([entry(100), entry(200), entry(300)])
    assert (oldest.must_read, oldest.publish_time_ms) == (True, None)
    await oldest.read()
    assert (oldest.must_read, oldest.publish_time_ms) == (False, 100)
    await cursor.ack_many(at(1))
    assert (oldest.must_read, oldest.publish_time_ms) == (False, 100)
    await cursor.ack_many(at(0))
    assert (oldest.must_read, oldest.publish_time_ms) == (True, None)
    await oldest.read()
    assert oldest.publish_time_ms == 300
    await cursor.ack_many(at(2))
    assert (oldest.must_read, oldest.publish_time_ms) == (False, None)
    await oldest.read()
    assert oldest.publish_time_ms is None


async def test_an_entry_that_cannot_be_read_has_no_time(cluster: Cluster) -> None:
    topic = await cluster.open(cache_size_max=0)
    cursor = await topic.open_cursor("s", start=EARLIEST)
    oldest = OldestMessage(cursor, topic)
    await topic.add_many([entry(100)])
    cluster.ledgers.fail_next("read", BookieUnavailable("made up"))
    await oldest.read()
    assert (oldest.must_read, oldest.publish_time_ms) == (True, None)
    await oldest.read()
    assert oldest.publish_time_ms == 100


async def test_an_entry_that_is_no_message_has_no_time(cluster: Cluster) -> None:
    topic = await cluster.open()
    cursor = await topic.open_cursor("s", start=EARLIEST)
    oldest = OldestMessage(cursor, topic)
    await topic.add_many([b"no message"])
    await oldest.read()
    assert oldest.publish_time_ms is None


async def test_a_damaged_entry_is_read_once(cluster: Cluster) -> None:
    """An answer reads a limited number of entries: damaged ones must not take the turn of others each time."""
    topic = await cluster.open()
    cursor = await topic.open_cursor("s", start=EARLIEST)
    oldest = OldestMessage(cursor, topic)
    await topic.add_many([b"\x0e\x01no message", entry(200)])
    await oldest.read()
    assert (oldest.must_read, oldest.publish_time_ms) == (False, None)
    await cursor.ack_many(at(0))
    await oldest.read()
    assert oldest.publish_time_ms == 200
