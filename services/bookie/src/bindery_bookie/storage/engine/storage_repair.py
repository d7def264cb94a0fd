"""StorageRepair: the engine's part in limbo and in healing damage; `bindery_bookie.maintenance.repair` drives it.

A base class of `StorageEngine`, in a module of its own for its size. What it declares without a value the engine sets.
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
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.reading.reads import Reads
from bindery_bookie.storage.store import AddDone

log = structlog.get_logger(__name__)


class StorageRepair:
    """Event loop only, but for `_index_damaged`."""

    damage: DamageRegister
    limbo: LimboState | None
    is_index_damaged: bool
    _limbo_ids: Sequence[int] | None
    """Ledgers in limbo, ascending, but for `_limbo_left`; None: not looked up yet."""
    _limbo_left: set[int]
    """Ledgers that left limbo, or were deleted, since."""
    _disk: Disk
    _directory: str
    _index: Index
    _ledgers: LedgerTable
    _reads: Reads
    _flush_loop: FlushLoop
    _flush_worker: Worker
    _loop: asyncio.AbstractEventLoop
    _is_open: bool

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore."""
        raise NotImplementedError

    async def flush(self) -> None:
        """See StorageEngine."""
        raise NotImplementedError

    # --- limbo: see `limbo`

    async def enter_limbo_ledgers(self, ledgers: Sequence[LimboLedger]) -> None:
        """Put these into limbo, fenced; durable on return. Only in phase listing. Raises OSError, DamagedStorage.

        At most some thousand at a time: they are kept in memory until they are flushed.
        """
        assert self.limbo is not None
        assert self.limbo.is_listing
        self._limbo_ids, self._limbo_left = None, set()
        self._ledgers.enter_limbo(ledgers)
        await self.flush()

    async def finish_listing(self) -> None:
        """All ledgers that may have lost something are in limbo: others may be denied from now on. Raises OSError."""
        assert self.limbo is not None
        if self.limbo.is_listing:
            await self.flush()
            await run_in(self._flush_worker, lambda: set_phase(self._disk, self._directory, LimboPhase.REPAIRING))
            self.limbo.phase = LimboPhase.REPAIRING

    async def limbo_ledger_ids(self, *, anew: bool = False) -> Sequence[int]:
        """Ledgers in limbo, ascending. Raises DamagedStorage, OSError.

        The index is read the first time, and `anew`: a look at all ledger rows, after a flush. From then on ledgers
        only leave, and who makes them leave says so here.
        """
        if anew or self._limbo_ids is None:
            await self.flush()
            self._limbo_ids = await run_in(self._flush_worker, lambda: array("q", self._index.limbo_ids()))
        if self._limbo_left:
            self._limbo_ids = array("q", (one for one in self._limbo_ids if one not in self._limbo_left))
            self._limbo_left = set()
        return self._limbo_ids

    async def entries_here(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """As `entry_ids`, also of a ledger in limbo: for those who know that it says nothing about other entries."""
        return await self._reads.entry_ids(ledger_id)

    async def store_recovered(self, ledger_id: int, bodies: Sequence[bytes]) -> Sequence[int]:
        """Add entries that were fetched from other bookies, with the ledger's own key; their statuses.

        Raises NoSuchLedger.
        """
        state = self._ledgers.find(ledger_id)
        if state is None:
            raise NoSuchLedger(ledger_id=ledger_id)
        answered: asyncio.Future[Sequence[int]] = self._loop.create_future()
        adds = [AddRequest(0, ledger_id, control.unpack_ids(body)[1], state.master_key, body, True) for body in bodies]

        def done(statuses: Sequence[int]) -> None:
            if not answered.done():
                answered.set_result(statuses)

        self.add_many(adds, done)
        return await answered

    async def entries_in_log(
        self, log_id: int, *, start: int, after: tuple[int, int], count: int
    ) -> Sequence[tuple[int, int]]:
        """Up to `count` (ledger id, entry id) that the index places in a log from offset `start` on, ascending, behind
        `after`. Raises DamagedStorage, OSError."""
        await self.flush()
        return await run_in(
            self._flush_worker,
            lambda: list(islice(self._index.entries_in_log(log_id, start=start, after=after), count)),
        )

    def holds(self, path: str) -> bool:
        """Whether a file of this shard's ledger directory is meant."""
        return path.startswith(f"{self._directory}/")

    def leave_limbo(self, ledger_id: int) -> None:
        """The ledger is whole: everything that it should have was stored and acknowledged. It stays fenced."""
        if self._ledgers.leave_limbo(ledger_id):
            self._limbo_left.add(ledger_id)
            self._flush_loop.start_age_timer()

    async def end_limbo(self) -> None:
        """No ledger is in limbo any more. Raises OSError."""
        await self.flush()
        await run_in(self._flush_worker, lambda: remove_marker(self._disk, self._directory))
        self.limbo = None
        self._limbo_ids, self._limbo_left = None, set()

    def _counted(self, count: int | None, error: BaseException | None) -> None:
        self._ledgers_at_start = count
        if error is not None:
            log.warning("ledgers_not_counted", error=str(error))

    @property
    def ledgers_count(self) -> int | None:
        """Ledgers here; None: not counted yet."""
        return None if self._ledgers_at_start is None else self._ledgers_at_start + self._ledgers.balance

    # --- damage of the index

    def _index_damaged(self, reason: str) -> None:
        """From any thread: the index cannot answer all that it should. What it cannot answer is IO_ERROR until then."""
        if self._is_open:
            self._loop.call_soon_threadsafe(self._ask_rebuild, reason)

    def _ask_rebuild(self, reason: str) -> None:
        if self.is_index_damaged or not self._is_open:
            return
        self.is_index_damaged = True
        self.damage.report(Damage(f"{self._directory}/index", 0, f"{reason}; a restart rebuilds it"))
        self._flush_worker.submit(
            lambda: opening.ask_rebuild(self._disk, self._directory, reason),
            _rebuild_asked,
        )


def _rebuild_asked(_: None, error: BaseException | None) -> None:
    if error is not None:
        log.error("index_rebuild_not_asked", error=str(error))
