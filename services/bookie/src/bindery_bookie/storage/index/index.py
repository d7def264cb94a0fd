"""Index: finds entries and ledgers in the KV that `index_format` describes.

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
"""Entries that far apart are looked up apart, so that two re-added entries do not rewrite all the rows between them."""

COMPACTION_STEPS: Final = 64
"""A compaction of the whole index goes in so many steps: at the end of the bookie only one of them is waited for."""

# Rows made from both sides of such a gap cannot join across rows in between that were left alone.
assert _MERGE_GAP > 2 * fmt.RUN_SLOTS_MAX + fmt.RUN_HOLE_MAX

Rows = list[tuple[bytes, bytes]]


class Index:
    """Reads may come from any thread, `commit` from one at a time."""

    def __init__(self, kv: KV) -> None:
        """Raises DamagedIndex, OSError."""
        self._kv = kv
        self._batch = self._number(fmt.BATCH_KEY)
        self._base = max(self._batch, 1)
        """The batch after which nothing may be missing: the last one when the store was opened."""
        self._stale = [key for key, _ in kv.scan(start=fmt.BATCH_ROW_START, stop=fmt.batch_row_key(self._base))]
        """Batch rows that the next batch removes."""

    def check_complete(self) -> None:
        """Raise DamagedIndex unless every batch is there that was written since the store was opened the last time.

        Call it before anything is written. That the *last* batches are there, only the generation tells.
        """
        if not self._batch:
            return
        first = self._number(fmt.batch_row_key(self._batch))
        start, stop = fmt.batch_row_key(first), fmt.batch_row_key(self._batch + 1)
        found = sum(1 for _ in self._kv.scan(start=start, stop=stop))
        if not 0 < first <= self._batch or found != self._batch - first + 1:
            raise DamagedIndex(
                "index lost something that was written to it", batches=found, first=first, last=self._batch
            )

    def _number(self, key: bytes) -> int:
        value = self._kv.get(key)
        return 0 if value is None else fmt.unpack_generation(value)

    def _write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False) -> None:
        """One batch, with its number."""
        number = self._batch + 1
        rows = (
            (fmt.BATCH_KEY, fmt.pack_generation(number)),
            (fmt.batch_row_key(number), fmt.pack_generation(self._base)),
        )
        self._kv.write_batch(chain(puts, rows), chain(deletes, self._stale), sync=sync)
        self._batch = number
        self._stale = []

    def generation(self) -> int:
        """Flushes so far; 0 for an empty index."""
        return self._number(fmt.GENERATION_KEY)

    def switches(self) -> int:
        """Compactions whose rows are in here; see `log_manifest`."""
        return self._number(fmt.SWITCHES_KEY)

    def set_switches(self, switches: int) -> None:
        """For a rebuild: not durable before the next `commit` with `sync`."""
        self._write([(fmt.SWITCHES_KEY, fmt.pack_generation(switches))])

    def ledger_row(self, ledger_id: int) -> LedgerRow | None:
        value = self._kv.get(fmt.ledger_key(ledger_id))
        return None if value is None else fmt.unpack_ledger_row(value, ledger_id=ledger_id)

    def ledger_ids(self) -> Iterator[int]:
        for key, _ in self._kv.scan(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP):
            yield fmt.unpack_ledger_key(key)

    def log_ids(self) -> set[int]:
        """Entry logs that rows point to. Reads the whole index."""
        rows = self._kv.scan(start=fmt.RUN_KEY_START, stop=fmt.RUN_KEY_STOP)
        return {fmt.location_of(value) >> OFFSET_BITS for _, value in rows}

    def entries_in_log(
        self, log_id: int, *, start: int, after: tuple[int, int] = (-1, -1)
    ) -> Iterator[tuple[int, int]]:
        """(ledger id, entry id) of what the index places in an entry log from offset `start` on, ascending and behind
        `after`. Reads all of it."""
        before = self.run_before(*after) if after[0] >= 0 else None
        first = fmt.RUN_KEY_START if before is None else fmt.run_key(before.ledger_id, before.first_entry_id)
        for key, value in self._kv.scan(start=first, stop=fmt.RUN_KEY_STOP):
            if fmt.location_of(value) >> OFFSET_BITS == log_id:
                run = fmt.unpack_run(key, value)
                for entry_id, location, size in run.entries():
                    if (location & OFFSET_MASK) + size > start and (run.ledger_id, entry_id) > after:
                        yield run.ledger_id, entry_id

    def limbo_ids(self) -> Iterator[int]:
        """Ledgers in limbo, ascending."""
        for key, value in self._kv.scan(start=fmt.LEDGER_KEY_START, stop=fmt.LEDGER_KEY_STOP):
            ledger_id = fmt.unpack_ledger_key(key)
            if fmt.unpack_ledger_row(value, ledger_id=ledger_id).is_limbo:
                yield ledger_id

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

    def runs_in_log(self, ledger_id: int, log_id: int) -> Iterator[Run | int]:
        """The ledger's runs in one entry log, ascending by entry id, as of this call; in between, of each other row,
        its size in bytes, so that the caller can pace a walk over a long ledger."""
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
        """Point what was copied out of `log_id` to where it is now, in one synced batch with the count `switches`.

        `ledgers`: (ledger id, first entry id, last) that held all that was copied. `moved`: the new location of what
        lay at an offset of that log with so many bytes of body (and the records between); None: that was not copied as
        one piece. Rows that point elsewhere by now stay. Raises Conflict, and changes nothing, when a row points into
        the log and was not copied.
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
                else:  # flushes joined what was copied in parts
                    yield from fmt.run_rows(ledger_id, self._moved_apart(run, moved))

    def _moved_apart(self, run: Run, moved: Callable[[int, int], int | None]) -> Iterator[Located]:
        for entry_id, location, size in run.entries():
            target = moved(location & OFFSET_MASK, size)
            if target is None:
                raise Conflict("entry was not compacted", ledger_id=run.ledger_id, entry_id=entry_id)
            yield entry_id, target, size

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
        self._write(puts, deletes, sync=sync)
        return len(puts)

    def rows(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows as they are, start <= key < stop, ascending: for a scrub, which goes on behind one that is damaged."""
        return self._kv.scan(start=start, stop=stop)

    def compaction_bounds(self) -> list[bytes]:
        """Keys between which `compact` is called, one pair after the other; a few more than COMPACTION_STEPS at most.

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
