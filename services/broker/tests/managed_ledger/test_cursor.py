"""Cursors: what is acknowledged stays acknowledged, and who must not acknowledge cannot."""

import asyncio
import contextlib
import random
from typing import Any

import pytest
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.managed_ledger.cursors.cursor_table import UNSETTLED_S_MAX
from bindery_core.errors import (
    AddTimeout,
    BadRequest,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchSubscription,
    NotEnoughBookies,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import LedgerId
from bindery_metadata.stores.memory import MemoryStore
from bindery_pulsar.managed_ledger_codec import decode_cursor, decode_position
from bindery_pulsar.message_id import EARLIEST, LATEST, Position

from .conftest import TOPIC, Cluster
from .faults import FaultyClient, FaultyStore, Plan

SUB = f"/managed-ledgers/{TOPIC}/s"


async def topic_of(cluster: Cluster, entries: int = 10, **settings: object) -> tuple[ManagedLedger, ManagedCursor]:
    topic = await cluster.open(**settings)
    if entries and not topic.entries_count:
        await topic.add_many([b"%d" % i for i in range(entries)])
    return topic, await topic.open_cursor("s", start=EARLIEST)


def at(*entries: int, ledger: int = 0) -> list[Position]:
    return [Position(ledger, entry) for entry in entries]


async def unacked(cursor: ManagedCursor) -> list[int]:
    found = await cursor.read_unacked(EARLIEST, entries_max=1000, size_max=10**9)
    return [int(entry.payload) for entry in found.entries]


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


async def test_start_decides_what_comes_first(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster)
    for name, start, backlog in [("e", EARLIEST, 10), ("l", LATEST, 0), ("m", Position(0, 4), 6)]:
        assert (await topic.open_cursor(name, start=start)).backlog_entries == backlog


@pytest.mark.parametrize("clean", [False, True])
async def test_acknowledgements_survive_the_broker(cluster: Cluster, clean: bool) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(
        at(0, 1, 4, 5, 8), batches=[BatchAck(Position(0, 3), 100, [0, 99]), BatchAck(Position(0, 6), 2, [1])]
    )
    await cursor.set_position_properties({"n": 7})
    await (topic.close() if clean else topic.crash())
    named = decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id
    assert (named == -1) == clean
    assert len(cluster.ledgers.ledgers) == (1 if clean else 2)
    _, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 1)
    assert cursor.individually_acked() == "[(0:3..0:5],(0:7..0:8]]"
    assert cursor.remaining(Position(0, 3)) == (1 << 100) - 2 - (1 << 99)
    assert cursor.remaining(Position(0, 6)) == 1
    assert cursor.position_properties == {"n": 7}
    assert cursor.backlog_entries == 5
    assert await unacked(cursor) == [2, 3, 6, 7, 9]


async def test_an_acknowledgement_is_answered_when_it_is_durable_and_not_before(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(1)))
    assert (await asyncio.wait([acking], timeout=0.02))[0] == set()
    assert cursor.is_acked(Position(0, 1))
    assert cursor.durable_mark_delete == Position(0, 0)
    repeated = asyncio.ensure_future(cursor.ack_many(at(1)))
    assert (await asyncio.wait([repeated], timeout=0.02))[0] == set()
    cluster.ledgers.release_adds()
    assert await acking == at(1)
    assert await repeated == []
    assert cursor.durable_mark_delete == Position(0, 1)


async def test_many_acknowledgements_share_a_record(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster, entries=200)
    await cursor.ack_many(at(0))
    before = cursor.commits
    await asyncio.gather(*[cursor.ack_many(at(i)) for i in range(1, 200)])
    assert cursor.commits - before <= 2
    assert cursor.backlog_entries == 0


async def test_what_is_no_entry_cannot_be_acknowledged_and_nothing_is_applied(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    for wrong in (Position(0, 10), Position(5, 0), LATEST):
        with pytest.raises(BadRequest, match="no such message"):
            await cursor.ack_many([*at(3), wrong])
        with pytest.raises(BadRequest, match="no such message"):
            await cursor.ack_cumulative(wrong)
    for index in (-1, 3):
        with pytest.raises(BadRequest, match="batch"):
            await cursor.ack_many(at(3), batches=[BatchAck(Position(0, 1), 3, [index])])
    assert cursor.backlog_entries == 10
    assert cursor.individually_acked() == "[]"


async def test_the_last_index_of_a_batch_completes_its_entry(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [0, 1])]) == []
    assert cursor.remaining(Position(0, 0)) == 0b100
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [0])]) == []
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [2])]) == at(0)
    assert cursor.mark_delete == Position(0, 0)
    assert cursor.remaining(Position(0, 0)) is None


async def test_a_cumulative_acknowledgement_may_point_into_a_batch(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(3))
    await cursor.ack_cumulative(Position(0, 5), batch=BatchAck(Position(0, 5), 4, [0, 1, 2]))
    assert cursor.mark_delete == Position(0, 4)
    assert cursor.remaining(Position(0, 5)) == 0b1000
    await cursor.ack_cumulative(Position(0, 7))
    assert cursor.mark_delete == Position(0, 7)
    await cursor.ack_cumulative(Position(0, 2))
    assert cursor.mark_delete == Position(0, 7)


async def test_mark_delete_runs_over_ledger_boundaries(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10", b"11"])
    await cursor.ack_many([*at(*range(1, 10)), *at(0, ledger=1)])
    assert cursor.mark_delete == Position(0, -1)
    await cursor.ack_many(at(0))
    assert cursor.mark_delete == Position(1, 0)
    assert cursor.individually_acked() == "[]"


@pytest.mark.parametrize(("target", "rest"), [(EARLIEST, 10), (LATEST, 0), (Position(0, 7), 3), (Position(0, 99), 0)])
async def test_seek_forgets_acknowledgements_durably(cluster: Cluster, target: Position, rest: int) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 1, 5, 8), batches=[BatchAck(Position(0, 9), 2, [0])])
    assert await cursor.seek(target) == Position(0, 10 - rest)
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert cursor.backlog_entries == rest
    assert await unacked(cursor) == list(range(10 - rest, 10))
    assert cursor.remaining(Position(0, 9)) is None


async def test_seek_into_a_batch_is_one_record(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 1, 2))
    before = cursor.commits
    await cursor.seek(Position(0, 1), passed=BatchAck(Position(0, 1), 3, [0, 1]))
    assert cursor.commits == before + 1
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert (cursor.mark_delete, cursor.remaining(Position(0, 1))) == (Position(0, 0), 0b100)


async def test_of_a_batch_that_was_trimmed_nothing_is_passed(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(*range(10)))
    await topic.trim()
    assert await cursor.seek(Position(0, 1), passed=BatchAck(Position(0, 1), 3, [0, 1])) == Position(1, 0)
    assert cursor.remaining(Position(1, 0)) is None


@pytest.mark.parametrize("target", [EARLIEST, LATEST, Position(0, 3)])
@pytest.mark.parametrize("with_ledger", [False, True])
async def test_a_seek_that_failed_is_not_stored_by_a_later_acknowledgement(
    cluster: Cluster, target: Position, with_ledger: bool
) -> None:
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    if with_ledger:
        await cursor.ack_many(at(0, 1, 4))
    else:
        await topic.delete_cursor("s")
        cursor = await topic.open_cursor("s", start=Position(0, 2))
    rest = await unacked(cursor)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    if with_ledger:
        cluster.ledgers.fail_next("add", AddTimeout("made up"))
    store = cluster.stores[-1]
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(OutcomeUnknown if with_ledger else MetadataUnavailable):
        await cursor.seek(target)
    store._faults.clear()
    assert await unacked(cursor) == rest
    assert cursor.durable_mark_delete <= cursor.mark_delete
    await cursor.ack_many(at(6))
    rest.remove(6)
    assert cursor.durable_mark_delete == cursor.mark_delete
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == rest


async def test_a_seek_of_unknown_outcome_keeps_what_it_would_need(cluster: Cluster) -> None:
    """Stored it may be: what comes after its target must not be trimmed until another record says so."""
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(*range(9)))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    seeking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seeking
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, 8), Position(0, -1))
    acking = asyncio.ensure_future(cursor.ack_many([*at(9), Position(1, 0)]))
    await asyncio.sleep(0.01)
    assert topic.contains(Position(0, 0))
    cluster.ledgers.release_adds()
    await acking
    assert cursor.durable_mark_delete == Position(1, 0)
    await asyncio.sleep(0.01)
    assert not topic.contains(Position(0, 0))


async def test_entries_behind_a_seek_are_kept_while_the_seek_is_being_stored(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(*range(9)))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, -1), Position(0, -1))
    cluster.ledgers.release_adds()
    await seeking
    assert cursor.durable_mark_delete == Position(0, -1)
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(0)))
    await asyncio.sleep(0.01)
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, 0), Position(0, -1))
    cluster.ledgers.release_adds()
    await acking


@pytest.mark.parametrize("sharing", [False, True])
async def test_an_acknowledgement_is_answered_by_no_record_of_a_seek_that_was_undone(
    cluster: Cluster, sharing: bool
) -> None:
    """Neither one that shares the seek's record nor a repetition that changes nothing."""
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    acking = [asyncio.ensure_future(cursor.ack_many(at(1)))]
    await asyncio.sleep(0.01)
    if sharing:
        acking.append(asyncio.ensure_future(cursor.ack_many(at(2))))
        await asyncio.sleep(0.01)
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    cluster.ledgers.hold_adds()
    await asyncio.sleep(0.01)
    seeking.cancel()
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(*acking)
    if not sharing:
        await asyncio.sleep(0.01)
        await cursor.ack_many(at(1))
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == list(range(2 + sharing, 10))


async def test_a_seek_that_is_cancelled_when_it_is_stored_took_place(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    first = asyncio.ensure_future(cursor.ack_many(at(1)))
    await asyncio.sleep(0.01)

    async def ack_and_cancel() -> None:
        await cursor.ack_many(at(2))
        seeking.cancel()

    sharing = asyncio.ensure_future(ack_and_cancel())
    await asyncio.sleep(0.01)
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(first, sharing)
    with pytest.raises(asyncio.CancelledError):
        await seeking
    assert await unacked(cursor) == list(range(10))
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == list(range(10))


@pytest.mark.parametrize("seed", range(30))
async def test_acknowledgements_stand_whatever_becomes_of_the_seeks_among_them(cluster: Cluster, seed: int) -> None:
    """Replay one: pytest -k 'seeks_among_them and [SEED]'"""
    chance = random.Random(seed)
    plan = Plan(seed, die_at=None, fault_rate=0)
    client, store = FaultyClient(cluster.ledgers, plan), FaultyStore(cluster.tree.connect(), plan)
    settings: dict[str, Any] = {"operation_timeout_s": 0.05, "cursor_entries_max": 4}
    topic = await cluster.open(client=client, store=store, **settings)
    await topic.add_many([b"%d" % i for i in range(40)])
    cursor = await topic.open_cursor("s", start=EARLIEST)
    cluster.ledgers.add_delay_s = 0.001
    seeks = succeeded = unsure = 0
    answered: dict[Position, int] = {}
    """Acknowledged, and how many seeks had begun before."""

    async def ack() -> None:
        await asyncio.sleep(chance.uniform(0, 0.01))
        nonlocal unsure
        began, chosen = seeks, at(*chance.sample(range(40), 3))
        with contextlib.suppress(TryAgain, OutcomeUnknown):
            await cursor.ack_many(chosen)
            answered.update(dict.fromkeys(chosen, began))
            if began >= unsure:  # a record was stored since
                unsure = 0

    async def seek() -> None:
        nonlocal seeks, succeeded, unsure
        await asyncio.sleep(chance.uniform(0, 0.01))
        seeks += 1
        seeking = asyncio.ensure_future(cursor.seek(chance.choice([EARLIEST, LATEST, *at(*range(40))])))
        if chance.random() < 0.3:
            asyncio.get_running_loop().call_later(chance.uniform(0, 0.005), seeking.cancel)
        with contextlib.suppress(TryAgain):
            try:
                await seeking
                succeeded, unsure = seeks, 0
            except (OutcomeUnknown, asyncio.CancelledError):
                unsure = seeks

    for _ in range(10):
        plan._fault_rate = chance.choice([0, 0.3, 0.9])
        await asyncio.gather(*[ack() for _ in range(6)], seek())
        if chance.random() < 0.3:
            plan._fault_rate = 0
            succeeded = max(succeeded, unsure)
            await topic.crash()
            cluster.forget(topic)
            topic = await cluster.open(client=client, store=store, **settings)
            cursor = topic.cursors["s"]
        for position, began in answered.items():
            assert began < succeeded or cursor.is_acked(position)


async def test_an_acknowledgement_waits_for_a_seek_and_counts_after_it(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(Position(0, 5)))
    await asyncio.sleep(0.01)
    acking = asyncio.ensure_future(cursor.ack_many(at(2, 6)))
    cumulative = asyncio.ensure_future(cursor.ack_cumulative(Position(0, 5)))
    await asyncio.sleep(0.01)
    assert not cursor.is_acked(Position(0, 6))
    cluster.ledgers.release_adds()
    assert await seeking == Position(0, 5)
    assert await acking == at(6)
    await cumulative
    assert cursor.mark_delete == Position(0, 6)
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == [7, 8, 9]


async def test_what_is_acknowledged_while_entries_are_read_is_not_among_them(cluster: Cluster) -> None:
    """After a fail-over with holes one read is several reads of bookies."""
    topic, cursor = await topic_of(cluster, cache_size_max=0)
    await cursor.ack_many(at(1, 3, 5))
    read, reads = topic.read, 0

    async def slow(position: Position, **limits: int) -> list[tuple[Position, bytes]]:
        nonlocal reads
        reads += 1
        found = await read(position, **limits)
        if reads == 2:
            await cursor.ack_many(at(0, 6), batches=[BatchAck(Position(0, 2), 2, [1])])
        return found

    topic.read = slow  # type: ignore[method-assign]
    found = await cursor.read_unacked(EARLIEST, entries_max=4, size_max=10**6)
    assert reads > 1
    assert [(int(entry.payload), entry.remaining) for entry in found.entries] == [(2, 0b01), (4, None), (7, None)]


async def test_reading_skips_what_is_acknowledged_and_says_where_to_go_on(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(0, 1, 3, 9))
    read = await cursor.read_unacked(EARLIEST, entries_max=3, size_max=10**6)
    assert [int(entry.payload) for entry in read.entries] == [2, 4, 5]
    assert read.next_position == Position(0, 6)
    read = await cursor.read_unacked(read.next_position, entries_max=100, size_max=2)
    assert [int(entry.payload) for entry in read.entries] == [6, 7]
    read = await cursor.read_unacked(read.next_position, entries_max=100, size_max=10**6)
    assert [int(entry.payload) for entry in read.entries] == [8, 10]
    assert read.next_position == Position(1, 1)
    assert await cursor.read_unacked(read.next_position, entries_max=1, size_max=1) == ([], Position(1, 1))


@pytest.mark.parametrize("entries_max", [1, 4])
async def test_a_cursor_ledger_is_rolled_and_the_old_one_deleted(cluster: Cluster, entries_max: int) -> None:
    topic, cursor = await topic_of(cluster, cursor_entries_max=entries_max)
    for i in range(9):
        await cursor.ack_many(at(i))
    await asyncio.sleep(0)
    assert len(cluster.ledgers.ledgers) == 2
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 8)


async def test_a_failed_cursor_ledger_is_replaced(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    await cursor.ack_many(at(1))
    assert len(cluster.ledgers.ledgers) == 2
    await topic.crash()
    assert (await topic_of(cluster))[1].mark_delete == Position(0, 1)


async def test_without_bookies_the_znode_takes_the_acknowledgements(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    await cursor.ack_many(at(1, 3))
    assert decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id == -1
    await cursor.ack_many(at(5))
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 1)
    assert cursor.individually_acked() == "[(0:2..0:3],(0:4..0:5]]"


async def test_when_nothing_takes_it_the_acknowledgement_fails_and_its_repetition_waits(cluster: Cluster) -> None:
    store = cluster.tree.connect()
    _, cursor = await topic_of(cluster, operation_timeout_s=0.3, entries=3)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"), count=10**6)
    cluster.tree.suspend(cluster.stores[-1])
    with pytest.raises((MetadataUnavailable, MetadataOutcomeUnknown)):
        await cursor.ack_many(at(0))
    assert cursor.is_acked(Position(0, 0))
    cluster.tree.resume(cluster.stores[-1])
    assert await cursor.ack_many(at(0)) == []
    assert decode_cursor((await store.get(SUB)).data).state.mark_delete == Position(0, 0)


@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_switch_of_cursor_ledgers_is_settled_before_the_next_record(
    cluster: Cluster, applied: bool
) -> None:
    """Were the old ledger written on while the znode names the new one, what it takes would be lost."""
    topic, cursor = await topic_of(cluster, cursor_entries_max=2, operation_timeout_s=0.3)
    store = cluster.stores[-1]
    await cursor.ack_many(at(0))
    await cursor.ack_many(at(1))
    store.lose_next_write(applied=applied)
    for _ in range(1000):  # nor can it be looked up
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await cursor.ack_many(at(2))
    store._faults.clear()  # the test double has no other way to call them off
    await cursor.ack_many(at(3))
    await topic.crash()
    assert (await topic_of(cluster))[1].mark_delete == Position(0, 3)


async def test_a_state_too_large_to_store_is_refused_until_it_has_fewer_holes(cluster: Cluster) -> None:
    count = 20_000
    topic, cursor = await topic_of(cluster, entries=count, cursor_record_size_max=1024, cursor_inline_size_max=512)
    await cursor.ack_many(at(1, 3, 5))
    with pytest.raises(TooManyRequests, match="size_max=1024"):
        await cursor.ack_many(at(*range(7, count, 2)))
    await cursor.ack_many(at(*range(0, count - 3, 2)))
    await topic.crash()
    assert (await topic_of(cluster))[1].individually_acked() == f"[(0:{count - 2}..0:{count - 1}]]"


async def test_a_stale_owner_acknowledges_nothing(cluster: Cluster) -> None:
    """With a cursor ledger (which is fenced), without one (its znode checks the topic's), and when it is new."""
    old, with_ledger = await topic_of(cluster)
    without = await old.open_cursor("without", start=EARLIEST)
    await with_ledger.ack_many(at(0))
    new = await cluster.open()
    for cursor in (with_ledger, without):
        with pytest.raises(TopicFenced):
            await cursor.ack_many(at(1))
    with pytest.raises(TopicFenced):
        await old.open_cursor("late", start=EARLIEST)
    with pytest.raises(TopicFenced):
        await old.delete_cursor("s")
    assert sorted(new.cursors) == ["s", "without"]
    await new.cursors["without"].ack_many(at(0))
    assert await new.cursors["s"].ack_many(at(0, 1)) == at(1)


async def test_each_guard_alone_stops_a_stale_owner(cluster: Cluster) -> None:
    for name, first in (("fresh", False), ("used", True)):
        old = await cluster.open()
        await old.add_many([b"0", b"1", b"2"])
        cursor = await old.open_cursor(name, start=EARLIEST)
        next_entry = cursor.next_unacked(EARLIEST)
        if first:
            await cursor.ack_many([next_entry])
        new = await cluster.open()
        with pytest.raises(TopicFenced):
            await cursor.ack_many([old.last_confirmed])
        assert not new.cursors[name].is_acked(old.last_confirmed)
        assert not old.is_open
        await new.crash()


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
    """The next write's outcome is unknown, and cannot be looked up."""
    store.lose_next_write(applied=applied)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")


async def test_a_subscription_that_could_not_be_deleted_goes_on(cluster: Cluster) -> None:
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


async def test_a_subscription_that_was_certainly_not_made_leaves_nothing(cluster: Cluster) -> None:
    topic, _ = await topic_of(cluster, operation_timeout_s=0.3)
    store = cluster.stores[-1]
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await topic.open_cursor("late", start=EARLIEST)
    store._faults.clear()
    with pytest.raises(NoSuchSubscription):
        await topic.delete_cursor("late")


async def test_the_znode_that_names_a_cursor_ledger_says_what_its_first_record_says(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    cluster.ledgers.hold_adds()
    first = asyncio.ensure_future(cursor.ack_many(at(0, 2)))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(cursor.ack_many(at(5)))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(first, second)
    state = decode_cursor((await cluster.tree.connect().get(SUB)).data).state
    records = cluster.ledgers.ledgers[LedgerId(1)].entries
    assert state is not None
    assert [str(decode_position(record.payload).acked) for record in records] == [
        str(state.acked),
        "[(0:1..0:2],(0:4..0:5]]",
    ]


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
    """The znode says "2 comes next after 8 acknowledgements": to continue there would skip what the seek asked for."""
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


async def test_the_cursor_ledger_says_what_it_is_for(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 4))
    ledger = cluster.ledgers.ledgers[LedgerId(1)]
    assert ledger.metadata.custom == {
        "application": b"pulsar",
        "component": b"managed-ledger",
        "pulsar/managed-ledger": TOPIC.encode(),
        "pulsar/cursor": b"s",
    }
    assert decode_position(ledger.entries[-1].payload).mark_delete == Position(0, 0)


async def test_opening_trims_nothing_before_it_knows_the_cursors(cluster: Cluster) -> None:
    """What a subscription has not consumed stays, even when a topic without any would have let it go long ago."""
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    await topic.roll()
    await topic.crash()
    cluster.now_ms += 8 * 24 * 3600 * 1000
    again = await cluster.open()
    await asyncio.sleep(1)
    assert await unacked(again.cursors["s"]) == list(range(1, 10))
