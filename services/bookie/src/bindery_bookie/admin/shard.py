"""EngineShard: a storage engine as the admin API uses it, and the state that only the API needs."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import get_logger

from bindery_bookie.storage.collection.collection_interface import GarbageCollection
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

if TYPE_CHECKING:
    from bindery_bookie.admin.context import Scrubber

log = get_logger(__name__)


class Engine(Protocol):
    """The part of a `StorageEngine` that is used here."""

    settings: StorageSettings
    stats: StorageStats

    @property
    def limbo(self) -> LimboState | None: ...

    async def compact_index(self) -> None:
        """Rewrite the index without deleted entries. Raises OSError, DamagedStorage."""
        ...


class EngineShard:
    """A `context.Shard`. Invariant: at most one compaction of the index runs. `wall_clock_ms`: milliseconds since
    1970."""

    def __init__(
        self,
        engine: Engine,
        *,
        wall_clock_ms: Callable[[], int],
        collector: Callable[[], GarbageCollection | None],
        scrubber: "Callable[[], Scrubber | None]",
    ) -> None:
        """`collector`, `scrubber` return None until the storage is open."""
        self._engine = engine
        self._wall_clock_ms = wall_clock_ms
        self._collector = collector
        self._scrubber = scrubber
        self.stats = engine.stats
        self.journal_path = f"{engine.settings.journal_directory}/current"
        self.ledger_path = f"{engine.settings.ledger_directory}/current"
        self.index_path = f"{self.ledger_path}/index"
        self.last_index_compaction_ms = 0
        self._index_compaction: asyncio.Task[None] | None = None
        self._runs_before_forced: int | None = None

    @property
    def collector(self) -> GarbageCollection | None:
        return self._collector()

    @property
    def scrubber(self) -> "Scrubber | None":
        return self._scrubber()

    @property
    def limbo(self) -> LimboState | None:
        return self._engine.limbo

    @property
    def is_gc_forced(self) -> bool:
        """Whether the run that was requested last is not complete."""
        return self._runs_before_forced is not None and self.stats.gc_runs <= self._runs_before_forced

    def force_gc(self, *, minor: bool, major: bool) -> None:
        """See `context.Shard`."""
        collector = self.collector
        assert collector is not None
        self._runs_before_forced = self.stats.gc_runs + (collector.state().running is not None)
        collector.request(minor=minor, major=major, force=True)

    @property
    def is_index_compacting(self) -> bool:
        return self._index_compaction is not None

    def compact_index(self) -> None:
        """See `context.Shard`."""
        if self._index_compaction is None:
            self._index_compaction = asyncio.create_task(self._compact_index(), name="index-compaction")

    async def _compact_index(self) -> None:
        try:
            await self._engine.compact_index()
            self.stats.index_compactions += 1
            self.last_index_compaction_ms = self._wall_clock_ms()
            log.info("index_compacted", path=self.index_path)
        except (BinderyError, OSError) as error:
            log.error("index_compaction_failed", path=self.index_path, error=str(error))
        finally:
            self._index_compaction = None
