"""Cursors of a topic: created, loaded, damaged, reset and deleted."""

import asyncio
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.managed_ledger.cursors.cursor_store import CursorStore
from bindery_broker.managed_ledger.cursors.cursor_table import UNSETTLED_S_MAX
from bindery_core.errors import (
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchSubscription,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import LedgerId
from bindery_metadata.stores.memory import MemoryStore
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import SUB, TOPIC, Cluster, at, topic_of, unacked


async def test_a_new_subscription_is_durable_with_its_properties_before_it_is_answered(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.add_many([b"0"])
    await topic.open_cursor("a/b c", start=LATEST, properties={"tag": "1"})
    await topic.crash()
    cursor = (await cluster.open()).cursors["a/b c"]
    assert cursor.properties == {"tag": "1"}
    assert cursor.backlog_entries == 0
    assert (await cluster.tree.connect().children(f"/managed-ledgers/{TOPIC}")) == ["a%2Fb+c"]


async def test_an_existing_subscription_keeps_position_and_properties(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    again = await topic.open_cursor("s", start=LATEST, properties={"x": "y"})
    assert again is cursor
    assert again.properties == {}
    assert again.backlog_entries == 9


async def test_a_new_subscription_begins_at_its_start_position(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster)
    for name, start, backlog in [("e", EARLIEST, 10), ("l", LATEST, 0), ("m", Position(0, 4), 6)]:
        assert (await topic.open_cursor(name, start=start)).backlog_entries == backlog


async def test_deleting_a_subscription_removes_znode_and_ledger(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    await topic.delete_cursor("s")
    assert list(cluster.ledgers.ledgers) == [0]
    assert await cluster.tree.connect().exists(SUB) is None
    with pytest.raises(NoSuchSubscription):
        await cursor.ack_many(at(1))
    with pytest.raises(NoSuchSubscription):
        await topic.delete_cursor("s")
    assert (await topic.open_cursor("s", start=EARLIEST)).backlog_entries == 10


def lose(store: MemoryStore, *, applied: bool) -> None:
    """Make the outcome of the next write unknown, and prevent the store from resolving it."""
    store.lose_next_write(applied=applied)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")


async def test_a_subscription_continues_after_a_failed_deletion(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    await cursor.ack_many(at(0))
    store = cluster.stores[-1]
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    deleting = asyncio.ensure_future(topic.delete_cursor("s"))
    await asyncio.sleep(0.01)
    acking = asyncio.ensure_future(cursor.ack_many(at(1)))
    with pytest.raises(MetadataUnavailable):
        await deleting
    store._faults.clear()
    assert await acking == at(1)
    assert await topic.open_cursor("s", start=EARLIEST) is cursor
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert await unacked(cursor) == list(range(2, 10))


async def test_an_acknowledgement_that_waited_for_a_deletion_finds_no_subscription(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    results = await asyncio.gather(topic.delete_cursor("s"), cursor.ack_many(at(1)), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], NoSuchSubscription)
    assert await cluster.tree.connect().exists(SUB) is None


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("then", ["again", "ack"])
async def test_a_deletion_of_unknown_outcome_can_be_repeated_or_forgotten(
    cluster: Cluster, applied: bool, then: str
) -> None:
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    await cursor.ack_many(at(0))
    store = cluster.stores[-1]
    lose(store, applied=applied)
    with pytest.raises(MetadataOutcomeUnknown):
        await topic.delete_cursor("s")
    store._faults.clear()
    if then == "again":
        await topic.delete_cursor("s")
        assert await cluster.tree.connect().exists(SUB) is None
        assert list(cluster.ledgers.ledgers) == [0]
        assert (await topic.open_cursor("s", start=EARLIEST)).backlog_entries == 10
    else:
        await cursor.ack_many(at(1))
        await topic.crash()
        assert await unacked((await topic_of(cluster))[1]) == list(range(2, 10))
    assert topic.is_open == (then == "again")


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("then", ["again", "delete it", "delete the topic", "trim"])
async def test_a_subscription_of_unknown_outcome_is_not_forgotten(cluster: Cluster, applied: bool, then: str) -> None:
    topic, first = await topic_of(cluster, operation_timeout_s=0.3)
    await topic.roll()
    await topic.add_many([b"10"])
    store = cluster.stores[-1]
    lose(store, applied=applied)
    with pytest.raises(MetadataOutcomeUnknown):
        await topic.open_cursor("late", start=Position(0, 3))
    store._faults.clear()
    await first.ack_many([*at(*range(10)), Position(1, 0)])
    await asyncio.sleep(0.01)
    assert await topic.trim() == 0
    assert topic.contains(Position(0, 3))
    names = ["late", "s"] if then == "again" else ["s"]
    if then == "again":
        assert (await topic.open_cursor("late", start=Position(0, 4))).backlog_entries == 7
        assert await topic.trim() == 0
    elif then == "delete it":
        await topic.delete_cursor("late")
        await asyncio.sleep(0.01)
        assert not topic.contains(Position(0, 3))
    elif then == "delete the topic":
        await topic.delete()
        assert await cluster.tree.connect().exists(f"/managed-ledgers/{TOPIC}") is None
        return
    else:
        await asyncio.sleep(UNSETTLED_S_MAX)
        assert await topic.trim() == 1
    assert topic.is_open
    assert sorted(await cluster.tree.connect().children(f"/managed-ledgers/{TOPIC}")) == names
    await topic.crash()
    assert sorted((await cluster.open()).cursors) == names


async def test_a_subscription_that_was_certainly_not_created_is_forgotten(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster, operation_timeout_s=0.3)
    store = cluster.stores[-1]
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await topic.open_cursor("late", start=EARLIEST)
    store._faults.clear()
    with pytest.raises(NoSuchSubscription):
        await topic.delete_cursor("late")


async def damaged(cluster: Cluster, damage: str) -> ManagedLedger:
    """A topic of ten entries over two ledgers, opened again after its subscription was sought back and then damaged."""
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(*range(8)))
    await cursor.seek(Position(0, 2))
    await topic.crash()
    if damage == "missing":
        del cluster.ledgers.ledgers[LedgerId(2)]
    else:
        cluster.ledgers.ledgers[LedgerId(2)].store([b"\xff\xff"])
    return await cluster.open()


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
async def test_a_lost_cursor_state_is_reported_and_never_replaced_by_the_older_one(
    cluster: Cluster, damage: str
) -> None:
    """The older state in the znode has the acknowledgements from before the seek.

    To continue from it would skip the entries to which the seek moved the subscription back.
    """
    topic = await damaged(cluster, damage)
    assert not topic.cursors
    with pytest.raises(Corrupt, match=r"reset or delete the subscription.*cursor=s.* ledger_id=2"):
        await topic.open_cursor("s", start=EARLIEST)
    with pytest.raises(Corrupt):
        topic.check_cursor("s")
    topic.check_cursor("other")
    assert list(topic.damaged_cursors) == ["s"]
    assert len(await topic.add_many([b"11"])) == 1  # the rest of the topic works
    other = await topic.open_cursor("other", start=LATEST)
    assert other.backlog_entries == 0
    await topic.close()
    with pytest.raises(Corrupt):
        (await cluster.open()).check_cursor("s")


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
async def test_nothing_is_trimmed_while_a_cursor_is_damaged(cluster: Cluster, damage: str) -> None:
    topic = await damaged(cluster, damage)
    await topic.open_cursor("other", start=LATEST)
    assert await topic.trim() == 0
    assert topic.contains(Position(0, 0))
    await topic.reset_cursor("s", start=LATEST)
    await asyncio.sleep(0.01)
    assert not topic.contains(Position(0, 0))


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
async def test_a_damaged_cursor_can_be_reset(cluster: Cluster, damage: str) -> None:
    topic = await damaged(cluster, damage)
    cursor = await topic.reset_cursor("s", start=EARLIEST)
    assert topic.cursors["s"] is cursor
    assert not topic.damaged_cursors
    assert await unacked(cursor) == list(range(11))
    assert LedgerId(2) not in cluster.ledgers.ledgers
    with pytest.raises(Conflict, match="use seek"):
        await topic.reset_cursor("s", start=EARLIEST)
    with pytest.raises(NoSuchSubscription):
        await topic.reset_cursor("other", start=EARLIEST)
    await cursor.ack_many(at(0))
    await topic.crash()
    topic, cursor = await topic_of(cluster)
    assert await unacked(cursor) == list(range(1, 11))


async def test_a_reset_fails_if_the_topic_closes_meanwhile(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await damaged(cluster, "unreadable")
    replace = CursorStore.replace

    async def close_meanwhile(store: CursorStore, state: CursorState) -> None:
        await replace(store, state)
        await topic.crash()

    monkeypatch.setattr(CursorStore, "replace", close_meanwhile)
    with pytest.raises(TryAgain):
        await topic.reset_cursor("s", start=EARLIEST)
    assert not topic.cursors
    assert list(topic.damaged_cursors) == ["s"]


@pytest.mark.parametrize("end", ["delete_cursor", "delete_topic"])
async def test_a_damaged_cursor_can_be_deleted(cluster: Cluster, end: str) -> None:
    topic = await damaged(cluster, "unreadable")
    if end == "delete_topic":
        await topic.delete()
        assert not cluster.ledgers.ledgers
    else:
        await topic.delete_cursor("s")
        assert LedgerId(2) not in cluster.ledgers.ledgers
        topic, cursor = await topic_of(cluster)
        assert await unacked(cursor) == list(range(11))


async def test_a_stale_owner_cannot_reset_a_damaged_cursor(cluster: Cluster) -> None:
    old = await damaged(cluster, "missing")
    new = await cluster.open()
    with pytest.raises(TopicFenced):
        await old.reset_cursor("s", start=LATEST)
    assert not old.is_open
    assert list(new.damaged_cursors) == ["s"]


async def test_nothing_is_trimmed_before_the_cursors_are_loaded(cluster: Cluster) -> None:
    """Unacknowledged entries are kept, even if they are older than the retention of a topic without subscriptions."""
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    await topic.roll()
    await topic.crash()
    cluster.now_ms += 8 * 24 * 3600 * 1000
    again = await cluster.open()
    await asyncio.sleep(1)
    assert await unacked(again.cursors["s"]) == list(range(1, 10))


async def test_a_cursor_may_be_deleted_while_a_lost_topic_is_released(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.open_cursor("other", start=EARLIEST)
    await cursor.ack_many(at(0))
    store: Any = cluster.stores[-1]
    may_delete = asyncio.Event()
    multi = store.multi

    async def slow(ops: Any) -> Any:
        await may_delete.wait()
        return await multi(ops)

    store.multi = slow
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(1)))
    deleting = asyncio.ensure_future(topic.delete_cursor("other"))
    await asyncio.sleep(0.01)
    crashing = asyncio.ensure_future(topic.crash())  # waits for the record that is being written
    await asyncio.sleep(0.01)
    may_delete.set()
    await deleting
    cluster.ledgers.release_adds()
    await crashing
    with pytest.raises(TryAgain):
        await acking
