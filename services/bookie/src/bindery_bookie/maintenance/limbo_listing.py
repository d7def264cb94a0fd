"""Limbo listing: which ledgers a shard that lost storage may have held, by the ledgers' metadata.

Runs before the bookie serves and registers, so nobody can be told anything wrong meanwhile, and no new ledger can name
this bookie. Each ledger that does name it, in any segment, is put into limbo and fenced: what the bookie promised of it
(entries, a fence) may be gone. The rest of the shard is trusted from then on.

A metadata store that goes away meanwhile is waited for, and the listing goes on behind the last ledger looked at. What
comes back may be a new session with a server that lags, which would not show a ledger that named this bookie a moment
ago: hence a sync at the beginning, after each interruption, and before each batch of reads.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

from bindery_core.digest import master_key
from bindery_core.errors import BadVersion, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.logs import get_logger
from bindery_kit.process.cluster_wait import asked_again
from bindery_metadata.stores.versioned import Versioned

from bindery_bookie.storage.corruption.limbo import LimboLedger
from bindery_bookie.storage.engine.engine import StorageEngine

READS_MAX: Final = 64
"""Metadata reads under way."""
CHUNK: Final = 2000
"""Ledgers put into limbo with one flush."""

log = get_logger(__name__)


class Manager(Protocol):
    """What is asked of `bindery_metadata.ledgers.ledger_manager.LedgerManager`."""

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]: ...

    def list(self) -> AsyncIterator[LedgerId]: ...


def names_bookie(metadata: LedgerMetadata, bookie_id: BookieId) -> bool:
    """Whether the bookie is in any ensemble of the ledger."""
    return any(bookie_id in segment.ensemble for segment in metadata.segments)


class LimboListing:
    """One listing for all shards that need it, once. Event loop only."""

    def __init__(
        self,
        shards: Sequence[StorageEngine],
        manager: Manager,
        bookie_id: BookieId,
        *,
        sync: Callable[[], Awaitable[None]],
        progress: Callable[[int], None],
    ) -> None:
        """`sync` returns once what `manager` reads is as new as anything committed before the call; `progress` hears
        how many ledgers were looked at."""
        self._shards = shards
        self._manager = manager
        self._bookie_id = bookie_id
        self._sync = sync
        self._progress = progress
        self._looked_at = 0
        self._last = -1
        """Every ledger up to this one was looked at."""
        self._found: dict[StorageEngine, list[LimboLedger]] = {}

    async def run(self) -> None:
        """Every shard in phase listing is in phase repairing afterwards, or whole. Raises DamagedStorage, OSError."""
        listing = [shard for shard in self._shards if shard.limbo is not None and shard.limbo.is_listing]
        if not listing:
            return
        self._found = {shard: [] for shard in listing}
        await asked_again(self._look_at_the_rest, event="limbo_listing_interrupted")
        for shard in listing:
            await self._store(shard)
            await shard.repair.finish_listing()
            assert shard.limbo is not None
            left = await shard.repair.limbo_ledger_ids()
            shard.limbo.left = len(left)
            log.warning("limbo_listed", ledgers=len(left), looked_at=self._looked_at, reason=shard.limbo.reason)
            if not left:
                await shard.repair.end_limbo()

    async def _look_at_the_rest(self) -> None:
        """Raises MetadataUnavailable; the next call goes on behind the last batch that was whole."""
        await self._sync()
        batch: list[LedgerId] = []
        async for ledger_id in self._manager.list():
            if ledger_id <= self._last or self._shards[ledger_id % len(self._shards)] not in self._found:
                continue
            batch.append(ledger_id)
            if len(batch) == READS_MAX:
                await self._look_at(batch)
                batch = []
        if batch:
            await self._look_at(batch)

    async def _look_at(self, ledger_ids: Sequence[LedgerId]) -> None:
        await self._sync()
        looks = await asyncio.gather(*map(self._limbo_ledger, ledger_ids), return_exceptions=True)
        for look in looks:
            if isinstance(look, BaseException):
                raise look
            if look is not None:
                self._found[self._shards[look.ledger_id % len(self._shards)]].append(look)
        self._last = ledger_ids[-1]
        self._looked_at += len(ledger_ids)
        self._progress(self._looked_at)
        for shard, found in self._found.items():
            assert shard.limbo is not None
            shard.limbo.listed += sum(self._shards[one % len(self._shards)] is shard for one in ledger_ids)
            if len(found) >= CHUNK:
                await self._store(shard)

    async def _limbo_ledger(self, ledger_id: LedgerId) -> LimboLedger | None:
        try:
            metadata = (await self._manager.read(ledger_id)).value
        except NoSuchLedger:
            return None
        except (Corrupt, BadVersion) as error:
            log.error("limbo_metadata_unreadable", ledger_id=ledger_id, error=str(error))
            return LimboLedger(ledger_id, b"")  # it may name us
        if not names_bookie(metadata, self._bookie_id):
            return None
        return LimboLedger(ledger_id, b"" if metadata.password is None else master_key(metadata.password))

    async def _store(self, shard: StorageEngine) -> None:
        found, self._found[shard] = self._found[shard], []
        if found:
            await shard.repair.enter_limbo_ledgers(found)
