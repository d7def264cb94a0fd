"""That a draining bookie holds nothing any more, told to the history once for each drain, by whoever sees it first: the
auditor, or who waits for the drain. The auditor takes it back when ledgers name the bookie again."""

from typing import Any, Final

from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords

HISTORY_READ_MAX: Final = 100


def drain_finished(bookie_id: BookieId, now_ms: int, **fields: Any) -> HistoryEvent:
    return HistoryEvent(
        now_ms, "drain_finished", f"no ledger names {bookie_id} any more", {"bookie_id": bookie_id, **fields}
    )


def drain_goes_on(bookie_id: BookieId, now_ms: int, *, ledgers: int) -> HistoryEvent:
    """What was told was too early: somebody who did not know of the drain chose the bookie for new ledgers."""
    text = f"{bookie_id} does not hold nothing after all: {ledgers} new ledgers name it"
    return HistoryEvent(now_ms, "drain_goes_on", text, {"bookie_id": bookie_id, "ledgers": ledgers})


async def is_drain_end_told(records: RecoveryRecords, bookie_id: BookieId) -> bool:
    """Whether it is the last thing that was told of a drain of this bookie, among what happened lately."""
    for event in await records.history(HISTORY_READ_MAX):
        if event.kind.startswith("drain_") and event.fields.get("bookie_id") == bookie_id:
            return event.kind == "drain_finished"
    return False
