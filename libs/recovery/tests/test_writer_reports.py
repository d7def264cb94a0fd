"""Reports of writers: ledgers with missing entries are marked despite faults of the metadata store, and repaired."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import Verdict
from bindery_client.ledger.writer import WriteHandle
from bindery_core.errors import Corrupt, MetadataUnavailable
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.writer_reports import RETRY_S, SETTLE_S, WriterReports
from bookie_cluster import QUICK, add, assert_whole, bookie_cluster, clock_ms, worker_on
from scripted import ledger
from simulated import simulate

LAYOUT = LedgersLayout()
NOW_MS = 5_000
WAIT_S = 30.0
LEDGERS = 200
B1, B2 = BookieId("b1"), BookieId("b2")


class Reporting:
    """Reports in a metadata tree of their own, with the marks that they cause. All ledgers are on b1 and b2, which are
    registered."""

    def __init__(self, **options: Any) -> None:
        self.tree = MemoryTree(now_ms=lambda: NOW_MS)
        self.store = self.tree.connect(latency_s=0.001)
        self.observer = self.tree.connect()
        self.marks = UnderreplicationManager(
            self.observer, LAYOUT, randomness=random.Random(1), clock_ms=lambda: NOW_MS
        )
        self.records = RecoveryRecords(self.observer)
        self.ledgers = LedgerManager(self.observer, LAYOUT, randomness=random.Random(2))
        self.reports = WriterReports(
            self.store, LAYOUT, randomness=random.Random(3), clock_ms=lambda: NOW_MS, **options
        )
        self.task = asyncio.create_task(self.reports.run())

    @classmethod
    async def make(cls, **options: Any) -> "Reporting":
        here = cls(**options)
        for number in range(LEDGERS):
            await here.ledgers.create_with_id(LedgerId(number), ledger(("b1", "b2")))
        for bookie_id in (B1, B2):
            await here.register(bookie_id)
        return here

    def tell(self, ledger_id: int, bookie_id: BookieId = B1) -> None:
        self.reports.degraded(LedgerId(ledger_id), bookie_id, "connection lost")

    async def register(self, bookie_id: BookieId) -> None:
        await self.observer.create(LAYOUT.bookie(bookie_id, read_only=False), make_parents=True)

    async def unregister(self, bookie_id: BookieId) -> None:
        await self.observer.delete(LAYOUT.bookie(bookie_id, read_only=False), version=None)

    async def marked(self) -> dict[int, tuple[str, ...]]:
        return {mark.ledger_id: mark.replicas async for mark in self.marks.list()}

    async def versions(self) -> list[int]:
        return [mark.version async for mark in self.marks.list()]

    async def until_marked(self) -> None:
        while self.reports.waiting:
            await asyncio.sleep(0.01)


def test_a_report_creates_a_record_and_a_mark_and_repeating_it_changes_nothing() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        here.tell(7)
        here.tell(7, B2)
        here.tell(8)
        here.tell(7)
        await here.until_marked()
        assert await here.marked() == {7: ("b1", "b2"), 8: ("b1",)}
        assert here.reports.marked == 2, "waiting reports of one ledger cause one mark"
        record = await here.records.get(LedgerId(7))
        assert record is not None
        assert (record.state, record.reason) == (RecoveryState.WAITING, Reason.REPORTED_BY_WRITER)
        assert (record.bookies, record.first_marked_ms) == (("b1", "b2"), NOW_MS)
        versions = await here.versions()
        here.tell(8)
        await here.until_marked()
        assert await here.versions() == versions

    simulate(scenario())


def test_a_report_strengthens_the_reason_of_a_record_and_keeps_its_attempts() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        await here.records.put(
            RecoveryRecord(
                LedgerId(7),
                RecoveryState.BACKING_OFF,
                Reason.BOOKIE_LOST,
                bookies=("b2",),
                attempts=3,
                first_marked_ms=1,
                missing_entries=5,
            )
        )
        here.tell(7)
        await here.until_marked()
        record = await here.records.get(LedgerId(7))
        assert record is not None
        assert record.reason is Reason.REPORTED_BY_WRITER
        assert (record.state, record.attempts) == (RecoveryState.WAITING, 3), "the obstacle of b2 does not apply to b1"
        assert (record.bookies, record.first_marked_ms, record.missing_entries) == (("b1", "b2"), 1, None)

    simulate(scenario())


def test_a_hole_reported_after_the_repair_is_marked_again() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        here.tell(7)
        await here.until_marked()
        held = await here.marks.lock(LedgerId(7))
        assert held is not None
        assert await here.marks.mark_replicated(held)
        assert await here.marked() == {}
        here.tell(7)
        await here.until_marked()
        assert await here.marked() == {7: ("b1",)}

    simulate(scenario())


def test_a_report_waits_while_the_bookie_is_down_and_requests_no_copies() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        for ledger_id in range(4):
            here.tell(ledger_id)
        await asyncio.sleep(SETTLE_S - 2)
        assert await here.marked() == {}, "it may be registered only because its session has not ended yet"
        await here.unregister(B1)
        await asyncio.sleep(1000)
        assert await here.marked() == {}
        assert here.reports.waiting == 4
        await here.ledgers.delete(LedgerId(0))
        await here.ledgers.update(LedgerId(1), lambda _: ledger(("b3", "b2")))
        await here.register(B1)
        await here.until_marked()
        assert await here.marked() == {2: ("b1",), 3: ("b1",)}
        assert here.reports.marked == 2

    simulate(scenario())


def test_a_waiting_report_is_checked_again_after_the_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        await here.unregister(B1)
        checks: list[float] = []
        get = here.store.get

        async def counted_get(path: str, **options: Any) -> Any:
            checks.append(asyncio.get_running_loop().time())
            return await get(path, **options)

        monkeypatch.setattr(here.store, "get", counted_get)
        here.tell(7)
        await asyncio.sleep(SETTLE_S + 5.5 * RETRY_S)
        assert len(checks) == 6
        assert all(RETRY_S <= later - earlier < RETRY_S + 1 for earlier, later in pairwise(checks))

    simulate(scenario())


def test_no_mark_is_written_beside_marks_of_another_format() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        await here.observer.create(LAYOUT.underreplication_layout, b'type: "other"\nversion: 9\n', make_parents=True)
        here.tell(7)
        await here.until_marked()
        assert await here.marked() == {}

    simulate(scenario())


def test_a_waiting_report_is_dropped_when_its_bookie_is_replaced() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        here.tell(1)
        here.tell(1, B2)
        await here.unregister(B1)
        await asyncio.sleep(100)
        assert await here.marked() == {1: ("b2",)}
        assert here.reports.waiting == 1
        await here.ledgers.update(LedgerId(1), lambda _: ledger(("b3", "b2")))
        await here.until_marked()
        assert await here.marked() == {1: ("b2",)}

    simulate(scenario())


def test_reports_received_during_an_outage_are_marked_after_it() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        here.tree.suspend(here.store)
        for ledger_id in range(20):
            here.tell(ledger_id)
        await asyncio.sleep(100)
        assert await here.marked() == {}
        here.tell(3, B2)
        here.tree.resume(here.store)
        await here.until_marked()
        assert await here.marked() == {n: ("b1", "b2") if n == 3 else ("b1",) for n in range(20)}

    simulate(scenario())


@pytest.mark.parametrize("part", ["underreplication/ledgers/", "/bindery/recovery"])
@pytest.mark.parametrize("applied", [False, True])
def test_lost_responses_lose_no_report(part: str, applied: bool) -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        here.store.lose_next_write(applied=applied, matching=lambda _, path: part in path)
        here.store.fail_next(MetadataUnavailable("away"), matching=lambda _, path: part in path)
        here.tell(7)
        here.tell(8)
        await here.until_marked()
        assert await here.marked() == {7: ("b1",), 8: ("b1",)}
        assert {record.ledger_id async for record in here.records.list()} == {7, 8}

    simulate(scenario())


def test_a_report_that_cannot_be_marked_does_not_block_others() -> None:
    async def scenario() -> None:
        here = await Reporting.make()
        for error in (Corrupt("damaged"), ValueError("a fault")):
            here.store.fail_next(error, matching=lambda _, path: path == LAYOUT.ledger(LedgerId(7)))  # type: ignore[arg-type]
            here.tell(7)
            here.tell(8)
            await here.until_marked()
        assert await here.marked() == {8: ("b1",)}
        assert not here.task.done()

    simulate(scenario())


def test_a_flood_of_reports_is_paced_and_limited() -> None:
    async def scenario() -> None:
        here = await Reporting.make(pending_max=100, checks_per_s=10)
        began = asyncio.get_running_loop().time()
        for ledger_id in range(150):
            here.tell(ledger_id)
        assert (here.reports.waiting, here.reports.dropped) == (100, 50)
        here.tell(0, B2)
        assert here.reports.dropped == 50, "the ledger is already waiting"
        await here.until_marked()
        assert await here.marked() == {n: ("b1", "b2") if n == 0 else ("b1",) for n in range(100)}
        assert 9.5 <= asyncio.get_running_loop().time() - began - SETTLE_S < 13

    simulate(scenario())


def test_close_marks_waiting_reports_within_a_time_limit() -> None:
    async def scenario() -> None:
        here = await Reporting.make(settle_s=1)
        loop = asyncio.get_running_loop()
        await here.unregister(B1)
        for ledger_id in range(5):
            here.tell(ledger_id)
        await asyncio.sleep(1.0005)
        here.task.cancel()  # while reports are being processed
        await here.reports.close()
        assert await here.marked() == dict.fromkeys(range(5), ("b1",))
        here.tree.suspend(here.store)
        here.tell(9)
        began = loop.time()
        await here.reports.close()
        assert 1 <= loop.time() - began <= 2
        assert here.reports.waiting == 1

    simulate(scenario())


async def test_entries_missed_by_a_stopped_bookie_are_copied_after_its_return(tmp_path: Path) -> None:
    """Three bookies, no spare. At the end the bookie has the first and the last entry, so only a check of all entries
    finds the missing ones."""
    async with bookie_cluster(tmp_path, 3) as cluster:
        reports = WriterReports(
            cluster.tree.connect(), LAYOUT, randomness=random.Random(4), clock_ms=clock_ms, settle_s=0.5
        )
        client = await LedgerClient.connect(
            cluster.tree.connect(), randomness=random.Random(7), settings=QUICK, on_degraded=reports.degraded
        )
        cluster.clients.append(client)
        tasks = [asyncio.create_task(reports.run())]
        try:
            writer = await client.create(password=b"pw", ensemble_size=3, write_quorum=3, ack_quorum=2)
            await add(writer, 0, 100)
            await cluster.stop("bookie-1")
            await add(writer, 100, 200)
            assert reports.waiting == 1
            await cluster.start("bookie-1")
            end = 200
            async with asyncio.timeout(WAIT_S):
                while not await holds(client, writer, end - 1):  # the writer sends adds to it again after a while
                    await add(writer, end, end + 10)
                    end += 10
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(WAIT_S):
                while (mark := await cluster.marks.get(writer.ledger_id)) is None:
                    await asyncio.sleep(0.02)
            assert mark.replicas == ("bookie-1",)
            record = await cluster.records.get(writer.ledger_id)
            assert record is not None
            assert record.reason is Reason.REPORTED_BY_WRITER
            await writer.close()
            assert await holds(client, writer, 0)
            assert not await holds(client, writer, 150)

            worker = worker_on(cluster.tree.connect(), await cluster.client(), "worker")
            tasks.append(asyncio.create_task(worker.run()))
            async with asyncio.timeout(WAIT_S):
                while await cluster.marks.get(writer.ledger_id) is not None:
                    await asyncio.sleep(0.02)
            await assert_whole(client, writer.ledger_id, end)
            assert worker.stats.entries_copied >= 100
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def holds(client: LedgerClient, writer: WriteHandle, entry_id: int) -> bool:
    """Return True if bookie-1 has a good copy of the entry."""
    (verdict,) = await client.read_replicas(
        writer.ledger_id, writer.metadata, BookieId("bookie-1"), [EntryId(entry_id)], lambda read: read.verdict
    )
    return verdict is Verdict.GOOD
