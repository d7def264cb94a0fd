"""Where a cursor's state is stored: cursor ledger or znode, their order, and writers that lost the topic."""

import asyncio

import pytest
import structlog
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger, Redelivered
from bindery_broker.managed_ledger.cursors.cursor_store import LEDGER_RETRY_S
from bindery_core.errors import (
    AddTimeout,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NotEnoughBookies,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import EntryId, LedgerId
from bindery_pulsar.managed_ledger_codec import (
    CursorInfo,
    CursorState,
    decode_cursor,
    decode_position,
    encode_cursor,
    encode_position,
)
from bindery_pulsar.managed_ledger_pb2 import PositionInfo
from bindery_pulsar.message_id import EARLIEST, Position
from bindery_pulsar.subscription_log import LogReplay
from managed_ledger_cluster import SUB, TOPIC, Cluster, at, topic_of


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


def old(cursor: ManagedCursor, *, by_s: float) -> None:
    """Make the cursor ledger older."""
    assert cursor.store._log is not None
    cursor.store._log.opened_at -= by_s


async def test_the_cursor_ledger_of_an_idle_subscription_is_replaced_at_its_maximum_age(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, cursor_age_s_max=600)
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == -1, "without an acknowledgement there is none"
    await cursor.ack_many(at(0, 2))
    first = cursor.store.ledger_id
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == first
    old(cursor, by_s=600)
    await topic.renew_cursor_ledgers()
    second = cursor.store.ledger_id
    assert second not in (first, -1)
    assert first not in cluster.ledgers.ledgers, "the old one is deleted"
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == second
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert (cursor.mark_delete, cursor.individually_acked()) == (Position(0, 0), "[(0:1..0:2]]")


async def test_a_cursor_ledger_is_not_replaced_while_a_record_is_written_or_after_the_end(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, cursor_age_s_max=600)
    await cursor.ack_many(at(0))
    first = cursor.store.ledger_id
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(1)))
    await asyncio.sleep(0)
    old(cursor, by_s=600)
    await asyncio.wait_for(topic.renew_cursor_ledgers(), 1)
    assert cursor.store.ledger_id == first
    cluster.ledgers.release_adds()
    await acking
    commits = cursor.commits
    await topic.crash()
    await cursor.renew_ledger()
    assert cursor.commits == commits


async def test_a_cursor_ledger_that_cannot_be_replaced_stays_in_use(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, cursor_age_s_max=600)
    await cursor.ack_many(at(0))
    first = cursor.store.ledger_id
    old(cursor, by_s=600)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    await topic.renew_cursor_ledgers()
    assert cursor.store.ledger_id == first
    await cursor.ack_many(at(1))
    assert cursor.durable_mark_delete == Position(0, 1)


async def test_a_cursor_that_cannot_be_stored_does_not_keep_others_from_their_new_ledgers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, first = await topic_of(cluster, cursor_age_s_max=600)
    second = await topic.open_cursor("t", start=EARLIEST)
    await second.ack_many(at(0))
    before = second.store.ledger_id
    old(second, by_s=600)

    async def refused() -> None:
        raise TooManyRequests("made up")

    monkeypatch.setattr(first, "renew_ledger", refused)
    with pytest.raises(TooManyRequests, match="made up"):
        await topic.renew_cursor_ledgers()
    assert second.store.ledger_id not in (before, -1)


async def test_a_failed_cursor_ledger_is_replaced(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    await cursor.ack_many(at(1))
    assert len(cluster.ledgers.ledgers) == 2
    await topic.crash()
    assert (await topic_of(cluster))[1].mark_delete == Position(0, 1)


async def test_acknowledgements_are_stored_in_the_znode_if_no_cursor_ledger_can_be_written(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    await cursor.ack_many(at(1, 3))
    assert decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id == -1
    assert list(cluster.ledgers.ledgers) == [0], "the failed cursor ledger is deleted"
    await cursor.ack_many(at(5))
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 1)
    assert cursor.individually_acked() == "[(0:2..0:3],(0:4..0:5]]"


async def test_a_cursor_ledger_is_tried_again_after_a_while(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    await cursor.ack_many(at(0))
    await asyncio.sleep(LEDGER_RETRY_S - 0.1)
    await cursor.ack_many(at(1))
    assert list(cluster.ledgers.ledgers) == [0]
    await asyncio.sleep(0.1)
    await cursor.ack_many(at(2))
    assert decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id == 1
    stats = topic.internal_stats()["cursors"]["s"]
    assert (stats["cursorLedger"], stats["cursorLedgerLastEntry"]) == (1, 0)
    await cursor.ack_many(at(3))
    assert topic.internal_stats()["cursors"]["s"]["cursorLedgerLastEntry"] == 1


async def test_an_acknowledgement_that_cannot_be_stored_fails_and_can_be_repeated(cluster: Cluster) -> None:
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
async def test_a_switch_of_unknown_outcome_is_resolved_before_the_next_record(cluster: Cluster, applied: bool) -> None:
    """If records went to the old ledger while the znode names the new one, they would be lost."""
    topic, cursor = await topic_of(cluster, cursor_entries_max=2, operation_timeout_s=0.3)
    store = cluster.stores[-1]
    await cursor.ack_many(at(0))
    await cursor.ack_many(at(1))
    store.lose_next_write(applied=applied)
    for _ in range(1000):  # the outcome cannot be read either
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await cursor.ack_many(at(2))
    store._faults.clear()  # the fake store has no other way to remove faults
    await cursor.ack_many(at(3))
    await topic.crash()
    assert (await topic_of(cluster))[1].mark_delete == Position(0, 3)


async def test_a_state_too_large_to_store_is_refused_until_it_has_fewer_holes(cluster: Cluster) -> None:
    count = 20_000
    topic, cursor = await topic_of(cluster, entries=count, cursor_state_size_max=1024, cursor_inline_size_max=512)
    await cursor.ack_many(at(1, 3, 5))
    with pytest.raises(TooManyRequests, match="size_max=1024"):
        await cursor.ack_many(at(*range(7, count, 2)))
    await cursor.ack_many(at(*range(0, count - 3, 2)))
    await topic.crash()
    assert (await topic_of(cluster))[1].individually_acked() == f"[(0:{count - 2}..0:{count - 1}]]"


async def test_a_stale_owner_acknowledges_nothing(cluster: Cluster) -> None:
    """This holds with a cursor ledger, which is fenced, without one, and for a new or deleted cursor.

    A write of a cursor's znode checks the version of the topic's znode.
    """
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


async def test_the_znode_that_names_a_cursor_ledger_equals_its_first_record(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    cluster.ledgers.hold_adds()
    first = asyncio.ensure_future(cursor.ack_many(at(0, 2)))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(cursor.ack_many(at(5)))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(first, second)
    state = decode_cursor((await cluster.tree.connect().get(SUB)).data).state
    snapshot, change = cluster.ledgers.ledgers[LedgerId(1)].entries
    replay = LogReplay()
    replay.feed(0, snapshot.payload)
    assert replay.state() == state
    replay.feed(1, change.payload)
    assert str(replay.state().acked) == "[(0:1..0:2],(0:4..0:5]]"


async def test_the_cursor_ledger_has_its_purpose_in_its_metadata(cluster: Cluster) -> None:
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


async def test_an_empty_cursor_ledger_leaves_the_state_of_the_znode(cluster: Cluster) -> None:
    """A Pulsar broker names a cursor ledger whose first record failed, after it stored the state in the znode."""
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 1, 2))
    znode = decode_cursor((await cluster.tree.connect().get(SUB)).data)
    await topic.crash()
    ledger = cluster.ledgers.ledgers[LedgerId(znode.ledger_id)]
    ledger.entries.clear()
    ledger.confirmed = EntryId(-1)
    with structlog.testing.capture_logs() as logs:
        topic, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 2)
    assert not topic.damaged_cursors
    assert [row["ledger_id"] for row in logs if row["event"] == "cursor_ledger_empty"] == [znode.ledger_id]


# --- snapshots and changes


def log_of(cluster: Cluster, ledger_id: int = 1) -> list[PositionInfo]:
    """The records of a cursor ledger."""
    return [PositionInfo.FromString(entry.payload) for entry in cluster.ledgers.ledgers[LedgerId(ledger_id)].entries]


async def test_a_commit_writes_what_changed_whatever_the_number_of_holes(cluster: Cluster) -> None:
    count = 44_000
    topic, cursor = await topic_of(cluster, entries=count)
    await cursor.ack_many(at(*range(1, count // 2, 2)))
    for entry in (31, 33):
        await cursor.ack_many(at(count // 2 + entry), batches=[BatchAck(Position(0, 40_000 + entry), 4, [1])])
    await cursor.record_redeliveries([Redelivered(Position(0, 0), 1, 1)])
    records = cluster.ledgers.ledgers[LedgerId(1)].entries
    assert max(len(record.payload) for record in records[1:]) < 120
    acked = cursor.individually_acked()
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert (cursor.individually_acked(), cursor.ranges_count) == (acked, count // 4 + 2)
    assert cursor.remaining(Position(0, 40_031)) == cursor.remaining(Position(0, 40_033)) == 0b1101
    assert cursor.redelivery_count(Position(0, 0)) == 1


async def test_a_snapshot_follows_changes_of_twice_its_size(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, entries=100, cursor_changes_size_max=1)
    for entry in range(1, 100, 2):
        await cursor.ack_many(at(entry))
    records = log_of(cluster)
    starts = [number for number, record in enumerate(records) if record.log.kind == 1]
    assert starts[0] == 0
    assert 4 < len(starts) < 40
    assert [record.log.snapshot_entry for record in records] == [
        max(start for start in starts if start <= number) for number in range(len(records))
    ]
    assert len(cluster.ledgers.ledgers) == 2, "in the same ledger"
    await topic.crash()
    _, cursor = await topic_of(cluster, entries=0)
    assert cursor.ranges_count == 50


async def test_a_cursor_ledger_is_rolled_at_its_maximum_size(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, entries=200, cursor_size_max=1000, cursor_changes_size_max=200)
    used = set()
    for entry in range(1, 200, 2):
        await cursor.ack_many(at(entry))
        used.add(cursor.store.ledger_id)
        assert sum(len(record.payload) for record in cluster.ledgers.ledgers[cursor.store.ledger_id].entries) < 5000
    assert len(used) > 3
    assert len(cluster.ledgers.ledgers) == 2
    await topic.crash()
    _, cursor = await topic_of(cluster, entries=0)
    assert cursor.ranges_count == 100


async def with_a_long_state(cluster: Cluster, count: int = 4100) -> tuple[ManagedLedger, ManagedCursor]:
    topic, cursor = await topic_of(cluster, entries=count)
    await cursor.ack_many(at(*range(1, count, 2)))
    await cursor.ack_many(at(0))
    await cursor.record_redeliveries([Redelivered(Position(0, 2), 1, 3)])
    return topic, cursor


async def test_after_a_clean_close_pulsar_finds_a_long_state_in_the_last_record(cluster: Cluster) -> None:
    """That is Pulsar's own form: the cursor ledger remains, and its last entry is the state."""
    topic, cursor = await with_a_long_state(cluster)
    ranges = cursor.ranges_count
    await topic.close()
    ledger = cluster.ledgers.ledgers[LedgerId(1)]
    assert ledger.is_closed
    assert decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id == 1
    pulsars = decode_position(ledger.entries[-1].payload)
    assert pulsars.mark_delete == Position(0, 1)
    assert pulsars.acked.ranges_count == ranges == 2049
    topic, cursor = await topic_of(cluster, entries=0)
    assert (cursor.ranges_count, cursor.redelivery_count(Position(0, 2))) == (ranges, 3)
    entries = list(ledger.entries)
    await topic.close()
    assert ledger.entries == entries, "nothing to write"
    assert decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id == 1


async def test_a_clean_close_after_a_crash_leaves_the_form_of_pulsar(cluster: Cluster) -> None:
    """The broker that was killed left a change as the last record, of which Pulsar reads a part only."""
    topic, cursor = await with_a_long_state(cluster)
    ranges = cursor.ranges_count
    await topic.crash()
    topic, cursor = await topic_of(cluster, entries=0)
    await topic.close()
    ledger_id = decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id
    assert ledger_id not in (-1, 1)
    assert LedgerId(1) not in cluster.ledgers.ledgers
    pulsars = decode_position(cluster.ledgers.ledgers[LedgerId(ledger_id)].entries[-1].payload)
    assert (pulsars.mark_delete, pulsars.acked.ranges_count) == (Position(0, 1), ranges)


async def test_a_killed_broker_leaves_a_record_from_which_pulsar_skips_nothing(cluster: Cluster) -> None:
    topic, cursor = await with_a_long_state(cluster)
    acked = cursor.individually_acked()
    for step in (lambda: cursor.ack_many(at(2)), lambda: cursor.seek(Position(0, 5)), lambda: cursor.ack_many(at(7))):
        await step()
        pulsars = decode_position(cluster.ledgers.ledgers[LedgerId(1)].entries[-1].payload)
        assert pulsars.mark_delete == cursor.mark_delete
        assert all(cursor.is_acked(Position(ledger, entry)) for ledger, entry, _ in pulsars.acked)
    assert acked != cursor.individually_acked()
    await topic.crash()


async def test_a_topic_that_pulsar_had_continues_from_its_record(cluster: Cluster) -> None:
    topic, cursor = await with_a_long_state(cluster)
    await topic.crash()
    client, store = cluster.ledgers_client(), cluster.tree.connect()
    await client.open(LedgerId(1))
    handle = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    for mark_delete in (3, 5):
        await handle.add(encode_position(CursorState(mark_delete=Position(0, mark_delete))))
    node = await store.get(SUB)
    info = decode_cursor(node.data)
    await store.set(
        SUB, encode_cursor(CursorInfo(ledger_id=handle.ledger_id, state=info.state)), version=node.stat.version
    )
    _, cursor = await topic_of(cluster, entries=0)
    assert (cursor.mark_delete, cursor.ranges_count) == (Position(0, 5), 0)
    assert cursor.redelivery_count(Position(0, 2)) == 0
    assert list(cursor.redelivery_counts()) == []


@pytest.mark.parametrize("parts", range(5))
async def test_a_broker_that_stops_in_a_snapshot_leaves_the_state_before_it(cluster: Cluster, parts: int) -> None:
    """The fourth record completes the snapshot of four blobs. Until then the changes before it count."""
    topic, cursor = await topic_of(cluster, cursor_changes_size_max=2**20)
    blobs = {str(i): bytes([i]) * 2**20 for i in range(3)}
    await cursor.put_blobs({"first": b""})
    await cursor.put_blobs(blobs)
    written = len(log_of(cluster))
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(2)))
    await asyncio.sleep(0.01)
    for _ in range(parts):
        cluster.ledgers.release_adds()
        cluster.ledgers.hold_adds()
        await asyncio.sleep(0.01)
    assert [record.log.kind for record in log_of(cluster)[written:]] == [1] * parts
    assert acking.done() == (parts == 4)
    await topic.crash()
    acking.cancel()
    cluster.ledgers.release_adds()
    _, cursor = await topic_of(cluster, entries=0)
    found = {name: (len(value), value[:1]) for name, value in cursor.blobs.items()}
    assert found == {name: (len(value), value[:1]) for name, value in {**blobs, "first": b""}.items()}
    assert cursor.is_acked(Position(0, 2)) == (parts == 4)


@pytest.mark.parametrize("new_ledger", [False, True])
async def test_changes_during_a_long_snapshot_are_not_part_of_it(cluster: Cluster, new_ledger: bool) -> None:
    """Otherwise the later parts would lack what a change of the mark-delete position removed from the state."""
    topic, cursor = await topic_of(cluster)
    await cursor.put_blobs({"first": b""})
    await cursor.put_blobs({str(i): bytes(2**20) for i in range(3)})
    if new_ledger:
        await topic.crash()
        topic, cursor = await topic_of(cluster)
    cluster.ledgers.hold_adds()
    first = asyncio.ensure_future(cursor.ack_many(at(2), batches=[BatchAck(Position(0, 4), 2, [1])]))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(cursor.ack_many(at(0, 1, 3), batches=[BatchAck(Position(0, 4), 2, [0])]))
    for _ in range(4):
        assert not first.done()
        cluster.ledgers.release_adds()
        cluster.ledgers.hold_adds()
        await asyncio.sleep(0.01)
    await first
    assert not second.done()
    await topic.crash()
    with pytest.raises(TryAgain):
        await second
    cluster.ledgers.release_adds()
    _, cursor = await topic_of(cluster, entries=0)
    assert cursor.mark_delete == Position(0, -1)
    assert cursor.individually_acked() == "[(0:1..0:2]]"
    assert cursor.remaining(Position(0, 4)) == 0b01


async def test_a_close_after_a_snapshot_writes_nothing_more(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster, entries=4100)
    await cursor.ack_many(at(*range(1, 4100, 2)))
    await topic.close()
    assert [record.log.kind for record in log_of(cluster)] == [1]
