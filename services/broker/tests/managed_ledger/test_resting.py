"""A topic has an open ledger only while it is written: none after an open, and none after a time without adds."""

import asyncio

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_core.errors import NotEnoughBookies, TopicFenced, TryAgain
from bindery_pulsar.managed_ledger_codec import decode_topic
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import TOPIC, Cluster, read_all

INACTIVE_S = 100.0


async def stored(cluster: Cluster) -> list[tuple[int, int, bool]]:
    """Return id, entries and whether it is closed, of each ledger in the topic's znode."""
    data = (await cluster.tree.connect().get(f"/managed-ledgers/{TOPIC}")).data
    return [(one.ledger_id, one.entries, one.closed_ms > 0) for one in decode_topic(data).ledgers]


def state(topic: ManagedLedger) -> object:
    return topic.internal_stats()["state"]


async def test_an_open_and_a_subscription_create_no_ledger(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.open_cursor("first", start=EARLIEST)
    await topic.open_cursor("last", start=LATEST)
    await topic.close()
    topic = await cluster.open()
    assert not cluster.ledgers.ledgers
    assert await stored(cluster) == []
    assert topic.internal_stats()["ledgers"] == []
    assert topic.entries_count == 0
    assert {cursor.backlog_entries for cursor in topic.cursors.values()} == {0}
    (position,) = await topic.add_many([b"a"])
    assert {cursor.backlog_entries for cursor in topic.cursors.values()} == {1}
    await topic.cursors["first"].ack_many([position])
    assert await stored(cluster) == [(position.ledger_id, 0, False)]


async def test_an_open_writes_the_znode_once(cluster: Cluster) -> None:
    await cluster.open()
    path = f"/managed-ledgers/{TOPIC}"
    before = (await cluster.tree.connect().get(path)).stat.version
    await cluster.open()
    assert (await cluster.tree.connect().get(path)).stat.version == before + 1


async def test_a_stale_owner_without_a_ledger_acknowledges_nothing(cluster: Cluster) -> None:
    """No bookie can fence it, because it has no ledger: the znode's version must."""
    old = await cluster.open()
    new = await cluster.open()
    with pytest.raises(TopicFenced):
        await old.add_many([b"late"])
    with pytest.raises(TopicFenced):
        await old.open_cursor("s", start=EARLIEST)
    assert not old.is_open
    await new.add_many([b"a"])
    assert list((await read_all(new)).values()) == [b"a"]


async def test_a_ledger_that_was_started_during_an_open_is_recovered_by_it(cluster: Cluster) -> None:
    """The former owner names a ledger and acknowledges after the next one has read the znode."""
    old = await cluster.open()
    store = cluster.tree.connect()
    get_really, acknowledged = store.get, []

    async def get(path: str, **kwargs: object) -> object:
        node = await get_really(path, **kwargs)  # type: ignore[arg-type]
        if path == f"/managed-ledgers/{TOPIC}" and not acknowledged:
            acknowledged.extend(await old.add_many([b"a", b"b"]))
        return node

    store.get = get  # type: ignore[assignment, method-assign]
    new = await cluster.open(store=store)
    assert list(await read_all(new)) == acknowledged
    with pytest.raises(TopicFenced):
        await old.add_many([b"late"])
    assert list((await read_all(new)).values()) == [b"a", b"b"]


async def test_an_unused_ledger_is_closed_without_a_successor(cluster: Cluster) -> None:
    topic = await cluster.open(inactive_s_max=INACTIVE_S)
    await topic.add_many([b"a"])
    await asyncio.sleep(INACTIVE_S - 1)
    await topic.add_many([b"b"])
    await asyncio.sleep(INACTIVE_S - 1)
    assert state(topic) == "LedgerOpened"
    await asyncio.sleep(2)
    assert state(topic) == "ClosedLedger"
    assert topic._writer is not None
    assert topic._writer.handle is None
    assert topic._writer._roll_timer is None
    assert topic._writer._expiry_timer is None
    assert not topic._writer._tasks
    assert list(cluster.ledgers.ledgers) == [0]
    assert cluster.ledgers.ledgers[0].is_closed
    assert topic.last_confirmed == Position(0, 1)
    assert list((await read_all(topic)).values()) == [b"a", b"b"]
    assert await topic.add_many([b"c"]) == [Position(1, 0)]
    assert await stored(cluster) == [(0, 2, True), (1, 0, False)]
    assert list((await read_all(topic)).values()) == [b"a", b"b", b"c"]


async def test_a_topic_at_rest_needs_no_recovery_at_its_next_open(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.add_many([b"a"])
    await topic.close()
    await (await cluster.open()).crash()  # this one stores that the ledger is closed
    assert await stored(cluster) == [(0, 1, True)]
    cluster.ledgers.fail_next("open", NotEnoughBookies("made up"))
    topic = await cluster.open()
    assert topic.entries_count == 1


async def test_adds_that_come_while_the_ledger_is_closed_go_to_the_next_one(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.add_many([b"a"])
    assert topic._writer is not None
    topic._writer._switch(rest=True)
    await asyncio.sleep(0)
    assert await asyncio.gather(topic.add_many([b"b"]), topic.add_many([b"c"])) == [[Position(1, 0)], [Position(1, 1)]]
    assert list((await read_all(topic)).values()) == [b"a", b"b", b"c"]


async def test_adds_wait_for_a_ledger_and_fail_at_their_deadline(cluster: Cluster) -> None:
    topic = await cluster.open(add_timeout_s=5)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"), count=10**6)
    with pytest.raises(TryAgain):
        await topic.add_many([b"a"])
    await asyncio.sleep(10)
    assert topic._writer is not None
    assert topic._writer.is_resting, "nobody waits, so no attempt is made"
    cluster.ledgers._faults.clear()
    assert (await topic.add_many([b"b"]))[0].entry_id == 0
    assert list((await read_all(topic)).values()) == [b"b"]


async def test_a_drained_topic_at_rest_keeps_no_entries(cluster: Cluster) -> None:
    """The ledger is deleted after another one was started, because cursors stand at its end."""
    topic = await cluster.open()
    cursor = await topic.open_cursor("s", start=EARLIEST)
    positions = await topic.add_many([b"a", b"b"])
    await topic.close()
    topic = await cluster.open()
    cursor = topic.cursors["s"]
    assert await topic.trim() == 0
    assert list(cluster.ledgers.ledgers) == [0]
    await cursor.ack_many(positions)
    await topic.trim()
    assert topic.entries_count == 0
    assert 0 not in cluster.ledgers.ledgers
    assert cursor.backlog_entries == 0
    await topic.add_many([b"c"])
    assert cursor.backlog_entries == 1


async def test_the_state_of_an_unused_subscription_moves_to_its_znode(cluster: Cluster) -> None:
    topic = await cluster.open(inactive_s_max=INACTIVE_S)
    cursor = await topic.open_cursor("s", start=EARLIEST)
    positions = await topic.add_many([b"a", b"b", b"c"])
    await cursor.ack_many([positions[1]])
    ledger_id = cursor.store.ledger_id
    assert ledger_id in cluster.ledgers.ledgers
    assert 0 < topic.maintenance_in_s() <= INACTIVE_S
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == ledger_id
    await asyncio.sleep(INACTIVE_S)
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == -1
    assert ledger_id not in cluster.ledgers.ledgers
    await topic.crash()
    topic = await cluster.open(inactive_s_max=INACTIVE_S)
    cursor = topic.cursors["s"]
    assert [cursor.is_acked(position) for position in positions] == [False, True, False]
    await cursor.ack_many([positions[0]])
    assert cursor.mark_delete == positions[1]
    assert cursor.store.ledger_id >= 0


async def test_changes_wait_while_the_state_of_a_subscription_moves(cluster: Cluster) -> None:
    topic = await cluster.open(inactive_s_max=INACTIVE_S)
    cursor = await topic.open_cursor("s", start=EARLIEST)
    positions = await topic.add_many([b"a", b"b", b"c"])
    await cursor.ack_many([positions[0]])
    await asyncio.sleep(INACTIVE_S)
    await asyncio.gather(topic.renew_cursor_ledgers(), cursor.ack_many([positions[1]]))
    await topic.crash()
    assert (await cluster.open()).cursors["s"].mark_delete == positions[1]


async def test_a_topic_without_entries_can_be_terminated(cluster: Cluster) -> None:
    topic = await cluster.open()
    assert await topic.terminate() == Position(0, -1)
    assert (await cluster.open()).is_terminated


async def test_a_topic_without_a_ledger_is_deleted(cluster: Cluster) -> None:
    """The placeholder in its list is the ledger of another topic."""
    other = await cluster.ledgers_client().create()
    await other.add(b"kept")
    topic = await cluster.open()
    await topic.set_properties({"a": "b"})
    assert await stored(cluster) == []
    await topic.delete()
    assert list(cluster.ledgers.ledgers) == [0]
