"""Index: finds entries and ledgers in the KV that `index_format` describes.

Invariants: runs of a ledger never overlap; a flush changes runs, ledger rows and the generation in one synced batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from bindery_core.ids import ID_MAX

from bindery_bookie.storage import index_format as fmt
from bindery_bookie.storage.index_format import LedgerRow, Located, Run
from bindery_bookie.storage.kv import KV

_MERGE_GAP: Final = 1024
"""Entries that far apart are looked up apart, so that two re-added entries do not rewrite all the rows between them."""

# Rows made from both sides of such a gap cannot join across rows in between that were left alone.
assert _MERGE_GAP > 2 * fmt.RUN_SLOTS_MAX + fmt.RUN_HOLE_MAX

Rows = list[tuple[bytes, bytes]]


class Index:
    """Reads may come from any thread, `commit` from one at a time."""

    def __init__(self, kv: KV) -> None:
        self._kv = kv

    def generation(self) -> int:
        """Flushes so far; 0 for an empty index."""
        value = self._kv.get(fmt.GENERATION_KEY)
        return 0 if value is None else fmt.unpack_generation(value)

    def ledger_row(self, ledger_id: int) -> LedgerRow | None:
        value = self._kv.get(fmt.ledger_key(ledger_id))
        return None if value is None else fmt.unpack_ledger_row(value, ledger_id=ledger_id)

    def ledger_ids(self) -> Iterator[int]:
        for key, _ in self._kv.scan(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP):
            yield fmt.unpack_ledger_key(key)

    def run_before(self, ledger_id: int, entry_id: int) -> Run | None:
        """The run with the greatest first entry <= `entry_id`. Whether it holds the entry is for the caller to see."""
        found = self._kv.floor(lowest=fmt.run_key(ledger_id, 0), key=fmt.run_key(ledger_id, entry_id))
        return None if found is None else fmt.unpack_run(*found)

    def runs(self, ledger_id: int, *, first: int = 0, last: int = ID_MAX) -> Iterator[Run]:
        """Runs that *begin* in [first, last], ascending. `first` may lie one behind the greatest id there is."""
        if first > last:
            return
        stop = fmt.run_key(ledger_id, last) + b"\0"
        for key, value in self._kv.scan(start=fmt.run_key(ledger_id, first), stop=stop):
            yield fmt.unpack_run(key, value)

    def last_entry_id(self, ledger_id: int) -> int | None:
        """The greatest entry id indexed, by floor search."""
        run = self.run_before(ledger_id, ID_MAX)
        return None if run is None else run.last_entry_id

    def commit(
        self,
        *,
        runs: Rows,
        merges: Mapping[int, Sequence[Located]],
        ledgers: Mapping[int, LedgerRow],
        deleted: Iterable[int],
        generation: int | None,
        sync: bool = True,
    ) -> int:
        """Apply one flush: forget `deleted`, then write. Returns the rows written.

        `runs`: rows that overlap nothing there. `merges`: located entries by ledger, ascending, which may; the last
        wins. `generation`: None leaves it as it is (a rebuild in parts).
        """
        puts = list(runs)
        deletes: list[bytes] = []
        gone = set(deleted)
        for ledger_id in gone:
            deletes.append(fmt.ledger_key(ledger_id))
            start, stop = fmt.run_key(ledger_id, 0), fmt.run_key(ledger_id, ID_MAX) + b"\0"
            deletes += [key for key, _ in self._kv.scan(start=start, stop=stop)]
        for ledger_id, located in merges.items():
            if ledger_id in gone:
                puts += fmt.run_rows(ledger_id, located)
                continue
            rows, replaced = self._merged(ledger_id, located)
            puts += rows
            deletes += replaced
        for ledger_id, row in ledgers.items():
            puts.append((fmt.ledger_key(ledger_id), fmt.pack_ledger_row(row)))
        if generation is not None:
            puts.append((fmt.GENERATION_KEY, fmt.pack_generation(generation)))
        self._kv.write_batch(puts, deletes, sync=sync)
        return len(puts)

    def close(self) -> None:
        self._kv.close()

    def _merged(self, ledger_id: int, located: Sequence[Located]) -> tuple[Rows, list[bytes]]:
        """Rows that hold `located` over what was there, and the keys that they replace."""
        overlapping: dict[int, Run] = {}
        for part in _clusters(located):
            before = self.run_before(ledger_id, part[0][0])
            if before is not None and before.last_entry_id >= part[0][0]:
                overlapping[before.first_entry_id] = before
            for run in self.runs(ledger_id, first=part[0][0] + 1, last=part[-1][0]):
                overlapping[run.first_entry_id] = run
        if not overlapping:
            return fmt.run_rows(ledger_id, located), []
        entries = {entry[0]: entry for run in overlapping.values() for entry in run.entries()}
        entries.update((entry[0], entry) for entry in located)
        rows = fmt.run_rows(ledger_id, [entries[entry_id] for entry_id in sorted(entries)])
        return rows, [fmt.run_key(ledger_id, first) for first in overlapping]


def _clusters(located: Sequence[Located]) -> Iterator[Sequence[Located]]:
    start = 0
    for at in range(1, len(located)):
        if located[at][0] - located[at - 1][0] > _MERGE_GAP:
            yield located[start:at]
            start = at
    if located:
        yield located[start:]
