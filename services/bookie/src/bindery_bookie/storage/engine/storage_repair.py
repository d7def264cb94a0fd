"""Change one shard's storage for limbo and for the repair of damage.

`bindery_bookie.maintenance.repair` and `limbo_listing` use StorageRepair. They determine which ledgers and entries are
affected and fetch them from other bookies; this module changes what is stored on this bookie.
"""

import asyncio
from array import array
from collections.abc import Sequence
from itertools import islice

import structlog
from bindery_core.errors import NoSuchLedger
from bindery_core.wire.messages import AddRequest

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboLedger, LimboPhase, LimboState, remove_marker, set_phase
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.reading.reads import Reads

log = structlog.get_logger(__name__)


class StorageRepair:
    """Limbo and repair of one shard. Event loop only."""

    def __init__(
        self,
        *,
        disk: Disk,
        directory: str,
        damage: DamageRegister,
        limbo: LimboState | None,
        index: Index,
        ledgers: LedgerTable,
        adds: Adds,
        reads: Reads,
        flush_loop: FlushLoop,
        flush_worker: Worker,
    ) -> None:
        """`directory`: `current` of the shard's ledger directory."""
        self.limbo = limbo
        """The limbo of the shard. None: the shard is complete, so a missing entry was never stored here."""
        self.is_index_damaged = False
        """Whether a read or write found the index damaged. The next start rebuilds it."""
        self._disk = disk
        self._directory = directory
        self._damage = damage
        self._index = index
        self._ledgers = ledgers
        self._adds = adds
        self._reads = reads
        self._flush_loop = flush_loop
        self._flush_worker = flush_worker
        self._limbo_ids: Sequence[int] | None = None
        """Ledgers in limbo, ascending, including those in `_left_limbo`. None: not read from the index yet."""
        self._left_limbo: set[int] = set()
        """Ledgers that left limbo or were deleted since `_limbo_ids` was read."""

    # --- limbo: see `limbo`

    async def enter_limbo_ledgers(self, ledgers: Sequence[LimboLedger]) -> None:
        """Put these ledgers into limbo and fence them; durable on return. Only in phase listing.

        Pass at most a few thousand, because they are kept in memory until flushed. Raises OSError, DamagedStorage.
        """
        assert self.limbo is not None
        assert self.limbo.is_listing
        self._limbo_ids, self._left_limbo = None, set()
        self._ledgers.enter_limbo(ledgers)
        await self._flush_loop.flush()

    async def finish_listing(self) -> None:
        """End phase listing: all ledgers that may have lost entries are in limbo.

        From now on, other ledgers that are stored here are served as usual. Requests for a ledger that is not stored
        here are answered with "unknown" until `end_limbo`. Raises OSError.
        """
        assert self.limbo is not None
        if self.limbo.is_listing:
            await self._flush_loop.flush()
            await run_in(self._flush_worker, lambda: set_phase(self._disk, self._directory, LimboPhase.REPAIRING))
            self.limbo.phase = LimboPhase.REPAIRING

    async def limbo_ledger_ids(self, *, reread: bool = False) -> Sequence[int]:
        """Return the ledgers in limbo, ascending. Raises DamagedStorage, OSError.

        The first call, and each call with `reread`, flushes and then reads all ledger rows of the index. Later calls
        use that list without the ledgers that left limbo since, which `leave_limbo` and `ledger_deleted` record.
        """
        if reread or self._limbo_ids is None:
            await self._flush_loop.flush()
            self._limbo_ids = await run_in(self._flush_worker, lambda: array("q", self._index.limbo_ids()))
        if self._left_limbo:
            kept = (ledger_id for ledger_id in self._limbo_ids if ledger_id not in self._left_limbo)
            self._limbo_ids = array("q", kept)
            self._left_limbo = set()
        return self._limbo_ids

    def leave_limbo(self, ledger_id: int) -> None:
        """End the limbo of a ledger, after all its missing entries were stored. The ledger stays fenced."""
        if self._ledgers.leave_limbo(ledger_id):
            self._left_limbo.add(ledger_id)
            self._flush_loop.start_age_timer()

    def ledger_deleted(self, ledger_id: int) -> None:
        """Record that a ledger in limbo was deleted."""
        self._left_limbo.add(ledger_id)

    async def end_limbo(self) -> None:
        """End the shard's limbo, after all ledgers left limbo. Raises OSError."""
        await self._flush_loop.flush()
        await run_in(self._flush_worker, lambda: remove_marker(self._disk, self._directory))
        self.limbo = None
        self._limbo_ids, self._left_limbo = None, set()

    # --- damaged regions and their entries

    def holds(self, path: str) -> bool:
        """Return True for a file in this shard's ledger directory."""
        return path.startswith(f"{self._directory}/")

    async def entries_here(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """Return runs (first, count) of the entries stored here, as `entry_ids` does, also for a ledger in limbo.

        For a ledger in limbo the list proves only presence: an entry that is not in it may have been lost here.
        """
        return await self._reads.entry_ids(ledger_id)

    async def entries_in_log(
        self, log_id: int, *, start: int, after: tuple[int, int], count: int
    ) -> Sequence[tuple[int, int]]:
        """Return up to `count` (ledger id, entry id) after `after`, ascending, that the index places in a log.

        `start`: lowest offset in the log. Raises DamagedStorage, OSError.
        """
        await self._flush_loop.flush()
        return await run_in(
            self._flush_worker,
            lambda: list(islice(self._index.entries_in_log(log_id, start=start, after=after), count)),
        )

    async def store_recovered(self, ledger_id: int, bodies: Sequence[bytes]) -> Sequence[int]:
        """Add entries that were fetched from other bookies, with the stored ledger key; return their statuses.

        Raises NoSuchLedger.
        """
        state = self._ledgers.find(ledger_id)
        if state is None:
            raise NoSuchLedger(ledger_id=ledger_id)
        result: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        adds = [AddRequest(0, ledger_id, control.unpack_ids(body)[1], state.master_key, body, True) for body in bodies]

        def done(statuses: Sequence[int]) -> None:
            if not result.done():
                result.set_result(statuses)

        self._adds.add_many(adds, done)
        return await result

    # --- damage of the index

    def index_damaged(self, reason: str) -> None:
        """Report the damage once and request a rebuild at the next start. Reads that need the index get IO_ERROR."""
        if self.is_index_damaged:
            return
        self.is_index_damaged = True
        self._damage.report(Damage(f"{self._directory}/index", 0, f"{reason}; a restart rebuilds it"))
        self._flush_worker.submit(
            lambda: opening.request_rebuild(self._disk, self._directory, reason),
            _rebuild_requested,
        )


def _rebuild_requested(_: None, error: BaseException | None) -> None:
    if error is not None:
        log.error("index_rebuild_request_failed", error=str(error))
