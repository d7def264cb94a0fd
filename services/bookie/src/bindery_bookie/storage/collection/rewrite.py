"""Rewrite: copy the live entries of one entry log into a new one, step by step, in the compaction worker.

Live entries are found through the index, not by a scan, so damage of dead records does not matter. The new log begins
with the `deleted` records that are still needed. For each ledger it has the current control state (its records may be
in the old log only, and an index rebuild needs them), then the entries, unchanged, after verification of their digests.

Invariants: the new log gets its final name only when it is complete and synced; a log with an unreadable live entry is
not replaced, and every such entry is reported in `damage`.
"""

from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection.log_usage import LogUsage, is_in, usage_of
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.io.disk import Disk, ReadableFile, WritableFile

STEP_SIZE: Final = 256 * 1024
"""Maximum number of bytes read or written per step, unless one entry is larger."""

DAMAGE_MAX: Final = 1000
"""Maximum number of damaged entries reported per log."""


class Rewrite:
    """The rewrite of one log. Run `steps` to the end, or close it. After its end, if `damage` is empty, use `moved` and
    `ledgers`."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        index: Index,
        *,
        source: LogUsage,
        target_id: int,
        live: Sequence[int],
        deletions: frozenset[int],
        sync_size: int,
    ) -> None:
        """`live`: live ledgers, ascending. `deletions`: ledgers whose `deleted` record is needed."""
        self._disk = disk
        self._index = index
        self.source = source
        self.target_id = target_id
        self._live = live
        self._deletions = deletions
        self._sync_size = sync_size
        self.source_path = f"{directory}/{fmt.file_name(source.log_id)}"
        self.path = f"{directory}/{fmt.file_name(target_id)}"
        self.temporary_path = self.path.removesuffix(fmt.FILE_SUFFIX) + fmt.COMPACTING_SUFFIX
        self._file: WritableFile | None = None
        self._offset = 0
        self._unsynced = 0
        self._work = 0
        self._buffer = bytearray()
        self._sizes: dict[int, int] = {}
        self._starts = array("Q")
        """Offsets in the old log of parts that were copied unchanged, in the order of copying; sorted at the end."""
        self._lengths = array("Q")
        self._targets = array("Q")
        self.ledgers: list[tuple[int, int, int]] = []
        """(ledger id, first entry id, last entry id) of the copied entries."""
        self.copied_bytes = 0
        self.damage: list[Damage] = []

    @property
    def target(self) -> LogUsage:
        """The usage of the new log, once it is complete."""
        return usage_of(self.target_id, self.source.order, self._offset, self._sizes, self._deletions)

    def moved(self, offset: int, size: int) -> int | None:
        """Return the new location of `size` bytes that were at `offset`; None: not copied as one piece."""
        start = offset - fmt.RECORD_HEADER_SIZE
        at = bisect_right(self._starts, start) - 1
        if at < 0 or offset + size > self._starts[at] + self._lengths[at]:
            return None
        return self.target_id << fmt.OFFSET_BITS | self._targets[at] + offset - self._starts[at]

    def steps(self) -> Generator[int, None, None]:
        """Copy; yield the bytes read and written per step. Close it to stop early.

        Raises OSError, DamagedStorage (index).
        """
        source = self._disk.open_read(self.source_path)
        try:
            yield from self._copy(source)
        finally:
            source.close()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _copy(self, source: ReadableFile) -> Iterator[int]:
        self._file = self._disk.create(self.temporary_path)
        self._put(fmt.pack_file_header(self.target_id, order=self.source.order))
        for ledger_id in sorted(self._deletions):
            self._put_control(ledger_id, control.pack_deleted(ledger_id))
        for ledger_id in self._ledger_ids():
            row = self._index.ledger_row(ledger_id)
            if row is not None:
                for record in _control_records(ledger_id, row):
                    self._put_control(ledger_id, record)
                yield from self._copy_ledger(source, ledger_id)
                if len(self._buffer) >= STEP_SIZE:
                    yield from self._worked(self._write())
        if self.damage:
            return
        ledgers_map = fmt.pack_record(fmt.pack_ledgers_map(self._sizes, self._deletions))
        trailer = fmt.pack_trailer(self._offset + fmt.RECORD_HEADER_SIZE)
        self._put(ledgers_map + trailer)
        self._write()
        self._file.sync()
        yield self._work
        self._sort()

    def _ledger_ids(self) -> Sequence[int]:
        """Return the live ledgers whose records may be in the old log."""
        if not self.source.is_exact:
            return self._live  # the unreadable part may have had control records of any ledger
        return [ledger_id for ledger_id in self.source.ledger_ids if is_in(self._live, ledger_id)]

    def _copy_ledger(self, source: ReadableFile, ledger_id: int) -> Iterator[int]:
        parts: list[tuple[int, int]] = []
        first = last = -1
        work = 0
        for run in self._index.runs_in_log(ledger_id, self.source.log_id):
            if isinstance(run, int):
                work += run
            else:
                start = (run.location & fmt.OFFSET_MASK) - fmt.RECORD_HEADER_SIZE
                end = start + fmt.RECORD_HEADER_SIZE + run.size
                if parts and parts[-1][1] == start:
                    parts[-1] = (parts[-1][0], end)
                else:
                    parts.append((start, end))
                first = run.first_entry_id if first < 0 else first
                last = run.last_entry_id
            if work >= STEP_SIZE:
                yield from self._worked(work)
                work = 0
        yield from self._worked(work)
        if not parts:
            return
        self.ledgers.append((ledger_id, first, last))
        for start, end in parts:
            try:
                yield from self._copy_part(source, ledger_id, start, end)
            except DamagedStorage:
                self.damage += self._find_damage(source, ledger_id)
                if not self.damage:  # the damaged entries have been stored elsewhere since
                    self.damage.append(Damage(self.source_path, start, "entries cannot be read", ledger_id))
                return

    def _copy_part(self, source: ReadableFile, ledger_id: int, start: int, end: int) -> Iterator[int]:
        """Copy adjacent records of the ledger."""
        self._starts.append(start)
        self._lengths.append(end - start)
        self._targets.append(self._offset)
        at = start
        size_wanted = STEP_SIZE
        while at < end:
            data = self._read(source, at, min(size_wanted, end - at))
            size, size_wanted = self._whole_records(data, ledger_id, at, end)
            if not self.damage:
                self._put(data[:size], ledger_id)
            at += size
            if size:
                self.copied_bytes += size
                yield from self._worked(size)
                if len(self._buffer) >= STEP_SIZE:
                    yield from self._worked(self._write())

    def _worked(self, size: int) -> Iterator[int]:
        """Count `size` bytes of work, and yield the sum once it is a step."""
        self._work += size
        if self._work >= STEP_SIZE:
            work, self._work = self._work, 0
            yield work

    def _whole_records(self, data: bytes, ledger_id: int, offset: int, end: int) -> tuple[int, int]:
        """Verify the records in `data`. Return the bytes of whole records, and the number of bytes to read next.

        `end`: end of the part. A record that would exceed it has a damaged size.
        """
        at = 0
        while at + fmt.RECORD_HEADER_SIZE <= len(data):
            _, size = fmt.unpack_record_header(data, at)
            body_at = at + fmt.RECORD_HEADER_SIZE
            if not fmt.BODY_SIZE_MIN <= size <= fmt.BODY_SIZE_MAX:
                raise DamagedStorage("entry size is out of range", path=self.source_path, offset=offset + body_at)
            if body_at + size > len(data):
                if at == 0 and offset + body_at + size <= end:
                    return 0, fmt.RECORD_HEADER_SIZE + size
                if at == 0:
                    raise DamagedStorage("entry log is short", path=self.source_path, offset=offset)
                break
            body = data[body_at : body_at + size]
            fmt.check_record(data[at:body_at], body, path=self.source_path, offset=offset + body_at)
            if fmt.unpack_ids(body)[0] != ledger_id:
                raise DamagedStorage(
                    "the record's ledger id or entry id differs from the index",
                    path=self.source_path,
                    offset=offset + body_at,
                )
            at = body_at + size
        if not at:
            raise DamagedStorage("entry log is short", path=self.source_path, offset=offset)
        return at, STEP_SIZE

    def _read(self, source: ReadableFile, offset: int, size: int) -> bytes:
        try:
            data = source.read_at(offset, size)
        except OSError as error:
            raise DamagedStorage(f"cannot be read: {error}", path=self.source_path, offset=offset) from error
        if len(data) < size:
            raise DamagedStorage("entry log is short", path=self.source_path, offset=offset + len(data))
        return data

    def _find_damage(self, source: ReadableFile, ledger_id: int) -> list[Damage]:
        """Return the ledger's unreadable entries in this log."""
        found: list[Damage] = []
        for run in self._index.runs_in_log(ledger_id, self.source.log_id):
            for entry_id, location, size in run.entries() if isinstance(run, Run) else ():
                offset = location & fmt.OFFSET_MASK
                try:
                    data = self._read(source, offset - fmt.RECORD_HEADER_SIZE, fmt.RECORD_HEADER_SIZE + size)
                    header, body = data[: fmt.RECORD_HEADER_SIZE], data[fmt.RECORD_HEADER_SIZE :]
                    fmt.check_record(header, body, path=self.source_path, offset=offset)
                    if fmt.unpack_ids(body) != (ledger_id, entry_id):
                        raise DamagedStorage(
                            "the record's ledger id or entry id differs from the index",
                            path=self.source_path,
                            offset=offset,
                        )
                except DamagedStorage as error:
                    if len(found) + len(self.damage) < DAMAGE_MAX:
                        found.append(Damage(self.source_path, offset, error.message, ledger_id, entry_id))
        return found

    # --- the new log

    def _put_control(self, ledger_id: int, record: bytes) -> None:
        self._put(fmt.pack_record(record), ledger_id)

    def _put(self, data: bytes, ledger_id: int | None = None) -> None:
        self._buffer += data
        self._offset += len(data)
        if ledger_id is not None:
            self._sizes[ledger_id] = self._sizes.get(ledger_id, 0) + len(data)

    def _write(self) -> int:
        """Write the buffer and return its size. After damage, discard it and return 0: there will be no new log."""
        assert self._file is not None
        size = len(self._buffer)
        if self.damage:
            self._buffer.clear()
            return 0
        self._file.write_at(self._buffer, self._offset - size)
        self._buffer = bytearray()
        self._unsynced += size
        if self._unsynced >= self._sync_size:
            self._file.datasync()
            self._unsynced = 0
        return size

    def _sort(self) -> None:
        """Sort the parts by offset in the old log, for `moved`."""
        order = sorted(range(len(self._starts)), key=self._starts.__getitem__)
        self._starts, self._lengths, self._targets = (
            array("Q", (values[at] for at in order)) for values in (self._starts, self._lengths, self._targets)
        )


def _control_records(ledger_id: int, row: LedgerRow) -> Iterator[bytes]:
    yield control.pack_master_key(ledger_id, row.master_key)
    if row.is_fenced:
        yield control.pack_fence(ledger_id)
    if row.explicit_lac is not None:
        yield control.pack_explicit_lac(ledger_id, row.explicit_lac)
