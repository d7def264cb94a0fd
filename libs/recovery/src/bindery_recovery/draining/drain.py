"""Emptying a bookie on purpose: a drain while it lives, a recovery when it is gone. Both can be begun again any time.

    drain    active --start_drain--> DRAINING: read-only; the auditor marks its ledgers, workers copy, metadata leave it
             --nothing names it any more--> stop it, retire its cookie            --cancel_drain--> active
    recover  absent --start_recovery--> REMOVED, its ledgers marked by us
             --nothing names it any more--> its cookie is retired here            --cancel_drain--> active

What is left is read from ledger metadata each time, and nothing else is remembered: who follows a drain may end and
come back, and several may follow. Nothing is changed on the bookie itself: one of ours turns read-only by itself. As
long as it is registered as writable, a new ledger may name it the moment after none did; so it is called empty only if
it was read-only, or absent, before the listing began that found no ledger.

A drain is refused below quorum: when fewer writable bookies would remain, neither draining nor in maintenance, than the
largest ensemble of a ledger that names the bookie has members. No bookie may stand twice in an ensemble, so that ledger
could never leave.
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
from bindery_recovery.records.drain_end import drain_finished, is_drain_end_told
from bindery_recovery.records.reasons import marked_for

READS_IN_FLIGHT: Final = 64
POLL_S: Final = 1.0
POLL_SHARE: Final = 5
"""Between two looks passes this many times what a look took: looking must not be the load."""
RATE_WINDOW_S: Final = 30.0
RECORDS_READ_MAX: Final = 200
"""Recovery records of what is left that are read to say why it does not move."""
SHOWN_MAX: Final = 5


class CannotDrain(Conflict):
    code = "cannot_drain"


class BelowQuorum(CannotDrain):
    code = "below_quorum"


class CannotRecover(Conflict):
    code = "cannot_recover"


def still_writable(bookie_id: BookieId) -> str:
    """Why a bookie is not done although no ledger names it, and what to do about it."""
    return (
        f"{bookie_id} is still registered as writable: new ledgers may be placed on it. Bindery's bookies turn "
        "read-only within seconds; set one of Apache's read-only with its HTTP admin API (PUT "
        '/api/v1/bookie/state/readonly with {"readOnly": true}), or restart it with forceReadOnlyBookie=true'
    )


class LedgerMetadataSource(Protocol):
    """All ledgers and their metadata, as a ledger client gives them."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...


class Ledgers(LedgerMetadataSource, Protocol):
    """The part of the ledger client that is needed here."""

    async def list_bookies(self) -> Mapping[BookieId, bool]: ...


class Held(NamedTuple):
    """What metadata say a bookie holds of one ledger."""

    entries: int
    size: int | None
    """Payload bytes; None: not known before the ledger is closed."""
    ensemble_size: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """Every ledger that names the bookie."""

    ledgers: Mapping[LedgerId, Held]
    unreadable: tuple[LedgerId, ...] = ()
    """Ledgers whose metadata cannot be read: they may name it too."""

    @property
    def size(self) -> int:
        """Payload bytes, of closed ledgers."""
        return sum(held.size or 0 for held in self.ledgers.values())

    @property
    def entries(self) -> int:
        return sum(held.entries for held in self.ledgers.values())

    @property
    def open_count(self) -> int:
        return sum(held.is_open for held in self.ledgers.values())

    def widest(self) -> tuple[LedgerId, int] | None:
        """A ledger with the largest ensemble, and its size."""
        if not self.ledgers:
            return None
        ledger_id = max(self.ledgers, key=lambda ledger_id: self.ledgers[ledger_id].ensemble_size)
        return ledger_id, self.ledgers[ledger_id].ensemble_size


async def holdings_of(
    ledgers: LedgerMetadataSource, bookie_id: BookieId, *, among: Collection[LedgerId] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Holdings:  # fmt: skip
    """Read the metadata of all ledgers, or of those `among`. Raises MetadataUnavailable: then nothing is known.

    `progress` is told how many were read.
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
    """A drain or a recovery that was begun, or goes on."""

    membership: Membership
    holdings: Holdings
    goes_on: bool
    """It had been begun before."""
    marked: int = 0
    """Ledgers that this call marked; of a recovery."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the emptying of a bookie is."""

    ledgers_left: int
    ledgers_total: int
    size_left: int
    """Payload bytes, of closed ledgers."""
    size_total: int
    bytes_per_s: float
    """Over the last RATE_WINDOW_S; 0: nothing moved."""
    eta_s: float | None
    """None: cannot be told."""
    obstacles: tuple[str, ...]
    """Why it does not move, in sentences; empty: it does, as far as can be seen."""
    unrecoverable: tuple[LedgerId, ...] = ()
    done: bool = False

    @property
    def part(self) -> float:
        """0 to 1: by bytes, or by ledgers where those have none."""
        left, total = (self.size_left, self.size_total) if self.size_total else (self.ledgers_left, self.ledgers_total)
        return 1.0 if self.done or not total else max(0.0, 1 - left / total)


class BookieEmptier:
    """Begins, cancels and follows drains and recoveries. `by`: who asks. `clock_ms`: wall clock."""

    def __init__(
        self, store: MetadataStore, layout: LedgersLayout, ledgers: Ledgers, *, randomness: RandomBits,
        clock_ms: Callable[[], int], by: str = "",
    ) -> None:  # fmt: skip
        self._store = store
        self._layout = layout
        self._ledgers = ledgers
        self._clock_ms = clock_ms
        self._by = by
        self._cookies = CookieStore(store, layout)
        self._memberships = MembershipStore(store, clock_ms=clock_ms)
        self._records = RecoveryRecords(store)
        self._marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms, worker_name=by)

    # --- begin ----------------------------------------------------------------------------------------------------

    async def start_drain(
        self, bookie_id: BookieId, *, reason: str = "", progress: Callable[[int], None] = lambda _: None
    ) -> Started:
        """Say that the bookie is to be emptied. Again: look how far it is.

        Raises NotThere (unknown), CannotDrain, BelowQuorum; nothing was changed then.
        """
        membership = await self._memberships.get(bookie_id)
        holdings = await holdings_of(self._ledgers, bookie_id, progress=progress)
        if membership.intent is Intent.DRAINING:
            return Started(membership, holdings, goes_on=True)
        bookies = await self._ledgers.list_bookies()
        await self._check_known(bookie_id, bookies, holdings)
        if membership.intent is Intent.REMOVED:
            raise CannotDrain(f"{bookie_id} is removed; `bindery bookie drain {bookie_id} --cancel` takes that back")
        if bookie_id not in bookies:
            raise CannotDrain(
                f"{bookie_id} is not registered. Start it and drain it then; when it is gone for good, "
                f"`bindery bookie recover {bookie_id}` makes new copies of what it held"
            )
        await self._check_quorum(bookie_id, bookies, holdings)
        membership = await self._memberships.set(
            bookie_id, Intent.DRAINING, reason=reason, by=self._by, version=membership.version,
            drain={"ledgers_total": len(holdings.ledgers), "bytes_total": holdings.size},
        )  # fmt: skip
        await self._tell(
            "drain_started", f"{bookie_id} is being drained: {len(holdings.ledgers)} ledgers, {holdings.size} bytes",
            bookie_id=bookie_id, ledgers=len(holdings.ledgers), bytes=holdings.size, reason=reason,
        )  # fmt: skip
        return Started(membership, holdings, goes_on=False)

    async def cancel_drain(self, bookie_id: BookieId) -> Membership:
        """The bookie is an ordinary member again. What has moved stays where it is. Returns what stood before.

        Raises CannotDrain when it is neither draining nor removed.
        """
        before = await self._memberships.get(bookie_id)
        if before.intent not in (Intent.DRAINING, Intent.REMOVED):
            raise CannotDrain(f"{bookie_id} is not being drained: it is {before.effective(self._clock_ms()).value}")
        await self._memberships.clear(bookie_id)
        kind = "drain_cancelled" if before.intent is Intent.DRAINING else "removal_cancelled"
        await self._tell(kind, f"{bookie_id} is an ordinary member again", bookie_id=bookie_id)
        return before

    async def plan_recovery(self, bookie_id: BookieId, *, progress: Callable[[int], None] = lambda _: None) -> Started:
        """What a recovery would have to do; changes nothing. Raises NotThere (unknown), CannotRecover (registered)."""
        membership = await self._memberships.get(bookie_id)
        bookies = await self._ledgers.list_bookies()
        if bookie_id in bookies:
            raise CannotRecover(
                f"{bookie_id} is registered: it is not gone. `bindery bookie drain {bookie_id}` empties a living one; "
                "of one that was just stopped the registration ends with its ZooKeeper session"
            )
        holdings = await holdings_of(self._ledgers, bookie_id, progress=progress)
        await self._check_known(bookie_id, bookies, holdings, membership)
        return Started(membership, holdings, goes_on=membership.intent is Intent.REMOVED)

    async def start_recovery(
        self, plan: Started, *, reason: str = "", progress: Callable[[int], None] = lambda _: None
    ) -> Started:
        """Declare the bookie gone for good and mark its ledgers. `progress` is told how many are marked.

        A bookie that registers from now on with this id refuses to start. Raises VersionConflict when somebody
        changed its membership since `plan_recovery`.
        """
        bookie_id = plan.membership.bookie_id
        membership = plan.membership
        if not plan.goes_on:
            membership = await self._memberships.set(
                bookie_id, Intent.REMOVED, reason=reason, by=self._by, version=membership.version,
                drain={"ledgers_total": len(plan.holdings.ledgers), "bytes_total": plan.holdings.size},
            )  # fmt: skip
            await self._tell(
                "bookie_removed", f"{bookie_id} was declared gone for good: {len(plan.holdings.ledgers)} ledgers",
                bookie_id=bookie_id, ledgers=len(plan.holdings.ledgers), reason=reason,
            )  # fmt: skip
        await self._marks.prepare()
        marked = 0
        for count, (ledger_id, held) in enumerate(plan.holdings.ledgers.items(), 1):
            await self._note(ledger_id, bookie_id, held)
            marked += await self._marks.mark(ledger_id, (bookie_id,))
            progress(count)
        return Started(membership, plan.holdings, plan.goes_on, marked)

    async def retire(self, bookie_id: BookieId) -> bool:
        """Remove the cookie of a removed bookie that nothing names any more. False: it had none.

        Raises CannotRecover, and nothing was removed, while it is registered or named.
        """
        plan = await self.plan_recovery(bookie_id)
        if plan.holdings.ledgers or plan.holdings.unreadable:
            raise CannotRecover(f"ledgers still name {bookie_id}", ledgers=len(plan.holdings.ledgers))
        cookie = await self._cookies.read(bookie_id)
        if cookie is None:
            return False
        await self._cookies.delete(bookie_id, version=cookie.version)
        await self._tell("bookie_retired", f"no ledger names {bookie_id} any more; its cookie is gone",
                         bookie_id=bookie_id)  # fmt: skip
        return True

    async def finish_drain(self, bookie_id: BookieId) -> None:
        """Note that it is done, unless the auditor did: for who followed a drain to its end."""
        if not await is_drain_end_told(self._records, bookie_id):
            await self._records.append_history(drain_finished(bookie_id, self._clock_ms(), by=self._by))

    # --- follow ---------------------------------------------------------------------------------------------------

    async def follow(
        self, started: Started, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep, poll_s: float = POLL_S
    ) -> AsyncIterator[Progress]:
        """How far it is, again and again; the last one is `done`: all ledgers were read after the bookie had turned
        read-only or had gone, and none names it.

        Ends early, without `done`, when nothing but unrecoverable ledgers is left.
        """
        bookie_id = started.membership.bookie_id
        loop = asyncio.get_running_loop()
        pace = _Pace(started.membership.drain, started.holdings)
        left = started.holdings
        while True:
            began = loop.time()
            is_writable = bool((await self._ledgers.list_bookies()).get(bookie_id))  # before all ledgers are read
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
        """(why it does not move, in sentences; ledgers that cannot be healed)."""
        sentences = []
        if not left.ledgers and (await self._ledgers.list_bookies()).get(bookie_id):
            sentences.append(still_writable(bookie_id))
        if not await self._marks.is_enabled():
            pause = await self._records.pause_info()
            why = f" ({pause.by}: {pause.reason})" if pause else ""
            sentences.append(f"recovery is paused{why}; `bindery recovery resume` lets it go on")
        if await current_auditor(self._store, self._layout) is None:
            sentences.append("no auditor is running, so no ledgers are marked: start one")
        elif not await self._records.reports() and not await self._marks.locks():  # Apache's workers do not report
            sentences.append("no replication worker is running, so nothing is copied: start an auditor with workers")
        if left.unreadable:
            shown = ", ".join(map(str, left.unreadable[:SHOWN_MAX]))
            sentences.append(f"the metadata of {len(left.unreadable)} ledgers cannot be read: {shown}")
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
            sentences.append(f"{len(those)} ledgers wait ({obstacle.value}); ledger {example.ledger_id}: {detail}")
        unrecoverable = tuple(r.ledger_id for r in records if r.state is RecoveryState.UNRECOVERABLE)
        if unrecoverable and len(left.ledgers) <= RECORDS_READ_MAX:
            return tuple(sentences), unrecoverable
        return tuple(sentences), ()

    async def check_known(self, bookie_id: BookieId) -> None:
        """Raises NotThere unless the bookie is registered or has a cookie, with the names of those that are."""
        bookies = await self._ledgers.list_bookies()
        await self._check_known(bookie_id, bookies, Holdings({}))

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _check_known(
        self, bookie_id: BookieId, bookies: Mapping[BookieId, bool], holdings: Holdings,
        membership: Membership | None = None,
    ) -> None:  # fmt: skip
        is_said = membership is not None and membership.version != ABSENT
        if bookie_id in bookies or holdings.ledgers or is_said or await self._cookies.read(bookie_id) is not None:
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
        """The bookies that could take over from this one."""
        now_ms = self._clock_ms()
        memberships = await self._memberships.all()
        busy = {b for b, m in memberships.items() if m.effective(now_ms) is not Intent.ACTIVE}
        return sorted(b for b, is_writable in bookies.items() if is_writable and b != bookie_id and b not in busy)

    async def _note(self, ledger_id: LedgerId, bookie_id: BookieId, held: Held) -> None:
        def change(current: RecoveryRecord | None) -> RecoveryRecord:
            return marked_for(
                current, ledger_id, (bookie_id,), Reason.OPERATOR, missing_entries=held.entries,
                missing_bytes=held.size, now_ms=self._clock_ms(),
            )  # fmt: skip

        await self._records.update(ledger_id, change)

    async def _tell(self, kind: str, text: str, **fields: object) -> None:
        await self._records.append_history(HistoryEvent(self._clock_ms(), kind, text, {"by": self._by, **fields}))


@dataclass(slots=True)
class _Pace:
    """Totals, and how fast what is left gets less. `totals`: of the beginning, as the membership remembers them."""

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
        """More was found than there was at the beginning: ledgers that were open then, or new ones."""
        self.ledgers_total = max(self.ledgers_total, len(holdings.ledgers))
        self.size_total = max(self.size_total, holdings.size)

    def progress(
        self, left: Holdings, obstacles: tuple[str, ...], unrecoverable: tuple[LedgerId, ...], *, now_s: float,
        done: bool = False,
    ) -> Progress:  # fmt: skip
        self.widen(left)
        self._seen.append((now_s, left.size))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        then_s, then_size = self._seen[0]
        rate = max(0.0, (then_size - left.size) / (now_s - then_s)) if now_s > then_s else 0.0
        return Progress(
            ledgers_left=len(left.ledgers), ledgers_total=self.ledgers_total, size_left=left.size,
            size_total=self.size_total, bytes_per_s=rate, eta_s=left.size / rate if rate else None,
            obstacles=obstacles, unrecoverable=unrecoverable, done=done,
        )  # fmt: skip


async def set_maintenance(
    memberships: MembershipStore, bookie_id: BookieId, *, until_ms: int, reason: str = "", by: str = ""
) -> Membership:
    """A lease: until then the bookie may be away and nobody copies what it holds. Again: the new end counts.

    Raises Conflict while it is draining or removed.
    """
    current = await memberships.get(bookie_id)
    if current.intent in (Intent.DRAINING, Intent.REMOVED):
        raise Conflict(
            f"{bookie_id} is {current.intent.value}; `bindery bookie drain {bookie_id} --cancel` ends that first"
        )
    return await memberships.set(
        bookie_id, Intent.MAINTENANCE, until_ms=until_ms, reason=reason, by=by, version=current.version
    )


async def end_maintenance(memberships: MembershipStore, bookie_id: BookieId) -> bool:
    """False: it was not in maintenance."""
    if (await memberships.get(bookie_id)).intent is not Intent.MAINTENANCE:
        return False
    await memberships.clear(bookie_id)
    return True
