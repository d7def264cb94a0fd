"""EntryStore: the bookie's storage engine as its server sees it.

Every call comes from the event loop. Batches in, one callback a batch out; a callback runs in the loop, possibly before
the call returns (when everything was in memory).

Invariants: an add, fence or explicit LAC is reported done only after the journal record that holds it was fdatasynced;
after a fence was reported no ordinary add of that ledger is ever reported OK; damage and lost storage are IO_ERROR or
UNKNOWN_LEDGER_STATE, never NO_ENTRY or NO_LEDGER.
Source: BookKeeper's Bookie, LedgerDescriptor and LedgerStorage (semantics), spec of each operation in `server`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bindery_core.wire.messages import AddRequest

AddDone = Callable[[Sequence[int]], None]
"""Gets one Status per add, in the order of the adds."""

ReadDone = Callable[[Sequence["bytes | int"]], None]
"""Gets per read the entry frame, or a Status when there is none."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    bytes_done: int
    bytes_total: int
    entries: int


@dataclass(frozen=True, slots=True)
class LacState:
    """What READ_LAC answers from."""

    explicit_packet: bytes | None
    last_entry: bytes | None


class EntryStore(Protocol):
    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """Open files and index, replay the journal behind LastLogMark. Raises DamagedStorage with file and offset."""
        ...

    async def close(self) -> None:
        """Flush, advance LastLogMark, close. After it, a start replays nothing."""
        ...

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """Journal and cache `adds`; `done` gets their statuses after one group commit.

        Ids come from inside each body. OK also for an entry that is there already (the last write wins). FENCED for an
        ordinary add to a fenced ledger, UNAUTHORIZED for another master key, BAD_REQUEST for a body that is no entry,
        TOO_MANY_REQUESTS over a byte budget, IO_ERROR when the journal failed. With DEFERRED_SYNC the status comes once
        the record was written, before its fdatasync.
        """
        ...

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """Read (ledger_id, entry_id) pairs; entry id -1: the ledger's last entry. NO_LEDGER, NO_ENTRY, IO_ERROR."""
        ...

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        """Fence (creating an unknown ledger); returns once that is durable. Idempotent. Raises Unauthorized."""
        ...

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        """Store an explicit LAC durably, creating an unknown ledger; allowed after a fence. Raises Unauthorized."""
        ...

    async def read_lac(self, ledger_id: int) -> LacState:
        """Both None when there is neither. Raises NoSuchLedger."""
        ...

    def last_add_confirmed(self, ledger_id: int) -> int:
        """Highest LAC seen in entries and explicit LACs; -1: none. Never goes back. Raises NoSuchLedger,
        DamagedStorage, OSError."""
        ...

    def watch_lac(self, ledger_id: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when the ledger's LAC advances, it is fenced or deleted. The result cancels."""
        ...

    def lac_updated_at_ms(self, ledger_id: int) -> int:
        """Wall-clock ms of the last advance, 0 if not known since the start."""
        ...

    async def force(self, ledger_id: int) -> None:
        """Return once everything added before this call is durable."""
        ...

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """Runs (first, count) of entry ids present, ascending. Raises NoSuchLedger."""
        ...

    async def list_ledger_ids(self) -> Sequence[int]:
        """Every ledger here, ascending, without holding up the event loop. Raises DamagedStorage, OSError."""
        ...

    async def delete_ledger(self, ledger_id: int) -> None:
        """Forget a ledger whose metadata is gone; its space is won back by garbage collection."""
        ...

    def disk_usage(self) -> tuple[int, int]:
        """(total, free) bytes over the ledger directories' file systems."""
        ...
