"""The operations of an operator on recovery. They use metadata only and work in any auditor, leader or standby, and in
a bookie.

| operation     | effect                                                                                         |
|---------------|------------------------------------------------------------------------------------------------|
| pause, resume | BookKeeper's switch (`underreplication/disable`), and the reason of the pause, under /bindery  |
| trigger_audit | the auditor audits all bookies now; absent bookies then count as lost without a delay          |
| replace       | declares an absent bookie permanently lost, and follows the repair of its ledgers (`drain`)    |

Only the switch decides whether recovery is enabled. If Apache's tools set the switch, no reason is stored; a stored
reason without the switch has no meaning. Source: BookKeeper's BookKeeperAdmin and its HTTP services.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadVersion,
    BinderyError,
    Corrupt,
    NoSuchLedger,
    NoSuchNode,
    NotThere,
    TooManyRequests,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Membership, MembershipStore
from bindery_metadata.cluster import cluster_status
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.ledgers.verified_records import VerifiedRecords
from bindery_metadata.recovery.recovery_records import HistoryEvent, Pause, RecoveryRecord, RecoveryRecords
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.draining.drain import BookieEmptier, Ledgers, Started
from bindery_recovery.reporting.explain import Known

REPLACE_POLL_S: Final = 5.0
"""Minimum interval in seconds at which the progress of a replacement is read."""
REPLACING_MAX: Final = 16
"""Maximum number of replacements that are followed at a time."""

log = get_logger(__name__)


class NoAuditorYet(NotThere):
    code = "no_auditor"


@dataclass(frozen=True, slots=True)
class MarkedLedger:
    """A marked ledger with its recovery record and its lock."""

    mark: Mark
    record: RecoveryRecord | None
    """None: a tool or client that writes no records marked it, and no worker has checked it yet."""
    worker: str | None
    """Worker that holds the lock; None: not locked."""


@dataclass(frozen=True, slots=True)
class BookieStatus:
    """The registration and the membership of a bookie."""

    bookie_id: BookieId
    registration: str
    """`writable`, `read_only` or `absent`."""
    has_cookie: bool
    membership: Membership
    intent: str
    """The membership that applies now: a lease may have ended."""


class RecoveryAdmin:
    """The operations of one process. `by`: name of the caller, for the history. `ledgers`: returns a ledger client.
    `clock_ms`: wall clock.

    Call `close` at the end, because replacements may still be followed. Every method may raise MetadataUnavailable.
    """

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        by: str,
        ledgers: Callable[[], Awaitable[Ledgers]],
        randomness: RandomBits,
        clock_ms: Callable[[], int],
    ) -> None:
        self.store = store
        self.layout = layout
        self._by = by
        self._ledgers = ledgers
        self._clock_ms = clock_ms
        self._randomness = randomness
        self.marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms, worker_name=by)
        self.records = RecoveryRecords(store)
        self.memberships = MembershipStore(store, clock_ms=clock_ms)
        self._replacing: dict[BookieId, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop following replacements. Their ledgers stay marked."""
        tasks = list(self._replacing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the switch -----------------------------------------------------------------------------------------------

    async def is_enabled(self) -> bool:
        return await self.marks.is_enabled()

    async def pause(self, reason: str) -> Pause:
        """Stop copying in the whole cluster. If recovery is already paused, the reason is replaced."""
        pause = Pause(self._by, reason, self._clock_ms())
        await self.records.set_pause_info(pause)
        try:
            await self.marks.disable()
        except AlreadyExists:
            return pause
        await self._record_event("paused", f"recovery was paused by {self._by}{reason and ': ' + reason}")
        return pause

    async def resume(self) -> bool:
        """Enable recovery. Return False if it was not paused."""
        try:
            await self.marks.enable()
        except NoSuchNode:
            return False
        finally:
            await self.records.clear_pause_info()
        await self._record_event("resumed", f"recovery was resumed by {self._by}")
        return True

    async def pause_state(self) -> Pause | None:
        """Return the pause; None: recovery is enabled. A pause by another tool has no reason and time 0."""
        if await self.marks.is_enabled():
            return None
        return await self.records.pause_info() or Pause("", "", 0)

    # --- the auditor ----------------------------------------------------------------------------------------------

    async def auditor(self) -> str | None:
        """Return the name of the leading auditor; None: there is none."""
        return await current_auditor(self.store, self.layout)

    async def trigger_audit(self) -> None:
        """Request an audit by writing the delay again. Raises NoAuditorYet if no auditor has been leader yet, because
        then no delay is set."""
        seconds = await self.marks.lost_bookie_delay_s()
        if seconds is None:
            raise NoAuditorYet("no auditor has been leader yet: start one, which then audits at once")
        await self.marks.set_lost_bookie_delay_s(seconds)

    # --- views ----------------------------------------------------------------------------------------------------

    async def marked(self, *, limit: int, first: int = 0) -> Sequence[MarkedLedger]:
        """Return the first `limit` marked ledgers from id `first` on, with their records."""
        found: list[Mark] = []
        async for mark in self.marks.list():
            if mark.ledger_id >= first:
                found.append(mark)
            if len(found) >= limit:
                break
        workers = await self.marks.locks()
        records = [await self.records.get(mark.ledger_id) for mark in found]
        return [
            MarkedLedger(mark, record, workers.get(mark.ledger_id)) for mark, record in zip(found, records, strict=True)
        ]

    async def known(self, ledger_id: LedgerId) -> Known:
        """Return the facts about a ledger for `explain`. Raises NoSuchLedger: there is neither a ledger nor a mark."""
        ledgers = await self._ledgers()
        mark = await self.marks.get(ledger_id)
        metadata: LedgerMetadata | None = None
        metadata_error = ""
        try:
            metadata = await ledgers.metadata(ledger_id)
        except NoSuchLedger:
            if mark is None:
                raise
        except (Corrupt, BadVersion) as error:
            metadata_error = str(error)
        view = ClusterView(
            await ledgers.list_bookies(),
            await self.memberships.all(),
            frozenset(await CookieStore(self.store, self.layout).bookies()),
            self._clock_ms(),
        )
        return Known(
            ledger_id=ledger_id,
            mark=mark,
            record=await self.records.get(ledger_id),
            metadata=metadata,
            metadata_error=metadata_error,
            view=view,
            locked_by=(await self.marks.locks()).get(ledger_id),
            workers=await self.records.reports(),
            auditor=await self.auditor(),
            is_enabled=await self.is_enabled(),
            pause=await self.records.pause_info(),
            verified=await VerifiedRecords(self.store).get(ledger_id),
            closing=await ClosingRecords(self.store).get(ledger_id),
        )

    async def bookies(self) -> Sequence[BookieStatus]:
        """Return every bookie that has a cookie, is registered, or has a membership; sorted by id."""
        status = await cluster_status(self.store, self.layout)
        memberships = await self.memberships.all()
        now_ms = self._clock_ms()
        found = []
        for name in sorted({*status.known, *status.writable, *status.read_only, *memberships}):
            bookie_id = BookieId(name)
            membership = memberships.get(bookie_id, Membership(bookie_id))
            registration = (
                "writable" if name in status.writable else "read_only" if name in status.read_only else "absent"
            )
            found.append(
                BookieStatus(
                    bookie_id, registration, name in status.known, membership, str(membership.effective(now_ms))
                )
            )
        return found

    # --- replacing a lost bookie ----------------------------------------------------------------------------------

    async def replace(self, bookie_id: BookieId, *, delete_cookie: bool) -> Started:
        """Declare `bookie_id` permanently lost and mark its ledgers. A background task follows the repair and finally
        deletes the cookie if `delete_cookie` is set.

        Raises NotThere (unknown), CannotRecover while it is registered, VersionConflict.
        """
        if bookie_id not in self._replacing and len(self._replacing) >= REPLACING_MAX:
            raise TooManyRequests("too many bookies are being replaced", bookies=len(self._replacing))
        emptier = BookieEmptier(
            self.store,
            self.layout,
            await self._ledgers(),
            randomness=self._randomness,
            clock_ms=self._clock_ms,
            by=self._by,
        )
        started = await emptier.start_recovery(await emptier.plan_recovery(bookie_id), reason="requested over HTTP")
        before = self._replacing.pop(bookie_id, None)
        if before is not None:
            before.cancel()
        task = asyncio.create_task(self._follow(emptier, started, delete_cookie), name=f"replace:{bookie_id}")
        self._replacing[bookie_id] = task
        task.add_done_callback(lambda done: self._forget(bookie_id, done))
        return started

    def _forget(self, bookie_id: BookieId, task: "asyncio.Task[None]") -> None:
        if self._replacing.get(bookie_id) is task:
            del self._replacing[bookie_id]

    async def _follow(self, emptier: BookieEmptier, started: Started, delete_cookie: bool) -> None:
        bookie_id = started.membership.bookie_id
        while True:
            try:
                is_done = False
                async for progress in emptier.follow(started, poll_s=REPLACE_POLL_S):
                    is_done = progress.done
                if is_done and delete_cookie:
                    await emptier.retire(bookie_id)
                log.info("bookie_replaced" if is_done else "bookie_not_replaced", bookie_id=bookie_id)
                return
            except BinderyError as error:
                log.warning("replacement_not_followed", bookie_id=bookie_id, **error_fields(error))
                await asyncio.sleep(REPLACE_POLL_S)

    async def _record_event(self, kind: str, text: str) -> None:
        await self.records.append_history(HistoryEvent(self._clock_ms(), kind, text, {"by": self._by}))
