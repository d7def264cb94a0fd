"""Append to entry logs and read entries by location.

Invariants: all records of flushes up to `durable`, in (log, offset) order, are synced. A log is created, filled and
closed, and is never reopened for writing. The remains of a failed flush are removed before the next attempt writes, and
that attempt uses the same log ids.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Final

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.io.disk import Disk, ReadableFile, WritableFile

_READ_SIZE_MAX: Final = 8 * 1024 * 1024
"""Maximum number of bytes per read, unless one entry is larger."""


class EntryLogWriter:
    """Owns the log that is being written.

    Methods run in the flush worker. `next_place` and `next_log_id` are for the event loop, while the worker has no job
    of a flush.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        log_id: int,
        offset: int,
        sync_size: int,
        new_id: Callable[[], int] | None = None,
    ) -> None:
        """(`log_id`, `offset`): end of the durable records; (0, 0) if there is no log.

        `sync_size`: number of bytes after which data is synced, so that the last sync is short.
        `new_id`: returns ascending log ids above `log_id`; None: the next integers.
        """
        self._sync_size = sync_size
        self._unsynced = 0
        self._disk = disk
        self._directory = directory
        self._durable = (log_id, offset)
        self._new_id = new_id or count(log_id + 1).__next__
        self._created: list[int] = []
        """Logs created since `durable`, ascending."""
        self._spare: list[int] = []
        """Ids for the next logs, ascending; all lower than the next one from `new_id`."""
        self._is_tail_open = False
        """True if the log of `durable` may have grown since."""
        self.unsealed: dict[int, int] = {}
        """Log id -> size of logs that a roll-back closed without a trailer, until the manifest lists them."""
        self._file: WritableFile | None = None
        self._log_id = log_id
        self._offset = offset
        self._sizes: dict[int, int] = {}
        self._deletions: set[int] = set()

    @property
    def durable(self) -> tuple[int, int]:
        """(log id, offset): end of the synced records."""
        return self._durable

    @property
    def is_open(self) -> bool:
        """True if a log is open: that of `durable` or a later one."""
        return self._file is not None

    @property
    def next_place(self) -> tuple[int, int]:
        """(log id, offset) of the next record."""
        if self._file is None:
            return self.next_log_id, fmt.HEADER_SIZE
        return self._log_id, self._offset

    @property
    def next_log_id(self) -> int:
        """The id of the log that is created next."""
        if not self._spare:
            self._spare.append(self._new_id())
        return self._spare[0]

    def open_ledgers(self) -> dict[int, int]:
        """Return the bytes of records by ledger id in the open log; empty if no log is open."""
        return dict(self._sizes) if self._file is not None else {}

    def append(
        self, data: bytes, *, log_id: int, offset: int, sizes: Mapping[int, int], deletions: Iterable[int] = ()
    ) -> None:
        """Write whole records at `offset` of `log_id`, which is the end of the open log or the start of a new one.

        `sizes`: bytes of these records by ledger id. `deletions`: ledgers with a `deleted` record. Both are for the
        ledgers map.
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
        self._deletions.update(deletions)

    def sync(self) -> None:
        """Make all appended records durable."""
        if self._file is not None:
            self._file.datasync()
            self._unsynced = 0
            self._advance_durable(is_tail_open=True)

    def seal(self) -> None:
        """Write the ledgers map, sync the log and close it, if one is open.

        `durable` advances only with the next `sync`; if none follows, use `close` instead.
        """
        if self._file is None:
            return
        ledgers_map = fmt.pack_record(fmt.pack_ledgers_map(self._sizes, self._deletions))
        trailer = fmt.pack_trailer(self._offset + fmt.RECORD_HEADER_SIZE)
        self._file.write_at(ledgers_map + trailer, self._offset)
        self._offset += len(ledgers_map) + len(trailer)
        self._file.sync()
        self._file.close()
        self._file = None

    def close(self) -> None:
        """Seal the log. All records are durable on return."""
        if self._file is not None:
            self.seal()
            self._advance_durable(is_tail_open=False)

    def roll_back(self) -> None:
        """Remove everything written after `durable`. The next record begins a new log.

        Nothing after `durable` is kept, because the kernel may have dropped the pages after a failed sync.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
        log_id, offset = self._durable
        existing = set(self._disk.list_names(self._directory))
        for created in self._created:
            if fmt.file_name(created) in existing:
                self._disk.remove(f"{self._directory}/{fmt.file_name(created)}")
        if self._is_tail_open:
            _truncate(self._disk, f"{self._directory}/{fmt.file_name(log_id)}", offset)
            self.unsealed[log_id] = offset
        self._disk.sync_directory(self._directory)
        self._log_id, self._offset = self._durable
        self._spare = self._created + self._spare
        self._created = []

    def _advance_durable(self, *, is_tail_open: bool) -> None:
        self._durable = (self._log_id, self._offset)
        self._is_tail_open = is_tail_open
        self._created = []

    def _create(self, log_id: int) -> None:
        assert log_id > self._log_id
        assert log_id == self.next_log_id
        assert log_id <= fmt.LOG_ID_MAX
        self._created.append(self._spare.pop(0))
        file = self._disk.create(f"{self._directory}/{fmt.file_name(log_id)}")
        try:
            file.write_at(fmt.pack_file_header(log_id), 0)
            file.sync()
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            raise
        self._file, self._log_id, self._offset, self._sizes = file, log_id, fmt.HEADER_SIZE, {}
        self._deletions = set()


def list_logs(disk: Disk, directory: str) -> list[int]:
    """Return the ids of the entry logs in a directory, ascending."""
    found = (fmt.parse_file_name(name) for name in disk.list_names(directory))
    return sorted(log_id for log_id in found if log_id is not None)


def _truncate(disk: Disk, path: str, offset: int) -> None:
    file = disk.open_read(path)
    try:
        size = file.size()
    finally:
        file.close()
    if size < offset:
        raise DamagedStorage("entry log is short", path=path, offset=size, expected=offset)
    if size > offset:
        disk.truncate(path, offset)


class EntryLogReader:
    """Reads entries by location. Used by one thread; keeps the most recently used logs open."""

    def __init__(self, disk: Disk, directory: str, *, open_logs_max: int) -> None:
        self._disk = disk
        self._directory = directory
        self._open_logs_max = open_logs_max
        self._files: OrderedDict[int, ReadableFile] = OrderedDict()

    def path(self, log_id: int) -> str:
        return f"{self._directory}/{fmt.file_name(log_id)}"

    def read(self, located: Sequence[Located], *, ledger_id: int) -> list[bytes]:
        """Return the bodies of entries of one ledger that are adjacent in one log, ascending.

        Stops before a damaged entry, or after `_READ_SIZE_MAX` bytes; raises DamagedStorage if the first entry is
        damaged. Each body is verified against its digest and its ids.
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
            intact = fmt.intact_entry(data, at, body_size, ledger_id, entry_id)
            if intact is not None:
                bodies.append(intact)
                continue
            body = data[at : at + body_size]
            try:
                fmt.check_record(data[at - fmt.RECORD_HEADER_SIZE : at], body, path=path, offset=start + at)
                if len(body) != body_size or fmt.unpack_ids(body) != (ledger_id, entry_id):
                    raise DamagedStorage(
                        "the record's ledger id or entry id differs from the index",
                        path=path,
                        offset=start + at,
                        entry_id=entry_id,
                    )
            except DamagedStorage:
                if bodies:
                    break  # only read ahead; reported once a client requests the entry
                raise
            raise AssertionError("intact_entry rejected an intact record")
        return bodies

    def forget(self, log_id: int) -> None:
        """Close a log before it is removed."""
        file = self._files.pop(log_id, None)
        if file is not None:
            file.close()

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
