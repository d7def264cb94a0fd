"""The auditor's work during one term as leader: detect lost bookies, mark ledgers, run the periodic checks.

| part            | module          | does                                                                         |
|-----------------|-----------------|------------------------------------------------------------------------------|
| bookies, delay, | bookie_watch,   | determines which bookies are registered and which are lost, and whether      |
| switch          | lost_bookies    | ledgers may be marked                                                        |
| audit           | bookie_audit,   | marks the ledgers of bookies that are lost, removed or draining              |
|                 | ledger_index    |                                                                              |
| closed ledgers  | closing_check   | checks recently closed ledgers, marks those with missing entries             |
| ledgers         | full_check      | reads replicas of every ledger, marks ledgers with missing entries           |
| placement       | placement_check | counts ensembles that violate the placement policy                           |
| racks           | placement_      | marks ledgers on fewer racks than possible, a few at a time, when the racks  |
|                 | repair          | of the bookies have changed                                                  |
| replicas        | replica_check   | counts entries with too few replicas                                         |

Rules for all parts
- Every write is a transaction that checks the leader's vote. NotLeader ends the term at once, with all its parts.
- While recovery is disabled, nothing is marked and the checks pause. When it is enabled again, the bookies are audited
  again.
- If the metadata store fails, the part is postponed and tries again after a pause. An incomplete read of the metadata
  or an outage never leads to a mark.
- A check of all ledgers waits while an audit is pending.

The time at which each check last finished is stored in BookKeeper's znodes. If an operator sets such a time back, the
check runs soon.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, Corrupt
from bindery_core.ids import BookieId
from bindery_core.placement.placement import DEFAULT_RACK
from bindery_core.sources import RandomFloats
from bindery_kit.observability.logs import get_logger
from bindery_metadata.bookies.membership import MembershipStore
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.layout.layout import CheckKind, LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.checks.bookie_audit import AuditState, BookieAudit, LedgerMarker
from bindery_recovery.checks.checker import Depth
from bindery_recovery.checks.closing_check import ClosingCheck, ClosingState
from bindery_recovery.checks.full_check import CURSOR, FullCheck, is_unfinished
from bindery_recovery.checks.placement_check import PlacementResult, check_placement
from bindery_recovery.checks.placement_repair import PlacementRepair, PlacementRepairState
from bindery_recovery.checks.replica_check import check_replicas
from bindery_recovery.cluster.bookie_watch import AuditorLimits, BookieWatch
from bindery_recovery.settings import RecoverySettings

__all__ = ["Auditor", "AuditorLimits", "AuditorState", "CheckState"]

CLOCK_SKEW_MAX_S: Final = 3600.0
"""Maximum clock skew in seconds. A check that finished further in the future than this counts as never run."""
GATE_POLL_S: Final = 1.0
"""Interval in seconds at which a waiting check tests whether it may continue."""

log = get_logger(__name__)


@dataclass(slots=True)
class CheckState:
    """State of a periodic check. Times in ms since 1970; 0: not since the process started."""

    interval_s: float
    """0: the check is disabled."""
    is_running: bool = False
    started_ms: int = 0
    finished_ms: int = 0
    duration_s: float = 0.0
    last_error: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    """Results of the last check that finished in this process."""


@dataclass(slots=True)
class AuditorState:
    """State of this process as an auditor, for health, metrics and the admin API."""

    checks: dict[CheckKind, CheckState]
    is_leading: bool = False
    leading_since_ms: int = 0
    """Start of the last term in ms since 1970; 0: none."""
    terms: int = 0
    """Number of terms since the process started."""
    audit: AuditState = field(default_factory=AuditState)
    closings: ClosingState = field(default_factory=ClosingState)
    placement_repair: PlacementRepairState = field(default_factory=PlacementRepairState)


class _Bookies:
    """The part of the watch that the checks use."""

    def __init__(self, watch: BookieWatch) -> None:
        self._watch = watch

    def registered(self) -> Mapping[BookieId, bool]:
        return self._watch.snapshot.registered

    def definitely_lost(self) -> frozenset[BookieId]:
        return self._watch.definitely_lost()


class Auditor:
    """The auditor of one process. `AuditorElection.run` calls `lead`."""

    def __init__(
        self,
        client: LedgerClient,
        store: MetadataStore,
        layout: LedgersLayout,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        memberships: MembershipStore,
        *,
        settings: RecoverySettings,
        clock_ms: Callable[[], int],
        randomness: RandomFloats,
        limits: AuditorLimits | None = None,
        racks: Callable[[], Mapping[BookieId, str]] | None = None,
    ) -> None:
        """`racks`: the racks of the known bookies; None: all bookies are in one rack."""
        self._client = client
        self._store = store
        self._layout = layout
        self._marks = marks
        self._records = records
        self._memberships = memberships
        self._settings = settings
        self._clock_ms = clock_ms
        self._randomness = randomness
        self._limits = limits or AuditorLimits()
        self._racks = racks
        self.watch: BookieWatch | None = None
        """None unless this process is the leader."""
        self.full_check: FullCheck | None = None
        """None unless the check is running."""
        self.state = AuditorState(
            {
                CheckKind.LEDGERS: CheckState(settings.ledger_check_interval_s),
                CheckKind.PLACEMENT: CheckState(settings.placement_check_interval_s),
                CheckKind.REPLICAS: CheckState(settings.replica_check_interval_s),
            }
        )

    async def lead(self, leadership: Leadership) -> None:
        """Run one term, until cancelled. Raises NotLeader when the term is over, and errors other than BinderyError
        from any part."""
        watch = BookieWatch(
            self._store,
            self._layout,
            self._marks,
            self._records,
            self._memberships,
            leadership=leadership,
            delay_s=self._settings.lost_bookie_delay_s,
            limits=self._limits,
            clock_ms=self._clock_ms,
        )
        end_watch = await self._until_done(watch.begin)
        marker = LedgerMarker(self._marks, self._records, leadership=leadership, clock_ms=self._clock_ms)
        audit = BookieAudit(
            self._client,
            self._store,
            self._layout,
            self._records,
            watch,
            marker,
            leadership=leadership,
            bookie_check_interval_s=self._settings.bookie_check_interval_s,
            drain_interval_s=self._settings.drain_interval_s,
            limits=self._limits,
            clock_ms=self._clock_ms,
            state=self.state.audit,
        )
        gate = self._gate(watch, audit)
        closings = ClosingCheck(
            self._client,
            ClosingRecords(self._store),
            self._marks,
            marker,
            _Bookies(watch),
            leadership=leadership,
            may_go_on=gate,
            retry_s=self._limits.retry_s,
            state=self.state.closings,
        )
        parts: list[Coroutine[Any, Any, None]] = [
            watch.follow_bookies(),
            watch.follow_delay(),
            watch.follow_switch(),
            audit.run(),
            closings.run(),
            self._repeat(
                CheckKind.LEDGERS, leadership, gate, lambda: self._check_ledgers(leadership, watch, marker, gate)
            ),
            self._repeat(CheckKind.PLACEMENT, leadership, gate, lambda: self._check_placement(leadership, watch)),
            self._repeat(CheckKind.REPLICAS, leadership, gate, lambda: self._check_replicas(leadership)),
        ]
        if self._settings.placement_repair and self._racks is not None:
            repair = PlacementRepair(
                self._client,
                self._records,
                self._marks,
                marker,
                racks=self._racks,
                snapshot=lambda: watch.snapshot,
                leadership=leadership,
                may_go_on=gate,
                delay_s=self._settings.placement_repair_delay_s,
                limits=self._limits,
                clock_ms=self._clock_ms,
                state=self.state.placement_repair,
                on_checked=self._placement_checked,
            )
            parts.append(repair.run())
        watch.record(
            HistoryEvent(self._clock_ms(), "leader", f"{leadership.name} is the auditor", {"name": leadership.name})
        )
        self.watch = watch
        state = self.state
        state.is_leading, state.leading_since_ms, state.terms = True, self._clock_ms(), state.terms + 1
        try:
            await _run_all(parts)
        finally:
            end_watch()
            state.is_leading = False
            self.watch = None
            self.full_check = None

    # --- periodic checks ------------------------------------------------------------------------------------------

    def _gate(self, watch: BookieWatch, audit: BookieAudit) -> Callable[[], Awaitable[None]]:
        """Return a function that waits until a check may continue with its next ledger."""

        def is_open() -> bool:
            is_audited = self.state.audit.audits > 0 and not audit.is_pending
            return watch.is_enabled and not watch.is_blind and is_audited

        async def wait() -> None:
            while not is_open():  # noqa: ASYNC110 - several conditions open the gate, and none is urgent
                await asyncio.sleep(GATE_POLL_S)

        return wait

    async def _repeat(
        self,
        kind: CheckKind,
        leadership: Leadership,
        gate: Callable[[], Awaitable[None]],
        check: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        """Run `check` whenever it is due. Never returns."""
        state = self.state.checks[kind]
        if state.interval_s <= 0:
            await asyncio.Event().wait()
        while True:
            try:
                wait_s = await self._due_in_s(kind, state.interval_s)
                if wait_s > 0:
                    await asyncio.sleep(min(wait_s, self._limits.check_poll_s))
                    continue
                await gate()
                await self._run_check(state, check)
                await self._marks.set_check_time_ms(kind, self._clock_ms(), guard=leadership)
            except NotLeader:
                raise
            except BinderyError as error:
                state.last_error = str(error)
                log.warning("check_postponed", check=kind.name.lower(), error=str(error))
                await asyncio.sleep(self._limits.retry_s)

    async def _run_check(self, state: CheckState, check: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        state.is_running, state.started_ms = True, self._clock_ms()
        try:
            state.result = await check()
        finally:
            state.is_running = False
        state.last_error = ""
        state.finished_ms, state.duration_s = self._clock_ms(), loop.time() - began

    async def _due_in_s(self, kind: CheckKind, interval_s: float) -> float:
        """Return the seconds until the next check; 0 or less: it is due."""
        if kind is CheckKind.LEDGERS and is_unfinished(await self._records.get_cursor(CURSOR) or {}):
            return 0.0
        try:
            last_ms = await self._marks.check_time_ms(kind)
        except Corrupt as error:
            log.warning("check_time_unreadable", check=kind.name.lower(), error=str(error))
            last_ms = None
        if last_ms is None:
            return 0.0
        ago_s = (self._clock_ms() - last_ms) / 1000
        if ago_s < -CLOCK_SKEW_MAX_S:
            log.warning("check_time_in_the_future", check=kind.name.lower(), by_s=-ago_s)
            return 0.0  # otherwise no check would run until that time
        return interval_s - ago_s

    async def _check_ledgers(
        self, leadership: Leadership, watch: BookieWatch, marker: LedgerMarker, gate: Callable[[], Awaitable[None]]
    ) -> Mapping[str, Any]:
        self.full_check = FullCheck(
            self._client,
            self._records,
            marker,
            _Bookies(watch),
            leadership=leadership,
            may_go_on=gate,
            rate=self._settings.ledger_check_rate,
            in_flight=self._limits.checks_in_flight,
            ledger_timeout_s=self._limits.ledger_timeout_s,
            depth=Depth(self._settings.ledger_check_percent),
            clock_ms=self._clock_ms,
            randomness=self._randomness,
        )
        try:
            return (await self.full_check.run()).to_json()
        finally:
            self.full_check = None

    async def _check_placement(self, leadership: Leadership, watch: BookieWatch) -> Mapping[str, Any]:
        snapshot = watch.snapshot
        racks = self._racks() if self._racks else dict.fromkeys(snapshot.registered, DEFAULT_RACK)
        result = await check_placement(
            self._client,
            racks=racks,
            unwanted=snapshot.draining | snapshot.removed,
            reads_in_flight=self._limits.reads_in_flight,
        )
        await self._keep_result(
            leadership,
            "placement",
            result.to_json(),
            f"{result.ledgers} closed ledgers: {result.strict} well placed, {result.soft} on fewer racks than they "
            f"could be, {result.failed} misplaced",
        )
        return result.to_json()

    def _placement_checked(self, result: PlacementResult) -> None:
        """Show the counters of a read of all metadata like those of the periodic check, in metrics."""
        self.state.checks[CheckKind.PLACEMENT].result = result.to_json()

    async def _check_replicas(self, leadership: Leadership) -> Mapping[str, Any]:
        result = await check_replicas(self._client, ledger_timeout_s=self._limits.replica_timeout_s)
        await self._keep_result(
            leadership,
            "replicas",
            result.to_json(),
            f"{result.ledgers} closed ledgers: entries without a replica {result.entries_without_replica}, below ack "
            f"quorum {result.entries_below_ack_quorum}, below write quorum {result.entries_below_write_quorum}",
        )
        return result.to_json()

    async def _keep_result(self, leadership: Leadership, check: str, result: Mapping[str, Any], text: str) -> None:
        now_ms = self._clock_ms()
        data = {"last_finished_ms": now_ms, "last_result": result}
        await self._records.put_cursor(f"{check}-check", data, guard=leadership)
        log.info(f"{check}_check_finished", **result)
        event = HistoryEvent(now_ms, "check_finished", text, {**result, "check": check})
        await self._records.append_history(event, guard=leadership)

    async def _until_done(self, work: Callable[[], Awaitable[Callable[[], None]]]) -> Callable[[], None]:
        while True:
            try:
                return await work()
            except NotLeader:
                raise
            except BinderyError as error:
                log.warning("auditor_waits", error=str(error))
                await asyncio.sleep(self._limits.retry_s)


async def _run_all(parts: list[Coroutine[Any, Any, None]]) -> None:
    """Run all parts until one fails, then cancel the others and raise its error. No part returns without an error."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in sorted(done, key=tasks.index):
        task.result()
