"""LimboListing: find the ledgers that a shard without its storage may have held, by the ledgers' metadata.

The listing runs before the bookie serves and registers, so no client gets a wrong answer meanwhile, and no new ledger
can name this bookie. Each ledger that names the bookie in any ensemble goes into limbo and is fenced, because entries
and a fence that the bookie acknowledged may be lost. After that, the rest of the shard is trusted.

If the metadata store becomes unavailable, the listing waits and continues after the last ledger that was checked. The
new session may be with a server that lags and does not yet have a ledger that names this bookie. The listing therefore
calls sync at the beginning, after each interruption, and before each batch of reads.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

from bindery_core.digest import master_key
from bindery_core.errors import BadVersion, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.logs import get_logger
from bindery_kit.process.cluster_wait import retry_while_unavailable
from bindery_metadata.stores.versioned import Versioned

from bindery_bookie.storage.corruption.limbo import LimboLedger
from bindery_bookie.storage.engine.engine import StorageEngine

READS_MAX: Final = 64
"""Maximum number of concurrent metadata reads."""
CHUNK: Final = 2000
"""Number of ledgers that are put into limbo with one flush."""

log = get_logger(__name__)


class Manager(Protocol):
    """The part of `bindery_metadata.ledgers.ledger_manager.LedgerManager` that is used here."""

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]: ...

    def list(self) -> AsyncIterator[LedgerId]: ...


def names_bookie(metadata: LedgerMetadata, bookie_id: BookieId) -> bool:
    """Return whether the bookie is in any ensemble of the ledger."""
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
        """After `sync`, reads of `manager` include all changes that were committed before it. `progress` is called with
        the number of ledgers checked."""
        self._shards = shards
        self._manager = manager
        self._bookie_id = bookie_id
        self._sync = sync
        self._progress = progress
        self._checked = 0
        self._last = -1
        """Every ledger up to this one was checked."""
        self._found: dict[StorageEngine, list[LimboLedger]] = {}

    async def run(self) -> None:
        """Take every shard in phase listing to phase repairing, or out of limbo. Raises DamagedStorage, OSError."""
        listing = [shard for shard in self._shards if shard.limbo is not None and shard.limbo.is_listing]
        if not listing:
            return
        self._found = {shard: [] for shard in listing}
        await retry_while_unavailable(self._check_remaining, event="limbo_listing_interrupted")
        for shard in listing:
            await self._store(shard)
            await shard.repair.finish_listing()
            assert shard.limbo is not None
            left = await shard.repair.limbo_ledger_ids()
            shard.limbo.left = len(left)
            log.warning("limbo_listed", ledgers=len(left), looked_at=self._checked, reason=shard.limbo.reason)
            if not left:
                await shard.repair.end_limbo()

    async def _check_remaining(self) -> None:
        """Check all ledgers after the last checked one.

        Raises MetadataUnavailable; the next call continues after the last complete batch.
        """
        await self._sync()
        batch: list[LedgerId] = []
        async for ledger_id in self._manager.list():
            if ledger_id <= self._last or self._shards[ledger_id % len(self._shards)] not in self._found:
                continue
            batch.append(ledger_id)
            if len(batch) == READS_MAX:
                await self._check(batch)
                batch = []
        if batch:
            await self._check(batch)

    async def _check(self, ledger_ids: Sequence[LedgerId]) -> None:
        await self._sync()
        found_ledgers = await asyncio.gather(*map(self._limbo_ledger, ledger_ids), return_exceptions=True)
        for one in found_ledgers:
            if isinstance(one, BaseException):
                raise one
            if one is not None:
                self._found[self._shards[one.ledger_id % len(self._shards)]].append(one)
        self._last = ledger_ids[-1]
        self._checked += len(ledger_ids)
        self._progress(self._checked)
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
            return LimboLedger(ledger_id, b"")  # it may name this bookie
        if not names_bookie(metadata, self._bookie_id):
            return None
        return LimboLedger(ledger_id, b"" if metadata.password is None else master_key(metadata.password))

    async def _store(self, shard: StorageEngine) -> None:
        found, self._found[shard] = self._found[shard], []
        if found:
            await shard.repair.enter_limbo_ledgers(found)
