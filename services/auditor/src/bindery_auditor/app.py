"""The HTTP API of the auditor: the state of recovery, its obstacles, and the operations of an operator.

| path                      | method | parameters, body   | answer                                                     |
|---------------------------|--------|--------------------|------------------------------------------------------------|
| /                         | GET    |                    | an HTML page with the same data                            |
| /v1/recovery/status       | GET    |                    | the leader, marked ledgers, rates, and the expected end;   |
|                           |        |                    | results of the last audits                                 |
| /v1/recovery/ledgers      | GET    | first, limit       | marked ledgers with their records, ascending               |
| /v1/recovery/ledgers/{id} | GET    |                    | one ledger: a sentence, and its facts                      |
| /v1/recovery/history      | GET    | limit              | events, newest first                                       |
| /v1/recovery/pause        | POST   | `{"reason": text}` | no ledger of the cluster is copied until `resume`          |
| /v1/recovery/resume       | POST   |                    | copying continues                                          |
| /v1/bookies               | GET    |                    | every bookie: registration, membership, drain              |
| /api/v1/autorecovery/...  |        |                    | BookKeeper's routes (`autorecovery_http`)                  |

The leader and the standbys give the same answers, except for `this` in the status. Times are milliseconds since 1970
(`..._ms`), sizes bytes. Errors are problems (RFC 9457). `bindery_kit.observability.health.OpsApp`, which wraps this
application, serves probes and metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_core.ids import LedgerId
from bindery_kit.admin import app
from bindery_kit.admin.access import Access, AdminAccess
from bindery_kit.admin.http import Answer, Request, Route, json_answer
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import HISTORY_MAX, HistoryEvent, RecoveryRecord
from bindery_recovery.admin import autorecovery_http
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.recovery_admin import BookieStatus, MarkedLedger, RecoveryAdmin
from bindery_recovery.checks.bookie_audit import CURSOR_DRAINING
from bindery_recovery.reporting.explain import Known, explain
from bindery_recovery.service import RecoveryService

from bindery_auditor.page import render

LEDGERS_MAX: Final = 1_000
"""Maximum `limit` of a list of ledgers."""
LEDGERS_DEFAULT: Final = 100
"""Default `limit` of a list of ledgers."""
HISTORY_DEFAULT: Final = 100
"""Default `limit` of the history."""
PAGE_ROWS_MAX: Final = 50
"""Maximum number of ledgers, and of events, on the HTML page."""
REASON_SIZE_MAX: Final = 1_000
"""Maximum characters of the reason of a pause."""

T = TypeVar("T")


class AuditorContext:
    """The objects that the routes use. Empty until `open`."""

    def __init__(self) -> None:
        self._admin: RecoveryAdmin | None = None
        self._service: RecoveryService | None = None
        self._last_audits: LastAuditsWatch | None = None
        self.clock_ms: Callable[[], int] = lambda: 0

    def open(
        self,
        admin: RecoveryAdmin,
        service: RecoveryService,
        last_audits: LastAuditsWatch,
        *,
        clock_ms: Callable[[], int],
    ) -> None:
        """Set all objects. `clock_ms`: the wall clock."""
        self._admin, self._service, self._last_audits, self.clock_ms = admin, service, last_audits, clock_ms

    @property
    def is_open(self) -> bool:
        return self._admin is not None

    async def recovery_admin(self) -> RecoveryAdmin:
        """Return the operations. Raises MetadataUnavailable before `open`."""
        return _there(self._admin)

    def recovery_service(self) -> RecoveryService:
        """Return the service. Raises MetadataUnavailable before `open`."""
        return _there(self._service)

    def last_audits(self) -> LastAuditsWatch:
        """Return the watch. Raises MetadataUnavailable before `open`."""
        return _there(self._last_audits)


def _there(part: T | None) -> T:
    if part is None:
        raise MetadataUnavailable("the auditor has no connection to the metadata store yet")
    return part


# --- recovery ---------------------------------------------------------------------------------------------------------


async def _status(context: AuditorContext, request: Request) -> Answer:
    return json_answer(await status_view(context))


async def status_view(context: AuditorContext) -> dict[str, Any]:
    """Return the state of recovery as JSON: the progress of the cluster, and the state of `this` process."""
    service = context.recovery_service()
    admin = await context.recovery_admin()
    progress = await service.progress.get()
    pause = await admin.pause_state()  # not cached, so that a pause is visible at once
    auditor, stats = service.auditor.state, service.worker.stats
    now_ms = context.clock_ms()
    return {
        **progress.to_json(),
        "audits": [audit.to_json(now_ms) for audit in await context.last_audits().get()],
        "is_enabled": pause is None,
        "pause": pause and asdict(pause),
        "lost_bookie_delay_s": await admin.marks.lost_bookie_delay_s(),
        "this": {
            "name": service.name,
            "is_leader": service.is_leader,
            "leading_since_ms": auditor.leading_since_ms if service.is_leader else None,
            "terms": auditor.terms,
            "ledgers_in_work": list(service.worker.current),
            "parked": service.worker.parked,
            "worker": asdict(stats),
            "audit": asdict(auditor.audit),
            "closings": asdict(auditor.closings),
            "checks": {kind.name.lower(): asdict(check) for kind, check in auditor.checks.items()},
            "parts_down": service.watcher.dead,
        },
    }


async def _ledgers(context: AuditorContext, request: Request) -> Answer:
    admin = await context.recovery_admin()
    limit = request.number("limit", LEDGERS_DEFAULT, low=1, high=LEDGERS_MAX)
    first = request.number("first", 0)
    found = await admin.marked(first=first, limit=limit + 1)
    answer: dict[str, Any] = {"ledgers": [marked_view(one) for one in found[:limit]]}
    if len(found) > limit:
        answer["next_first"] = found[limit].mark.ledger_id
    return json_answer(answer)


async def _ledger(context: AuditorContext, request: Request) -> Answer:
    admin = await context.recovery_admin()
    known = await admin.known(LedgerId(request.number("id")))
    explanation = explain(known)
    return json_answer({"sentence": explanation.sentence, "waits": explanation.waits, **known_view(known)})


async def _history(context: AuditorContext, request: Request) -> Answer:
    admin = await context.recovery_admin()
    limit = request.number("limit", HISTORY_DEFAULT, low=1, high=HISTORY_MAX)
    events = await admin.records.history(limit)
    return json_answer({"events": [event_view(event) for event in events]})


async def _pause(context: AuditorContext, request: Request) -> Answer:
    reason = request.json_object(may_be_empty=True, only=("reason",)).get("reason", "")
    if not isinstance(reason, str) or len(reason) > REASON_SIZE_MAX:
        raise BadRequest(f"reason must be a string of at most {REASON_SIZE_MAX} characters", member="reason")
    pause = await (await context.recovery_admin()).pause(reason)
    return json_answer({"paused": {"by": pause.by, "reason": pause.reason, "at_ms": pause.at_ms}})


async def _resume(context: AuditorContext, request: Request) -> Answer:
    was_paused = await (await context.recovery_admin()).resume()
    return json_answer({"paused": None, "was_paused": was_paused})


async def _bookies(context: AuditorContext, request: Request) -> Answer:
    admin = await context.recovery_admin()
    return json_answer({"bookies": await bookie_views(admin)})


async def bookie_views(admin: RecoveryAdmin) -> list[dict[str, Any]]:
    """Return every bookie as JSON, draining bookies with their progress at the auditor's last audit."""
    bookies = await admin.bookies()
    seen: dict[str, Any] = {}
    if any(bookie.intent == Intent.DRAINING for bookie in bookies):
        seen = await admin.records.get_cursor(CURSOR_DRAINING) or {}
    return [bookie_view(bookie, seen) for bookie in bookies]


async def _page(context: AuditorContext, request: Request) -> Answer:
    admin = await context.recovery_admin()
    status = await status_view(context)
    ledgers = await admin.marked(limit=PAGE_ROWS_MAX + 1)
    history = await admin.records.history(PAGE_ROWS_MAX)
    return render(
        status=status,
        ledgers=[marked_view(one) for one in ledgers[:PAGE_ROWS_MAX]],
        ledgers_more=len(ledgers) > PAGE_ROWS_MAX,
        bookies=await bookie_views(admin),
        history=[event_view(event) for event in history],
        now_ms=context.clock_ms(),
    )


def event_view(event: HistoryEvent) -> dict[str, Any]:
    """Return an event as JSON."""
    return {"at_ms": event.at_ms, "kind": event.kind, "text": event.text, "fields": dict(event.fields)}


def marked_view(marked: MarkedLedger) -> dict[str, Any]:
    """Return a marked ledger as JSON."""
    return {
        "ledger_id": marked.mark.ledger_id,
        "bookies": list(marked.mark.replicas),
        "marked_ms": marked.mark.ctime_ms,
        "locked_by": marked.worker,
        "record": None if marked.record is None else record_view(marked.record),
    }


def record_view(record: RecoveryRecord) -> dict[str, Any]:
    """Return the recovery record of a ledger as JSON."""
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
        "worker": record.worker,
    }


def known_view(known: Known) -> dict[str, Any]:
    """Return the facts on which an explanation is based, as JSON."""
    mark, metadata, view = known.mark, known.metadata, known.view
    return {
        "ledger_id": known.ledger_id,
        "is_marked": mark is not None,
        "bookies": list(mark.replicas) if mark else [],
        "marked_ms": mark.ctime_ms if mark else None,
        "locked_by": known.locked_by,
        "record": None if known.record is None else record_view(known.record),
        "closing_note": None
        if known.closing is None
        else {"cause": known.closing.cause.value, "noted_at_ms": known.closing.noted_at_ms},
        "metadata": None
        if metadata is None
        else {
            "state": metadata.state.name,
            "ensemble_size": metadata.ensemble_size,
            "write_quorum": metadata.write_quorum,
            "ack_quorum": metadata.ack_quorum,
            "last_entry_id": metadata.last_entry_id,
            "length": metadata.length,
            "segments": [{"first": one.first_entry_id, "bookies": list(one.ensemble)} for one in metadata.segments],
        },
        "metadata_error": known.metadata_error,
        "members": {
            bookie_id: {
                "registration": "absent"
                if bookie_id not in view.bookies
                else "writable"
                if view.bookies[bookie_id]
                else "read_only",
                "intent": view.intent(bookie_id).value,
            }
            for bookie_id in sorted({b for one in metadata.segments for b in one.ensemble} if metadata else ())
        },
        "auditor": known.auditor,
        "workers": [report.name for report in known.workers],
        "is_enabled": known.is_enabled,
        "verified": None if known.verified is None else asdict(known.verified),
    }


def bookie_view(bookie: BookieStatus, seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bookie as JSON. `seen`: the draining bookies at the auditor's last audit."""
    membership = bookie.membership
    view: dict[str, Any] = {
        "bookie_id": bookie.bookie_id,
        "registration": bookie.registration,
        "has_cookie": bookie.has_cookie,
        "intent": bookie.intent,
        "since_ms": membership.since_ms,
        "until_ms": membership.until_ms,
        "reason": membership.reason,
        "by": membership.by,
        "drain": None,
    }
    if bookie.intent == Intent.DRAINING:
        left = seen.get("bookies", {}).get(bookie.bookie_id, {})
        view["drain"] = {
            "ledgers_total": membership.drain.get("ledgers_total"),
            "bytes_total": membership.drain.get("bytes_total"),
            "ledgers_left": left.get("ledgers_left"),
            "bytes_left": left.get("bytes_left"),
            "seen_ms": seen.get("at_ms") if left else None,
        }
    return view


ROUTES: Final[tuple[Route[AuditorContext], ...]] = (
    Route("GET", "/", _page, is_heavy=True),
    Route("GET", "/v1/recovery/status", _status, is_heavy=True),
    Route("GET", "/v1/recovery/ledgers", _ledgers, is_heavy=True),
    Route("GET", "/v1/recovery/ledgers/{id}", _ledger, is_heavy=True),
    Route("GET", "/v1/recovery/history", _history, is_heavy=True),
    Route("POST", "/v1/recovery/pause", _pause),
    Route("POST", "/v1/recovery/resume", _resume),
    Route("GET", "/v1/bookies", _bookies, is_heavy=True),
    *autorecovery_http.ROUTES,
)


class AuditorApp(app.AdminApp[AuditorContext]):
    """The ASGI application of the API."""

    def __init__(
        self,
        context: AuditorContext,
        *,
        access: Access | None,
        rules: Mapping[tuple[str, str], app.RoleRule] | None = None,
    ) -> None:
        super().__init__(
            context,
            ROUTES,
            access=AdminAccess(own=access, cluster=access),
            is_open=lambda: context.is_open,
            service="auditor",
            rules=rules,
        )
