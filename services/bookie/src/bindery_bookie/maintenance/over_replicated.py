"""OverReplicated: forgets ledgers that moved away, that is closed ones whose metadata name this bookie no longer.

    named --replaced--> seen unneeded --for GRACE_S, metadata unchanged, no copies brought--> forgotten
                             `--named again, marked, copies brought--> not looked at again before the next search

Whoever heals a ledger copies first and has the metadata name the new bookie last, so "not named" alone proves nothing.
What must hold, in this order, when a ledger is forgotten:

| condition                                                       | because                                           |
|-----------------------------------------------------------------|---------------------------------------------------|
| storage is not in limbo                                         | metadata are then what it refills itself by       |
| no copies were brought for GRACE_S, as far as is known          | healers without a lock too, or with a lost one    |
| it was seen unneeded GRACE_S ago in this version of metadata    | nothing was changed about it since                |
| recovery is not disabled                                        | paused is paused                                  |
| we hold the lock of its mark, in this session                   | no worker is at it, and none begins               |
| it is not marked                                                | it lacks copies: ours may be wanted               |
| every bookie that is named is there and has its ends            | metadata may come from a backup, older than moves |
| read after a sync under the lock: closed, and does not name us  | a worker that has just finished does              |

From the last answer to the deletion nothing is waited for, and until the deletion is done the lock is kept: a worker
that makes this bookie its target afterwards stores all its copies anew. A tombstone keeps late writers out.

What cannot be read or asked is kept. Source: BookKeeper's over-replicated collection (gcOverreplicatedLedgerWaitTime),
which takes the lock and reads the metadata again; the rest is ours.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from bindery_core.errors import AlreadyExists, BadVersion, BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore, SessionState

log = structlog.get_logger(__name__)

GRACE_S: Final = 3600.0
"""Far longer than anybody copies without a break before the metadata name the bookie."""
CANDIDATES_MAX: Final = 100_000
"""Of one search; the next one finds the others."""
TAKEN_MAX: Final = 1_000
"""Ledgers looked at in one go. Source: BookKeeper, which has as many under way."""
PAUSE_S: Final = 0.02
"""After each of them."""
RELEASE_ATTEMPTS: Final = 3
RELEASE_PAUSE_S: Final = 1.0
FLUSH_EVERY: Final = 100
"""Deletions, which wait in memory for a flush."""


class Shard(Protocol):
    """What is used of a StorageEngine."""

    @property
    def limbo(self) -> object | None: ...

    async def list_ledger_ids(self) -> Sequence[int]: ...

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool: ...

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None: ...

    async def flush(self) -> None: ...


@dataclass(slots=True)
class OverReplicatedState:
    """`*_ms`: wall clock ms of 1970, 0: never."""

    searched_ms: int = 0
    candidates: int = 0
    """Ledgers that are about to be forgotten, unless somebody wants them."""
    forgotten: int = 0
    """Since the start."""


@dataclass(frozen=True, slots=True)
class _Seen:
    shard: Shard
    version: int
    """Of the metadata."""
    since_s: float


class OverReplicated:
    """Event loop only; times by the loop's clock. `step` now and then."""

    def __init__(
        self,
        shards: Sequence[Shard],
        store: MetadataStore,
        reads: Any,
        layout: LedgersLayout,
        *,
        bookie_id: BookieId,
        connect: Callable[[], Awaitable[Any]],
        check_cluster: Callable[[], Awaitable[None]],
        interval_s: float,
        wall_clock_ms: Callable[[], int],
        randomness: Any,
        grace_s: float = GRACE_S,
    ) -> None:
        """`reads`: `store` with paced reads. `connect` gives a LedgerClient, which is closed here. `check_cluster`
        raises when this is not the cluster of this bookie. `interval_s`: between two searches of all ledgers here; 0:
        never."""
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
        """Locks of ours that may stand, and the sessions that they are of."""
        self.state = OverReplicatedState()

    async def step(self) -> int:
        """Search if that is due, and forget what may be forgotten now; how many. Raises BinderyError, OSError."""
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
        module = importlib.import_module("bindery_metadata.ledgers.ledger_manager")  # late, as in `garbage`
        manager = module.LedgerManager(self._reads, self._layout, randomness=self._randomness)
        try:
            if now >= self._search_at:
                await self._search(manager)
                self._search_at = self._loop.time() + self._interval_s
            return await self._forget_ripe(manager)
        finally:
            await manager.close()
            self.state.candidates = len(self._seen)

    # --- searching ------------------------------------------------------------------------------------------------

    async def _search(self, manager: Any) -> None:
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

    async def _unneeded(self, manager: Any, ledger_id: int) -> int | None:
        """The version of metadata that need nothing from us; None: they do, or that cannot be told."""
        try:
            found = await manager.read(LedgerId(ledger_id))
        except (NoSuchLedger, Corrupt, BadVersion):
            return None
        if found.value.state is not LedgerState.CLOSED:
            return None
        is_named = any(self._bookie_id in segment.ensemble for segment in found.value.segments)
        return None if is_named else int(found.version)

    # --- forgetting -----------------------------------------------------------------------------------------------

    async def _forget_ripe(self, manager: Any) -> int:
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

    async def _others_have_it(self, client: Any, ledger_id: int) -> bool:
        """Whether all copies that count are there, by the ends of what each bookie should hold."""
        checker = importlib.import_module("bindery_recovery.checks.checker")
        try:
            metadata = await client.metadata(LedgerId(ledger_id))
        except (NoSuchLedger, Corrupt, BadVersion):
            return False
        bookies = await client.list_bookies()
        check = await checker.check_ledger(client, LedgerId(ledger_id), metadata, bookies=bookies)
        if not check.is_whole:
            log.warning("over_replicated_kept", ledger_id=ledger_id, reason="bookies that are named lack their copies")
        return bool(check.is_whole)

    async def _forget(self, manager: Any, client: Any, ledger_id: int, seen: _Seen) -> bool:
        mark, lock = self._layout.mark(LedgerId(ledger_id)), self._layout.mark_lock(LedgerId(ledger_id))
        if lock in self._locks_left or not self._is_quiet(ledger_id, seen.shard):
            return False
        if await self._store.exists(mark) is not None or not await self._others_have_it(client, ledger_id):
            return False
        formats = importlib.import_module("bindery_core.formats.replication_formats")
        session_id = self._store.session_id
        self._locks_left[lock] = session_id
        try:
            with contextlib.suppress(AlreadyExists):
                await self._store.create(lock, formats.encode_lock(self._bookie_id), ephemeral=True, make_parents=True)
            stat = await self._store.exists(lock)
            if stat is None or stat.ephemeral_owner != session_id:
                del self._locks_left[lock]  # a worker's
                return False
            await self._store.sync(mark)
            if await self._store.exists(mark) is not None:
                return False
            if await self._unneeded(manager, ledger_id) != seen.version:
                return False
            # From here on nothing is waited for.
            is_ours = self._store.session_state is SessionState.CONNECTED and self._store.session_id == session_id
            if not is_ours or not self._is_quiet(ledger_id, seen.shard):
                return False
            await seen.shard.delete_ledger(ledger_id, is_closed=True)
            return True
        finally:
            if lock in self._locks_left:
                await self._release(lock, session_id)

    async def _release(self, lock: str, session_id: int) -> None:
        """A lock that stays keeps everybody from healing its ledger, so it is tried again, here and at each step."""
        ephemerals = importlib.import_module("bindery_metadata.stores.ephemerals")
        for attempt in range(RELEASE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RELEASE_PAUSE_S)
            try:
                await ephemerals.delete_own(self._store, lock, session_id)
                self._locks_left.pop(lock, None)
                return
            except BinderyError as error:
                log.warning("over_replicated_lock_left", lock=lock, error=str(error))
