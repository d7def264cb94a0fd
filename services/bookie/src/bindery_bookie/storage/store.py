"""EntryStore: the interface of the storage engine to the bookie's server.

All calls come from the event loop. Adds and reads are batches with one callback per batch. A callback runs in the loop,
possibly before the call returns (if all data is in memory).

Invariants: an add, fence or explicit LAC is reported as done only after its journal record was synced with fdatasync;
after a fence was reported, no ordinary add of that ledger is reported OK; damage and lost storage are answered with
IO_ERROR or UNKNOWN_LEDGER_STATE, never with NO_ENTRY or NO_LEDGER.
Source: BookKeeper's Bookie, LedgerDescriptor and LedgerStorage. The operations of clients are described in `server`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bindery_core.wire.messages import AddRequest

AddDone = Callable[[Sequence[int]], None]
"""Called with one Status per add, in the order of the adds."""

ReadDone = Callable[[Sequence["bytes | int"]], None]
"""Called with an entry frame per read, or a Status if there is none, in the order of the reads."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Progress of a replay, in bytes of the journal and replayed entries."""

    bytes_done: int
    bytes_total: int
    entries: int


@dataclass(frozen=True, slots=True)
class LacState:
    """The data for an answer to READ_LAC."""

    explicit_packet: bytes | None
    """The explicit LAC packet as its writer sent it."""
    last_entry: bytes | None
    """The frame of the last stored entry."""


class EntryStore(Protocol):
    """The ledgers that a bookie, or one of its shards, stores. Event loop only."""

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """Open files and index, replay the journal after LastLogMark. Raises DamagedStorage with file and offset."""
        ...

    async def close(self) -> None:
        """Flush, advance LastLogMark, close. The next start then has nothing to replay."""
        ...

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """Journal and cache `adds`; `done` gets their statuses after one group commit.

        Ids are taken from each body. OK also for an entry that is stored already (the last write wins). FENCED for an
        ordinary add to a fenced ledger, UNAUTHORIZED for a wrong master key, BAD_REQUEST for a body that is not an
        entry, TOO_MANY_REQUESTS above a byte budget, READ_ONLY if the journal is full, IO_ERROR if it failed. With
        DEFERRED_SYNC the status is sent once the record is written, before its fdatasync.
        """
        ...

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """Read (ledger_id, entry_id) pairs; entry id -1: the ledger's last entry.

        Statuses: NO_LEDGER, NO_ENTRY, UNKNOWN_LEDGER_STATE, TOO_MANY_REQUESTS, IO_ERROR.
        """
        ...

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        """Fence a ledger, creating an unknown one; durable on return. Idempotent. Raises Unauthorized."""
        ...

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        """Store an explicit LAC, creating an unknown ledger; durable on return. Allowed after a fence.

        Raises Unauthorized.
        """
        ...

    async def read_lac(self, ledger_id: int) -> LacState:
        """Return the explicit LAC and the last entry, each None if there is none. Raises NoSuchLedger."""
        ...

    def last_add_confirmed(self, ledger_id: int) -> int:
        """Return the highest LAC of entries and explicit LACs; -1: none. Never decreases.

        Raises NoSuchLedger, DamagedStorage, OSError.
        """
        ...

    def watch_lac(self, ledger_id: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when the LAC advances or the ledger is fenced or deleted.

        Return a function that cancels the watch.
        """
        ...

    def lac_updated_at_ms(self, ledger_id: int) -> int:
        """Return the wall-clock time of the last advance in ms; 0 if there was none since the start."""
        ...

    async def force(self, ledger_id: int) -> None:
        """Return once all adds before this call are durable."""
        ...

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """Return runs (first, count) of the stored entry ids, ascending. Raises NoSuchLedger."""
        ...

    async def list_ledger_ids(self) -> Sequence[int]:
        """Return all stored ledgers, ascending, without blocking the event loop. Raises DamagedStorage, OSError."""
        ...

    async def delete_ledger(self, ledger_id: int) -> None:
        """Delete a ledger whose metadata was deleted. Garbage collection frees its space."""
        ...

    def disk_usage(self) -> tuple[int, int]:
        """Return (total, free) bytes of the file systems of the ledger directories."""
        ...
