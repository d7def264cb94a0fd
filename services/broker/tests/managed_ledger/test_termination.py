"""Termination: durable, seen by every later owner, and never a reason to lose an acknowledged entry."""

import asyncio
import contextlib
from typing import Any

import pytest
from bindery_broker.errors import TopicTerminated
from bindery_broker.managed_ledger import ManagedLedger
from bindery_core.errors import (
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchTopic,
    TopicFenced,
    TryAgain,
)
from bindery_metadata.stores.store import Set
from bindery_pulsar.managed_ledger_codec import TopicInfo, decode_topic, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import TOPIC, Cluster, read_all, topic_of, unacked
from managed_ledger_faults import FaultyClient, FaultyStore, Plan

NODE = f"/managed-ledgers/{TOPIC}"
SEEDS = 30


async def stored(cluster: Cluster) -> TopicInfo:
    return decode_topic((await cluster.tree.connect().get(NODE)).data)


async def texts(topic: ManagedLedger) -> list[bytes]:
    return list((await read_all(topic)).values())


async def test_a_terminated_topic_refuses_entries_and_keeps_those_it_has(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, entries=3)
    assert await topic.terminate() == Position(0, 2)
    assert topic.is_terminated
    with pytest.raises(TopicTerminated):
        await topic.add_many([b"late"])
    assert await topic.terminate() == Position(0, 2)
    assert await unacked(cursor) == [0, 1, 2]
    await cursor.ack_many([Position(0, 1)])
    assert topic.internal_stats()["state"] == "Terminated"
    info = await stored(cluster)
    assert info.terminated == Position(0, 2)
    assert [(one.ledger_id, one.entries, one.size, one.closed_ms) for one in info.ledgers] == [
        (0, 3, 3, cluster.now_ms)
    ]


@pytest.mark.parametrize("ends", ["close", "crash"])
async def test_the_next_owner_knows_it(cluster: Cluster, ends: str) -> None:
    topic, cursor = await topic_of(cluster, entries=3)
    await topic.terminate()
    await cursor.ack_many([Position(0, 0)])
    await (topic.close() if ends == "close" else topic.crash())
    ledgers = len(cluster.ledgers.ledgers)
    topic = await cluster.open()
    assert topic.is_terminated
    assert await texts(topic) == [b"0", b"1", b"2"]
    assert await unacked(topic.cursors["s"]) == [1, 2]
    assert await topic.terminate() == Position(0, 2)
    with pytest.raises(TopicTerminated):
        topic.submit_many([b"late"])
    assert len(cluster.ledgers.ledgers) == ledgers, "no ledger is created for entries that cannot come"


async def test_a_former_owner_is_fenced_although_no_ledger_is_created(cluster: Cluster) -> None:
    former, cursor = await topic_of(cluster, entries=3)
    await former.terminate()
    await cluster.open()
    with pytest.raises(TopicFenced):
        await former.set_properties({"a": "b"})
    with pytest.raises(TopicFenced):
        await cursor.ack_many([Position(0, 0)])


async def test_an_empty_topic_is_terminated_before_its_first_entry(cluster: Cluster) -> None:
    topic = await cluster.open()
    assert await topic.terminate() == Position(0, -1)
    await topic.close()
    topic = await cluster.open()
    assert topic.is_terminated
    assert await texts(topic) == []
    cursor = await topic.open_cursor("s", start=EARLIEST)
    assert cursor.backlog_entries == 0


async def test_adds_in_progress_are_completed_and_later_ones_retried(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster, entries=1)
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"1"]))
    await asyncio.sleep(0)
    terminating = asyncio.ensure_future(topic.terminate())
    again = asyncio.ensure_future(topic.terminate())
    await asyncio.sleep(0)
    with pytest.raises(TryAgain):
        await topic.add_many([b"late"])
    cluster.ledgers.release_adds()
    assert await adding == [Position(0, 1)]
    assert await terminating == await again == Position(0, 1)
    with pytest.raises(TopicTerminated):
        await topic.add_many([b"late"])


async def test_a_topic_whose_last_ledger_is_empty_ends_with_it(cluster: Cluster) -> None:
    """Pulsar takes the position in the last ledger, even if the last entry is in another one."""
    topic, cursor = await topic_of(cluster, entries=2)
    await topic.roll()
    assert await topic.terminate() == Position(1, -1)
    assert topic.last_confirmed == Position(0, 1)
    await cursor.ack_many([Position(0, 0), Position(0, 1)])
    assert await topic.trim() == 1
    await topic.crash()
    topic = await cluster.open()
    assert topic.is_terminated
    assert await texts(topic) == []


async def test_a_waiting_reader_is_woken(cluster: Cluster) -> None:
    topic = await cluster.open()
    waiting = asyncio.ensure_future(topic.wait_for_entry(Position(0, 0), timeout_s=10**6))
    await asyncio.sleep(0)
    await topic.terminate()
    assert await waiting is False


async def test_properties_can_be_changed(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.terminate()
    await topic.set_properties({"a": "b"})
    await topic.crash()
    assert dict((await cluster.open()).properties) == {"a": "b"}
    assert (await stored(cluster)).terminated == Position(0, -1)


async def test_a_terminated_topic_can_be_deleted(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster, entries=2)
    await topic.terminate()
    await topic.delete()
    with pytest.raises(NoSuchTopic):
        await cluster.open(create=False)
    assert not cluster.ledgers.ledgers


async def test_one_that_pulsar_terminated_is_honoured(cluster: Cluster) -> None:
    """Pulsar leaves the record of the last ledger without a number of entries, and drops an empty one."""
    topic, _ = await topic_of(cluster, entries=3)
    await topic.crash()
    store = cluster.tree.connect()
    node = await store.get(NODE)
    info = TopicInfo(ledgers=(LedgerRecord(ledger_id=0),), terminated=Position(0, 2))
    await store.multi([Set(NODE, encode_topic(info), node.stat.version)])
    topic = await cluster.open()
    assert topic.is_terminated
    assert topic.last_confirmed == Position(0, 2)
    assert await texts(topic) == [b"0", b"1", b"2"]


async def test_one_without_ledgers_names_none_of_others(cluster: Cluster) -> None:
    """Ledger 0 belongs to another topic: it must not be recovered, nor be named."""
    other = await cluster.ledgers_client().create()
    await other.add(b"of another topic")
    store = cluster.tree.connect()
    await store.create(NODE, encode_topic(TopicInfo(terminated=Position(7, -1))), make_parents=True)
    topic = await cluster.open()
    assert topic.is_terminated
    await topic.set_properties({"a": "b"})
    await topic.open_cursor("s", start=LATEST)
    await topic.crash()
    topic = await cluster.open()
    assert [record.ledger_id for record in (await stored(cluster)).ledgers] == []
    await other.add(b"and another one")
    await topic.delete()
    assert 0 in cluster.ledgers.ledgers


@pytest.mark.parametrize("error", [MetadataUnavailable, MetadataOutcomeUnknown])
async def test_a_failed_termination_leaves_a_topic_that_is_opened_again(
    cluster: Cluster, error: type[BinderyError]
) -> None:
    topic, _ = await topic_of(cluster, entries=3)

    async def fail(_data: bytes, *, is_unique: bool) -> None:
        raise error("made up")

    topic._metadata.write_topic = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        await topic.terminate()
    with pytest.raises(TopicFenced):
        await topic.add_many([b"late"])
    topic = await cluster.open()
    assert await topic.add_many([b"3"]) == [Position(1, 0)]
    assert await texts(topic) == [b"0", b"1", b"2", b"3"]


async def test_a_cancelled_termination_leaves_a_topic_that_is_opened_again(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster, entries=1)
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"1"]))
    await asyncio.sleep(0)
    terminating = asyncio.ensure_future(topic.terminate())
    await asyncio.sleep(0)
    terminating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await terminating
    with pytest.raises(BinderyError):
        await adding
    with pytest.raises(TopicFenced):
        await topic.add_many([b"late"])


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_termination_with_faults_is_done_or_not(cluster: Cluster, seed: int) -> None:
    """Whatever the broker that terminates survives, the next owner agrees with what it answered."""
    first = await cluster.open()
    acknowledged = await first.add_many([b"0", b"1", b"2"])
    await first.close()
    plan = Plan(seed, die_at=None if seed % 2 else 1 + seed // 2, fault_rate=0.15 if seed % 2 else 0.0)
    store: Any = FaultyStore(cluster.tree.connect(), plan)
    ended: Position | None = None

    async def work() -> None:
        nonlocal ended
        topic = await cluster.open(client=FaultyClient(cluster.ledgers, plan), store=store)
        acknowledged.extend(await topic.add_many([b"3"]))
        ended = await topic.terminate()

    working = asyncio.ensure_future(work())
    dying = asyncio.ensure_future(plan.died.wait())
    await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
    for task in (working, dying):
        task.cancel()
        with contextlib.suppress(BinderyError, asyncio.CancelledError):
            await task
    following = await cluster.open()
    assert set(acknowledged) <= set(await read_all(following))
    if ended is not None:
        assert following.is_terminated
        assert following.terminated == ended
    if following.is_terminated:
        with pytest.raises(TopicTerminated):
            await following.add_many([b"late"])
    else:
        await following.add_many([b"next"])
