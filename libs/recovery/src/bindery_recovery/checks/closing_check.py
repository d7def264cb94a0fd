"""ClosingCheck: looks at ledgers that were closed by somebody who does not know of all copies (`closing_records`).

Every bookie of a noted ledger is asked for the list of its entries, and to bring them to its disk: a copy that was not
confirmed, say because that disk hangs, is listed out of memory, and gone with the next kill. What comes of it:

| finding                                    | consequence                                                             |
|--------------------------------------------|-------------------------------------------------------------------------|
| all bookies answered, nothing lacks        | the note goes                                                           |
| a bookie lacks entries, and denies one     | marked with ENTRY_MISSING: every entry is read. The note stays until    |
| when it is asked for it                    | the mark is gone and a look finds the ledger whole                      |
| a bookie is not registered, does not       | looked at again, later each time, and at once when a bookie comes back: |
| answer, or cannot tell (limbo)             | a restart must not cost copies, and the audit marks what stays away     |
| not closed yet                             | looked at again                                                         |
| deleted                                    | the note goes                                                           |
| metadata that cannot be understood         | looked at again, logged                                                 |
| metadata changed under the look            | looked at again                                                         |

A list says nothing about damage, which is the full check's to find; a bookie in limbo lists what it happens to have, so
that no list alone makes a mark. A note is looked at `SETTLE_S` after it was first seen: copies may be on their
way. A bookie that kept a look waiting in vain is not asked for a while, so that it does not keep all others waiting.
Notes are in the metadata, so the next leader goes on where this one ends; nothing but the next look is remembered.
It waits while recovery is disabled and while an audit is pending, as all walks do.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from bindery_client.ledger.api import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import (
    BadVersion,
    BinderyError,
    Corrupt,
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
from bindery_recovery.cluster.bounded import in_order
from bindery_recovery.cluster.ledger_index import members_of

POLL_S: Final = 2.0
SETTLE_S: Final = 5.0
"""As long as a writer waits for last copies (`bindery_client.ledger.writer.LAST_COPIES_S`)."""
LOOKS_PER_S: Final = 50.0
LOOKS_IN_FLIGHT: Final = 8
LOOK_TIMEOUT_S: Final = 60.0
RELOOK_S: Final = 5.0
RELOOK_MAX_S: Final = 30.0
"""A look is a few small requests, and their rate is bounded: who waits for the last note need not wait long for it."""
SLOW_S: Final = 2.0
SILENT_S: Final = 10.0
"""A bookie that gave no answer for SLOW_S counts as silent for so long."""
PASS_LOOKS_MAX: Final = 1_000
"""Notes that are looked at before they are listed anew."""

log = get_logger(__name__)


class Bookies(Protocol):
    """What the check asks of a `BookieWatch`."""

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
"""The note goes."""


@dataclass(slots=True)
class ClosingState:
    """For metrics and the admin API."""

    pending: int = 0
    """Notes when they were last listed."""
    findings: dict[str, int] = field(default_factory=dict)
    """Looks since the process began, by what came of them."""
    last_error: str = ""


@dataclass(slots=True)
class _Waiting:
    due: float
    looks: int = 0
    is_marked: bool = False


class ClosingCheck:
    """One term's. `run` for ever."""

    def __init__(
        self,
        client: LedgerClient,
        notes: ClosingRecords,
        marks: UnderreplicationManager,
        marker: LedgerMarker,
        bookies: Bookies,
        *,
        leadership: Leadership,
        may_go_on: Callable[[], Awaitable[None]],
        retry_s: float,
        state: ClosingState,
    ) -> None:
        """`may_go_on` returns when the next ledger may be looked at. `retry_s`: pause after a failure of the
        metadata."""
        self._client = client
        self._notes = notes
        self._marks = marks
        self._marker = marker
        self._bookies = bookies
        self._leadership = leadership
        self._may_go_on = may_go_on
        self._retry_s = retry_s
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[LedgerId, _Waiting] = {}
        self._silent_until: dict[BookieId, float] = {}
        self._were_there: frozenset[BookieId] = frozenset()
        """Bookies of the last pass."""

    async def run(self) -> None:
        """Raises NotLeader."""
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
        ledger_ids = await self._notes.ledger_ids()
        self._state.pending = len(ledger_ids)
        now = self._loop.time()
        before = self._waiting
        self._waiting = {one: before.get(one) or _Waiting(now + SETTLE_S) for one in ledger_ids}
        self._hurry(now)
        due = [one for one, waiting in self._waiting.items() if waiting.due <= now]
        due.sort(key=lambda one: self._waiting[one].due)
        looks = in_order(self._paced(due[:PASS_LOOKS_MAX]), self._look, limit=LOOKS_IN_FLIGHT)
        async with contextlib.aclosing(looks) as findings:
            async for ledger_id, finding in findings:
                self._note(ledger_id, finding)

    def _hurry(self, now: float) -> None:
        """A bookie is there that was not: what waited for it waits no longer."""
        there = frozenset(self._bookies.registered())
        if there - self._were_there:
            self._silent_until.clear()
            for waiting in self._waiting.values():
                if waiting.looks:
                    waiting.due, waiting.looks = min(waiting.due, now), 1
        self._were_there = there

    async def _paced(self, ledger_ids: list[LedgerId]) -> AsyncIterator[LedgerId]:
        for ledger_id in ledger_ids:
            await self._may_go_on()
            yield ledger_id
            await asyncio.sleep(1 / LOOKS_PER_S)

    def _note(self, ledger_id: LedgerId, finding: Finding) -> None:
        findings = self._state.findings
        findings[finding] = findings.get(finding, 0) + 1
        if finding in SETTLED:
            del self._waiting[ledger_id]
            self._state.pending = len(self._waiting)
            return
        waiting = self._waiting[ledger_id]
        waiting.is_marked = finding is Finding.MARKED
        pause_s = POLL_S if waiting.is_marked else min(RELOOK_MAX_S, RELOOK_S * 2 ** min(waiting.looks, 16))
        waiting.looks = 0 if waiting.is_marked else waiting.looks + 1
        waiting.due = self._loop.time() + pause_s

    async def _look(self, ledger_id: LedgerId) -> tuple[LedgerId, Finding]:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                if self._waiting[ledger_id].is_marked and await self._marks.get(ledger_id) is not None:
                    return ledger_id, Finding.MARKED
                finding = await self._judge(ledger_id)
        except (NotLeader, MetadataUnavailable, MetadataOutcomeUnknown):
            raise
        except NoSuchLedger:
            finding = Finding.DELETED
        except TimeoutError:
            log.warning("closing_look_hung", ledger_id=ledger_id, waited_s=LOOK_TIMEOUT_S)
            finding = Finding.FAILED
        except (Corrupt, BadVersion) as error:
            log.error("ledger_metadata_unreadable", ledger_id=ledger_id, error=str(error))
            finding = Finding.UNREADABLE
        except Exception:  # one ledger must not keep all others from being looked at
            log.exception("closing_look_failed", ledger_id=ledger_id)
            finding = Finding.FAILED
        if finding in SETTLED:
            await self._notes.remove(ledger_id, guard=self._leadership)
        return ledger_id, finding

    async def _judge(self, ledger_id: LedgerId) -> Finding:
        """Raises NoSuchLedger: it was deleted."""
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
            return Finding.UNANSWERED  # repaired under our questions: ask anew
        if bad:
            await self._mark(ledger_id, metadata, bad)
            return Finding.MARKED
        return Finding.UNANSWERED if None in answers or lacks else Finding.WHOLE

    async def _ask(self, ledger_id: LedgerId, bookie_id: BookieId) -> Runs | None:
        """What it holds for good; None: it did not say."""
        began = self._loop.time()
        if bookie_id not in self._bookies.registered() or began < self._silent_until.get(bookie_id, began):
            return None
        try:
            return await self._client.entries_on(ledger_id, bookie_id, durable=True)
        except NoSuchLedger:
            return ()  # this bookie has nothing of it; were it deleted, its metadata would be gone
        except (MetadataUnavailable, MetadataOutcomeUnknown):
            raise
        except BinderyError as error:
            log.info("closing_bookie_silent", ledger_id=ledger_id, bookie_id=bookie_id, error=str(error))
            now = self._loop.time()
            if now - began >= SLOW_S:
                self._silent_until[bookie_id] = now + SILENT_S
            return None

    async def _denies(self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, lack: Lack) -> bool:
        """Whether it says, asked for the first entry that it did not list, that it does not have it."""

        def is_denied(replica: ReplicaRead) -> bool:
            return replica.verdict in (Verdict.ABSENT, Verdict.CORRUPT)

        entry_ids = [EntryId(lack.first_entry_id)]
        [denied] = await self._client.read_replicas(ledger_id, metadata, bookie_id, entry_ids, is_denied)
        return denied

    async def _mark(self, ledger_id: LedgerId, metadata: LedgerMetadata, bad: Mapping[BookieId, Lack]) -> None:
        entries = sum(lack.entries for lack in bad.values())
        bookies: Collection[BookieId] = sorted(bad)
        await self._marker.mark(
            ledger_id, bookies, Reason.ENTRY_MISSING, missing_entries=entries,
            missing_bytes=metadata.length * entries // (metadata.last_entry_id + 1),
        )  # fmt: skip
        log.warning("closed_ledger_lacks_copies", ledger_id=ledger_id, bookies=bookies, entries=entries)
