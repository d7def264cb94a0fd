"""Flush: move the entries of a full write cache into an entry log and the index.

A flush writes the entry log, then the index (one batch with the next generation), then LastLogMark; each step is
durable before the next. Then it deletes old journals. After a crash between two steps, a replay of the journal leads to
the same state.

The event loop encodes entries in slices of `flush_slice_s` and runs other tasks in between. Writes, syncs and index
updates run in the flush worker. Adds do not wait for a flush.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import BinderyError
from crc32c import crc32c

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, ManifestFile
from bindery_bookie.storage.index.index import Index, Rows
from bindery_bookie.storage.index.index_format import RUN_SLOTS_MAX, LedgerRow, dense_run_rows, run_rows
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import drop_needed
from bindery_bookie.storage.journal.mark import LastLogMark, write_mark
from bindery_bookie.storage.memory.ledgers import LedgerState
from bindery_bookie.storage.memory.write_cache import WriteCache
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

_SLICE_ENTRIES: Final = 2 * RUN_SLOTS_MAX
"""Number of entries encoded between two checks of the clock: far less than a millisecond if they are small."""

assert _SLICE_ENTRIES % RUN_SLOTS_MAX == 0


@dataclass(slots=True)
class Flush:
    """The input and progress of one flush: everything accepted before `position`."""

    cache: WriteCache
    position: JournalPosition
    """Start of a replay after this flush."""
    states: dict[int, LedgerState]
    """Ledgers with entries in `cache`, and ledgers with other changes."""
    deleted: Sequence[int]
    control_records: list[bytes] | None = None
    """Control records of `states` and `deleted`, collected by the first attempt and reused by later ones."""
    attempts: int = 0
    """Number of attempts so far. After a failed attempt it is unknown whether its rows are in the index."""
    is_stored: bool = False
    """Whether the entries are in entry log and index, so that only the mark must be written."""
    overwritten: list[tuple[int, int]] = field(default_factory=list)
    """(ledger id, entry id) of entries that the index may have had before."""


class Flusher:
    """Runs one flush at a time. Owns the entry log writer, index commits and the mark."""

    def __init__(
        self,
        *,
        disk: Disk,
        directory: str,
        journal_directory: str,
        index: Index,
        logs: EntryLogWriter,
        manifest: ManifestFile,
        mark: LastLogMark,
        worker: Worker,
        clock: Callable[[], float],
        settings: StorageSettings,
        stats: StorageStats,
        encoder: "type[Encoder] | None" = None,
    ) -> None:
        """`encoder`: determines the order of entries in the entry log; None: sorted."""
        self._encoder = encoder or Encoder
        self._disk = disk
        self._directory = directory
        self._journal_directory = journal_directory
        self._index = index
        self._logs = logs
        self._manifest = manifest
        self.mark = mark
        self._worker = worker
        self._clock = clock
        self._settings = settings
        self._stats = stats
        self.closed_below = mark.log_id + 1
        """Log id below which all logs of flushes are closed, with their entries in the index."""
        self._must_roll_back = False
        """True if the open log was closed, but the remains of its failed seal could not be removed."""

    async def store(self, flush: Flush) -> None:
        """Make `flush` durable in entry log and index. Raises OSError, DamagedStorage; the call may be repeated.

        Entries stay readable from the cache until the caller drops the cache.
        """
        if flush.attempts or self._must_roll_back:
            await self._roll_back()
        flush.attempts += 1
        encoder = self._encoder(self, flush)
        await encoder.run()
        generation = self.mark.generation + 1
        rows = await run_in(self._worker, lambda: self._commit(encoder, flush.deleted, generation))
        for ledger_id, state in flush.states.items():
            state.indexed_entry_id = encoder.ledgers[ledger_id].last_entry_id
        self._stats.flushes += 1
        self._stats.flush_entries += encoder.entries_count
        self._stats.flush_bytes += encoder.bytes_count
        self._stats.index_rows_written += rows

    async def advance_mark(self, position: JournalPosition, *, is_stored: bool = True) -> None:
        """Write LastLogMark, then delete the journals before it.

        `is_stored`: follows a `store`, which incremented the generation of the index. The journal must be durable up to
        `position`.
        """
        generation = self.mark.generation + (1 if is_stored else 0)
        log_id, log_offset = self._logs.durable
        mark = LastLogMark(generation, position, log_id, log_offset)
        dropped = await run_in(self._worker, lambda: self._write_mark(mark))
        self.mark = mark
        self.closed_below = log_id if self._logs.is_open else log_id + 1
        self._stats.journal_files_dropped += dropped

    async def close(self, position: JournalPosition) -> None:
        """Seal the open entry log, so that tools need not scan it, and advance the mark to the end of the journal.

        `position`: the end of the journal; everything before it is stored and synced.
        """
        durable = self._logs.durable
        await run_in(self._worker, self._logs.close)
        if self._logs.durable != durable or position != self.mark.journal:
            await self.advance_mark(position, is_stored=False)

    async def roll(self) -> None:
        """Close the open entry log, if there is one, and seal it if the disk allows. Only between flushes.

        Raises OSError if the remains of a failed seal cannot be truncated. The next call or flush truncates them.
        """
        if not self._must_roll_back:
            try:
                await self.close(self.mark.journal)
            except (OSError, BinderyError):
                self._must_roll_back = True
        if self._must_roll_back:
            await self._roll_back()
            self.closed_below = self.mark.log_id + 1

    async def _roll_back(self) -> None:
        await run_in(self._worker, self._logs.roll_back)
        self._must_roll_back = False

    async def write(
        self, data: bytes, *, log_id: int, offset: int, sizes: dict[int, int], deletions: Sequence[int] = ()
    ) -> None:
        """Append to the entry log. Called by the encoder."""
        await run_in(
            self._worker,
            lambda: self._logs.append(data, log_id=log_id, offset=offset, sizes=sizes, deletions=deletions),
        )

    def log_end(self, log_id: int) -> LogEnd:
        """Return the expected end of a closed log, or of the log of LastLogMark. Any thread."""
        mark = self.mark  # read before the manifest, which lists an unsealed log before the mark leaves it
        return self._manifest.manifest.end(log_id, mark=(mark.log_id, mark.log_offset))

    def next_place(self) -> tuple[int, int]:
        """Return (log id, offset) of the next record. Only while no job of a flush is running."""
        return self._logs.next_place

    def next_log_id(self) -> int:
        """Return the id of the log after the open one. Only while no job of a flush is running."""
        return self._logs.next_log_id

    async def open_ledgers(self) -> dict[int, int]:
        """Return the bytes of records by ledger id in the open log."""
        return await run_in(self._worker, self._logs.open_ledgers)

    def _commit(self, encoder: "Encoder", deleted: Sequence[int], generation: int) -> int:
        self._logs.sync()
        return self._index.commit(
            runs=encoder.rows, merges=encoder.merges, ledgers=encoder.ledgers, deleted=deleted, generation=generation
        )

    def _write_mark(self, mark: LastLogMark) -> int:
        left = {log_id: size for log_id, size in self._logs.unsealed.items() if log_id != mark.log_id}
        if left:  # the manifest must list their sizes before the mark leaves these logs
            self._manifest.change(lambda manifest: manifest.with_unsealed(left))
            for log_id in left:
                del self._logs.unsealed[log_id]
        write_mark(self._disk, self._directory, mark)
        dropped = 0
        for name in self._disk.list_names(self._journal_directory):
            journal_id = journal_format.parse_file_name(name)
            if journal_id is not None and journal_id < mark.journal.journal_id:
                self._disk.remove(f"{self._journal_directory}/{name}", is_unread=True)
                dropped += 1
        drop_needed(self._disk, self._journal_directory, mark.journal.journal_id)
        return dropped


class Encoder:
    """Encodes one flush into entry log records and index rows, in slices. Sorts entries by ledger and id."""

    def __init__(self, flusher: Flusher, flush: Flush) -> None:
        self._flusher = flusher
        self._flush = flush
        self._clock = flusher._clock
        self._slice_s = flusher._settings.flush_slice_s
        self._chunk_size = flusher._settings.flush_chunk_size
        self._log_size_max = flusher._settings.entry_log_size_max
        self._log_id, self._offset = flusher.next_place()
        self._chunk_offset = self._offset
        self._parts: list[bytes] = []
        self._sizes: dict[int, int] = {}
        self._deletions: list[int] = []
        self._slice_end = 0.0
        self.rows: Rows = []
        self.merges: dict[int, list[Located]] = {}
        self.ledgers: dict[int, LedgerRow] = {}
        self.entries_count = 0
        self.bytes_count = 0

    async def run(self) -> None:
        self._slice_end = self._clock() + self._slice_s
        flush = self._flush
        flush.overwritten = []
        if flush.control_records is None:
            flush.control_records = [control.pack_deleted(ledger_id) for ledger_id in flush.deleted]
            for state in flush.states.values():
                flush.control_records += state.take_control_records()
        for record in flush.control_records:
            self._add_control(record)
            await self._yield_if_due()
        await self._add_entries(flush)
        for ledger_id, state in flush.states.items():
            if ledger_id not in self.ledgers:
                self.ledgers[ledger_id] = state.row(indexed_entry_id=state.indexed_entry_id)
                await self._yield_if_due()
        await self._write_chunk()

    async def _add_entries(self, flush: Flush) -> None:
        for ledger_id, entry_ids, bodies in flush.cache.sorted_ledgers():
            await self._add_ledger(flush.states[ledger_id], entry_ids, bodies)

    async def _open_next_log_if_full(self) -> None:
        if self._offset > self._log_size_max:
            await self._write_chunk()
            self._log_id, self._offset = self._flusher.next_log_id(), fmt.HEADER_SIZE
            self._chunk_offset = self._offset

    def _add_control(self, record: bytes) -> None:
        packed = fmt.pack_record(record)
        self._parts.append(packed)
        ledger_id, entry_id = control.unpack_ids(record)
        if entry_id == control.DELETED:
            self._deletions.append(ledger_id)
        self._count(ledger_id, len(packed))

    async def _add_ledger(self, state: LedgerState, entry_ids: Sequence[int], bodies: dict[int, bytes]) -> None:
        ledger_id = state.ledger_id
        # Entries that the index may already have are merged with its rows. From the second attempt on, all may be.
        known = bisect_right(entry_ids, state.indexed_entry_id) if self._flush.attempts == 1 else len(entry_ids)
        at = 0
        while at < len(entry_ids):
            await self._open_next_log_if_full()
            is_known = at < known
            part = entry_ids[at : min(at + _SLICE_ENTRIES, known if is_known else len(entry_ids))]
            sizes = self._add_records(part, bodies)
            part = part[: len(sizes)]
            at += len(part)
            location = self._log_id << fmt.OFFSET_BITS | self._offset + fmt.RECORD_HEADER_SIZE
            self._count(ledger_id, sum(sizes) + fmt.RECORD_HEADER_SIZE * len(sizes))
            if is_known:
                self.merges.setdefault(ledger_id, []).extend(_located(part, location, sizes))
                self._flush.overwritten += [(ledger_id, entry_id) for entry_id in part]
            elif part[-1] - part[0] == len(part) - 1:
                self.rows += dense_run_rows(ledger_id, part[0], location, sizes)
            else:
                self.rows += run_rows(ledger_id, _located(part, location, sizes))
            self.entries_count += len(part)
            await self._yield_if_due()
        self.ledgers[ledger_id] = state.row(indexed_entry_id=max(state.indexed_entry_id, entry_ids[-1]))

    def _add_records(self, entry_ids: Sequence[int], bodies: dict[int, bytes]) -> list[int]:
        """Encode entries until a chunk is about full, at least one; return their sizes."""
        append = self._parts.append
        pack, checksum = fmt.pack_record_header, crc32c
        sizes: list[int] = []
        room = self._chunk_size
        for entry_id in entry_ids:
            body = bodies[entry_id]
            size = len(body)
            append(pack(checksum(body, size), size))
            append(body)
            sizes.append(size)
            room -= size
            if room <= 0:
                break
        return sizes

    def _count(self, ledger_id: int, size: int) -> None:
        self._sizes[ledger_id] = self._sizes.get(ledger_id, 0) + size
        self._offset += size
        self.bytes_count += size

    async def _yield_if_due(self) -> None:
        """Write a full chunk; let other tasks run if the time slice is over."""
        if self._offset - self._chunk_offset >= self._chunk_size:
            await self._write_chunk()
        elif self._clock() >= self._slice_end:
            await asyncio.sleep(0)
        else:
            return
        self._slice_end = self._clock() + self._slice_s

    async def _write_chunk(self) -> None:
        if not self._parts:
            return
        data = b"".join(self._parts)
        assert len(data) == self._offset - self._chunk_offset
        sizes, self._sizes = self._sizes, {}
        deletions, self._deletions = self._deletions, []
        self._parts = []
        await self._flusher.write(
            data, log_id=self._log_id, offset=self._chunk_offset, sizes=sizes, deletions=deletions
        )
        self._chunk_offset = self._offset


def _located(entry_ids: Sequence[int], location: int, sizes: Sequence[int]) -> list[Located]:
    located: list[Located] = []
    for entry_id, size in zip(entry_ids, sizes, strict=True):
        located.append((entry_id, location, size))
        location += size + fmt.RECORD_HEADER_SIZE
    return located
