"""Index: read and write the rows of entries and ledgers in the KV that `index_format` describes.

Invariants: runs of a ledger never overlap; a flush changes runs, ledger rows and the generation in one synced batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from bindery_core.errors import Conflict
from bindery_core.ids import ID_MAX

from bindery_bookie.storage.entry_log.entry_log_format import OFFSET_BITS, OFFSET_MASK, Located
from bindery_bookie.storage.index import index_format as fmt
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.kv import KV

_MERGE_GAP: Final = 1024
"""Distance of entry ids above which entries are merged separately, so that rows between them are not rewritten."""

COMPACTION_STEPS: Final = 64
"""Number of steps of a compaction of the index. A stop of the bookie waits for the current step only."""

# Rows made from the entries on both sides of a gap must not join across unchanged rows in between.
assert _MERGE_GAP > 2 * fmt.RUN_SLOTS_MAX + fmt.RUN_HOLE_MAX

Rows = list[tuple[bytes, bytes]]
"""(key, value) pairs."""


class Index:
    """The index of one shard. Any thread may read; only one thread at a time may write."""

    def __init__(self, kv: KV) -> None:
        """Raises DamagedIndex, OSError."""
        self._kv = kv
        self._batch = self._number(fmt.BATCH_KEY)
        self._base = max(self._batch, 1)
        """The last batch when the store was opened. No later batch may be missing."""
        self._stale = [key for key, _ in kv.scan(start=fmt.BATCH_ROW_START, stop=fmt.batch_row_key(self._base))]
        """Batch rows that the next batch removes."""

    def check_complete(self) -> None:
        """Raise DamagedIndex if a batch is missing that was written after the last time the store was opened.

        Call it before any write. Missing *last* batches are not detected here, but by the generation.
        """
        if not self._batch:
            return
        first = self._number(fmt.batch_row_key(self._batch))
        start, stop = fmt.batch_row_key(first), fmt.batch_row_key(self._batch + 1)
        found = sum(1 for _ in self._kv.scan(start=start, stop=stop))
        if not 0 < first <= self._batch or found != self._batch - first + 1:
            raise DamagedIndex("batches are missing from the index", batches=found, first=first, last=self._batch)

    def _number(self, key: bytes) -> int:
        value = self._kv.get(key)
        return 0 if value is None else fmt.unpack_generation(value)

    def _write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False) -> None:
        """Write one batch, with its number."""
        number = self._batch + 1
        rows = (
            (fmt.BATCH_KEY, fmt.pack_generation(number)),
            (fmt.batch_row_key(number), fmt.pack_generation(self._base)),
        )
        self._kv.write_batch(chain(puts, rows), chain(deletes, self._stale), sync=sync)
        self._batch = number
        self._stale = []

    def generation(self) -> int:
        """Return the number of flushes; 0 for an empty index."""
        return self._number(fmt.GENERATION_KEY)

    def switches(self) -> int:
        """Return the number of compactions that switched rows of this index; see `log_manifest`."""
        return self._number(fmt.SWITCHES_KEY)

    def set_switches(self, switches: int) -> None:
        """Set the number of compactions, for a rebuild. Durable with the next `commit` with `sync`."""
        self._write([(fmt.SWITCHES_KEY, fmt.pack_generation(switches))])

    def ledger_row(self, ledger_id: int) -> LedgerRow | None:
        value = self._kv.get(fmt.ledger_key(ledger_id))
        return None if value is None else fmt.unpack_ledger_row(value, ledger_id=ledger_id)

    def ledger_ids(self) -> Iterator[int]:
        for key, _ in self._kv.scan(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP):
            yield fmt.unpack_ledger_key(key)

    def log_ids(self) -> set[int]:
        """Return the entry logs that rows refer to. Reads the whole index."""
        rows = self._kv.scan(start=fmt.RUN_KEY_START, stop=fmt.RUN_KEY_STOP)
        return {fmt.location_of(value) >> OFFSET_BITS for _, value in rows}

    def entries_in_log(
        self, log_id: int, *, start: int, after: tuple[int, int] = (-1, -1)
    ) -> Iterator[tuple[int, int]]:
        """Yield (ledger id, entry id) of the entries in a log from offset `start` on, ascending and after `after`.

        Reads the whole index after `after`.
        """
        before = self.run_before(*after) if after[0] >= 0 else None
        first = fmt.RUN_KEY_START if before is None else fmt.run_key(before.ledger_id, before.first_entry_id)
        for key, value in self._kv.scan(start=first, stop=fmt.RUN_KEY_STOP):
            if fmt.location_of(value) >> OFFSET_BITS == log_id:
                run = fmt.unpack_run(key, value)
                for entry_id, location, size in run.entries():
                    if (location & OFFSET_MASK) + size > start and (run.ledger_id, entry_id) > after:
                        yield run.ledger_id, entry_id

    def limbo_ids(self) -> Iterator[int]:
        """Yield the ledgers in limbo, ascending."""
        for key, value in self._kv.scan(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP):
            ledger_id = fmt.unpack_ledger_key(key)
            if fmt.unpack_ledger_row(value, ledger_id=ledger_id).is_limbo:
                yield ledger_id

    def run_before(self, ledger_id: int, entry_id: int) -> Run | None:
        """Return the run with the greatest first entry <= `entry_id`. It need not contain the entry."""
        found = self._kv.floor(lowest=fmt.run_key(ledger_id, 0), key=fmt.run_key(ledger_id, entry_id))
        return None if found is None else fmt.unpack_run(*found)

    def runs(self, ledger_id: int, *, first: int = 0, last: int = ID_MAX) -> Iterator[Run]:
        """Yield the runs that *begin* in [first, last], ascending. `first` may be ID_MAX + 1."""
        if first > last:
            return
        stop = fmt.run_key(ledger_id, last) + b"\0"
        for key, value in self._kv.scan(start=fmt.run_key(ledger_id, first), stop=stop):
            yield fmt.unpack_run(key, value)

    def runs_in_log(self, ledger_id: int, log_id: int) -> Iterator[Run | int]:
        """Yield the ledger's runs in one entry log, ascending by entry id, as of this call.

        For each other row of the ledger its size in bytes is yielded, so that the caller can limit the rate.
        """
        stop = fmt.run_key(ledger_id, ID_MAX) + b"\0"
        for key, value in self._kv.scan(start=fmt.run_key(ledger_id, 0), stop=stop):
            if fmt.location_of(value) >> OFFSET_BITS == log_id:
                yield fmt.unpack_run(key, value)
            else:
                yield len(key) + len(value)

    def switch(
        self,
        log_id: int,
        ledgers: Iterable[tuple[int, int, int]],
        moved: Callable[[int, int], int | None],
        *,
        switches: int,
    ) -> None:
        """Replace the locations of entries that were copied from `log_id`, and set `switches`, in one synced batch.

        `ledgers`: (ledger id, first entry id, last entry id) that cover all copied entries. `moved(offset, size)`: the
        new location of a run whose bodies, with the record headers between them, had that offset and size in the log;
        None if it was not copied as one piece. Rows that refer to other logs are kept. Raises Conflict, and changes
        nothing, if a row refers to an entry of the log that was not copied.
        """
        mark = (fmt.SWITCHES_KEY, fmt.pack_generation(switches))
        self._write(chain(self._switched(log_id, ledgers, moved), (mark,)), sync=True)

    def _switched(
        self, log_id: int, ledgers: Iterable[tuple[int, int, int]], moved: Callable[[int, int], int | None]
    ) -> Iterator[tuple[bytes, bytes]]:
        for ledger_id, first, last in ledgers:
            stop = fmt.run_key(ledger_id, last) + b"\0"
            for key, value in self._kv.scan(start=fmt.run_key(ledger_id, first), stop=stop):
                location = fmt.location_of(value)
                if location >> OFFSET_BITS != log_id:
                    continue
                run = fmt.unpack_run(key, value)
                target = moved(location & OFFSET_MASK, run.size)
                if target is not None:
                    yield key, fmt.relocated(value, target)
                else:  # a flush joined runs that were copied separately
                    yield from fmt.run_rows(ledger_id, self._moved_entries(run, moved))

    def _moved_entries(self, run: Run, moved: Callable[[int, int], int | None]) -> Iterator[Located]:
        for entry_id, location, size in run.entries():
            target = moved(location & OFFSET_MASK, size)
            if target is None:
                raise Conflict("entry was not compacted", ledger_id=run.ledger_id, entry_id=entry_id)
            yield entry_id, target, size

    def last_entry_id(self, ledger_id: int) -> int | None:
        """Return the greatest entry id in the index, by floor search."""
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
        """Apply one flush: delete the rows of `deleted`, then write. Return the number of rows written.

        `runs`: rows that overlap no existing row. `merges`: located entries by ledger, ascending, that may overlap
        rows; the new ones replace the old. `generation`: None keeps the current one, for a rebuild in parts.
        """
        puts = list(runs)
        deletes: list[bytes] = []
        deleted_ids = set(deleted)
        for ledger_id in deleted_ids:
            deletes.append(fmt.ledger_key(ledger_id))
            start, stop = fmt.run_key(ledger_id, 0), fmt.run_key(ledger_id, ID_MAX) + b"\0"
            deletes += [key for key, _ in self._kv.scan(start=start, stop=stop)]
        for ledger_id, located in merges.items():
            if ledger_id in deleted_ids:
                puts += fmt.run_rows(ledger_id, located)
                continue
            rows, replaced = self._merged(ledger_id, located)
            puts += rows
            deletes += replaced
        for ledger_id, row in ledgers.items():
            puts.append((fmt.ledger_key(ledger_id), fmt.pack_ledger_row(row)))
        if generation is not None:
            puts.append((fmt.GENERATION_KEY, fmt.pack_generation(generation)))
        self._write(puts, deletes, sync=sync)
        return len(puts)

    def rows(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield raw rows, start <= key < stop, ascending, for a scrub, which continues after a damaged row."""
        return self._kv.scan(start=start, stop=stop)

    def compaction_bounds(self) -> list[bytes]:
        """Return ascending keys; call `compact` for each adjacent pair. At most a few more than COMPACTION_STEPS.

        Any thread. Raises OSError, DamagedIndex.
        """
        ledger_ids = list(self.ledger_ids())
        stride = -(-len(ledger_ids) // COMPACTION_STEPS) or 1
        between = [fmt.run_key(ledger_id, 0) for ledger_id in ledger_ids[stride::stride]]
        return [fmt.RUN_KEY_START, *between, fmt.RUN_KEY_STOP, fmt.LEDGER_KEY_STOP]

    def compact(self, *, start: bytes, stop: bytes) -> None:
        """See KV. Any thread. Raises OSError, DamagedIndex."""
        self._kv.compact(start=start, stop=stop)

    def close(self) -> None:
        self._kv.close()

    def _merged(self, ledger_id: int, located: Sequence[Located]) -> tuple[Rows, list[bytes]]:
        """Return the rows of `located` merged with the overlapping rows, and the keys of the overlapping rows."""
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
