"""Explain why a ledger is not repaired, and request another attempt."""

from dataclasses import asdict
from typing import Any

from bindery_core.errors import NotThere
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_recovery.admin.recovery_admin import RecoveryAdmin
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.reporting.explain import explain

from bindery.common.operator import time_text
from bindery.common.tables import size_text


async def explain_ledger(admin: RecoveryAdmin, ledger_id: LedgerId) -> dict[str, Any]:
    """Return JSON: `sentence`, `waits` (True if the repair needs an action first) and the facts of the explanation.

    Raises NoSuchLedger if neither the ledger nor its mark exists; MetadataUnavailable.
    """
    known = await admin.known(ledger_id)
    mark, record, metadata = known.mark, known.record, known.metadata
    found = explain(known)
    return {
        "ledger_id": int(ledger_id),
        "sentence": found.sentence,
        "waits": found.waits,
        "state": None if metadata is None else metadata.state.name.lower(),
        "unreadable": known.metadata_error,
        "last_entry_id": int(metadata.last_entry_id)
        if metadata is not None and metadata.state is LedgerState.CLOSED
        else None,
        "bookies": _bookies(metadata, known.view),
        "mark": None if mark is None else {"replicas": list(mark.replicas), "ctime_ms": mark.ctime_ms},
        "locked_by": known.locked_by,
        "record": None if record is None else _record_facts(record),
        "enabled": known.is_enabled,
        "auditor": known.auditor,
        "workers": [report.name for report in known.workers],
        "verified": None if known.verified is None else asdict(known.verified),
    }


def _bookies(metadata: LedgerMetadata | None, view: ClusterView) -> list[dict[str, Any]]:
    """Return each bookie in the metadata of the ledger with registration and intent."""
    if metadata is None:
        return []
    return [
        {
            "bookie_id": str(bookie_id),
            "registered": _registered(view, bookie_id),
            "intent": view.intent(bookie_id).value,
        }
        for bookie_id in sorted({b for segment in metadata.segments for b in segment.ensemble})
    ]


def _registered(view: ClusterView, bookie_id: BookieId) -> str:
    if bookie_id not in view.bookies:
        return "absent"
    return "writable" if view.bookies[bookie_id] else "read-only"


def _record_facts(record: RecoveryRecord) -> dict[str, Any]:
    return {
        "state": record.state.value,
        "reason": record.reason.value,
        "obstacle": record.obstacle.value,
        "detail": record.detail,
        "attempts": record.attempts,
        "last_error": record.last_error,
        "first_marked_ms": record.first_marked_ms,
        "next_retry_ms": record.next_retry_ms,
        "missing_entries": record.missing_entries,
        "missing_bytes": record.missing_bytes,
        "bookies": list(record.bookies),
        "worker": record.worker,
    }


def explanation_lines(facts: dict[str, Any]) -> list[str]:
    """Return the result of `explain_ledger` as text: the sentence, then the facts."""
    lines = [facts["sentence"], ""]
    if facts["unreadable"]:
        lines.append(f"metadata         {facts['unreadable']}")
    if facts["state"] is not None:
        lines.append(f"ledger           {facts['state']}")
    for bookie in facts["bookies"]:
        intent = "" if bookie["intent"] == "active" else f", {bookie['intent']}"
        lines.append(f"bookie           {bookie['bookie_id']}: {bookie['registered']}{intent}")
    mark, record = facts["mark"], facts["record"]
    if mark is None:
        lines.append("marked           no")
    else:
        since = f" since {time_text(mark['ctime_ms'])}" if mark["ctime_ms"] else ""
        lines.append(f"marked           {', '.join(mark['replicas']) or 'without naming a bookie'}{since}")
    if facts["locked_by"] is not None:
        lines.append(f"worker           {facts['locked_by'] or '(without a name)'}")
    if record is not None:
        lines += [
            f"state            {record['state']}, {record['attempts']} attempts",
            f"why marked       {record['reason']}",
            f"obstacle         {record['obstacle']}",
        ]
        if record["last_error"]:
            lines.append(f"last error       {record['last_error']}")
        if record["missing_entries"] is not None:
            size = "" if record["missing_bytes"] is None else f", {size_text(record['missing_bytes'])}"
            lines.append(f"to copy          {record['missing_entries']} entries{size}")
        if record["next_retry_ms"] is not None:
            lines.append(f"next attempt     {time_text(record['next_retry_ms'])}")
    verified = facts["verified"]
    if verified is not None:
        lines.append(
            f"verified         {time_text(verified['verified_at_ms'])}, level {verified['level']},"
            f" run {verified['run_id']}"
        )
    lines.append(f"auditor          {facts['auditor'] or 'none'}")
    lines.append(f"workers          {', '.join(facts['workers']) or 'none'}")
    return lines


async def retry_ledger(
    marks: UnderreplicationManager, records: RecoveryRecords, ledger_id: LedgerId
) -> RecoveryRecord | None:
    """End the back-off or the terminal state of a marked ledger. Return its previous record, or None without one.

    Raises NotThere if the ledger is not marked.
    """
    if await marks.get(ledger_id) is None:
        raise NotThere(
            f"ledger {ledger_id} is not marked: no copy is known to be missing; `bindery ledger check {ledger_id}` "
            "checks its copies"
        )
    before = await records.get(ledger_id)

    def change(current: RecoveryRecord | None) -> RecoveryRecord | None:
        if current is None:
            return None
        return current.with_changes(
            state=RecoveryState.WAITING, obstacle=Obstacle.NONE, detail="", attempts=0, next_retry_ms=None
        )

    await records.update(ledger_id, change)
    return before
