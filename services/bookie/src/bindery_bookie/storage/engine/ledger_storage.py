"""LedgerStorage: the interface of one shard's storage, and its two forms.

|                        | sorted (the default)                       | interleaved                                 |
|------------------------|--------------------------------------------|---------------------------------------------|
| a flush writes entries | by ledger, then by entry id                | in the order in which they arrived          |
| index rows             | about one per 128 entries of a busy ledger | one per change of ledger:                   |
|                        |                                            | up to one per entry                         |
| reading a ledger back  | long sequential reads                      | one disk read per run of adjacent entries   |
| tailing readers        | answered from the write cache              | answered from the write cache               |
| memory per add         | a dictionary entry                         | a dictionary entry and a list item          |
| use                    | normal operation: many ledgers, read again | few ledgers at a time, and comparison with  |
|                        | long after they were written               | BookKeeper's form of that name              |

Measured with 200,000 entries of 128 bytes in 20 alternating ledgers; processor time per entry, sorted / interleaved
(CPython 3.11, LevelDB, one process): adds 1.3 / 2.1 us, flush 1.2 / 4.2 us, catching up from disk 5 / 14 us; index rows
1,601 / 200,021.

Both forms write the same file formats. A directory written by one form can be opened by the other, so the setting
`ledger_storage` may change at any restart.

Both are the same `StorageEngine` with different parts. The sorted form has no overhead for the other one, because the
additional work of the interleaved form is in separate classes (`interleaved`).

Source: BookKeeper's LedgerStorage, with SortedLedgerStorage / DbLedgerStorage and InterleavedLedgerStorage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.engine.interleaved import InterleavedAdds, InterleavedCache, InterleavedEncoder
from bindery_bookie.storage.engine.storage_repair import StorageRepair
from bindery_bookie.storage.flushing.flush import Encoder
from bindery_bookie.storage.io.disk import DiskUsage
from bindery_bookie.storage.memory.write_cache import WriteCache
from bindery_bookie.storage.scrub.scrub import Scrubber
from bindery_bookie.storage.settings import LedgerStorageKind, StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import EntryStore


class LedgerStorage(EntryStore, Protocol):
    """The storage of one shard (a ledger directory and a journal): an EntryStore with methods for its maintenance."""

    settings: StorageSettings
    stats: StorageStats
    damage: DamageRegister
    """Known damage that is not repaired yet."""

    @property
    def scrubber(self) -> Scrubber:
        """Verifies stored entries in the background. Valid once `open` returned."""
        ...

    @property
    def repair(self) -> StorageRepair:
        """Puts ledgers into limbo and refills them. Valid once `open` returned."""
        ...

    @property
    def limbo(self) -> LimboState | None:
        """The limbo of the shard. None: the shard is complete, so a missing entry was never stored here. Valid once
        `open` returned."""
        ...

    async def flush(self) -> None:
        """Return once everything accepted before this call is in entry log and index. Raises OSError if that fails."""
        ...

    def ledger_disk_usage(self) -> DiskUsage:
        """Return the usage of the file system of the ledger directory. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class StorageForm:
    """The parts in which the forms differ."""

    make_cache: Callable[[int], WriteCache]
    """Called with the maximum size of the cache in bytes."""
    adds: type[Adds]
    encoder: type[Encoder]


# Setting `ledger_storage` -> the parts of this form.
FORMS: Final = {
    LedgerStorageKind.SORTED: StorageForm(WriteCache, Adds, Encoder),
    LedgerStorageKind.INTERLEAVED: StorageForm(InterleavedCache, InterleavedAdds, InterleavedEncoder),
}
