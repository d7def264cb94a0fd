"""GarbageCollector: delete ledgers whose metadata is gone. `storage.compaction` then frees their space.

A run deletes nothing unless it has read all of the metadata. Each step may end the run:

| step                                                           | reason                                       |
|----------------------------------------------------------------|----------------------------------------------|
| 1 list the ledgers that this bookie stores                     | later ledgers are not candidates             |
| 2 sync                                                         | a ZooKeeper server may lag behind the leader |
| 3 check that INSTANCEID is the cookie's and LAYOUT readable    | another cluster, or a tree in another format |
| 4 check that the metadata may have known every stored ledger   | ZooKeeper was rolled back to an older state  |
| (`rollback_guard`)                                             |                                              |
| 5 list all ledgers of the metadata, ascending; a stored ledger | an error, or ids out of order, ends the run  |
| that is not listed is a candidate                              |                                              |
| 6 sync, and read each candidate: only "no such ledger" counts  | a listing is not a snapshot                  |
| 7 steps 3 and 4 again                                          | the tree may have changed meanwhile          |

`run_schedule` decides when. One listing serves all shards. `is_gone` checks a single ledger in the same way, for the
repair. `over_replicated` deletes ledgers whose metadata no longer names this bookie; it is called after each run.
Source: BookKeeper's ScanAndCompareGarbageCollector with verifyMetadataOnGC; sync, the checks of the tree and the guard
are added.
"""

import asyncio
import heapq
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from bindery_core.errors import BadVersion, BinderyError, Conflict, Corrupt, NoSuchLedger
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_kit.observability.logs import get_logger
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.layout.layout import LAYOUT_TEXT, SHORT_ID_END, LedgersLayout
from bindery_metadata.ledgers.known_ledgers import MetadataRollbackSuspected
from bindery_metadata.stores.store import MetadataStore, Node, Watch

from bindery_bookie.maintenance.over_replicated import OverReplicated
from bindery_bookie.maintenance.over_replicated import Shard as OverReplicatedShard
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.maintenance.run_schedule import RunSchedule
from bindery_bookie.storage.collection.collection_interface import GarbageCollection
from bindery_bookie.storage.stats import StorageStats

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_metadata.ledgers.ledger_manager import LedgerManager

log = get_logger(__name__)

_SLEEP_MIN_S: Final = 0.01
"""Pauses shorter than this are accumulated, because the event loop sleeps too coarsely for them."""


_WAIT_MIN_S: Final = 0.001
"""Minimum time between two checks whether a run is due. A difference of times may be too small to advance a clock."""


class GarbageShard(OverReplicatedShard, Protocol):
    """The part of StorageEngine that garbage collection uses."""

    @property
    def stats(self) -> StorageStats: ...

    @property
    def compactor(self) -> GarbageCollection: ...

    async def list_ledger_ids(self) -> Sequence[int]:
        """Return the stored ledgers, ascending. Raises OSError, DamagedStorage."""
        ...


@dataclass(slots=True)
class MetadataGarbageState:
    """State over all shards. `*_ms`: milliseconds since 1970; 0: never."""

    running: bool = False
    last_run_ms: int = 0
    last_success_ms: int = 0
    last_error: str = ""
    """Error that ended the last run; empty if it completed."""
    ledgers_here: int = 0
    """Ledgers stored here at the last run that completed."""
    ledgers_listed: int = 0
    """Ledgers in the metadata at that run."""
    ledgers_deleted: int = 0
    """Ledgers deleted since the start."""


class GarbageCollector:
    """Event loop only. `run` until cancelled; `collect` makes one run."""

    def __init__(
        self,
        shards: Sequence[GarbageShard],
        metadata: MetadataStore,
        layout: LedgersLayout,
        *,
        instance_id: str,
        bookie_id: BookieId,
        guard: RollbackGuard,
        connect: "Callable[[], Awaitable[LedgerClient]]",
        wait_s: float,
        wait_min_s: float,
        written_max: int,
        over_replicated_wait_s: float,
        op_rate: float,
        clock: Callable[[], float],
        wall_clock_ms: Callable[[], int],
        randomness: RandomBits,
    ) -> None:
        """`instance_id`: the cluster id in this bookie's cookie. `connect`: connects a client to check the other
        replicas of ledgers that moved away. `wait_s`, `wait_min_s`, `written_max`: see `run_schedule`.
        `over_replicated_wait_s`: seconds between two searches for ledgers that moved away; 0: no search. `op_rate`:
        maximum metadata reads per second."""
        self._shards = shards
        self._metadata = metadata
        self._layout = layout
        self._instance_id = instance_id
        self._guard = guard
        self._schedule = RunSchedule(wait_min_s=wait_min_s, wait_max_s=wait_s, written_max=written_max)
        self._clock = clock
        self._paced = cast(MetadataStore, _PacedReads(metadata, rate=op_rate, clock=clock))
        self._wall_clock_ms = wall_clock_ms
        self._randomness = randomness
        self._wanted = asyncio.Event()
        self._compact_after = False
        self.state = MetadataGarbageState()
        self.over_replicated = OverReplicated(
            shards,
            metadata,
            self._paced,
            layout,
            bookie_id=bookie_id,
            connect=connect,
            check_cluster=self._check_metadata,
            interval_s=over_replicated_wait_s,
            wall_clock_ms=wall_clock_ms,
            randomness=randomness,
        )

    def request(self, *, compact: bool = False) -> None:
        """Start a run soon. With `compact`, sparse entry logs are rewritten after it, even if it fails."""
        self._compact_after |= compact
        self._wanted.set()

    async def run(self) -> None:
        """Run until cancelled. Errors of the metadata store and of disks end one run only."""
        while True:
            await self._until_due()
            self._wanted.clear()
            try:
                await self._collect_in_time()
                await self._forget_moved()
            except (BinderyError, OSError) as error:
                log.warning("garbage_not_collected", error=str(error))
            except Exception:  # a program error, or unexpected metadata, must not end the bookie
                log.exception("garbage_collection_broke")
            if self._compact_after:
                self._compact_after = False
                for shard in self._shards:
                    shard.compactor.request(minor=True, major=True)

    async def _until_due(self) -> None:
        """Return when a run is due or requested."""
        began, written = self._clock(), self._written()
        while not self._wanted.is_set():
            waited_s = self._clock() - began
            if self._schedule.is_due(waited_s=waited_s, written=self._written() - written):
                return
            wait_s = max(min(self._schedule.check_s, self._schedule.wait_s - waited_s), _WAIT_MIN_S)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _written(self) -> int:
        return sum(shard.stats.add_bytes for shard in self._shards)

    async def _collect_in_time(self) -> None:
        """Make a run, and schedule the next one by its result. Raises BinderyError or OSError."""
        began, deleted = self._clock(), 0
        try:
            deleted = await self.collect()
        finally:
            self._schedule.run_ended(seconds=self._clock() - began, deleted=deleted)

    async def collect(self) -> int:
        """Make one run and return the number of ledgers deleted.

        Raises BinderyError or OSError. Nothing was deleted then, unless the deletion itself failed.
        """
        state = self.state
        state.running = True
        state.last_run_ms = self._wall_clock_ms()
        try:
            deleted = await self._collect()
        except BaseException as error:
            state.last_error = str(error) or repr(error)
            raise
        finally:
            state.running = False
        state.last_error = ""
        state.last_success_ms = self._wall_clock_ms()
        return deleted

    async def is_gone(self, ledger_id: int) -> bool:
        """Return whether the metadata has no such ledger, confirmed by all steps but the listing. Raises
        BinderyError."""
        await self._metadata.sync(self._layout.root)
        await self._check_metadata(ledger_id)
        manager = self._ledger_manager()
        try:
            is_gone = await _is_gone(manager.read, ledger_id)
        finally:
            await manager.close()
        await self._check_metadata(ledger_id)
        return is_gone

    def _ledger_manager(self) -> "LedgerManager":
        from bindery_metadata.ledgers.ledger_manager import LedgerManager  # the start does not need it; it loads slowly

        return LedgerManager(self._paced, self._layout, randomness=self._randomness)

    async def _forget_moved(self) -> None:
        before = self.over_replicated.state.forgotten
        try:
            await self.over_replicated.step()
        finally:
            if self.over_replicated.state.forgotten != before:
                for shard in self._shards:
                    shard.compactor.request()

    async def _collect(self) -> int:
        here = [await shard.list_ledger_ids() for shard in self._shards]
        if not any(here):
            return 0
        await self._metadata.sync(self._layout.root)
        await self._check_cluster()
        suspected: MetadataRollbackSuspected | None = None
        try:
            await self._guard.check(here)
        except MetadataRollbackSuspected as error:
            suspected = error
        manager = self._ledger_manager()
        try:
            candidates, highest = await self._missing(heapq.merge(*here), manager.list())
            if suspected is not None:
                await self._guard.count_missing(len(candidates))
                raise suspected
            await self._guard.raise_mark(highest)
            self.state.ledgers_here = sum(map(len, here))
            if candidates:
                await self._metadata.sync(self._layout.root)
            gone = {ledger_id for ledger_id in candidates if await _is_gone(manager.read, ledger_id)}
            await self._check_metadata(*gone)
        finally:
            await manager.close()
        for shard, ledger_ids in zip(self._shards, here, strict=True):
            await self._delete(shard, [ledger_id for ledger_id in ledger_ids if ledger_id in gone])
        return len(gone)

    async def _check_metadata(self, *ledger_ids: int) -> None:
        """Check the cluster, and that the metadata may have known these ledgers. Raises BinderyError."""
        await self._check_cluster()
        await self._guard.confirm(ledger_ids)

    async def _check_cluster(self) -> None:
        """Raise Conflict if this is another cluster, and BadVersion if the tree has another format."""
        found = await CookieStore(self._metadata, self._layout).instance_id()
        if found != self._instance_id:
            raise Conflict(
                "no ledgers are deleted: this is not the cluster in the bookie's cookie",
                path=self._layout.instance_id,
                expected=self._instance_id,
                found=found,
            )
        layout = (await self._metadata.get(self._layout.layout)).data
        if layout.rstrip(b"\n") != LAYOUT_TEXT:
            raise BadVersion(
                "no ledgers are deleted: the layout of ledger metadata is unknown",
                path=self._layout.layout,
                expected=LAYOUT_TEXT.decode(),
                found=layout.decode("ascii", "replace"),
            )

    async def _missing(self, here: Iterator[int], listed: AsyncIterator[int]) -> "tuple[array[int], tuple[int, ...]]":
        """Return the ids in `here` that are not in `listed`, and the highest short and long id in `listed`, as far as
        there are any. Both arguments are ascending."""
        missing = array("q")
        local = next(here, None)
        count = 0
        before = -1
        short = -1
        async for ledger_id in listed:
            if ledger_id <= before:
                raise Conflict("the list of ledgers is out of order", before=before, found=ledger_id)
            before = ledger_id
            if ledger_id < SHORT_ID_END:
                short = ledger_id
            count += 1
            while local is not None and local < ledger_id:
                missing.append(local)
                local = next(here, None)
            if local == ledger_id:
                local = next(here, None)
        if local is not None:
            missing.append(local)
        missing.extend(here)
        self.state.ledgers_listed = count
        return missing, tuple(one for one in (short, before) if one >= 0)

    async def _delete(self, shard: GarbageShard, ledger_ids: Sequence[int]) -> None:
        for ledger_id in ledger_ids:
            await shard.delete_ledger(ledger_id)
            shard.stats.ledgers_deleted += 1
            self.state.ledgers_deleted += 1
            await asyncio.sleep(0)
        if ledger_ids:
            log.info("ledgers_collected", ledgers=len(ledger_ids), first=ledger_ids[:10])
            shard.compactor.request()


async def _is_gone(read: Callable[[LedgerId], Awaitable[object]], ledger_id: int) -> bool:
    try:
        await read(LedgerId(ledger_id))
    except NoSuchLedger:
        return True
    except (Corrupt, BadVersion):
        return False  # the metadata exists, although it cannot be read
    return False


class _PacedReads:
    """A MetadataStore whose reads are rate-limited; all other calls are delegated unchanged."""

    def __init__(self, store: MetadataStore, *, rate: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._step_s = 1 / rate
        self._clock = clock
        self._next = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def children(self, path: str, *, watch: Watch | None = None) -> list[str]:
        await self._wait()
        return await self._store.children(path, watch=watch)

    async def get(self, path: str, *, watch: Watch | None = None) -> Node:
        await self._wait()
        return await self._store.get(path, watch=watch)

    async def _wait(self) -> None:
        now = self._clock()
        self._next = max(self._next, now) + self._step_s
        if self._next - now >= _SLEEP_MIN_S:
            await asyncio.sleep(self._next - now)
