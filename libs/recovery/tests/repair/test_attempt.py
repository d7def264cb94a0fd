"""The progress that an attempt writes to the recovery record of its ledger."""

from collections.abc import Collection
from typing import Any, cast

import pytest
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord
from bindery_metadata.recovery.underreplication import HeldMark
from bindery_recovery.checks.checker import FragmentCheck, FragmentState, LedgerCheck
from bindery_recovery.repair.attempt import Attempt
from scripted import ledger

METADATA = ledger(("b1", "b2", "b3"))


class RecordingWorker:
    """Keeps the records that the attempt writes."""

    name = "worker"

    def __init__(self) -> None:
        self.written: list[RecoveryRecord] = []

    def at_work(self, ledger_id: LedgerId, entries: int, size: int) -> None: ...

    async def put(self, record: RecoveryRecord, *, known: Collection[str]) -> RecoveryRecord:
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
