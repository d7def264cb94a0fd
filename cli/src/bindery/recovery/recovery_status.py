"""Read the status of automatic recovery from the metadata, so that no auditor is needed, and format it as text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from bindery_core.errors import Corrupt, NoSuchNode
from bindery_core.formats import replication_formats
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import ClusterStatus, cluster_status
from bindery_metadata.layout.layout import VOTE_PREFIX, LedgersLayout
from bindery_metadata.recovery.last_audits import LastAudits, findings_text
from bindery_metadata.recovery.last_backup import LastBackupStore
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.records.drain_end import is_drain_end_recorded
from bindery_recovery.reporting.progress import Pace, Snapshot, collect, summarize

from bindery.common.operator import duration_text, time_text
from bindery.common.tables import size_text, table

WORKER_STALE_S: Final = 30.0
"""Seconds after which the report of a worker is stale."""
NO_RECORD: Final = "not processed yet"
"""Key under which marked ledgers without a recovery record are counted."""


class NoRandomness:
    """Source of randomness for managers that only read, and therefore never use it."""

    def getrandbits(self, k: int, /) -> int:
        return 0


async def read_status(
    store: MetadataStore, layout: LedgersLayout, *, now_ms: int, pace: Pace | None = None
) -> dict[str, Any]:
    """Return the status as JSON. `pace` measures the copying speed from call to call. Raises MetadataUnavailable."""
    marks = UnderreplicationManager(store, layout, randomness=NoRandomness(), clock_ms=lambda: now_ms)
    memberships = MembershipStore(store, clock_ms=lambda: now_ms)
    snapshot = await collect(
        store, layout, marks=marks, records=RecoveryRecords(store), memberships=memberships, clock_ms=lambda: now_ms
    )
    if pace is not None:
        is_working = bool(snapshot.marks and snapshot.reports) and snapshot.is_enabled
        pace.note(snapshot.reports, now_ms, is_working=is_working)
    progress = summarize(snapshot, rate_bytes_per_s=None if pace is None else pace.bytes_per_s())
    candidates = await _candidates(store, layout)
    delay_s = await _delay(marks)
    lost, draining, excused = _bookies(await cluster_status(store, layout), snapshot, delay_s)
    for bookie in draining:
        bookie["finished"] = await is_drain_end_recorded(RecoveryRecords(store), BookieId(bookie["bookie_id"]))
        if bookie["finished"]:  # the last report of the auditor may be older
            bookie |= {"ledgers_left": 0, "bytes_left": 0, "percent": 100.0, "as_of_ms": None}
    workers = [_worker(report, now_ms) for report in snapshot.reports]
    pause = progress.pause
    marked = _marked(snapshot)
    backup = await LastBackupStore(store).get()
    problem = _problem(snapshot.is_enabled, candidates, workers, marked["ledgers"] or lost or draining)
    return {
        "at_ms": now_ms,
        "enabled": snapshot.is_enabled,
        "pause": None if pause is None else {"by": pause.by, "reason": pause.reason, "at_ms": pause.at_ms},
        "auditor": candidates[0] if candidates else None,
        "candidates": candidates,
        "lost_bookie_delay_s": delay_s,
        "lost_bookies": lost,
        "draining": draining,
        "maintenance": excused,
        "marked": marked,
        "closings": asdict(progress.closings),
        "placement": asdict(progress.placement),
        "workers": workers,
        "bytes_per_s": progress.rate_bytes_per_s,
        "eta_s": progress.eta_s if marked["ledgers"] else None,
        "why_no_eta": progress.why_no_eta,
        "check": asdict(progress.ledger_check),
        "audits": [audit.to_json(now_ms) for audit in await LastAudits(store).all()],
        "backup": None if backup is None else backup.to_json(now_ms),
        "can_heal": problem is None,
        "problem": problem,
    }


def _problem(enabled: bool, candidates: list[str], workers: list[dict[str, Any]], to_do: object) -> str | None:
    """Return the reason why no ledger can be repaired; None if ledgers can be repaired."""
    if not enabled:
        return "automatic recovery is paused"
    if not candidates:
        return "no auditor is running: lost bookies are not detected"
    if to_do and not workers:
        return "no replication worker is running: nothing is copied"
    return None


async def _candidates(store: MetadataStore, layout: LedgersLayout) -> list[str]:
    """Return the names in the votes of the auditors, the leader first."""
    try:
        names = await store.children(layout.auditor_election)
    except NoSuchNode:
        return []
    votes = sorted(name for name in names if name.startswith(VOTE_PREFIX) and name[len(VOTE_PREFIX) :].isdecimal())
    found = []
    for name in votes:
        try:
            node = await store.get(f"{layout.auditor_election}/{name}")
            found.append(replication_formats.decode_vote(node.data) or "(without a name)")
        except NoSuchNode:
            continue
        except Corrupt:
            found.append("(unreadable)")
    return found


async def _delay(marks: UnderreplicationManager) -> int | None:
    try:
        return await marks.lost_bookie_delay_s()
    except Corrupt:
        return None


def _bookies(
    status: ClusterStatus, snapshot: Snapshot, delay_s: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the bookies that are (absent without maintenance, draining, in maintenance)."""
    memberships, now_ms = snapshot.memberships, snapshot.now_ms
    lost_cursor, drain_cursor = snapshot.lost, snapshot.draining
    intents = {str(b): membership.effective(now_ms) for b, membership in memberships.items()}
    registered = {*status.writable, *status.read_only}
    lost = []
    for bookie_id in sorted(set(status.known) - registered):
        if intents.get(bookie_id) in (Intent.MAINTENANCE, Intent.REMOVED):
            continue
        lost.append({"bookie_id": bookie_id, **_absence(lost_cursor, bookie_id, delay_s, now_ms)})
    draining, excused = [], []
    for bookie_key, membership in sorted(memberships.items()):
        intent = membership.effective(now_ms)
        facts: dict[str, Any] = {
            "bookie_id": str(bookie_key),
            "intent": intent.value,
            "since_ms": membership.since_ms,
            "by": membership.by,
            "reason": membership.reason,
        }
        if intent is Intent.DRAINING or (intent is Intent.REMOVED and membership.drain):
            left = _group(drain_cursor, "bookies").get(str(bookie_key))
            facts |= {**_drain_facts(membership.drain, left), "as_of_ms": drain_cursor.get("at_ms") if left else None}
            if intent is Intent.DRAINING:
                draining.append(facts)
        elif intent is Intent.MAINTENANCE:
            excused.append({**facts, "until_ms": membership.until_ms})
    return lost, draining, excused


def _absence(cursor: Mapping[str, Any], bookie_id: str, delay_s: int | None, now_ms: int) -> dict[str, Any]:
    """Return the absence of a bookie as the auditor observed it, extrapolated to `now_ms`."""
    seen = _group(cursor, "bookies").get(bookie_id)
    saved_ms = cursor.get("saved_ms")
    if not isinstance(seen, dict) or not isinstance(saved_ms, int):
        return {"phase": "absent", "since_ms": None, "absent_s": None, "left_s": None}
    absent_s = float(seen.get("absent_s", 0.0)) + max(0.0, (now_ms - saved_ms) / 1000)
    phase = str(seen.get("phase", "waiting"))
    left_s = max(0.0, delay_s - absent_s) if phase == "waiting" and delay_s is not None else None
    return {"phase": phase, "since_ms": seen.get("since_ms"), "absent_s": round(absent_s, 1), "left_s": left_s}


def _drain_facts(totals: Mapping[str, int], left: object) -> dict[str, Any]:
    ledgers, size = totals.get("ledgers_total", 0), totals.get("bytes_total", 0)
    facts: dict[str, Any] = {"ledgers_total": ledgers, "bytes_total": size}
    if isinstance(left, dict):
        ledgers_left, bytes_left = left.get("ledgers_left", 0), left.get("bytes_left", 0)
        part = bytes_left / size if size else ledgers_left / ledgers if ledgers else 0.0
        facts |= {
            "ledgers_left": ledgers_left,
            "bytes_left": bytes_left,
            "percent": percent_done(max(0.0, 1 - part), ledgers_left=ledgers_left),
        }
    return facts


def percent_done(part: float, *, ledgers_left: int) -> float:
    """Return `part` in percent; less than 100 while ledgers are left, because these may be empty or of unknown size."""
    percent = round(100 * part, 1)
    return min(percent, 99.0) if ledgers_left else percent


def _group(cursor: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = cursor.get(name)
    return found if isinstance(found, dict) else {}


def _marked(snapshot: Snapshot) -> dict[str, Any]:
    obstacles: Counter[str] = Counter()
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    examples: dict[str, dict[str, Any]] = {}
    bytes_left = entries_left = unknown = 0
    oldest: tuple[int, int] | None = None
    for mark in snapshot.marks:
        record = snapshot.records.get(mark.ledger_id)
        since_ms = (record.first_marked_ms if record else 0) or mark.ctime_ms
        if since_ms and (oldest is None or since_ms < oldest[0]):
            oldest = since_ms, int(mark.ledger_id)
        key = _key(record)
        obstacles[key] += 1
        states[record.state.value if record else "unknown"] += 1
        reasons[record.reason.value if record else "unknown"] += 1
        missing = snapshot.missing(mark.ledger_id)
        if missing.length is None:
            unknown += 1
        else:
            bytes_left += missing.length
            entries_left += missing.entries
        if key not in examples:
            examples[key] = {"ledger_id": int(mark.ledger_id), "detail": record.detail if record else ""}
    return {
        "ledgers": len(snapshot.marks),
        "by_obstacle": dict(obstacles),
        "by_state": dict(states),
        "by_reason": dict(reasons),
        "examples": examples,
        "bytes_left": bytes_left,
        "entries_left": entries_left,
        "size_unknown": unknown,
        "oldest": None
        if oldest is None
        else {"ledger_id": oldest[1], "since_ms": oldest[0], "age_s": max(0, snapshot.now_ms - oldest[0]) / 1000},
    }


def _key(record: RecoveryRecord | None) -> str:
    """Return the key under which a marked ledger is counted."""
    if record is None:
        return NO_RECORD
    if record.state is RecoveryState.UNRECOVERABLE:
        return f"unrecoverable: {record.obstacle.value}"
    if record.obstacle is Obstacle.NONE:
        return record.state.value
    return record.obstacle.value


def _worker(report: WorkerReport, now_ms: int) -> dict[str, Any]:
    age_s = max(0, now_ms - report.at_ms) / 1000
    return {
        "name": report.name,
        "state": report.state,
        "age_s": age_s,
        "stale": age_s > WORKER_STALE_S,
        "ledger_id": None if report.ledger_id is None else int(report.ledger_id),
        "bytes_per_s": report.bytes_per_s,
        "bytes_done_total": report.bytes_done_total,
        "entries_done_total": report.entries_done_total,
        "budget_bytes_per_s": report.budget_bytes_per_s,
        "foreground_p99_ms": report.foreground_p99_ms,
    }


# --- text -------------------------------------------------------------------------------------------------------------


def status_lines(facts: Mapping[str, Any], *, now_ms: int) -> list[str]:
    """Return the result of `read_status` as lines of text, the most important first."""
    marked = facts["marked"]
    lines = []
    if facts["enabled"]:
        lines.append("automatic recovery is enabled")
    else:
        pause = facts["pause"]
        why = f" by {pause['by']} since {time_text(pause['at_ms'])}: {pause['reason']}" if pause else ""
        lines.append(f"automatic recovery is PAUSED{why}")
    others = len(facts["candidates"]) - 1
    lines.append(
        f"auditor: {facts['auditor']}" + (f" ({others} on standby)" if others > 0 else "")
        if facts["auditor"]
        else "auditor: NONE"
    )
    if facts["problem"]:
        lines.append(f"no ledger can be repaired: {facts['problem']}")
    lines += _bookie_lines(facts, now_ms)
    if not marked["ledgers"]:
        lines.append("no ledger is known to be under-replicated")
    else:
        lines += _marked_lines(facts)
    closings = facts["closings"]
    if closings["pending"]:
        age = "" if closings["oldest_age_s"] is None else f", the oldest for {duration_text(closings['oldest_age_s'])}"
        lines.append(f"{closings['pending']} recently closed ledgers are not checked for missing copies yet{age}")
    lines += _placement_lines(facts["placement"])
    lines += map(_audit_line, facts["audits"])
    lines += _backup_lines(facts["backup"], now_ms)
    lines += _worker_lines(facts["workers"])
    return lines


def _bookie_lines(facts: Mapping[str, Any], now_ms: int) -> list[str]:
    lines = []
    for bookie in facts["lost_bookies"]:
        text = f"absent: {bookie['bookie_id']}"
        if bookie["absent_s"] is not None:
            text += f" for {duration_text(bookie['absent_s'])}"
        if bookie["left_s"] is not None:
            text += f"; its ledgers are marked in {duration_text(bookie['left_s'])} unless it returns"
        elif bookie["phase"] == "handled":
            text += "; its ledgers are marked"
        elif bookie["phase"] == "forced":
            text += "; its ledgers are being marked"
        lines.append(text)
    for bookie in facts["maintenance"]:
        until = "without an end" if bookie["until_ms"] is None else f"until {time_text(bookie['until_ms'])}"
        lines.append(f"in maintenance {until}: {bookie['bookie_id']} {bookie['reason']}".rstrip())
    for bookie in facts["draining"]:
        how_far = (
            f"{bookie['percent']:.0f} %, {bookie['ledgers_left']} ledgers and {size_text(bookie['bytes_left'])} left"
            + _as_of(bookie["as_of_ms"], now_ms)
            if "percent" in bookie
            else f"{bookie['ledgers_total']} ledgers, {size_text(bookie['bytes_total'])} at the start"
        )
        if bookie["finished"]:
            how_far = "empty: stop it, then run `bindery bookie cookie retire`"
        lines.append(f"draining: {bookie['bookie_id']}, {how_far}")
    return lines


def _as_of(at_ms: object, now_ms: int) -> str:
    """Return the age of the report of the auditor as text; empty if it is less than two seconds."""
    if not isinstance(at_ms, int) or now_ms - at_ms < 2000:
        return ""
    return f" (seen {duration_text((now_ms - at_ms) / 1000)} ago)"


def _marked_lines(facts: Mapping[str, Any]) -> list[str]:
    marked = facts["marked"]
    unknown = f", {marked['size_unknown']} of unknown size" if marked["size_unknown"] else ""
    text = f"{marked['ledgers']} ledgers are under-replicated: {size_text(marked['bytes_left'])} to copy{unknown}"
    if facts["bytes_per_s"]:
        text += f", {size_text(facts['bytes_per_s'])}/s"
    if facts["eta_s"] is not None:
        text += f", about {duration_text(facts['eta_s'])} left"
    lines = [text]
    if facts["why_no_eta"] and not facts["problem"]:
        lines.append(f"no estimate: {facts['why_no_eta']}")
    for key, count in sorted(marked["by_obstacle"].items(), key=lambda item: -item[1]):
        example = marked["examples"][key]
        detail = f": {example['detail']}" if example["detail"] else ""
        lines.append(f"  {count:>6}  {key}, such as ledger {example['ledger_id']}{detail}")
    oldest = marked["oldest"]
    if oldest:
        lines.append(f"oldest: ledger {oldest['ledger_id']}, marked {duration_text(oldest['age_s'])} ago")
    return lines


def _placement_lines(placement: Mapping[str, Any]) -> list[str]:
    """Return the ledgers that are on fewer racks than possible; nothing if there are none."""
    if not (placement["total"] or placement["waiting"] or placement["stuck"]):
        return []
    total, done = placement["total"], placement["done"]
    text = f"placement over {placement['racks']} racks: {done} of {total} ledgers moved to more racks"
    if placement["is_running"] and placement["moving"]:
        text += f", {placement['moving']} being moved"
    text += f"; {placement['waiting']} wait for the next run" if placement["waiting"] else ""
    text += f"; no move helps {placement['stuck']}" if placement["stuck"] else ""
    return [text]


def _audit_line(audit: Mapping[str, Any]) -> str:
    return (
        f"last {audit['level']} audit: {audit['verdict']} {duration_text(audit['age_s'])} ago, "
        f"{audit['copies_verified']} of {audit['copies_expected']} copies checked, "
        f"findings: {findings_text(audit['severities'])} (run {audit['run_id']})"
    )


def _backup_lines(backup: Mapping[str, Any] | None, now_ms: int) -> list[str]:
    """Return the last scheduled backup of the metadata; nothing if none is scheduled."""
    if backup is None:
        return []
    lines = ["no scheduled backup of the metadata has succeeded"]
    if backup["ended_ms"]:
        place = ", also uploaded" if backup["is_uploaded"] else ""
        lines = [
            f"last backup of the metadata: {duration_text(backup['age_s'])} ago, {backup['nodes']} nodes, "
            f"{size_text(backup['size'])} ({backup['name']}{place})"
        ]
    if backup["has_failed"]:
        ago = duration_text(max(0, now_ms - backup["failed_ms"]) / 1000)
        lines.append(f"the last backup of the metadata FAILED {ago} ago: {backup['failure']}")
    return lines


def _worker_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    if not workers:
        return []
    rows = [
        {
            "worker": worker["name"],
            "state": worker["state"] + (" (stale report)" if worker["stale"] else ""),
            "ledger": worker["ledger_id"],
            "speed": f"{size_text(worker['bytes_per_s'])}/s",
            "allowed": f"{size_text(worker['budget_bytes_per_s'])}/s",
            "copied": f"{size_text(worker['bytes_done_total'])}",
            "foreground p99": "-" if worker["foreground_p99_ms"] is None else f"{worker['foreground_p99_ms']:.0f} ms",
        }
        for worker in workers
    ]
    return table(rows)
