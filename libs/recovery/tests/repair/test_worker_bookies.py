"""Workers with complete bookies: after a repair, the tests read every replica from its bookie."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import LedgerFenced
from bindery_core.formats.ledger_metadata import DigestType, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status
from bindery_metadata.recovery.recovery_records import Obstacle, Reason, RecoveryRecord, RecoveryState
from bindery_recovery.checks.checker import ALL, FragmentState, check_ledger
from bindery_recovery.repair.worker import ReplicationWorker
from bookie_cluster import MIB, QUICK, BookieCluster, add, assert_whole, bookie_cluster, payload, worker_on, write

WAIT_S = 30.0


@asynccontextmanager
async def working(cluster: BookieCluster, name: str = "worker", **settings: Any) -> AsyncIterator[ReplicationWorker]:
    """Run a worker with a session and a client of its own until the block ends."""
    store = cluster.tree.connect()
    client = await LedgerClient.connect(store, randomness=random.Random(3), settings=QUICK)
    worker = worker_on(store, client, name, **settings)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await store.close()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = true()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


async def healed(cluster: BookieCluster, *ledger_ids: LedgerId) -> None:
    for ledger_id in ledger_ids:

        async def is_gone(ledger_id: LedgerId = ledger_id) -> bool:
            return await cluster.marks.get(ledger_id) is None

        await until(is_gone)


async def mark(
    cluster: BookieCluster, ledger_id: LedgerId, bookie_id: str, reason: Reason = Reason.BOOKIE_LOST
) -> None:
    await cluster.records.put(RecoveryRecord(ledger_id, reason=reason, bookies=(bookie_id,)))
    await cluster.marks.mark(ledger_id, [bookie_id])


async def recorded(cluster: BookieCluster, ledger_id: LedgerId, obstacle: Obstacle, part: str = "") -> RecoveryRecord:
    async with asyncio.timeout(WAIT_S):
        while True:
            record = await cluster.records.get(ledger_id)
            if record is not None and record.obstacle is obstacle and record.detail and part in record.detail:
                return record
            await asyncio.sleep(0.02)


async def test_the_copies_of_a_dead_bookie_are_replaced_for_every_kind_of_ledger(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 5) as cluster:
        client = await cluster.client()
        written = [
            (await write(client, count, digest_type=digest, ensemble_size=e, write_quorum=w, ack_quorum=a), count)
            for count, digest, e, w, a in [
                (400, DigestType.CRC32C, 3, 3, 2),
                (301, DigestType.MAC, 3, 2, 2),
                (77, DigestType.CRC32, 4, 3, 2),
                (1, DigestType.DUMMY, 2, 2, 1),
                (0, DigestType.CRC32C, 3, 3, 2),
                (150, DigestType.CRC32C, 4, 2, 2),
            ]
        ]
        lost = written[0][0].metadata.last_segment.ensemble[1]
        concerned = [(w.ledger_id, n) for w, n in written if lost in w.metadata.last_segment.ensemble]
        await cluster.stop(lost)
        for ledger_id, _ in concerned:
            await mark(cluster, ledger_id, lost)
        async with working(cluster, workers=2) as worker:
            await healed(cluster, *(ledger_id for ledger_id, _ in concerned))
            await until(lambda: worker.stats.ledgers_healed == len(concerned))
        for writer, count in written:
            metadata = await assert_whole(client, writer.ledger_id, count)
            assert lost not in metadata.last_segment.ensemble
        assert len(concerned) >= 3


async def test_a_bookie_restarted_before_the_copy_receives_no_copies(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writers = [await write(client, 100) for _ in range(4)]
        away = "bookie-1"
        await cluster.stop(away)
        for writer in writers:
            await mark(cluster, writer.ledger_id, away)
        await cluster.start(away)
        async with working(cluster) as worker:
            await healed(cluster, *(writer.ledger_id for writer in writers))
            await until(lambda: worker.stats.ledgers_healed == 4)
            assert worker.stats.ledgers_without_need == 4
            assert worker.stats.entries_copied == 0
        for writer in writers:
            await assert_whole(client, writer.ledger_id, 100)


async def test_a_bookie_that_lost_its_disks_is_neither_a_source_nor_treated_as_empty(tmp_path: Path) -> None:
    """It answers UNKNOWN_LEDGER_STATE, is never a source, and refills itself without interference by workers."""
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writer = await write(client, 200, ensemble_size=2, write_quorum=2, ack_quorum=2)
        away, empty = writer.metadata.last_segment.ensemble
        await cluster.stop(away, empty)
        cluster.wipe(empty)
        await cluster.start(empty)
        replica = await client.read_from_bookie(writer.ledger_id, EntryId(5), empty)
        assert replica.status == Status.UNKNOWN_LEDGER_STATE
        check = await check_ledger(
            client, writer.ledger_id, writer.metadata, bookies=await client.list_bookies(), depth=ALL
        )
        assert [(one.state, one.bad_entry_ids) for one in check.bad] == [
            (FragmentState.LOST, ()),
            (FragmentState.REFILLING, ()),
        ]
        await mark(cluster, writer.ledger_id, away)
        async with working(cluster) as worker:
            record = await recorded(cluster, writer.ledger_id, Obstacle.SOURCE_IN_LIMBO)
            assert record.state is RecoveryState.BLOCKED, "not unrecoverable: a source may come back"
            assert worker.stats.entries_copied == 0
            assert (await client.metadata(writer.ledger_id)).segments == writer.metadata.segments
            await cluster.start(away)
            await until(lambda: all(shard.limbo is None for shard in cluster.bookies[empty].shards))
            worker.retry_now()
            await healed(cluster, writer.ledger_id)
            assert worker.stats.entries_copied == 0, "the bookie refilled itself"
        await assert_whole(client, writer.ledger_id, 200)


async def test_a_ledger_without_a_spare_is_healed_within_seconds_when_a_bookie_joins(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 3) as cluster:
        client = await cluster.client()
        writer = await write(client, 120)
        await cluster.stop("bookie-2")
        await mark(cluster, writer.ledger_id, "bookie-2")
        async with working(cluster):
            record = await recorded(cluster, writer.ledger_id, Obstacle.NO_SPARE)
            assert "no bookie can replace bookie-2" in record.detail
            await cluster.start("bookie-3")
            await healed(cluster, writer.ledger_id)
        metadata = await assert_whole(client, writer.ledger_id, 120)
        assert "bookie-3" in metadata.last_segment.ensemble


async def test_a_running_writer_replaces_the_bookie_itself_and_is_not_fenced(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writer = await write(client, 100, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[0]
        await cluster.stop(lost)
        await mark(cluster, writer.ledger_id, lost)
        async with working(cluster, open_ledger_grace_s=3) as worker:
            await recorded(cluster, writer.ledger_id, Obstacle.LEDGER_OPEN)
            await add(writer, 100, 200)  # the writer detects that the bookie is gone, and changes the ensemble
            await healed(cluster, writer.ledger_id)
            assert worker.stats.ledgers_fenced == 0
            await add(writer, 200, 250)
            await writer.close()
        metadata = await assert_whole(client, writer.ledger_id, 250)
        assert len(metadata.segments) == 2
        assert all(lost not in segment.ensemble for segment in metadata.segments)


async def test_an_idle_open_ledger_is_closed_after_the_grace_period_with_all_acknowledged_entries(
    tmp_path: Path,
) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writer = await write(client, 100, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[0]
        await cluster.stop(lost)
        await mark(cluster, writer.ledger_id, lost)
        async with working(cluster, open_ledger_grace_s=1) as worker:
            await recorded(cluster, writer.ledger_id, Obstacle.LEDGER_OPEN)
            assert (await client.metadata(writer.ledger_id)).state is LedgerState.OPEN
            await healed(cluster, writer.ledger_id)
            assert worker.stats.ledgers_fenced == 1
        metadata = await assert_whole(client, writer.ledger_id, 100)
        assert metadata.state is LedgerState.CLOSED
        assert lost not in metadata.last_segment.ensemble
        with pytest.raises(LedgerFenced):
            await writer.add(b"late")


async def test_holes_that_only_a_check_of_all_entries_finds_are_filled_in_place(tmp_path: Path) -> None:
    """A writer continued without an absent bookie, which lacks the entries written in the meantime."""
    async with bookie_cluster(tmp_path, 3) as cluster:
        client = await cluster.client()
        writer = await write(client, 100, is_closed=False)
        await cluster.stop("bookie-1")
        await add(writer, 100, 150)
        await cluster.start("bookie-1")
        await asyncio.sleep(0.3)
        await add(writer, 150, 200)
        metadata = await writer.close()
        (verdict,) = await client.read_replicas(
            writer.ledger_id, metadata, BookieId("bookie-1"), [EntryId(120)], lambda r: r.verdict
        )
        assert verdict is Verdict.ABSENT
        await mark(cluster, writer.ledger_id, "bookie-1", Reason.REPORTED_BY_WRITER)
        async with working(cluster) as worker:
            await healed(cluster, writer.ledger_id)
            assert 50 <= worker.stats.entries_copied < 110
        assert (await assert_whole(client, writer.ledger_id, 200)).segments == metadata.segments


async def test_a_ledger_with_a_single_copy_on_an_absent_bookie_is_whole_when_the_bookie_returns(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 3) as cluster:
        client = await cluster.client()
        writer = await write(client, 50, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (holder,) = writer.metadata.last_segment.ensemble
        await cluster.stop(holder)
        await mark(cluster, writer.ledger_id, holder)
        async with working(cluster) as worker:
            record = await recorded(cluster, writer.ledger_id, Obstacle.SOURCE_UNAVAILABLE, "is not registered")
            assert record.state is RecoveryState.BLOCKED
            await cluster.start(holder)
            await healed(cluster, writer.ledger_id)
            assert worker.stats.entries_copied == 0
        await assert_whole(client, writer.ledger_id, 50)


async def test_another_worker_completes_the_repair_after_the_session_of_the_first_ends(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writer = await write(client, 3_000)
        size = sum(len(payload(writer.ledger_id, n)) for n in range(3_000))
        lost = writer.metadata.last_segment.ensemble[2]
        await cluster.stop(lost)
        await mark(cluster, writer.ledger_id, lost)
        slow = size // 4
        async with working(cluster, "first", bytes_per_s_max=slow, bytes_per_s_min=slow) as first:
            await until(lambda: first.stats.entries_copied >= 300)
            cluster.tree.expire(first._store)  # type: ignore[arg-type]
            assert (await client.metadata(writer.ledger_id)).segments == writer.metadata.segments
        assert await cluster.marks.get(writer.ledger_id) is not None
        assert first.stats.ledgers_healed == 0
        async with working(cluster, "second") as second:
            await healed(cluster, writer.ledger_id)
            assert second.stats.entries_copied == 3_000
        await assert_whole(client, writer.ledger_id, 3_000)


async def test_two_workers_share_the_work_and_copy_nothing_twice(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writers = [await write(client, 200) for _ in range(10)]
        lost = "bookie-0"
        concerned = [w.ledger_id for w in writers if lost in w.metadata.last_segment.ensemble]
        await cluster.stop(lost)
        rate = {"bytes_per_s_max": MIB // 2, "bytes_per_s_min": MIB // 2}
        async with working(cluster, "one", **rate) as one, working(cluster, "two", **rate) as two:
            for ledger_id in concerned:
                await mark(cluster, ledger_id, lost)
            await healed(cluster, *concerned)
            assert one.stats.entries_copied + two.stats.entries_copied == 200 * len(concerned)
            await until(lambda: one.stats.ledgers_healed + two.stats.ledgers_healed == len(concerned))
            assert one.stats.ledgers_healed
            assert two.stats.ledgers_healed
        assert len(concerned) >= 4
        for writer in writers:
            await assert_whole(client, writer.ledger_id, 200)
