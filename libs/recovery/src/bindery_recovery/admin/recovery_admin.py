"""RecoveryAdmin: what an operator may ask and tell a cluster's healing. Works from metadata alone, anywhere: in an
auditor that leads or not, and in a bookie.

| verb          | does                                                                                           |
|---------------|------------------------------------------------------------------------------------------------|
| pause, resume | BookKeeper's switch (`underreplication/disable`), and why it was paused, under /bindery         |
| trigger_audit | has the auditor look at all bookies now; those that are away then count as lost without delay  |
| replace       | declares a bookie that is away gone for good, and sees its ledgers moved (`drain`)             |

The switch is what counts: one that Apache's tools threw has no reason, and a reason without it means nothing.
Source: BookKeeper's BookKeeperAdmin and its HTTP services.
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
REPLACING_MAX: Final = 16
"""Bookies that are followed to their end at a time."""
READS_IN_FLIGHT: Final = 64

log = get_logger(__name__)


class NoAuditorYet(NotThere):
    code = "no_auditor"


@dataclass(frozen=True, slots=True)
class MarkedLedger:
    mark: Mark
    record: RecoveryRecord | None
    """None: marked by a tool or a client that keeps none, and not looked at yet."""
    worker: str | None
    """Who has it locked."""


@dataclass(frozen=True, slots=True)
class BookieStanding:
    bookie_id: BookieId
    registration: str
    """`writable`, `read_only` or `absent`."""
    has_cookie: bool
    membership: Membership
    intent: str
    """The one that counts now."""


class RecoveryAdmin:
    """`by`: who acts, for histories. `ledgers`: a ledger client, made when first needed. `clock_ms`: wall clock.

    Close it: it may follow replacements. Every method may raise MetadataUnavailable.
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
        tasks = list(self._replacing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the switch -----------------------------------------------------------------------------------------------

    async def is_enabled(self) -> bool:
        return await self.marks.is_enabled()

    async def pause(self, reason: str) -> Pause:
        """No new copies from now on, anywhere. Paused already: the reason is replaced."""
        pause = Pause(self._by, reason, self._clock_ms())
        await self.records.set_pause_info(pause)
        try:
            await self.marks.disable()
        except AlreadyExists:
            return pause
        await self._tell("paused", f"healing was paused by {self._by}{reason and ': ' + reason}")
        return pause

    async def resume(self) -> bool:
        """False: it was not paused."""
        try:
            await self.marks.enable()
        except NoSuchNode:
            return False
        finally:
            await self.records.clear_pause_info()
        await self._tell("resumed", f"healing was resumed by {self._by}")
        return True

    async def pause_state(self) -> Pause | None:
        """None: healing is on. One that another tool paused has no reason and time 0."""
        if await self.marks.is_enabled():
            return None
        return await self.records.pause_info() or Pause("", "", 0)

    # --- the auditor ----------------------------------------------------------------------------------------------

    async def auditor(self) -> str | None:
        return await current_auditor(self.store, self.layout)

    async def trigger_audit(self) -> None:
        """Raises NoAuditorYet: no auditor has led, so there is no delay to write again."""
        seconds = await self.marks.lost_bookie_delay_s()
        if seconds is None:
            raise NoAuditorYet("no auditor has led yet: start one, it audits at once")
        await self.marks.set_lost_bookie_delay_s(seconds)

    # --- what there is --------------------------------------------------------------------------------------------

    async def marked(self, *, limit: int, first: int = 0) -> Sequence[MarkedLedger]:
        """The first `limit` marked ledgers from id `first` on, with what is recorded of them."""
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
        """All that explains how a ledger stands, for `explain`. Raises NoSuchLedger: neither it nor a mark is there."""
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

    async def bookies(self) -> Sequence[BookieStanding]:
        """Every bookie that has a cookie, is registered, or about which something is said; by id."""
        status = await cluster_status(self.store, self.layout)
        said = await self.memberships.all()
        now_ms = self._clock_ms()
        found = []
        for name in sorted({*status.known, *status.writable, *status.read_only, *said}):
            bookie_id = BookieId(name)
            membership = said.get(bookie_id, Membership(bookie_id))
            registration = (
                "writable" if name in status.writable else "read_only" if name in status.read_only else "absent"
            )
            found.append(
                BookieStanding(
                    bookie_id, registration, name in status.known, membership, str(membership.effective(now_ms))
                )
            )
        return found

    # --- a bookie that is gone ------------------------------------------------------------------------------------

    async def replace(self, bookie_id: BookieId, *, delete_cookie: bool) -> Started:
        """Declare `bookie_id` gone for good and mark its ledgers; then follow it in the background, and at the end
        remove its cookie if `delete_cookie`.

        Raises NotThere for one that nobody knows, CannotRecover while it is registered; VersionConflict.
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
        started = await emptier.start_recovery(await emptier.plan_recovery(bookie_id), reason="asked for over HTTP")
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

    async def _tell(self, kind: str, text: str) -> None:
        await self.records.append_history(HistoryEvent(self._clock_ms(), kind, text, {"by": self._by}))
