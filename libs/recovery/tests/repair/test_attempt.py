"""The progress that an attempt writes to the recovery record of its ledger."""

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest
from bindery_core.errors import MetadataUnavailable, VersionConflict
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import HeldMark
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import Create
from bindery_recovery.checks.checker import FragmentCheck, FragmentState, LedgerCheck
from bindery_recovery.repair.attempt import PROGRESS_S, Attempt, Unchanged
from scripted import ledger
from simulated import simulate

METADATA = ledger(("b1", "b2", "b3"))


class RecordingWorker:
    """Keeps the records that the attempt writes."""

    name = "worker"

    def __init__(self) -> None:
        self.written: list[RecoveryRecord] = []
        self.copied: list[tuple[int, int, int]] = []
        self.write_s = 0.0
        """Duration of each write."""
        self.writes_fail = False

    def at_work(self, ledger_id: LedgerId, entries: int, size: int) -> None:
        self.copied.append((ledger_id, entries, size))

    async def put(self, record: RecoveryRecord, *, known: Collection[str]) -> RecoveryRecord:
        await asyncio.sleep(self.write_s)
        if self.writes_fail:
            raise MetadataUnavailable("away")
        self.written.append(record)
        return record


def attempt(worker: RecordingWorker, reason: Reason = Reason.BOOKIE_LOST) -> Attempt:
    return Attempt(worker, cast(HeldMark, None), RecoveryRecord(LedgerId(7), reason=reason, bookies=("b2",)))


def found(state: FragmentState, bad_entry_ids: tuple[int, ...] = ()) -> LedgerCheck:
    fragment = next(one for one in closed_fragments(METADATA) if one.bookie_id == BookieId("b2"))
    return LedgerCheck(LedgerId(7), METADATA, (FragmentCheck(fragment, state, bad_entry_ids),), None, 0, 0)


async def test_a_second_check_of_one_attempt_starts_the_remaining_count_again() -> None:
    worker = RecordingWorker()
    run = attempt(worker)
    run.checked(found(FragmentState.LOST))
    await run.begins()
    assert (worker.written[-1].missing_entries, worker.written[-1].missing_bytes) == (10, 1000)
    run.copied(4, 400)
    await run.begins()
    assert (worker.written[-1].missing_entries, worker.written[-1].missing_bytes) == (6, 600)
    run.checked(found(FragmentState.MISSING, (3, 8)))
    await run.begins()
    assert (worker.written[-1].missing_entries, worker.written[-1].missing_bytes) == (2, 200)


@pytest.mark.parametrize(
    ("state", "reason"), [(FragmentState.MISSING, Reason.ENTRY_MISSING), (FragmentState.LOST, Reason.BOOKIE_LOST)]
)
async def test_a_missing_entry_becomes_the_reason_for_later_attempts(state: FragmentState, reason: Reason) -> None:
    run = attempt(RecordingWorker())
    details: Any = (3,) if state is FragmentState.MISSING else ()
    run.checked(found(state, details))
    assert run.record.reason is reason


async def test_before_a_check_nothing_is_known_to_be_missing() -> None:
    worker = RecordingWorker()
    run = attempt(worker)
    await run.begins()
    (written,) = worker.written
    assert (written.state, written.worker, written.next_retry_ms) == (RecoveryState.COPYING, "worker", None)
    assert (written.missing_entries, written.missing_bytes) == (0, None)


async def test_entries_copied_beyond_those_that_were_missing_leave_nothing_to_do() -> None:
    worker = RecordingWorker()
    run = attempt(worker)
    run.checked(found(FragmentState.LOST))
    run.copied(11, 1001)
    assert worker.copied == [(7, 11, 1001)]
    assert (run.entries, run.bytes) == (11, 1001)
    await run.begins()
    assert (worker.written[-1].missing_entries, worker.written[-1].missing_bytes) == (0, 0)


def test_progress_is_written_at_intervals_and_never_twice_at_once() -> None:
    async def scenario() -> None:
        worker = RecordingWorker()
        run = attempt(worker)
        run.checked(found(FragmentState.LOST))
        loop = asyncio.get_running_loop()

        async def copy(seconds: float) -> int:
            """Copy batches for a while. Return the number of writes in this time."""
            before, end = len(worker.written), loop.time() + seconds
            while loop.time() < end:
                run.copied(0, 0)
                await asyncio.sleep(PROGRESS_S / 8)
            return len(worker.written) - before

        assert await copy(PROGRESS_S) == 0
        assert await copy(10 * PROGRESS_S) in (9, 10)
        worker.write_s = 3 * PROGRESS_S
        assert await copy(12 * PROGRESS_S) in (3, 4), "the next write waits for the end of the last one"

    simulate(scenario())


def test_a_stop_waits_for_the_write_of_the_progress_whether_or_not_it_succeeds() -> None:
    async def scenario(writes_fail: bool) -> None:
        worker = RecordingWorker()
        worker.write_s, worker.writes_fail = 5.0, writes_fail
        run = attempt(worker)
        await asyncio.sleep(PROGRESS_S)
        run.copied(1, 100)
        await run.stop()
        assert len(worker.written) == (0 if writes_fail else 1)
        await run.stop()

    for writes_fail in (False, True):
        simulate(scenario(writes_fail))


async def test_an_attempt_is_outdated_when_the_ledger_was_marked_for_another_bookie() -> None:
    run = attempt(RecordingWorker())
    assert not run.is_outdated
    await run.write(bookies=())
    assert not run.is_outdated
    await run.write(bookies=("b1", "b2"))
    assert run.is_outdated


async def test_guarded_writes_fail_once_the_record_has_changed() -> None:
    store = MemoryTree().connect()
    records = RecoveryRecords(store)
    record = await records.put(RecoveryRecord(LedgerId(7)))
    guard = Unchanged(store, BinderyLayout(), record)
    assert await guard.multi([Create("/a"), Create("/b")]) == ["/a", "/b"], "without the result of the check"
    await records.put(record.with_changes(attempts=1))
    with pytest.raises(VersionConflict):
        await guard.multi([Create("/c")])
    assert await store.exists("/c") is None
