"""Check recently closed ledgers for missing entries.

A client that recovers a ledger may close it without knowing whether every replica holds every entry; it then leaves a
closing record (`closing_records`). For each such ledger, this check asks every bookie to write the ledger's entries to
its disk and then to list them. Without the write, a bookie could list an unconfirmed entry that it holds only in
memory, for example while its disk hangs, and would lose the entry in a crash.

| finding                                            | consequence                                                    |
|----------------------------------------------------|----------------------------------------------------------------|
| all bookies answered, no entry is missing          | the record is removed                                          |
| a bookie does not list an entry, and a read of the | the ledger is marked with ENTRY_MISSING, so that every entry   |
| entry returns "no such entry" or a corrupt entry   | is read; the record stays until the mark is removed and a      |
|                                                    | check finds the ledger whole                                   |
| a bookie is not registered, does not answer, or    | checked again with back-off, and immediately when a bookie     |
| lost its storage                                   | registers: a restart must not trigger copying, and the audit   |
|                                                    | marks the ledgers of bookies that stay away                    |
| the ledger is not closed yet                       | checked again                                                  |
| the ledger was deleted                             | the record is removed                                          |
| the metadata cannot be parsed                      | checked again, logged                                          |
| the metadata changed during the check              | checked again                                                  |

An entry list proves presence, not integrity; the full check detects corruption. A bookie in limbo may return an
incomplete list, so a list alone never marks a ledger.

A ledger is first checked SETTLE_S after its record was found, because copies may still arrive. A bookie that did not
answer within SLOW_S gets no request for SILENT_S, so that it does not delay the other ledgers. Closing records are
stored in the metadata, so after a failover the next leader continues with them. The check pauses while recovery is
disabled and while an audit is pending.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from bindery_client.ledger.api import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.backoff import Backoff
from bindery_core.errors import (
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchLedger,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_kit.observability.logs import get_logger
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.recovery.recovery_records import Reason
from bindery_metadata.recovery.underreplication import UnderreplicationManager

from bindery_recovery.checks.bookie_audit import LedgerMarker
from bindery_recovery.checks.replica_check import Lack, Runs, find_lacks
from bindery_recovery.cluster.ledger_index import members_of
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip, each

POLL_S: Final = 2.0
"""Pause in seconds before the closing records are listed again."""
SETTLE_S: Final = 5.0
"""Seconds before the first check of a ledger: as long as a writer waits for its last copies
(`bindery_client.ledger.writer.LAST_COPIES_S`)."""
CHECKS_PER_S: Final = 50.0
"""Maximum number of ledgers checked per second."""
CHECKS_IN_FLIGHT: Final = 8
"""Maximum number of ledgers checked at a time."""
CHECK_TIMEOUT_S: Final = 60.0
"""Time limit in seconds for the check of one ledger."""
RECHECK_S: Final = 5.0
"""Seconds until the second check of a ledger; doubles with each further check."""
RECHECK_MAX_S: Final = 30.0
"""Maximum seconds between two checks of a ledger. It may be short, because a check needs only a few small requests."""
RECHECK: Final = Backoff(RECHECK_S, RECHECK_MAX_S)
SLOW_S: Final = 2.0
"""Minimum duration in seconds of a failed request after which the bookie gets no requests for SILENT_S."""
SILENT_S: Final = 10.0
"""Seconds without requests to a bookie after a slow failed request."""
PASS_CHECKS_MAX: Final = 1_000
"""Maximum number of ledgers checked before the closing records are listed again."""

log = get_logger(__name__)


class Bookies(Protocol):
    """The part of `BookieWatch` that the check uses."""

    def registered(self) -> Mapping[BookieId, bool]: ...


class Finding(StrEnum):
    WHOLE = "whole"
    DELETED = "deleted"
    MARKED = "marked"
    OPEN = "open"
    UNANSWERED = "unanswered"
    UNREADABLE = "unreadable"
    FAILED = "failed"


SETTLED: Final = frozenset({Finding.WHOLE, Finding.DELETED})
"""Findings after which the closing record is removed."""


@dataclass(slots=True)
class ClosingState:
    """State of the check, for metrics and the admin API."""

    pending: int = 0
    """Number of closing records when they were last listed."""
    findings: dict[str, int] = field(default_factory=dict)
    """Checks since the process started, by finding."""
    last_error: str = ""


@dataclass(slots=True)
class _Waiting:
    due: float
    checks: int = 0
    is_marked: bool = False


class ClosingCheck:
    """The check during one term of the leader. `run` never returns."""

    def __init__(
        self,
        client: LedgerClient,
        records: ClosingRecords,
        marks: UnderreplicationManager,
        marker: LedgerMarker,
        bookies: Bookies,
        *,
        leadership: Leadership,
        may_go_on: Callable[[], Awaitable[None]],
        retry_s: float,
        state: ClosingState,
    ) -> None:
        """`may_go_on` returns when the next ledger may be checked. `retry_s`: pause in seconds after a failure of the
        metadata store."""
        self._client = client
        self._records = records
        self._marks = marks
        self._marker = marker
        self._bookies = bookies
        self._leadership = leadership
        self._walk = LedgerWalk(
            CHECKS_IN_FLIGHT,
            rate=CHECKS_PER_S,
            may_go_on=may_go_on,
            timeout_s=CHECK_TIMEOUT_S,
            hung_event="closing_look_hung",
            failed_event="closing_look_failed",
        )
        self._retry_s = retry_s
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[LedgerId, _Waiting] = {}
        self._silent_until: dict[BookieId, float] = {}
        self._seen_before: frozenset[BookieId] = frozenset()
        """Bookies registered during the previous pass."""

    async def run(self) -> None:
        """Check ledgers until cancelled. Raises NotLeader."""
        while True:
            try:
                await self._pass()
                self._state.last_error = ""
                await asyncio.sleep(POLL_S)
            except NotLeader:
                raise
            except BinderyError as error:
                self._state.last_error = str(error)
                log.warning("closings_postponed", error=str(error))
                await asyncio.sleep(self._retry_s)

    async def _pass(self) -> None:
        ledger_ids = await self._records.ledger_ids()
        self._state.pending = len(ledger_ids)
        now = self._loop.time()
        before = self._waiting
        self._waiting = {one: before.get(one) or _Waiting(now + SETTLE_S) for one in ledger_ids}
        self._advance(now)
        due = [one for one, waiting in self._waiting.items() if waiting.due <= now]
        due.sort(key=lambda one: self._waiting[one].due)
        walk = self._walk.run(each(due[:PASS_CHECKS_MAX]), self._check)
        async with walk as findings:
            async for ledger_id, finding in findings:
                self._count(ledger_id, Finding.FAILED if finding is Skip.HUNG else Finding(finding))

    def _advance(self, now: float) -> None:
        """If a bookie has registered since the previous pass, check the waiting ledgers now."""
        registered = frozenset(self._bookies.registered())
        if registered - self._seen_before:
            self._silent_until.clear()
            for waiting in self._waiting.values():
                if waiting.checks:
                    waiting.due, waiting.checks = min(waiting.due, now), 1
        self._seen_before = registered

    def _count(self, ledger_id: LedgerId, finding: Finding) -> None:
        findings = self._state.findings
        findings[finding] = findings.get(finding, 0) + 1
        if finding in SETTLED:
            del self._waiting[ledger_id]
            self._state.pending = len(self._waiting)
            return
        waiting = self._waiting[ledger_id]
        waiting.is_marked = finding is Finding.MARKED
        waiting.checks = 0 if waiting.is_marked else waiting.checks + 1
        pause_s = POLL_S if waiting.is_marked else RECHECK.delay_s(waiting.checks)
        waiting.due = self._loop.time() + pause_s

    async def _check(self, ledger_id: LedgerId) -> Finding:
        if self._waiting[ledger_id].is_marked and await self._marks.get(ledger_id) is not None:
            return Finding.MARKED
        try:
            finding = await self._judge(ledger_id)
        except NoSuchLedger:
            finding = Finding.DELETED
        if finding in SETTLED:
            await self._records.remove(ledger_id, guard=self._leadership)
        return finding

    async def _judge(self, ledger_id: LedgerId) -> Finding:
        """Compare the entry lists of all bookies of the ledger. Raises NoSuchLedger: it was deleted."""
        metadata = await self._client.metadata(ledger_id)
        if metadata.state is not LedgerState.CLOSED:
            return Finding.OPEN
        members = sorted(members_of(metadata))
        answers = await asyncio.gather(*(self._ask(ledger_id, bookie_id) for bookie_id in members))
        held = dict(zip(members, answers, strict=True))
        lacks = find_lacks(metadata, held)
        denied = await asyncio.gather(*(self._denies(ledger_id, metadata, b, lacks[b]) for b in lacks))
        bad = {bookie_id: lack for (bookie_id, lack), is_denied in zip(lacks.items(), denied, strict=True) if is_denied}
        if await self._client.metadata(ledger_id) != metadata:
            return Finding.UNANSWERED  # repaired during the check: ask again
        if bad:
            await self._mark(ledger_id, metadata, bad)
            return Finding.MARKED
        return Finding.UNANSWERED if None in answers or lacks else Finding.WHOLE

    async def _ask(self, ledger_id: LedgerId, bookie_id: BookieId) -> Runs | None:
        """Return the entries of the ledger that the bookie holds on disk; None: it did not answer."""
        began = self._loop.time()
        if bookie_id not in self._bookies.registered() or began < self._silent_until.get(bookie_id, began):
            return None
        try:
            return await self._client.entries_on(ledger_id, bookie_id, durable=True)
        except NoSuchLedger:
            return ()  # the bookie has no entry of it; if the ledger were deleted, its metadata would be missing
        except (MetadataUnavailable, MetadataOutcomeUnknown):
            raise
        except BinderyError as error:
            log.info("closing_bookie_silent", ledger_id=ledger_id, bookie_id=bookie_id, error=str(error))
            now = self._loop.time()
            if now - began >= SLOW_S:
                self._silent_until[bookie_id] = now + SILENT_S
            return None

    async def _denies(self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, lack: Lack) -> bool:
        """Read the first entry that the bookie did not list. Return True if the bookie has no good copy of it."""

        def is_denied(replica: ReplicaRead) -> bool:
            return replica.verdict in (Verdict.ABSENT, Verdict.CORRUPT)

        entry_ids = [EntryId(lack.first_entry_id)]
        [denied] = await self._client.read_replicas(ledger_id, metadata, bookie_id, entry_ids, is_denied)
        return denied

    async def _mark(self, ledger_id: LedgerId, metadata: LedgerMetadata, bad: Mapping[BookieId, Lack]) -> None:
        entries = sum(lack.entries for lack in bad.values())
        bookies: Collection[BookieId] = sorted(bad)
        await self._marker.mark(
            ledger_id,
            bookies,
            Reason.ENTRY_MISSING,
            missing_entries=entries,
            missing_bytes=metadata.length * entries // (metadata.last_entry_id + 1),
        )
        log.warning("closed_ledger_lacks_copies", ledger_id=ledger_id, bookies=bookies, entries=entries)
