"""AdminContext: what the admin API may see and touch of its bookie. Filled by `process`, and by tests.

Parts that a bookie does not have (no drills, no scrub) are None or empty, and their paths say so.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from bindery_core.errors import MetadataUnavailable
from bindery_core.sources import RandomBits
from bindery_kit.admin.access import Access
from bindery_kit.observability.health import Health
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.state import BookieState
from bindery_bookie.storage.collection.collection_interface import GarbageCollection
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.scrub.scrub import ScrubState
from bindery_bookie.storage.scrub.scrub_state import Region
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import EntryStore

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    from bindery_bookie.maintenance.repair import RepairState

DRILLS_SETTING: Final = "--storage-drills (BOOKIE_STORAGE_DRILLS)"


class Scrubber(Protocol):
    """One shard's background verification (`storage.scrub`)."""

    def state(self) -> ScrubState: ...

    def request(self, *, rate: int | None = None) -> bool:
        """Begin a round now, or go on without waiting. Whether a new one begins."""
        ...

    def regions(self) -> Sequence[Region]:
        """Quarantined ones."""
        ...


class Shard(Protocol):
    """What the admin API asks of one storage engine and what runs beside it (`shard`)."""

    stats: StorageStats
    journal_path: str
    """Where its journal files are."""
    ledger_path: str
    """Where its entry logs and its mark are."""
    index_path: str

    @property
    def collector(self) -> GarbageCollection | None: ...

    @property
    def scrubber(self) -> Scrubber | None: ...

    @property
    def limbo(self) -> LimboState | None:
        """None: not in limbo."""
        ...

    @property
    def is_gc_forced(self) -> bool:
        """A run that `force_gc` asked for is not over."""
        ...

    def force_gc(self, *, minor: bool, major: bool) -> None:
        """Only with a collector."""
        ...

    @property
    def is_index_compacting(self) -> bool: ...

    @property
    def last_index_compaction_ms(self) -> int:
        """Wall clock; 0: none since the start."""
        ...

    def compact_index(self) -> None:
        """Have the index rewrite itself without what was deleted, in the background; at most one at a time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    bookie_id: str
    store: EntryStore
    state: BookieState
    health: Health
    settings: Callable[[], Mapping[str, str]]
    """Every setting's name and value as text, secrets masked."""
    is_open: Callable[[], bool]
    """Whether storage is open: before that only few paths answer."""
    disk: Disk
    layout: LedgersLayout
    randomness: RandomBits
    metadata: Callable[[], MetadataStore | None]
    """None: not connected yet."""
    ledger_client: Callable[[], Awaitable["LedgerClient"]] | None = None
    """The process's own client, made when first asked for."""
    access: Access | None = None
    """None: nobody is asked for a token."""
    shards: Callable[[], Sequence[Shard]] = tuple
    directories: Callable[[], Sequence[Any]] = tuple
    """State of each configured directory: `storage_watch.DirectoryState`."""
    damage: DamageRegister | None = None
    repair: "Callable[[], RepairState | None]" = lambda: None
    """The repairer's progress; None: there is none."""
    drills: DrillControl | None = None
    recovery: Callable[[], Awaitable["RecoveryAdmin"]] | None = None
    """What an operator may ask and tell the cluster's healing, made when first asked for."""

    def metadata_store(self) -> MetadataStore:
        """Raises MetadataUnavailable before there is one."""
        store = self.metadata()
        if store is None:
            raise MetadataUnavailable("the bookie has no connection to the metadata store yet")
        return store

    def ledger_manager(self) -> LedgerManager:
        """For one request; it owns nothing that must be closed. Raises MetadataUnavailable."""
        return LedgerManager(self.metadata_store(), self.layout, randomness=self.randomness)

    async def recovery_admin(self) -> "RecoveryAdmin":
        """Raises MetadataUnavailable."""
        if self.recovery is None:
            raise MetadataUnavailable("this bookie cannot ask for the cluster's healing")
        return await self.recovery()

    async def client(self) -> "LedgerClient":
        """Raises MetadataUnavailable."""
        if self.ledger_client is None:
            raise MetadataUnavailable("this bookie has no ledger client")
        return await self.ledger_client()
