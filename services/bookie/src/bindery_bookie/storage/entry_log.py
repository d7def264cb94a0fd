"""Entry logs: written by flushes, read by location.

Invariants: bytes in (log, offset) order up to `durable` are synced; a log is created, filled, closed, never reopened
for writing; what a failed flush left behind is cut off before the next one writes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import entry_log_format as fmt
from bindery_bookie.storage.disk import Disk, ReadableFile, WritableFile
from bindery_bookie.storage.index_format import Located

_READ_SIZE_MAX: Final = 8 * 1024 * 1024
"""Bytes read in one go, unless one entry is larger."""


class EntryLogWriter:
    """Owns the log being written. All methods run in the flush's worker."""

    def __init__(self, disk: Disk, directory: str, *, log_id: int, offset: int, sync_size: int) -> None:
        """(`log_id`, `offset`): where durable records end; (0, 0) when there is no log.

        `sync_size`: bytes after which the disk is given the data, so that the last sync is a short one.
        """
        self._sync_size = sync_size
        self._unsynced = 0
        self._disk = disk
        self._directory = directory
        self._durable = (log_id, offset)
        self._file: WritableFile | None = None
        self._log_id = log_id
        self._offset = offset
        self._sizes: dict[int, int] = {}

    @property
    def durable(self) -> tuple[int, int]:
        """(log id, offset) where synced records end."""
        return self._durable

    @property
    def next_place(self) -> tuple[int, int]:
        """(log id, offset) of the next record."""
        if self._file is None:
            return self._log_id + 1, fmt.HEADER_SIZE
        return self._log_id, self._offset

    def append(self, data: bytes, *, log_id: int, offset: int, sizes: Mapping[int, int]) -> None:
        """Write whole records, whose headers start at `offset` of `log_id`: the end of this log, or a new one's start.

        `sizes`: their bytes by ledger id, for the ledgers map.
        """
        if self._file is None or log_id != self._log_id:
            self.seal()
            self._create(log_id)
        assert self._file is not None
        assert offset == self._offset
        self._file.write_at(data, offset)
        self._offset += len(data)
        self._unsynced += len(data)
        if self._unsynced >= self._sync_size:
            self._file.datasync()
            self._unsynced = 0
        for ledger_id, size in sizes.items():
            self._sizes[ledger_id] = self._sizes.get(ledger_id, 0) + size

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._file is not None:
            self._file.datasync()
            self._unsynced = 0
            self._durable = (self._log_id, self._offset)

    def seal(self) -> None:
        """Close the log, if one is open, with its ledgers map. Synced, but `durable` moves only with the next `sync`.

        The caller that seals without a `sync` after it must not: see `close`.
        """
        if self._file is None:
            return
        ledgers_map = fmt.pack_record(fmt.pack_ledgers_map(self._sizes))
        trailer = fmt.pack_trailer(self._offset + fmt.RECORD_HEADER_SIZE)
        self._file.write_at(ledgers_map + trailer, self._offset)
        self._offset += len(ledgers_map) + len(trailer)
        self._file.sync()
        self._file.close()
        self._file = None

    def close(self) -> None:
        """Seal. Everything is durable after it."""
        if self._file is not None:
            self.seal()
            self._durable = (self._log_id, self._offset)

    def roll_back(self) -> None:
        """Cut off what was written behind `durable`. The next record opens a new log.

        After a failed sync the kernel may have dropped the pages, so nothing written since is kept.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
        cut_logs(self._disk, self._directory, log_id=self._durable[0], offset=self._durable[1])
        self._log_id, self._offset = self._durable

    def _create(self, log_id: int) -> None:
        assert log_id == self._log_id + 1
        assert log_id <= fmt.LOG_ID_MAX
        file = self._disk.create(f"{self._directory}/{fmt.file_name(log_id)}")
        try:
            file.write_at(fmt.pack_file_header(log_id), 0)
            file.sync()
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            raise
        self._file, self._log_id, self._offset, self._sizes = file, log_id, fmt.HEADER_SIZE, {}


def list_logs(disk: Disk, directory: str) -> list[int]:
    """Log ids, ascending."""
    found = (fmt.parse_file_name(name) for name in disk.list_names(directory))
    return sorted(log_id for log_id in found if log_id is not None)


def cut_logs(disk: Disk, directory: str, *, log_id: int, offset: int) -> None:
    """Remove what lies behind (`log_id`, `offset`): a flush wrote it that did not finish, and its journal is kept.

    Raises DamagedStorage when what should lie before is missing.
    """
    for found in list_logs(disk, directory):
        path = f"{directory}/{fmt.file_name(found)}"
        if found > log_id:
            disk.remove(path)
        elif found == log_id:
            file = disk.open_read(path)
            try:
                size = file.size()
            finally:
                file.close()
            if size < offset:
                raise DamagedStorage("entry log is short", path=path, offset=size, expected=offset)
            if size > offset:
                disk.truncate(path, offset)
    disk.sync_directory(directory)


class EntryLogReader:
    """Reads entries by location. For one thread; keeps the most recently used logs open."""

    def __init__(self, disk: Disk, directory: str, *, open_logs_max: int) -> None:
        self._disk = disk
        self._directory = directory
        self._open_logs_max = open_logs_max
        self._files: OrderedDict[int, ReadableFile] = OrderedDict()

    def path(self, log_id: int) -> str:
        return f"{self._directory}/{fmt.file_name(log_id)}"

    def read(self, located: Sequence[Located], *, ledger_id: int) -> list[bytes]:
        """Bodies of entries of one ledger that lie one after the other in one log, ascending.

        Stops before the first one that is damaged, or when a good deal was read; raises DamagedStorage if that is the
        first of all. Every body was checked against its digest and its ids.
        """
        log_id, offset = located[0][1] >> fmt.OFFSET_BITS, located[0][1] & fmt.OFFSET_MASK
        path = self.path(log_id)
        start = offset - fmt.RECORD_HEADER_SIZE
        size = 0
        for _, location, body_size in located:
            end = (location & fmt.OFFSET_MASK) + body_size - start
            if size and end > _READ_SIZE_MAX:
                break
            size = end
        data = self._file(log_id, path).read_at(start, size)
        bodies: list[bytes] = []
        for entry_id, location, body_size in located:
            at = (location & fmt.OFFSET_MASK) - start
            if bodies and at + body_size > size:
                break
            body = data[at : at + body_size]
            try:
                fmt.check_record(data[at - fmt.RECORD_HEADER_SIZE : at], body, path=path, offset=start + at)
                if len(body) != body_size or fmt.unpack_ids(body) != (ledger_id, entry_id):
                    raise DamagedStorage("another entry is there", path=path, offset=start + at, entry_id=entry_id)
            except DamagedStorage:
                if bodies:
                    break  # read ahead of demand: it is reported when somebody asks for it
                raise
            bodies.append(body)
        return bodies

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, log_id: int, path: str) -> ReadableFile:
        file = self._files.get(log_id)
        if file is not None:
            self._files.move_to_end(log_id)
            return file
        try:
            file = self._disk.open_read(path)
        except FileNotFoundError as error:
            raise DamagedStorage("entry log is missing", path=path, offset=0) from error
        self._files[log_id] = file
        if len(self._files) > self._open_logs_max:
            self._files.popitem(last=False)[1].close()
        return file
