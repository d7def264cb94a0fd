"""AdminContext: the parts of a bookie that the admin API reads and controls. `process` fills it, and so do tests.

Parts that a bookie does not have (no fault injection, no scrub) are None or empty, and their paths return errors.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from bindery_core.errors import MetadataUnavailable
from bindery_core.sources import RandomBits
from bindery_kit.admin.access import OPEN, AdminAccess
from bindery_kit.observability.health import Health
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.roles import NO_ROLES, Roles
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
    from bindery_bookie.maintenance.rollback_guard import RollbackGuard

DRILLS_SETTING: Final = "--storage-drills (BOOKIE_STORAGE_DRILLS)"
"""Flag and environment variable that allow fault injection."""


class Scrubber(Protocol):
    """One shard's background verification (`storage.scrub`)."""

    def state(self) -> ScrubState: ...

    def request(self, *, rate: int | None = None) -> bool:
        """Begin a round now, or continue the current one without delay. Return whether a new round begins."""
        ...

    def regions(self) -> Sequence[Region]:
        """Return the quarantined regions."""
        ...


class Shard(Protocol):
    """One storage engine and its background work, as the admin API uses them (`shard`)."""

    stats: StorageStats
    journal_path: str
    """Directory of the shard's journal files."""
    ledger_path: str
    """Directory of the shard's entry logs and its LastLogMark."""
    index_path: str

    @property
    def collector(self) -> GarbageCollection | None: ...

    @property
    def scrubber(self) -> Scrubber | None: ...

    @property
    def limbo(self) -> LimboState | None:
        """None if the shard is not in limbo."""
        ...

    @property
    def is_gc_forced(self) -> bool:
        """Whether a run that `force_gc` requested is not complete."""
        ...

    def force_gc(self, *, minor: bool, major: bool) -> None:
        """Request a run. Only if there is a collector."""
        ...

    @property
    def is_index_compacting(self) -> bool: ...

    @property
    def last_index_compaction_ms(self) -> int:
        """Milliseconds since 1970; 0 if the index was not compacted since the start."""
        ...

    def compact_index(self) -> None:
        """Start a compaction of the index in the background, unless one runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """The parts of one bookie, for the handlers of the admin API."""

    bookie_id: str
    store: EntryStore
    state: BookieState
    health: Health
    settings: Callable[[], Mapping[str, str]]
    """Name and value of each setting as text, with masked secrets."""
    is_open: Callable[[], bool]
    """Whether the storage is open: before that, only routes with `during_start` are served."""
    disk: Disk
    layout: LedgersLayout
    randomness: RandomBits
    metadata: Callable[[], MetadataStore | None]
    """None until the bookie is connected."""
    ledger_client: Callable[[], Awaitable["LedgerClient"]] | None = None
    """The ledger client of the process, which is connected by the first call."""
    access: AdminAccess = OPEN
    roles: Roles = NO_ROLES
    shards: Callable[[], Sequence[Shard]] = tuple
    directories: Callable[[], Sequence[Any]] = tuple
    """State of each configured directory: `storage_watch.DirectoryState`."""
    damage: DamageRegister | None = None
    repair: "Callable[[], RepairState | None]" = lambda: None
    """Progress of the repair; None until it runs."""
    guard: "Callable[[], RollbackGuard | None]" = lambda: None
    """The guard against rolled-back metadata; None until the bookie's identity is established."""
    drills: DrillControl | None = None
    recovery: Callable[[], Awaitable["RecoveryAdmin"]] | None = None
    """Operations on the recovery of the cluster; built by the first call."""

    def metadata_store(self) -> MetadataStore:
        """Return the metadata store. Raises MetadataUnavailable until the bookie is connected."""
        store = self.metadata()
        if store is None:
            raise MetadataUnavailable("the bookie has no connection to the metadata store yet")
        return store

    def ledger_manager(self) -> LedgerManager:
        """Return a manager for one request, which need not be closed. Raises MetadataUnavailable."""
        return LedgerManager(self.metadata_store(), self.layout, randomness=self.randomness)

    async def recovery_admin(self) -> "RecoveryAdmin":
        """Return the operations on the recovery of the cluster. Raises MetadataUnavailable."""
        if self.recovery is None:
            raise MetadataUnavailable("this bookie has no access to the recovery of the cluster")
        return await self.recovery()

    async def client(self) -> "LedgerClient":
        """Return the connected ledger client. Raises MetadataUnavailable."""
        if self.ledger_client is None:
            raise MetadataUnavailable("this bookie has no ledger client")
        return await self.ledger_client()
