"""LedgerTable: what the bookie knows of each ledger in use, besides its entries.

Invariants: a fence is never cleared; `lac` never goes back; a state that the index does not hold yet (it is in
`changed`, or its entries are in a write cache) is never evicted. Others are, when there are too many, and come back
from the index.
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
from bindery_bookie.storage.journal.journal import record_parts

log = structlog.get_logger(__name__)

DELETIONS_MAX: Final = 10_000
"""Deleted ledgers that wait for one flush."""


class LedgerState:
    """One ledger. Ids are -1 where there is none yet."""

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
        """What is missing here may have been lost: it is not denied."""
        self.explicit_lac: bytes | None = None
        self.lac = -1
        self.lac_updated_ms = 0
        self.last_entry_id = -1
        self.indexed_entry_id = -1
        """Greatest entry id in the index; below it a flush must look for rows that it overlaps."""
        self.has_new_key = False
        self.has_new_fence = False
        self.has_new_lac = False
        """The `has_new_*` facts are not in an entry log yet, from which a lost index is rebuilt."""
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
        """What the index keeps once entries up to `indexed_entry_id` are in it."""
        return LedgerRow(self.master_key, self.is_fenced, self.lac, indexed_entry_id, self.explicit_lac, self.is_limbo)

    def set_explicit_lac(self, packet: bytes) -> bool:
        """Keep the packet. Whether the LAC advanced. The caller puts the state into `changed`."""
        self.explicit_lac = packet
        self.has_new_lac = True
        lac = control.lac_of_packet(packet)
        if lac <= self.lac:
            return False
        self.lac = lac
        return True

    def take_control_records(self) -> list[bytes]:
        """Records for the entry log of what changed since the last time."""
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
        """Call every watcher, once."""
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
        """In memory. Public for the add loop."""
        self.changed: dict[int, LedgerState] = {}
        """Created, fenced or given an explicit LAC since the last flush took them."""
        self.deleted: dict[int, None] = {}
        """Deleted since the last flush took them: the index still holds their rows."""
        self.balance = 0
        """Ledgers created less those deleted since the start."""
        self._count_at_start: int | None = None
        self._forgetting: frozenset[int] = frozenset()
        self._tombstones: dict[int, None] = {}

    def find(self, ledger_id: int) -> LedgerState | None:
        """The state, read from the index if need be (one short blocking look-up). Raises DamagedStorage or OSError."""
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
        """Take `master_key` for a ledger whose own was lost; `parts` gets its record. False: it has another.

        Only a fenced ledger can have lost it (limbo fences what it finds), so nobody gets to write with a new key.
        """
        if state.master_key or not state.is_fenced or not master_key:
            return False
        state.master_key = master_key
        state.has_new_key = True
        self.changed[state.ledger_id] = state
        parts += record_parts(control.pack_master_key(state.ledger_id, master_key))
        return True

    def fence(self, state: LedgerState) -> None:
        """Durable with the next flush; until then by a record in the journal, if the caller writes one."""
        state.is_fenced = state.has_new_fence = True
        self.changed[state.ledger_id] = state

    def enter_limbo(self, ledgers: Iterable[LimboLedger]) -> None:
        """Fence these and deny nothing of them any more. Durable with the next flush.

        No journal says so, and a crash between index and LastLogMark cuts off what that flush wrote to the entry log.
        So the listing after it writes keys and fences there once more, though the rows have them.
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
        """Whether it was in limbo. Durable with the next flush; what repaired it must be durable already."""
        state = self.find(ledger_id)
        if state is None or not state.is_limbo:
            return False
        state.is_limbo = False
        self.changed[ledger_id] = state
        return True

    def delete(self, ledger_id: int, *, is_closed: bool = False) -> LedgerState | None:
        """Forget a ledger; the next flush removes its rows. One that was fenced here, or of which the caller knows that
        it is closed, leaves a tombstone. Its last state, if any."""
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
        """Fenced and deleted: a late writer must not bring it back."""
        return ledger_id in self._tombstones

    def is_hidden(self, ledger_id: int) -> bool:
        """Whether rows in the index are of a deleted ledger and must not be seen."""
        return ledger_id in self.deleted or ledger_id in self._forgetting

    @property
    def has_changes(self) -> bool:
        """Whether a flush has something to do besides entries."""
        return bool(self.changed or self.deleted)

    def hidden_ids(self) -> frozenset[int]:
        """Ledgers deleted, unless they were made anew, whose rows are in the index still."""
        return frozenset(one for one in (*self.deleted, *self._forgetting) if one not in self.states)

    @property
    def has_deletions(self) -> bool:
        """Whether rows of a deleted ledger are in the index still."""
        return bool(self.deleted or self._forgetting)

    def take_changes(self) -> tuple[dict[int, LedgerState], tuple[int, ...]]:
        """(changed, deleted) for a flush. The deleted stay hidden until `forgotten`."""
        changed, self.changed = self.changed, {}
        deleted = tuple(self.deleted)
        self._forgetting = frozenset(deleted)
        self.deleted = {}
        return changed, deleted

    def forgotten(self) -> None:
        """The flush that took the deleted is done: their rows are gone."""
        self._forgetting = frozenset()

    def evict(self, keep: Container[int]) -> None:
        """Drop idle states beyond the bound, oldest first. `keep`: ledgers in a write cache."""
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
        """Counts the ledgers that are here as of this call, less `balance` of now. Any thread; it reads all rows.

        Raises DamagedIndex, OSError.
        """
        rows = self._index.rows(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP)
        only_here = set(self.states)
        hidden = {*self.deleted, *self._forgetting}
        balance = self.balance

        def count() -> int:
            total = 0
            for key, _ in rows:
                ledger_id = fmt.unpack_ledger_key(key)
                if ledger_id not in hidden:
                    total += 1
                    only_here.discard(ledger_id)
            return total + len(only_here) - balance

        return count
