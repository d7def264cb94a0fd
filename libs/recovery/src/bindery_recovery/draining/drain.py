"""Empty a bookie: drain it while it is running, or recover its ledgers when it is gone. Both can be started again at
any time.

    drain    active --start_drain--> DRAINING: read-only; the auditor marks its ledgers, workers copy them
             --no ledger names it any more--> stop it, retire its cookie          --cancel_drain--> active
    recover  absent --start_recovery--> REMOVED, its ledgers marked by this call
             --no ledger names it any more--> its cookie is retired here          --cancel_drain--> active

The remaining ledgers are read from ledger metadata each time, and no other state is stored: a client that follows a
drain may stop and continue later, and several may follow at once. Nothing is changed on the bookie itself: Bindery's
bookies turn read-only on their own. As long as a bookie is registered as writable, a new ledger may be placed on it at
any moment. Therefore a bookie is reported as empty only if a listing of the ledgers finds none that names it, and the
bookie was read-only or absent before the listing started.

A drain is refused if too few bookies would remain for the largest ensemble of the ledgers that name the bookie: no
bookie may be in an ensemble twice, so the replicas of that ledger could never move. Only writable bookies whose
membership is active count.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from bindery_core.errors import Conflict, NotThere
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import ABSENT, Intent, Membership, MembershipStore
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import refuse_if_suspected
from bindery_metadata.recovery.recovery_records import (
    HistoryEvent,
    Obstacle,
    Reason,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
)
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.cluster.ledger_index import members_of, share_of
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip, each
from bindery_recovery.records.drain_end import drain_finished, is_drain_end_recorded
from bindery_recovery.records.reasons import marked_for
from bindery_recovery.records.sentences import counted

READS_IN_FLIGHT: Final = 64
"""Maximum number of ledgers whose metadata is read at a time."""
POLL_S: Final = 1.0
"""Default minimum pause in seconds between two polls of the progress."""
POLL_SHARE: Final = 5
"""Minimum pause between two polls, as a multiple of the time that a poll takes, so that polling causes little load."""
RATE_WINDOW_S: Final = 30.0
"""Time in seconds over which the speed of a drain is averaged."""
RECORDS_READ_MAX: Final = 200
"""Maximum number of recovery records that are read to report obstacles."""
SHOWN_MAX: Final = 5
"""Maximum number of ledgers listed in a message."""


class CannotDrain(Conflict):
    code = "cannot_drain"


class BelowQuorum(CannotDrain):
    code = "below_quorum"


class CannotRecover(Conflict):
    code = "cannot_recover"


def still_writable(bookie_id: BookieId) -> str:
    """Explain why a bookie that no ledger names is not drained yet, and how to make it read-only."""
    return (
        f"{bookie_id} is still registered as writable: new ledgers may be placed on it. Bindery's bookies turn "
        "read-only within seconds; set one of Apache's read-only with its HTTP admin API (PUT "
        '/api/v1/bookie/state/readonly with {"readOnly": true}), or restart it with forceReadOnlyBookie=true'
    )


class LedgerMetadataSource(Protocol):
    """All ledgers and their metadata; a ledger client implements it."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...


class Ledgers(LedgerMetadataSource, Protocol):
    """The part of the ledger client that draining uses."""

    async def list_bookies(self) -> Mapping[BookieId, bool]: ...


class Held(NamedTuple):
    """What a bookie stores of one ledger according to the metadata."""

    entries: int
    size: int | None
    """Payload bytes; None: unknown until the ledger is closed."""
    ensemble_size: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """All ledgers that name the bookie."""

    ledgers: Mapping[LedgerId, Held]
    unreadable: tuple[LedgerId, ...] = ()
    """Ledgers whose metadata cannot be read; they may name the bookie too."""

    @property
    def size(self) -> int:
        """Payload bytes of closed ledgers."""
        return sum(held.size or 0 for held in self.ledgers.values())

    @property
    def entries(self) -> int:
        return sum(held.entries for held in self.ledgers.values())

    @property
    def open_count(self) -> int:
        return sum(held.is_open for held in self.ledgers.values())

    def widest(self) -> tuple[LedgerId, int] | None:
        """Return a ledger with the largest ensemble, and the size of that ensemble."""
        if not self.ledgers:
            return None
        ledger_id = max(self.ledgers, key=lambda ledger_id: self.ledgers[ledger_id].ensemble_size)
        return ledger_id, self.ledgers[ledger_id].ensemble_size


async def holdings_of(
    ledgers: LedgerMetadataSource,
    bookie_id: BookieId,
    *,
    among: Collection[LedgerId] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Holdings:
    """Return what the bookie stores, from the metadata of all ledgers or of those in `among`. Raises
    MetadataUnavailable.

    `progress` is called with the number of ledgers read so far.
    """
    found: dict[LedgerId, Held] = {}
    unreadable: list[LedgerId] = []

    source = ledgers.list_ledgers() if among is None else each(sorted(among))
    count = 0
    async with LedgerWalk(READS_IN_FLIGHT, unreadable_event="").run(source, ledgers.metadata) as results:
        async for ledger_id, metadata in results:
            count += 1
            progress(count)
            if metadata is Skip.UNREADABLE:
                unreadable.append(ledger_id)
            elif not isinstance(metadata, Skip) and bookie_id in members_of(metadata):
                share = share_of(metadata, (bookie_id,))
                is_open = metadata.state is not LedgerState.CLOSED
                found[ledger_id] = Held(share.entries, share.length, metadata.ensemble_size, is_open)
    return Holdings(found, tuple(unreadable))


@dataclass(frozen=True, slots=True)
class Started:
    """A drain or a recovery that was started, or that continues."""

    membership: Membership
    holdings: Holdings
    goes_on: bool
    """Whether it had been started before."""
    marked: int = 0
    """Number of ledgers that this call marked (recovery only)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of emptying a bookie."""

    ledgers_left: int
    ledgers_total: int
    size_left: int
    """Payload bytes of closed ledgers."""
    size_total: int
    bytes_per_s: float
    """Average over the last RATE_WINDOW_S; 0: no progress."""
    eta_s: float | None
    """None: unknown."""
    obstacles: tuple[str, ...]
    """Reasons why there is no progress, as sentences; empty: no obstacle is known."""
    unrecoverable: tuple[LedgerId, ...] = ()
    done: bool = False

    @property
    def part(self) -> float:
        """Completed share, 0 to 1: by bytes, or by ledgers if no size is known."""
        left, total = (self.size_left, self.size_total) if self.size_total else (self.ledgers_left, self.ledgers_total)
        return 1.0 if self.done or not total else max(0.0, 1 - left / total)


class BookieEmptier:
    """Starts, cancels and follows drains and recoveries. `by`: the name of the caller. `clock_ms`: wall clock."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        ledgers: Ledgers,
        *,
        randomness: RandomBits,
        clock_ms: Callable[[], int],
        by: str = "",
    ) -> None:
        self._store = store
        self._layout = layout
        self._ledgers = ledgers
        self._clock_ms = clock_ms
        self._by = by
        self._cookies = CookieStore(store, layout)
        self._memberships = MembershipStore(store, clock_ms=clock_ms)
        self._records = RecoveryRecords(store)
        self._marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms, worker_name=by)

    # --- start ----------------------------------------------------------------------------------------------------

    async def start_drain(
        self, bookie_id: BookieId, *, reason: str = "", progress: Callable[[int], None] = lambda _: None
    ) -> Started:
        """Start draining the bookie, or return the state of a drain that has been started before.

        Raises NotThere (unknown), CannotDrain, BelowQuorum; nothing has been changed then.
        """
        membership = await self._memberships.get(bookie_id)
        holdings = await holdings_of(self._ledgers, bookie_id, progress=progress)
        if membership.intent is Intent.DRAINING:
            return Started(membership, holdings, goes_on=True)
        bookies = await self._ledgers.list_bookies()
        await self._check_known(bookie_id, bookies, holdings)
        if membership.intent is Intent.REMOVED:
            raise CannotDrain(
                f"{bookie_id} is removed; `bindery bookie drain {bookie_id} --cancel` makes it active again"
            )
        if bookie_id not in bookies:
            raise CannotDrain(
                f"{bookie_id} is not registered. Start it, then drain it. If it is permanently lost, "
                f"`bindery bookie recover {bookie_id}` re-replicates its entries"
            )
        await self._check_quorum(bookie_id, bookies, holdings)
        membership = await self._memberships.set(
            bookie_id,
            Intent.DRAINING,
            reason=reason,
            by=self._by,
            version=membership.version,
            drain={"ledgers_total": len(holdings.ledgers), "bytes_total": holdings.size},
        )
        await self._record_event(
            "drain_started",
            f"{bookie_id} is being drained: {counted(len(holdings.ledgers), 'ledger')}, {holdings.size} bytes",
            bookie_id=bookie_id,
            ledgers=len(holdings.ledgers),
            bytes=holdings.size,
            reason=reason,
        )
        return Started(membership, holdings, goes_on=False)

    async def cancel_drain(self, bookie_id: BookieId) -> Membership:
        """Make the bookie an active member again and return its previous membership. Ledgers that have moved stay where
        they are.

        Raises CannotDrain if it is neither draining nor removed.
        """
        before = await self._memberships.get(bookie_id)
        if before.intent not in (Intent.DRAINING, Intent.REMOVED):
            raise CannotDrain(f"{bookie_id} is not being drained: it is {before.effective(self._clock_ms()).value}")
        await self._memberships.clear(bookie_id)
        kind = "drain_cancelled" if before.intent is Intent.DRAINING else "removal_cancelled"
        await self._record_event(kind, f"the membership of {bookie_id} is active again", bookie_id=bookie_id)
        return before

    async def plan_recovery(self, bookie_id: BookieId, *, progress: Callable[[int], None] = lambda _: None) -> Started:
        """Return what a recovery has to do, without changing anything. Raises NotThere (unknown), CannotRecover
        (registered)."""
        membership = await self._memberships.get(bookie_id)
        bookies = await self._ledgers.list_bookies()
        if bookie_id in bookies:
            raise CannotRecover(
                f"{bookie_id} is registered: it is not lost. `bindery bookie drain {bookie_id}` drains a running "
                "bookie. If it was stopped just now, its registration ends with its ZooKeeper session; try again then"
            )
        holdings = await holdings_of(self._ledgers, bookie_id, progress=progress)
        await self._check_known(bookie_id, bookies, holdings, membership)
        return Started(membership, holdings, goes_on=membership.intent is Intent.REMOVED)

    async def start_recovery(
        self, plan: Started, *, reason: str = "", progress: Callable[[int], None] = lambda _: None
    ) -> Started:
        """Declare the bookie permanently lost and mark its ledgers. `progress` is called with the number of ledgers
        processed.

        A bookie with this id refuses to start from now on. Raises VersionConflict if its membership has changed since
        `plan_recovery`.
        """
        bookie_id = plan.membership.bookie_id
        membership = plan.membership
        if not plan.goes_on:
            membership = await self._memberships.set(
                bookie_id,
                Intent.REMOVED,
                reason=reason,
                by=self._by,
                version=membership.version,
                drain={"ledgers_total": len(plan.holdings.ledgers), "bytes_total": plan.holdings.size},
            )
            await self._record_event(
                "bookie_removed",
                f"{bookie_id} was declared permanently lost: {counted(len(plan.holdings.ledgers), 'ledger')}",
                bookie_id=bookie_id,
                ledgers=len(plan.holdings.ledgers),
                reason=reason,
            )
        await self._marks.prepare()
        marked = 0
        for count, (ledger_id, held) in enumerate(plan.holdings.ledgers.items(), 1):
            await self._record_mark(ledger_id, bookie_id, held)
            marked += await self._marks.mark(ledger_id, (bookie_id,))
            progress(count)
        return Started(membership, plan.holdings, plan.goes_on, marked)

    async def retire(self, bookie_id: BookieId) -> bool:
        """Delete the cookie of a removed bookie that no ledger names any more. Return False if it had none.

        Raises CannotRecover, without deleting anything, while the bookie is registered or a ledger names it;
        MetadataRollbackSuspected, because a ledger that names it may be missing in the metadata.
        """
        await refuse_if_suspected(self._store, self._layout, f"the cookie of {bookie_id} is not deleted")
        plan = await self.plan_recovery(bookie_id)
        if plan.holdings.ledgers or plan.holdings.unreadable:
            raise CannotRecover(f"ledgers still name {bookie_id}", ledgers=len(plan.holdings.ledgers))
        cookie = await self._cookies.read(bookie_id)
        if cookie is None:
            return False
        await self._cookies.delete(bookie_id, version=cookie.version)
        await self._record_event(
            "bookie_retired", f"no ledger names {bookie_id} any more; its cookie was deleted", bookie_id=bookie_id
        )
        return True

    async def finish_drain(self, bookie_id: BookieId) -> None:
        """Record the end of a drain, unless it is recorded already. For clients that followed the drain to its end."""
        if not await is_drain_end_recorded(self._records, bookie_id):
            await self._records.append_history(drain_finished(bookie_id, self._clock_ms(), by=self._by))

    # --- follow ---------------------------------------------------------------------------------------------------

    async def follow(
        self, started: Started, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep, poll_s: float = POLL_S
    ) -> AsyncIterator[Progress]:
        """Yield the progress repeatedly. The last one is `done`: no ledger names the bookie, according to a listing of
        all ledgers that started after the bookie was read-only or absent.

        Ends early, without `done`, if only unrecoverable ledgers are left.
        """
        bookie_id = started.membership.bookie_id
        loop = asyncio.get_running_loop()
        pace = _Pace(started.membership.drain, started.holdings)
        left = started.holdings
        while True:
            began = loop.time()
            # read before the listing of all ledgers
            is_writable = bool((await self._ledgers.list_bookies()).get(bookie_id))
            if not left.ledgers and not is_writable:
                left = await holdings_of(self._ledgers, bookie_id)
            if not left.ledgers and not left.unreadable and not is_writable:
                yield pace.progress(left, (), (), now_s=loop.time(), done=True)
                return
            obstacles, unrecoverable = await self.obstacles(bookie_id, left)
            yield pace.progress(left, obstacles, unrecoverable, now_s=loop.time())
            if unrecoverable and len(unrecoverable) == len(left.ledgers):
                return
            await pause(max(poll_s, POLL_SHARE * (loop.time() - began)))
            if left.ledgers:
                left = Holdings((await holdings_of(self._ledgers, bookie_id, among=left.ledgers)).ledgers)

    async def obstacles(self, bookie_id: BookieId, left: Holdings) -> tuple[tuple[str, ...], tuple[LedgerId, ...]]:
        """Return the reasons why there is no progress, as sentences, and the ledgers that cannot be repaired."""
        sentences = []
        if not left.ledgers and (await self._ledgers.list_bookies()).get(bookie_id):
            sentences.append(still_writable(bookie_id))
        if not await self._marks.is_enabled():
            pause = await self._records.pause_info()
            why = f" ({pause.by}: {pause.reason})" if pause else ""
            sentences.append(f"recovery is paused{why}; `bindery recovery resume` resumes it")
        if await current_auditor(self._store, self._layout) is None:
            sentences.append("no auditor is running, so no ledgers are marked: start one")
        elif not await self._records.reports() and not await self._marks.locks():  # Apache's workers write no reports
            sentences.append("no replication worker is running, so nothing is copied: start an auditor with workers")
        if left.unreadable:
            shown = ", ".join(map(str, left.unreadable[:SHOWN_MAX]))
            sentences.append(f"the metadata of {counted(len(left.unreadable), 'ledger')} cannot be read: {shown}")
        records = [
            record
            for record in await asyncio.gather(*map(self._records.get, list(left.ledgers)[:RECORDS_READ_MAX]))
            if record is not None
        ]
        blocked: dict[Obstacle, list[RecoveryRecord]] = {}
        for record in records:
            if record.obstacle is not Obstacle.NONE and record.state is not RecoveryState.COPYING:
                blocked.setdefault(record.obstacle, []).append(record)
        for obstacle, those in blocked.items():
            example = those[0]
            detail = example.detail or example.last_error or obstacle.value.replace("_", " ")
            waiting = counted(len(those), "ledger waits", "ledgers wait")
            sentences.append(f"{waiting} ({obstacle.value}); ledger {example.ledger_id}: {detail}")
        unrecoverable = tuple(r.ledger_id for r in records if r.state is RecoveryState.UNRECOVERABLE)
        if unrecoverable and len(left.ledgers) <= RECORDS_READ_MAX:
            return tuple(sentences), unrecoverable
        return tuple(sentences), ()

    async def check_known(self, bookie_id: BookieId) -> None:
        """Raise NotThere, with the names of all known bookies, unless the bookie is registered or has a cookie."""
        bookies = await self._ledgers.list_bookies()
        await self._check_known(bookie_id, bookies, Holdings({}))

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _check_known(
        self,
        bookie_id: BookieId,
        bookies: Mapping[BookieId, bool],
        holdings: Holdings,
        membership: Membership | None = None,
    ) -> None:
        has_membership = membership is not None and membership.version != ABSENT
        if (
            bookie_id in bookies
            or holdings.ledgers
            or has_membership
            or await self._cookies.read(bookie_id) is not None
        ):
            return
        known = sorted({*await self._cookies.bookies(), *bookies})
        raise NotThere(f"{bookie_id} is not a bookie of this cluster; those that are: {', '.join(known) or 'none'}")

    async def _check_quorum(self, bookie_id: BookieId, bookies: Mapping[BookieId, bool], holdings: Holdings) -> None:
        widest = holdings.widest()
        if widest is None:
            return
        remaining = await self.remaining(bookie_id, bookies)
        ledger_id, needed = widest
        if len(remaining) < needed:
            raise BelowQuorum(
                f"{bookie_id} cannot be drained: ledger {ledger_id} needs {needed} bookies, and without it "
                f"{len(remaining)} would be writable and neither draining nor in maintenance"
                f"{': ' + ', '.join(remaining) if remaining else ''}. Add {needed - len(remaining)} first"
            )

    async def remaining(self, bookie_id: BookieId, bookies: Mapping[BookieId, bool]) -> list[BookieId]:
        """Return the bookies that can take over the data of this bookie."""
        now_ms = self._clock_ms()
        memberships = await self._memberships.all()
        busy = {b for b, m in memberships.items() if m.effective(now_ms) is not Intent.ACTIVE}
        return sorted(b for b, is_writable in bookies.items() if is_writable and b != bookie_id and b not in busy)

    async def _record_mark(self, ledger_id: LedgerId, bookie_id: BookieId, held: Held) -> None:
        def change(current: RecoveryRecord | None) -> RecoveryRecord:
            return marked_for(
                current,
                ledger_id,
                (bookie_id,),
                Reason.OPERATOR,
                missing_entries=held.entries,
                missing_bytes=held.size,
                now_ms=self._clock_ms(),
            )

        await self._records.update(ledger_id, change)

    async def _record_event(self, kind: str, text: str, **fields: object) -> None:
        await self._records.append_history(HistoryEvent(self._clock_ms(), kind, text, {"by": self._by, **fields}))


@dataclass(slots=True)
class _Pace:
    """Totals, and the rate at which the remaining data shrinks. `totals`: the initial values, stored with the
    membership."""

    totals: Mapping[str, int]
    begin: Holdings
    ledgers_total: int = 0
    size_total: int = 0
    _seen: "deque[tuple[float, int]]" = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.ledgers_total = self.totals.get("ledgers_total", 0)
        self.size_total = self.totals.get("bytes_total", 0)
        self.widen(self.begin)

    def widen(self, holdings: Holdings) -> None:
        """Raise the totals if `holdings` exceeds them, because ledgers were open at the start or are new."""
        self.ledgers_total = max(self.ledgers_total, len(holdings.ledgers))
        self.size_total = max(self.size_total, holdings.size)

    def progress(
        self,
        left: Holdings,
        obstacles: tuple[str, ...],
        unrecoverable: tuple[LedgerId, ...],
        *,
        now_s: float,
        done: bool = False,
    ) -> Progress:
        self.widen(left)
        self._seen.append((now_s, left.size))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        then_s, then_size = self._seen[0]
        rate = max(0.0, (then_size - left.size) / (now_s - then_s)) if now_s > then_s else 0.0
        return Progress(
            ledgers_left=len(left.ledgers),
            ledgers_total=self.ledgers_total,
            size_left=left.size,
            size_total=self.size_total,
            bytes_per_s=rate,
            eta_s=left.size / rate if rate else None,
            obstacles=obstacles,
            unrecoverable=unrecoverable,
            done=done,
        )


async def set_maintenance(
    memberships: MembershipStore, bookie_id: BookieId, *, until_ms: int, reason: str = "", by: str = ""
) -> Membership:
    """Set a maintenance lease: until it ends, no data of the absent bookie is re-replicated. Calling it again sets a
    new end.

    Raises Conflict while the bookie is draining or removed.
    """
    current = await memberships.get(bookie_id)
    if current.intent in (Intent.DRAINING, Intent.REMOVED):
        raise Conflict(
            f"{bookie_id} is {current.intent.value}. First make it active again: "
            f"`bindery bookie drain {bookie_id} --cancel`"
        )
    return await memberships.set(
        bookie_id, Intent.MAINTENANCE, until_ms=until_ms, reason=reason, by=by, version=current.version
    )


async def end_maintenance(memberships: MembershipStore, bookie_id: BookieId) -> bool:
    """End the maintenance of the bookie. Return False if it was not in maintenance."""
    if (await memberships.get(bookie_id)).intent is not Intent.MAINTENANCE:
        return False
    await memberships.clear(bookie_id)
    return True
