"""LedgerStorage: the interface of one shard's storage, and its two forms.

|                        | sorted (the default)                       | interleaved                                 |
|------------------------|--------------------------------------------|---------------------------------------------|
| a flush writes entries | by ledger, then by entry id                | in the order in which they arrived          |
| index rows             | about one for 128 entries of a busy ledger | one for each time that the ledger changes:  |
|                        |                                            | up to one an entry                          |
| reading a ledger back  | long sequential reads                      | one disk read for each piece between others |
| tailing readers        | answered from the write cache              | answered from the write cache               |
| adds                   | a dictionary entry                         | and a place in a list                       |
| good for               | everything usual: many ledgers, read again | few ledgers at a time, and comparing with   |
|                        | long after they were written               | BookKeeper's form of that name              |

Measured with 200,000 entries of 128 bytes in 20 ledgers that take turns, processor time an entry, sorted / interleaved
(CPython 3.11, LevelDB, one process): adds 1.3 / 2.1 us, flush 1.2 / 4.2 us, catching up from disk 5 / 14 us; index rows
1,601 / 200,021.

Records, index rows and every other file are the same: a directory written by one form is opened by the other, and the
setting `ledger_storage` may change at any restart.

Both are the same `StorageEngine`, put together from different parts. The sorted form pays nothing for the other one:
what the interleaved form does besides is in classes of its own (`interleaved`).

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
    """An EntryStore with what its upkeep needs. One shard: a ledger directory and a journal."""

    settings: StorageSettings
    stats: StorageStats
    damage: DamageRegister
    """What is known to be damaged, until it is healed."""

    @property
    def scrubber(self) -> Scrubber:
        """Verifies in the background. Only after `open` returned."""
        ...

    @property
    def repair(self) -> StorageRepair:
        """Puts ledgers into limbo and refills them. Only after `open` returned."""
        ...

    @property
    def limbo(self) -> LimboState | None:
        """None: an entry that is not stored here was never stored here. Valid once `open` returned."""
        ...

    async def flush(self) -> None:
        """Return once what was accepted before this call is in entry log and index. Raises OSError when that fails."""
        ...

    def ledger_disk_usage(self) -> DiskUsage:
        """Of the file system of the ledger directory. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class StorageForm:
    """The parts in which the forms differ."""

    make_cache: Callable[[int], WriteCache]
    """Gets the bytes that it may hold."""
    adds: type[Adds]
    encoder: type[Encoder]


FORMS: Final = {
    LedgerStorageKind.SORTED: StorageForm(WriteCache, Adds, Encoder),
    LedgerStorageKind.INTERLEAVED: StorageForm(InterleavedCache, InterleavedAdds, InterleavedEncoder),
}
