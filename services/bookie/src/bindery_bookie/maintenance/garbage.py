"""GarbageCollector: forgets ledgers whose metadata is gone. `storage.compaction` then wins their space back.

The metadata is believed only as a whole. Order of a run, each step a reason to stop without deleting anything:

| step                                                                 | because                                       |
|----------------------------------------------------------------------|-----------------------------------------------|
| 1 take the list of ledgers here                                      | ledgers made later are no candidates          |
| 2 sync                                                               | a ZooKeeper server may lag behind that list   |
| 3 INSTANCEID is the cookie's, LAYOUT is the one we can read          | another cluster, or a tree we would misread   |
| 4 walk all of the metadata's ledgers, ascending; those here that are | an error, or ids out of order, ends the run   |
|   not in it are candidates                                           |                                               |
| 5 sync, and read each candidate: only "no such ledger" counts        | a listing is no single moment                 |
| 6 step 3 once more                                                   | the tree may have gone in between             |

One walk serves all shards. `is_gone` looks at a single ledger likewise, for the repair. Ledgers whose metadata name
this bookie no longer are `over_replicated`'s, after such a run.
Source: BookKeeper's ScanAndCompareGarbageCollector with verifyMetadataOnGC; sync and the checks of the tree are ours.
"""

import asyncio
import heapq
import importlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from bindery_core.errors import BadVersion, BinderyError, Conflict, Corrupt, NoSuchLedger
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.layout.layout import LAYOUT_TEXT, LedgersLayout
from bindery_metadata.stores.store import MetadataStore, Node, Watch

from bindery_bookie.maintenance.over_replicated import OverReplicated
from bindery_bookie.maintenance.over_replicated import Shard as OverReplicatedShard
from bindery_bookie.storage.collection.collection_interface import GarbageCollection
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

_SLEEP_MIN_S: Final = 0.01
"""Shorter pauses are saved up."""


class GarbageShard(OverReplicatedShard, Protocol):
    """What the collector uses of a StorageEngine."""

    @property
    def stats(self) -> StorageStats: ...

    @property
    def compactor(self) -> GarbageCollection: ...

    async def list_ledger_ids(self) -> Sequence[int]:
        """Ascending. Raises OSError, DamagedStorage."""
        ...


@dataclass(slots=True)
class MetadataGarbageState:
    """Of all shards. `*_ms`: wall clock ms of 1970, 0: never."""

    running: bool = False
    last_run_ms: int = 0
    last_success_ms: int = 0
    last_error: str = ""
    """Why the last run deleted nothing; empty: it went through."""
    ledgers_here: int = 0
    """At the last run that went through."""
    ledgers_listed: int = 0
    """In the metadata, then."""
    ledgers_deleted: int = 0
    """Since the start."""


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
        connect: Callable[[], Awaitable[Any]],
        wait_s: float,
        over_replicated_wait_s: float,
        op_rate: float,
        clock: Callable[[], float],
        wall_clock_ms: Callable[[], int],
        randomness: Any,
    ) -> None:
        """`instance_id`: the cluster's, as this bookie's cookie has it. `connect` gives a LedgerClient, to look after
        ledgers that moved. `wait_s`: between two runs, and before the first. `over_replicated_wait_s`: between two
        searches for ledgers that moved away; 0: none. `op_rate`: reads of metadata a second at most."""
        self._shards = shards
        self._metadata = metadata
        self._layout = layout
        self._instance_id = instance_id
        self._wait_s = wait_s
        self._paced = _PacedReads(metadata, rate=op_rate, clock=clock)
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
            check_cluster=self._check_cluster,
            interval_s=over_replicated_wait_s,
            wall_clock_ms=wall_clock_ms,
            randomness=randomness,
        )

    def request(self, *, compact: bool = False) -> None:
        """Have a run soon; with `compact` sparse entry logs are rewritten after it, whatever came of it."""
        self._compact_after |= compact
        self._wanted.set()

    async def run(self) -> None:
        """Never returns, and never raises for what metadata or disks can do."""
        while True:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            try:
                await self.collect()
                await self._forget_moved()
            except (BinderyError, OSError) as error:
                log.warning("garbage_not_collected", error=str(error))
            except Exception:  # a fault of ours, or of what the metadata holds, is not worth the bookie's end
                log.exception("garbage_collection_broke")
            if self._compact_after:
                self._compact_after = False
                for shard in self._shards:
                    shard.compactor.request(minor=True, major=True)

    async def collect(self) -> int:
        """Ledgers deleted. Raises BinderyError or OSError; then none was, unless deleting itself failed."""
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
        """Whether the metadata have no such ledger, made sure of by steps 2, 3, 5 and 6. Raises BinderyError."""
        await self._metadata.sync(self._layout.root)
        await self._check_cluster()
        manager = self._ledger_manager()
        try:
            is_gone = await _is_gone(manager.read, ledger_id)
        finally:
            await manager.close()
        await self._check_cluster()
        return is_gone

    def _ledger_manager(self) -> Any:
        """Few bookies need one soon, and importing it takes time."""
        module = importlib.import_module("bindery_metadata.ledgers.ledger_manager")
        return module.LedgerManager(self._paced, self._layout, randomness=self._randomness)

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
        manager = self._ledger_manager()
        try:
            candidates = await self._missing(heapq.merge(*here), manager.list())
            self.state.ledgers_here = sum(map(len, here))
            if candidates:
                await self._metadata.sync(self._layout.root)
            gone = {ledger_id for ledger_id in candidates if await _is_gone(manager.read, ledger_id)}
            await self._check_cluster()
        finally:
            await manager.close()
        for shard, ledger_ids in zip(self._shards, here, strict=True):
            await self._delete(shard, [ledger_id for ledger_id in ledger_ids if ledger_id in gone])
        return len(gone)

    async def _check_cluster(self) -> None:
        """Raises Conflict or BadVersion when this is not the cluster, or not the tree, that the listing needs."""
        found = await CookieStore(self._metadata, self._layout).instance_id()
        if found != self._instance_id:
            raise Conflict(
                "this is not the cluster of the bookie's cookie: nothing is collected",
                path=self._layout.instance_id,
                expected=self._instance_id,
                found=found,
            )
        layout = (await self._metadata.get(self._layout.layout)).data
        if layout.rstrip(b"\n") != LAYOUT_TEXT:
            raise BadVersion(
                "ledger metadata is laid out in another way: nothing is collected",
                path=self._layout.layout,
                expected=LAYOUT_TEXT.decode(),
                found=layout.decode("ascii", "replace"),
            )

    async def _missing(self, here: Iterator[int], listed: AsyncIterator[int]) -> "array[int]":
        """Ids of `here` that are not in `listed`; both ascend."""
        missing = array("q")
        local = next(here, None)
        count = 0
        before = -1
        async for ledger_id in listed:
            if ledger_id <= before:
                raise Conflict("the list of ledgers is out of order", before=before, found=ledger_id)
            before = ledger_id
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
        return missing

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
        return False  # there is metadata, whoever can read it
    return False


class _PacedReads:
    """The reads of a MetadataStore, so many a second. All else is the store's own."""

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
