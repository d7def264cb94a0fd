"""OverReplicated: delete closed ledgers whose metadata no longer names this bookie.

    named --replaced--> candidate --GRACE_S pass, same metadata version, no entries stored--> deleted
                             `--named again, marked, or entries stored--> no candidate until the next search

Replication workers copy entries before they update the ensemble. A bookie that is absent from the ensemble may be the
target of a copy in progress, so absence alone does not allow deletion. A ledger is deleted if, checked in this order:

| condition                                                           | reason                                        |
|---------------------------------------------------------------------|-----------------------------------------------|
| storage is not in limbo                                             | it is refilled according to the metadata      |
| no entries were copied here for GRACE_S                             | a worker may copy without a lock, or lose it  |
| it was a candidate GRACE_S ago, at this version of the metadata     | the metadata has not changed since            |
| recovery is not disabled                                            | an operator paused it                         |
| this bookie holds the lock of the ledger's mark, in this session    | no worker repairs it, and none begins to      |
| it is not marked                                                    | it is under-replicated: entries here may help |
| every bookie that is named is available and has the fragment's ends | metadata may come from an old backup          |
| read again after a sync under the lock: closed, does not name us    | a worker that has just finished updated it    |

Between the last response and the deletion nothing is awaited, and the lock is kept until the deletion is done: a worker
that makes this bookie its target afterwards stores all entries again. A tombstone rejects late writers.

If something cannot be read, the ledger is kept. Source: BookKeeper's over-replicated collection
(gcOverreplicatedLedgerWaitTime), which takes the lock and reads the metadata again; the other conditions are added.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from bindery_core.errors import AlreadyExists, BadVersion, BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_kit.observability.logs import get_logger
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore, SessionState

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_metadata.ledgers.ledger_manager import LedgerManager

log = get_logger(__name__)

GRACE_S: Final = 3600.0
"""Minimum age of a candidate in seconds before its deletion. A worker takes far less time from the copy of an entry to
the update of the metadata."""
CANDIDATES_MAX: Final = 100_000
"""Maximum number of candidates of one search; the next search finds the others."""
TAKEN_MAX: Final = 1_000
"""Maximum number of ledgers checked in one step. Source: BookKeeper, which checks as many concurrently."""
PAUSE_S: Final = 0.02
"""Pause in seconds after each checked ledger."""
RELEASE_ATTEMPTS: Final = 3
"""Maximum number of attempts to delete a lock in one step."""
RELEASE_PAUSE_S: Final = 1.0
"""Pause in seconds between two of these attempts."""
FLUSH_EVERY: Final = 100
"""Number of deletions, which stay in memory until a flush, between two flushes."""


class Shard(Protocol):
    """The part of StorageEngine that is used here."""

    @property
    def limbo(self) -> object | None: ...

    async def list_ledger_ids(self) -> Sequence[int]: ...

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool: ...

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None: ...

    async def flush(self) -> None: ...


@dataclass(slots=True)
class OverReplicatedState:
    """`*_ms`: milliseconds since 1970; 0: never."""

    searched_ms: int = 0
    candidates: int = 0
    """Ledgers that will be deleted unless a condition fails."""
    forgotten: int = 0
    """Ledgers deleted since the start."""


@dataclass(frozen=True, slots=True)
class _Seen:
    shard: Shard
    version: int
    """Version of the metadata."""
    since_s: float


class OverReplicated:
    """Event loop only; times are the loop's. Call `step` periodically."""

    def __init__(
        self,
        shards: Sequence[Shard],
        store: MetadataStore,
        reads: MetadataStore,
        layout: LedgersLayout,
        *,
        bookie_id: BookieId,
        connect: "Callable[[], Awaitable[LedgerClient]]",
        check_cluster: Callable[[], Awaitable[None]],
        interval_s: float,
        wall_clock_ms: Callable[[], int],
        randomness: RandomBits,
        grace_s: float = GRACE_S,
    ) -> None:
        """`reads`: `store` with rate-limited reads. `connect` returns a LedgerClient, which is closed here.
        `check_cluster` raises if this is not the cluster of this bookie. `interval_s`: seconds between two searches of
        all ledgers stored here; 0: never."""
        self._shards = shards
        self._store = store
        self._reads = reads
        self._layout = layout
        self._bookie_id = bookie_id
        self._connect = connect
        self._check_cluster = check_cluster
        self._interval_s = interval_s
        self._wall_clock_ms = wall_clock_ms
        self._randomness = randomness
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._search_at = self._loop.time()
        self._seen: dict[int, _Seen] = {}
        self._locks_left: dict[str, int] = {}
        """Path of a lock that this bookie may still hold -> the session that created it."""
        self.state = OverReplicatedState()

    async def step(self) -> int:
        """Search if that is due, delete what may be deleted, and return the number of ledgers deleted. Raises
        BinderyError, OSError."""
        if not self._interval_s:
            return 0
        for path, session_id in list(self._locks_left.items()):
            await self._release(path, session_id)
        now = self._loop.time()
        ripe = any(now - seen.since_s >= self._grace_s for seen in self._seen.values())
        if now < self._search_at and not ripe:
            return 0
        await self._store.sync(self._layout.root)
        await self._check_cluster()
        from bindery_metadata.ledgers.ledger_manager import LedgerManager  # late, as in `deleted_ledgers`

        manager = LedgerManager(self._reads, self._layout, randomness=self._randomness)
        try:
            if now >= self._search_at:
                await self._search(manager)
                self._search_at = self._loop.time() + self._interval_s
            return await self._forget_ripe(manager)
        finally:
            await manager.close()
            self.state.candidates = len(self._seen)

    # --- searching ------------------------------------------------------------------------------------------------

    async def _search(self, manager: "LedgerManager") -> None:
        before, self._seen = self._seen, {}
        for shard in self._shards:
            if shard.limbo is not None or len(self._seen) >= CANDIDATES_MAX:
                continue
            for ledger_id in await shard.list_ledger_ids():
                version = await self._unneeded(manager, ledger_id)
                if version is None:
                    continue
                seen = before.get(ledger_id)
                if seen is None or seen.version != version:
                    seen = _Seen(shard, version, self._loop.time())
                self._seen[ledger_id] = seen
                if len(self._seen) == CANDIDATES_MAX:
                    break
        self.state.searched_ms = self._wall_clock_ms()
        if self._seen:
            log.info("over_replicated_ledgers", ledgers=len(self._seen), first=list(self._seen)[:10])

    async def _unneeded(self, manager: "LedgerManager", ledger_id: int) -> int | None:
        """Return the version of the metadata if the ledger is closed and its metadata does not name this bookie.

        None otherwise, or if the metadata cannot be read.
        """
        try:
            found = await manager.read(LedgerId(ledger_id))
        except (NoSuchLedger, Corrupt, BadVersion):
            return None
        if found.value.state is not LedgerState.CLOSED:
            return None
        is_named = any(self._bookie_id in segment.ensemble for segment in found.value.segments)
        return None if is_named else int(found.version)

    # --- forgetting -----------------------------------------------------------------------------------------------

    async def _forget_ripe(self, manager: "LedgerManager") -> int:
        now = self._loop.time()
        ripe = [ledger_id for ledger_id, seen in self._seen.items() if now - seen.since_s >= self._grace_s]
        if not ripe:
            return 0
        forgotten: list[int] = []
        client = await self._connect()
        try:
            for ledger_id in ripe[:TAKEN_MAX]:
                if await self._store.exists(self._layout.replication_disabled) is not None:
                    break
                seen = self._seen.pop(ledger_id)
                if await self._forget(manager, client, ledger_id, seen):
                    forgotten.append(ledger_id)
                    self.state.forgotten += 1
                    if len(forgotten) % FLUSH_EVERY == 0:
                        await seen.shard.flush()
                await asyncio.sleep(PAUSE_S)
        finally:
            await client.close()
        if forgotten:
            log.info("over_replicated_forgotten", ledgers=len(forgotten), first=forgotten[:10])
        return len(forgotten)

    def _is_quiet(self, ledger_id: int, shard: Shard) -> bool:
        since_s = self._loop.time() - self._grace_s
        return shard.limbo is None and not shard.was_given_copies(ledger_id, since_s=since_s)

    async def _others_have_it(self, client: "LedgerClient", ledger_id: int) -> bool:
        """Return whether every bookie in the metadata has the first and the last entry of each of its fragments."""
        from bindery_recovery.checks.checker import check_ledger

        try:
            metadata = await client.metadata(LedgerId(ledger_id))
        except (NoSuchLedger, Corrupt, BadVersion):
            return False
        bookies = await client.list_bookies()
        check = await check_ledger(client, LedgerId(ledger_id), metadata, bookies=bookies)
        if not check.is_whole:
            log.warning(
                "over_replicated_kept",
                ledger_id=ledger_id,
                reason="the check could not confirm that every bookie in the metadata has its entries",
            )
        return bool(check.is_whole)

    async def _forget(self, manager: "LedgerManager", client: "LedgerClient", ledger_id: int, seen: _Seen) -> bool:
        mark, lock = self._layout.mark(LedgerId(ledger_id)), self._layout.mark_lock(LedgerId(ledger_id))
        if lock in self._locks_left or not self._is_quiet(ledger_id, seen.shard):
            return False
        if await self._store.exists(mark) is not None or not await self._others_have_it(client, ledger_id):
            return False
        from bindery_core.formats.replication_formats import encode_lock

        session_id = self._store.session_id
        self._locks_left[lock] = session_id
        try:
            with contextlib.suppress(AlreadyExists):
                await self._store.create(lock, encode_lock(self._bookie_id), ephemeral=True, make_parents=True)
            stat = await self._store.exists(lock)
            if stat is None or stat.ephemeral_owner != session_id:
                del self._locks_left[lock]  # a worker holds it
                return False
            await self._store.sync(mark)
            if await self._store.exists(mark) is not None:
                return False
            if await self._unneeded(manager, ledger_id) != seen.version:
                return False
            # Nothing is awaited from here to the deletion.
            is_ours = self._store.session_state is SessionState.CONNECTED and self._store.session_id == session_id
            if not is_ours or not self._is_quiet(ledger_id, seen.shard):
                return False
            await seen.shard.delete_ledger(ledger_id, is_closed=True)
            return True
        finally:
            if lock in self._locks_left:
                await self._release(lock, session_id)

    async def _release(self, lock: str, session_id: int) -> None:
        """Delete the lock. While it exists no worker can repair the ledger, so this is retried, here and at each
        step."""
        from bindery_metadata.stores.ephemerals import delete_own

        for attempt in range(RELEASE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RELEASE_PAUSE_S)
            try:
                await delete_own(self._store, lock, session_id)
                self._locks_left.pop(lock, None)
                return
            except BinderyError as error:
                log.warning("over_replicated_lock_left", lock=lock, error=str(error))
