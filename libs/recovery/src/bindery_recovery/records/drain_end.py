"""History events at the end of a drain.

The end of each drain is reported once, by the auditor or by `drain --wait`, whichever finds first that no ledger names
the bookie. If ledgers name the bookie again later, the auditor reports that the drain continues.
"""

from typing import Any, Final

from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords

HISTORY_READ_MAX: Final = 100
"""Maximum number of recent events that are searched for the end of a drain."""


def drain_finished(bookie_id: BookieId, now_ms: int, **fields: Any) -> HistoryEvent:
    """Return the event of a finished drain: no ledger names the bookie any more."""
    return HistoryEvent(
        now_ms, "drain_finished", f"no ledger names {bookie_id} any more", {"bookie_id": bookie_id, **fields}
    )


def drain_goes_on(bookie_id: BookieId, now_ms: int, *, ledgers: int) -> HistoryEvent:
    """Return the event of a drain whose end was reported too early, because a client with a stale bookie list placed
    new ledgers on the bookie."""
    text = f"the drain of {bookie_id} continues: {ledgers} new ledgers name it"
    return HistoryEvent(now_ms, "drain_goes_on", text, {"bookie_id": bookie_id, "ledgers": ledgers})


async def is_drain_end_recorded(records: RecoveryRecords, bookie_id: BookieId) -> bool:
    """Return True if the newest drain event of this bookie in the recent history is the end of its drain."""
    for event in await records.history(HISTORY_READ_MAX):
        if event.kind.startswith("drain_") and event.fields.get("bookie_id") == bookie_id:
            return event.kind == "drain_finished"
    return False
