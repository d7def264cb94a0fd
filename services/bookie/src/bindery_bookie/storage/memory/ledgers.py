"""LedgerTable: the state of each ledger in use: key, fence, LAC, last entry.

Invariants: a fence is never cleared; `lac` never decreases; a state that is not in the index yet (it is in `changed`,
or its entries are in a write cache) is never evicted. If there are too many states, others are evicted and read from
the index when needed.
"""

from collections.abc import Callable, Container, Iterable
from typing import Final

import structlog
from bindery_core.errors import BinderyError

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption.limbo import LimboLedger
from bindery_bookie.storage.index import index_format as fmt
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.worker import Worker
from bindery_bookie.storage.journal.journal_format import record_parts

log = structlog.get_logger(__name__)

DELETIONS_MAX: Final = 10_000
"""Maximum number of deleted ledgers that wait for one flush."""


class LedgerState:
    """The state of one ledger. An entry id of -1 means none."""

    __slots__ = (
        "explicit_lac",
        "has_new_fence",
        "has_new_key",
        "has_new_lac",
        "indexed_entry_id",
        "is_fenced",
        "is_limbo",
        "lac",
        "lac_updated_ms",
        "last_entry_id",
        "ledger_id",
        "master_key",
        "watchers",
    )

    def __init__(self, ledger_id: int, master_key: bytes) -> None:
        self.ledger_id = ledger_id
        self.master_key = master_key
        self.is_fenced = False
        self.is_limbo = False
        """True: missing entries may have been lost here, so they are not answered with "no such entry"."""
        self.explicit_lac: bytes | None = None
        self.lac = -1
        self.lac_updated_ms = 0
        self.last_entry_id = -1
        self.indexed_entry_id = -1
        """Greatest entry id in the index. For entries up to it, a flush must check for overlapping rows."""
        self.has_new_key = False
        self.has_new_fence = False
        self.has_new_lac = False
        """`has_new_*`: whether this part of the state is not in an entry log yet. An index is rebuilt from the entry
        logs."""
        self.watchers: dict[int, Callable[[], None]] = {}

    @classmethod
    def from_row(cls, ledger_id: int, row: LedgerRow) -> "LedgerState":
        state = cls(ledger_id, row.master_key)
        state.is_fenced = row.is_fenced
        state.is_limbo = row.is_limbo
        state.explicit_lac = row.explicit_lac
        state.lac = row.lac
        state.last_entry_id = state.indexed_entry_id = row.last_entry_id
        return state

    def row(self, *, indexed_entry_id: int) -> LedgerRow:
        """Return the index row for the time when entries up to `indexed_entry_id` are in the index."""
        return LedgerRow(self.master_key, self.is_fenced, self.lac, indexed_entry_id, self.explicit_lac, self.is_limbo)

    def set_explicit_lac(self, packet: bytes) -> bool:
        """Store the packet; return True if the LAC advanced. The caller must add the state to `changed`."""
        self.explicit_lac = packet
        self.has_new_lac = True
        lac = control.lac_of_packet(packet)
        if lac <= self.lac:
            return False
        self.lac = lac
        return True

    def take_control_records(self) -> list[bytes]:
        """Return records for the entry log for all changes since the last call."""
        records: list[bytes] = []
        if self.has_new_key:
            records.append(control.pack_master_key(self.ledger_id, self.master_key))
        if self.has_new_fence:
            records.append(control.pack_fence(self.ledger_id))
        if self.has_new_lac and self.explicit_lac is not None:
            records.append(control.pack_explicit_lac(self.ledger_id, self.explicit_lac))
        self.has_new_key = self.has_new_fence = self.has_new_lac = False
        return records

    def wake(self) -> None:
        """Call and remove all watchers."""
        watchers, self.watchers = self.watchers, {}
        for watcher in watchers.values():
            watcher()


class LedgerTable:
    """States by ledger id. Event loop only."""

    def __init__(self, index: Index, *, ledgers_max: int, tombstones_max: int) -> None:
        self._index = index
        self._ledgers_max = ledgers_max
        self._tombstones_max = tombstones_max
        self.states: dict[int, LedgerState] = {}
        """States in memory. Public for the add loop."""
        self.changed: dict[int, LedgerState] = {}
        """Ledgers created, fenced or given an explicit LAC since the last flush began."""
        self.deleted: dict[int, None] = {}
        """Ledgers deleted since the last flush began. Their rows are still in the index."""
        self.balance = 0
        """Number of ledgers created minus number of ledgers deleted since the start."""
        self._count_at_start: int | None = None
        self._being_deleted: frozenset[int] = frozenset()
        """Deleted ledgers whose rows the current flush removes."""
        self._tombstones: dict[int, None] = {}

    def find(self, ledger_id: int) -> LedgerState | None:
        """Return the state, read from the index if necessary (one short blocking lookup). None: no such ledger.

        Raises DamagedStorage, OSError.
        """
        state = self.states.get(ledger_id)
        if state is None and not self.is_hidden(ledger_id):
            row = self._index.ledger_row(ledger_id)
            if row is not None:
                state = self.states[ledger_id] = LedgerState.from_row(ledger_id, row)
        return state

    def create(self, ledger_id: int, master_key: bytes) -> LedgerState:
        state = LedgerState(ledger_id, master_key)
        state.has_new_key = True
        self._tombstones.pop(ledger_id, None)
        self.states[ledger_id] = self.changed[ledger_id] = state
        self.balance += 1
        return state

    def learn_key(self, state: LedgerState, master_key: bytes, parts: list[bytes]) -> bool:
        """Set `master_key` for a ledger whose key was lost, and append its record to `parts`. False: the key differs.

        Only a fenced ledger can have lost its key (limbo fences the ledgers it lists), so no client can become its
        writer with a new key.
        """
        if state.master_key or not state.is_fenced or not master_key:
            return False
        state.master_key = master_key
        state.has_new_key = True
        self.changed[state.ledger_id] = state
        parts += record_parts(control.pack_master_key(state.ledger_id, master_key))
        return True

    def fence(self, state: LedgerState) -> None:
        """Fence a ledger. Durable with the next flush, or earlier by a journal record that the caller appends."""
        state.is_fenced = state.has_new_fence = True
        self.changed[state.ledger_id] = state

    def enter_limbo(self, ledgers: Iterable[LimboLedger]) -> None:
        """Put ledgers into limbo and fence them. Durable with the next flush.

        There is no journal record for this, and a crash between index and LastLogMark truncates what that flush wrote
        to the entry log. The listing after the crash therefore writes keys and fences to the entry log again, although
        the rows have them.
        """
        for ledger in ledgers:
            state = self.find(ledger.ledger_id)
            if state is None:
                state = self.create(ledger.ledger_id, ledger.master_key)
            elif not state.master_key and ledger.master_key:
                state.master_key = ledger.master_key
            state.has_new_key = state.has_new_key or bool(state.master_key)
            state.is_limbo = True
            self.fence(state)
            state.wake()

    def leave_limbo(self, ledger_id: int) -> bool:
        """End the limbo of a ledger; return True if it was in limbo. The repaired entries must be durable already.

        Durable with the next flush.
        """
        state = self.find(ledger_id)
        if state is None or not state.is_limbo:
            return False
        state.is_limbo = False
        self.changed[ledger_id] = state
        return True

    def delete(self, ledger_id: int, *, is_closed: bool = False) -> LedgerState | None:
        """Delete a ledger and return its last state, if any. The next flush removes its rows.

        A tombstone is kept if the ledger was fenced here, or if `is_closed`.
        """
        state = self.find(ledger_id)
        if state is None:
            return None
        del self.states[ledger_id]
        self.balance -= 1
        self.changed.pop(ledger_id, None)
        self.deleted[ledger_id] = None
        if (state.is_fenced or is_closed) and self._tombstones_max:
            self._tombstones[ledger_id] = None
            if len(self._tombstones) > self._tombstones_max:
                del self._tombstones[next(iter(self._tombstones))]
        return state

    def is_tombstone(self, ledger_id: int) -> bool:
        """Return True for a fenced or closed ledger that was deleted: a late writer must not create it again."""
        return ledger_id in self._tombstones

    def is_hidden(self, ledger_id: int) -> bool:
        """Return True if the ledger's rows in the index are of a deleted ledger and must be ignored."""
        return ledger_id in self.deleted or ledger_id in self._being_deleted

    @property
    def has_changes(self) -> bool:
        """True if a flush has changes to write besides entries."""
        return bool(self.changed or self.deleted)

    def hidden_ids(self) -> frozenset[int]:
        """Return the deleted ledgers whose rows are still in the index, except those that were created again."""
        deleted = (*self.deleted, *self._being_deleted)
        return frozenset(ledger_id for ledger_id in deleted if ledger_id not in self.states)

    @property
    def has_deletions(self) -> bool:
        """True if rows of deleted ledgers are still in the index."""
        return bool(self.deleted or self._being_deleted)

    def take_changes(self) -> tuple[dict[int, LedgerState], tuple[int, ...]]:
        """Return (changed, deleted) for a flush. The deleted ledgers stay hidden until `deletions_flushed`."""
        changed, self.changed = self.changed, {}
        deleted = tuple(self.deleted)
        self._being_deleted = frozenset(deleted)
        self.deleted = {}
        return changed, deleted

    def deletions_flushed(self) -> None:
        """Record that the flush has removed the rows of the ledgers it took."""
        self._being_deleted = frozenset()

    def evict(self, keep: Container[int]) -> None:
        """Drop idle states above the limit, the oldest first. `keep`: ledgers in a write cache."""
        excess = len(self.states) - self._ledgers_max
        if excess <= 0:
            return
        idle: list[int] = []
        for ledger_id, state in self.states.items():
            if len(idle) == excess:
                break
            if not (ledger_id in keep or ledger_id in self.changed or state.watchers):
                idle.append(ledger_id)
        for ledger_id in idle:
            del self.states[ledger_id]

    @property
    def count(self) -> int | None:
        """Number of ledgers stored here; None: not counted yet."""
        return None if self._count_at_start is None else self._count_at_start + self.balance

    def start_count(self, worker: Worker) -> None:
        """Count the ledgers in `worker`; `count` has the result from then on. A failure is logged."""
        try:
            worker.submit(self.count_job(), self._counted)
        except (OSError, BinderyError) as error:
            self._counted(None, error)

    def _counted(self, count: int | None, error: BaseException | None) -> None:
        self._count_at_start = count
        if error is not None:
            log.warning("ledgers_not_counted", error=str(error))

    def count_job(self) -> Callable[[], int]:
        """Return a job that counts the ledgers stored as of this call, minus the current `balance`.

        The job reads all ledger rows and may run in any thread. Raises DamagedIndex, OSError.
        """
        rows = self._index.rows(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP)
        not_indexed = set(self.states)
        hidden = {*self.deleted, *self._being_deleted}
        balance = self.balance

        def count() -> int:
            total = 0
            for key, _ in rows:
                ledger_id = fmt.unpack_ledger_key(key)
                if ledger_id not in hidden:
                    total += 1
                    not_indexed.discard(ledger_id)
            return total + len(not_indexed) - balance

        return count
