"""Find ledgers that sit on fewer racks than possible, and mark them, a few at a time, so that workers move replicas.

    racks of the writable bookies change -> no further change for `delay_s` -> read the metadata of all ledgers
        -> mark each ledger that a move puts on more racks, at most MARKS_MAX at a time -> wait until they are moved

| ledger                                                        | consequence                                          |
|---------------------------------------------------------------|------------------------------------------------------|
| closed; a move puts a write quorum on more racks              | marked with the reason PLACEMENT and no bookies, as  |
|                                                               | BookKeeper does                                      |
| closed; on fewer racks than possible, but no move helps       | counted as stuck, for example without a spare bookie |
| open, or one of its bookies is not registered                 | waits for the next run: its writer, or the repair of |
|                                                               | the lost bookie, chooses racks itself                |
| marked for another reason                                     | waits too                                            |

There is another run when the racks change again, when ledgers wait (after RERUN_WAITING_S, or longer if reading all
metadata takes long), and every RERUN_S. With fewer than two racks nothing is read. A move is never urgent: this part
pauses while recovery is disabled or an audit of bookies is pending, and few marks at a time leave the workers free for
under-replicated ledgers.

Replicas are moved by `ledger_repair`. Every write checks the leadership. Source: BookKeeper's
AuditorPlacementPolicyCheckTask with repairedPlacementPolicyNotAdheringBookieEnable.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from bindery_core.errors import BadVersion, BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.placement import Candidate, choose_move
from bindery_kit.observability.logs import get_logger
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager

from bindery_recovery.checks.bookie_audit import LedgerMarker
from bindery_recovery.checks.placement_check import PlacementResult, check_placement
from bindery_recovery.cluster.bookie_watch import AuditorLimits, BookieSnapshot
from bindery_recovery.cluster.ledger_index import MetadataReader, members_of, share_of

CURSOR: Final = "placement-repair"
"""Name of the cursor that stores the progress, for commands and metrics."""
MARKS_MAX: Final = 16
"""Maximum number of ledgers that are marked for a move at the same time."""
MARK_TIMEOUT_S: Final = 600.0
"""Seconds after which a mark no longer counts towards MARKS_MAX: a worker tries it again later."""
RERUN_S: Final = 86_400.0
"""Seconds after which all ledgers are read again although the racks have not changed: placement may have been limited
when they were created."""
RERUN_WAITING_S: Final = 600.0
"""Seconds until the next run if ledgers wait."""
RERUN_SHARE: Final = 10
"""Minimum time until that run, as a multiple of the time that it takes to read all metadata."""
CURSOR_INTERVAL_S: Final = 5.0
"""Interval in seconds between two writes of the progress."""

log = get_logger(__name__)

Topology = frozenset[tuple[BookieId, str]]
"""Bookies that may receive replicas, each with its rack."""


class _First:
    """A source of random numbers that always selects the first of several bookies: whether a move exists does not
    depend on it."""

    def random(self) -> float:
        return 0.0


@dataclass(slots=True)
class PlacementRepairState:
    """Progress of the current or the last run. Times in ms since 1970; 0: none."""

    racks: int = 0
    """Racks with writable bookies; below 2: nothing is moved."""
    is_running: bool = False
    started_ms: int = 0
    finished_ms: int = 0
    total: int = 0
    """Ledgers to move, as found at the start of the run."""
    done: int = 0
    """Of these, ledgers that workers have finished, or that need no move any more."""
    waiting: int = 0
    """Ledgers that the next run looks at again."""
    stuck: int = 0
    """Ledgers on fewer racks than possible that no move helps."""
    last_error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PlacementRepair:
    """The moves of one term. `run` never returns."""

    def __init__(
        self,
        client: MetadataReader,
        records: RecoveryRecords,
        marks: UnderreplicationManager,
        marker: LedgerMarker,
        *,
        racks: Callable[[], Mapping[BookieId, str]],
        snapshot: Callable[[], BookieSnapshot],
        leadership: Leadership,
        may_go_on: Callable[[], Awaitable[None]],
        delay_s: float,
        limits: AuditorLimits,
        clock_ms: Callable[[], int],
        state: PlacementRepairState,
        on_checked: Callable[[PlacementResult], None],
    ) -> None:
        """`racks`: of the registered bookies. `may_go_on` returns when the next ledger may be marked. `on_checked`
        receives the counters of each read of all metadata."""
        self._client = client
        self._records = records
        self._marks = marks
        self._marker = marker
        self._racks = racks
        self._snapshot = snapshot
        self._leadership = leadership
        self._may_go_on = may_go_on
        self._delay_s = delay_s
        self._limits = limits
        self._clock_ms = clock_ms
        self._state = state
        self._on_checked = on_checked
        self._loop = asyncio.get_running_loop()
        self._marked: dict[LedgerId, float] = {}
        """Ledgers that are marked for a move, with the time after which they no longer count."""
        self._save_at = 0.0

    async def run(self) -> None:
        seen: Topology = frozenset()
        finished: Topology | None = None
        at = next_at = self._loop.time()
        while True:
            await asyncio.sleep(min(self._limits.poll_interval_s, self._delay_s))
            await self._may_go_on()
            try:
                topology, now = self._topology(), self._loop.time()
                self._state.racks = len({rack for _, rack in topology})
                if topology != seen:
                    seen, at = topology, now
                if now - at < self._delay_s:
                    continue
                if self._state.racks < 2:
                    finished = None  # ledgers that are stored now may be on more racks when another rack returns
                    continue
                if topology == finished and now < next_at:
                    continue
                next_at = await self._run(topology)
                finished = topology
            except NotLeader:
                raise
            except BinderyError as error:
                self._state.is_running, self._state.last_error = False, str(error)
                log.warning("placement_repair_postponed", error=str(error))
                await asyncio.sleep(self._limits.retry_s)

    def _topology(self) -> Topology:
        snapshot, racks = self._snapshot(), self._racks()
        refused = snapshot.draining | snapshot.removed | snapshot.maintained
        return frozenset(
            (bookie_id, racks[bookie_id])
            for bookie_id, is_writable in snapshot.registered.items()
            if is_writable and bookie_id not in refused and bookie_id in racks
        )

    async def _run(self, topology: Topology) -> float:
        """Find the ledgers and mark them. Return the time of the next run by the loop's clock."""
        state, began = self._state, self._loop.time()
        state.is_running, state.started_ms, state.last_error = True, self._clock_ms(), ""
        state.total = state.done = state.waiting = state.stuck = 0
        movable, result = await self._find(topology)
        read_s = self._loop.time() - began
        self._on_checked(result)
        state.total = len(movable)
        log.info("placement_checked", racks=state.racks, to_move=state.total, waiting=state.waiting, stuck=state.stuck)
        for number in movable:
            await self._wait_for_room(MARKS_MAX)
            await self._mark(LedgerId(number))
            await self._save_if_due()
        await self._wait_for_room(1)
        state.is_running, state.finished_ms = False, self._clock_ms()
        await self._finish()
        pause_s = max(RERUN_WAITING_S, RERUN_SHARE * read_s) if state.waiting else RERUN_S
        return self._loop.time() + pause_s

    async def _find(self, topology: Topology) -> tuple["array[int]", PlacementResult]:
        """Return the ledgers that can be moved now, and the counters of the check. Count the others in the state."""
        movable, state = array("q"), self._state
        targets = dict(topology)

        def soft(ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
            if not self._has_move(metadata, targets):
                state.stuck += metadata.state is LedgerState.CLOSED
            elif self._must_wait(metadata):
                state.waiting += 1
            else:
                movable.append(ledger_id)

        snapshot = self._snapshot()
        result = await check_placement(
            self._client,
            racks=self._racks(),
            unwanted=snapshot.draining | snapshot.removed,
            reads_in_flight=self._limits.reads_in_flight,
            soft=soft,
        )
        return movable, result

    def _has_move(self, metadata: LedgerMetadata, targets: Mapping[BookieId, str]) -> bool:
        racks = self._racks()
        candidates = [Candidate(bookie_id, rack=rack) for bookie_id, rack in targets.items()]
        return any(
            choose_move(
                candidates,
                ensemble=segment.ensemble,
                write_quorum=metadata.write_quorum,
                rng=_First(),
                absent=racks,
            )
            for segment in metadata.segments
        )

    def _must_wait(self, metadata: LedgerMetadata) -> bool:
        registered: Collection[BookieId] = self._snapshot().registered
        return metadata.state is not LedgerState.CLOSED or any(b not in registered for b in members_of(metadata))

    async def _mark(self, ledger_id: LedgerId) -> None:
        """Mark a ledger that still has to be moved."""
        await self._may_go_on()
        try:
            metadata = await self._client.metadata(ledger_id)
        except (NoSuchLedger, Corrupt, BadVersion):
            self._state.done += 1  # deleted; or the next check reports it
            return
        if self._must_wait(metadata):
            self._state.waiting += 1
            self._state.total -= 1
            return
        share = share_of(metadata, [metadata.segments[-1].ensemble[0]])  # of one replica, about as large as each other
        is_new = await self._marker.mark(
            ledger_id,
            (),
            Reason.PLACEMENT,
            missing_entries=share.entries,
            missing_bytes=share.length,
            only_new=True,
        )
        if is_new:
            self._marked[ledger_id] = self._loop.time() + MARK_TIMEOUT_S
        else:  # marked for another reason, or by the leader before
            self._state.waiting += 1
            self._state.total -= 1

    async def _wait_for_room(self, limit: int) -> None:
        """Wait until fewer than `limit` ledgers are marked for a move."""
        while len(self._marked) >= limit:
            for ledger_id, until in list(self._marked.items()):
                if await self._marks.get(ledger_id) is None:
                    self._state.done += 1
                elif self._loop.time() < until:
                    continue
                else:
                    self._state.waiting += 1
                    self._state.total -= 1
                del self._marked[ledger_id]
            await self._save_if_due()
            if len(self._marked) >= limit:
                await asyncio.sleep(min(1.0, self._limits.poll_interval_s))

    async def _save_if_due(self) -> None:
        if self._loop.time() >= self._save_at:
            await self._save()

    async def _save(self) -> None:
        await self._records.put_cursor(CURSOR, self._state.to_json(), guard=self._leadership)
        self._save_at = self._loop.time() + CURSOR_INTERVAL_S

    async def _finish(self) -> None:
        await self._save()
        state = self._state
        if not state.total:
            return
        took_s = max(0, state.finished_ms - state.started_ms) / 1000
        text = f"{state.done} ledgers were spread over more racks in {took_s:.0f} s"
        text += f"; {state.waiting} wait" if state.waiting else ""
        text += f"; no move helps {state.stuck}" if state.stuck else ""
        event = HistoryEvent(state.finished_ms, "placement_repaired", text, state.to_json())
        await self._records.append_history(event, guard=self._leadership)
