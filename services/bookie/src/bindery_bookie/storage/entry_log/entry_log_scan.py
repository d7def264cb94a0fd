"""List entry logs and scan them, continuing after damage. Used by scrub, compaction, index rebuild and tools.

A scan needs only the files, so it works on a copied directory, and it writes nothing. Everything here blocks and must
run in a worker. The work is done in steps of bounded size, so that the caller can limit its rate or stop.

The end of a damaged region is found in two ways. If the size word of the damaged record leads to another intact record,
the damage ends there. Otherwise each following byte is tried as the start of a record until a digest matches. Both can
be wrong, because a client's payload may contain the bytes of a record. Every record after the first damage of a log
therefore has `is_anchored` False: it may be displayed, or compared with an index row that refers to it, but it must not
be trusted alone.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import BinderyError, DamagedStorage
from crc32c import crc32c

from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.io.disk import Disk, ReadableFile

STEP_SIZE: Final = 1024 * 1024
"""Maximum number of bytes read (and, in a search, digested) per step, unless one record is larger."""

CUT: Final = "entry log is cut: it was closed, and its trailer is not at its end"
"""Reason of the damage of a truncated log."""

_SECTOR_SIZE: Final = 4096
"""Number of bytes skipped at once if the disk cannot read them."""

_SEARCH_STEP_SIZE: Final = 64 * 1024

_CANDIDATE: Final = re.compile(
    rb"(?s)(?=....\x00(?!\x00\x00[\x00-\x0f])...(?:[\x00-\x7f].{7}[\x00-\x7f\xff].{7}|\xff{15}\xfe))"
)
"""Matches a possible record: a size from 16 to 2^24 - 1 bytes (frames are smaller than 6 MiB), a ledger id that is not
negative, and the id of an entry or control record; or the ledgers map."""

_CANDIDATE_SIZE: Final = fmt.RECORD_HEADER_SIZE + fmt.BODY_SIZE_MIN


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An entry or a control record whose digest matches."""

    log_id: int
    offset: int
    """Offset of the body in the file in bytes."""
    body: bytes
    ledger_id: int
    entry_id: int
    """Negative for a control record, see `control_records`."""
    is_anchored: bool
    """True if nothing before it in this log is damaged; otherwise it may be part of a payload."""

    @property
    def location(self) -> int:
        """Location as in the index."""
        return self.log_id << fmt.OFFSET_BITS | self.offset


@dataclass(frozen=True, slots=True)
class DamagedRegion:
    """Bytes of a log that are not a record."""

    log_id: int
    path: str
    offset: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScanStep:
    """The result of one step. Records and regions are ascending; a region is reported once its end is known."""

    records: list[LogRecord] = field(default_factory=list)
    damage: list[DamagedRegion] = field(default_factory=list)
    offset: int = 0
    """Start of the next step. Everything before it is reported, unless a search is in progress."""
    work_size: int = 0
    """Number of bytes read or digested, for rate limits."""


@dataclass(frozen=True, slots=True)
class LedgersInLog:
    """The ledgers that have records in a log."""

    sizes: dict[int, int]
    """Bytes of records, including headers, by ledger id."""
    is_complete: bool
    """False: parts of the log could not be read, and may belong to any ledger."""
    is_sealed: bool
    """True: from the log's ledgers map. False: counted by a scan."""


class EntryLogScanner:
    """Reads the entry logs of one directory (`current` of a ledger directory). Opens a file only while reading it."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory

    def log_ids(self) -> list[int]:
        """Return the ids of the entry logs, ascending."""
        return list_logs(self._disk, self._directory)

    def path(self, log_id: int) -> str:
        return f"{self._directory}/{fmt.file_name(log_id)}"

    def size(self, log_id: int) -> int:
        """Return the size of the file in bytes. Raises FileNotFoundError."""
        file = self._disk.open_read(self.path(log_id))
        try:
            return file.size()
        finally:
            file.close()

    def ledgers_map(self, log_id: int) -> dict[int, int] | None:
        """Return the bytes of records by ledger id from the ledgers map; None for a log that was not sealed.

        Raises DamagedStorage, FileNotFoundError, OSError.
        """
        path = self.path(log_id)
        file = self._disk.open_read(path)
        try:
            fmt.check_file_header(file, path=path, log_id=log_id)
            return fmt.read_ledgers_map(file, path=path)
        finally:
            file.close()

    def ledgers(self, log_id: int, *, stop: int | None = None) -> LedgersInLog:
        """Return the ledgers map; if it is missing or damaged, the result of a scan up to `stop`. Raises OSError."""
        try:
            sizes = self.ledgers_map(log_id)
        except BinderyError:
            sizes = None
        if sizes is not None:
            return LedgersInLog(sizes, is_complete=True, is_sealed=True)
        counted: dict[int, int] = {}
        is_complete = True
        for step in self.steps(log_id, stop=stop):
            is_complete = is_complete and not step.damage
            for record in step.records:
                size = fmt.RECORD_HEADER_SIZE + len(record.body)
                counted[record.ledger_id] = counted.get(record.ledger_id, 0) + size
        return LedgersInLog(counted, is_complete=is_complete, is_sealed=False)

    def scan(
        self, log_id: int, *, start: int = fmt.HEADER_SIZE, stop: int | None = None, is_sealed: bool = False
    ) -> Iterator[LogRecord | DamagedRegion]:
        """Yield the records and damaged regions in [start, stop), ascending by offset. See `steps`."""
        for step in self.steps(log_id, start=start, stop=stop, is_sealed=is_sealed):
            found: list[LogRecord | DamagedRegion] = [*step.records, *step.damage]
            yield from sorted(found, key=lambda item: item.offset)

    def steps(
        self,
        log_id: int,
        *,
        start: int = fmt.HEADER_SIZE,
        stop: int | None = None,
        is_sealed: bool = False,
        step_size: int = STEP_SIZE,
    ) -> Iterator[ScanStep]:
        """Scan a log from the record whose header is at `start` up to `stop`.

        `stop`: the end of a record, such as LastLogMark's offset; None: the end of the file. A torn end is reported as
        a region that reaches `stop`. If the file is shorter than `stop`, the missing part is reported as a region.
        `is_sealed`: the log must end with its trailer; if it does not, it was truncated, which is reported as an empty
        region at its end. Raises FileNotFoundError, and OSError if the file cannot be opened; unreadable parts of it
        are reported as damage.
        """
        path = self.path(log_id)
        file = self._disk.open_read(path)
        try:
            scan = _Scan(file, log_id=log_id, path=path, start=start, stop=stop, step_size=step_size)
            yield from scan.run(is_sealed=is_sealed)
        finally:
            file.close()


class _Scan:
    """One pass over one log."""

    def __init__(
        self, file: ReadableFile, *, log_id: int, path: str, start: int, stop: int | None, step_size: int
    ) -> None:
        self._file = file
        self._log_id = log_id
        self._path = path
        self._size = file.size()
        self._wanted = self._size if stop is None else stop
        self._stop = min(self._wanted, self._size)
        self._step_size = step_size
        self._offset = start
        self._chunk = b""
        self._chunk_start = 0
        self._work = 0
        self._records: list[LogRecord] = []
        self._damage: list[DamagedRegion] = []
        self._is_anchored = True
        self._ledgers: Container[int] | None = None
        self._has_trailer = False

    def run(self, *, is_sealed: bool) -> Iterator[ScanStep]:
        if self._offset <= fmt.HEADER_SIZE:
            self._offset = fmt.HEADER_SIZE
            self._check_header()
        while self._offset < self._stop:
            reason = self._take_record()
            if reason is not None:
                yield from self._skip_damage(reason)
            if self._work >= self._step_size:
                yield self._step()
        if self._stop < self._wanted:
            self._report_damage(self._stop, self._wanted, "entry log is short")
        elif is_sealed and not self._has_trailer:
            self._report_damage(self._stop, self._stop, CUT)
        yield self._step()

    def _step(self) -> ScanStep:
        step = ScanStep(self._records, self._damage, self._offset, self._work)
        self._records, self._damage, self._work = [], [], 0
        return step

    def _report_damage(self, start: int, end: int, reason: str) -> None:
        self._is_anchored = False
        self._damage.append(DamagedRegion(self._log_id, self._path, start, end - start, reason))

    def _check_header(self) -> None:
        try:
            fmt.check_file_header(self._file, path=self._path, log_id=self._log_id)
        except (BinderyError, OSError) as error:
            self._report_damage(0, min(fmt.HEADER_SIZE, self._wanted), _reason(error))

    def _take_record(self) -> str | None:
        """Read the record at the current offset and advance. If there is none, return the reason and do not advance."""
        offset = self._offset
        body, reason = self._record_at(offset)
        if body is None:
            return reason
        self._offset = offset + fmt.RECORD_HEADER_SIZE + len(body)
        if not body:  # the trailer
            self._offset = self._stop
            self._has_trailer = True
            return None
        ledger_id, entry_id = fmt.unpack_ids(body)
        if ledger_id >= 0:  # not the ledgers map
            self._records.append(
                LogRecord(self._log_id, offset + fmt.RECORD_HEADER_SIZE, body, ledger_id, entry_id, self._is_anchored)
            )
        return None

    def _record_at(self, offset: int) -> tuple[bytes | None, str]:
        """Return (body, "") of the record at `offset`, with an empty body for the trailer; (None, reason) if none."""
        left = self._stop - offset
        try:
            head = self._read(offset, min(fmt.TRAILER_SIZE, left))
            if left == fmt.TRAILER_SIZE and head[:4] == fmt.TRAILER_MAGIC:
                return (b"", "") if _is_trailer(head) else (None, "entry log trailer is damaged")
            if left < _CANDIDATE_SIZE:
                return None, "entry log ends inside a record"
            digest, size = fmt.unpack_record_header(head)
            if not fmt.BODY_SIZE_MIN <= size <= min(fmt.BODY_SIZE_MAX, left - fmt.RECORD_HEADER_SIZE):
                return None, "entry size is out of range"
            body = self._read(offset + fmt.RECORD_HEADER_SIZE, size)
        except OSError as error:
            return None, _reason(error)
        if len(body) != size:
            return None, "entry log is short"
        if crc32c(body, size) != digest:
            return None, "entry digest mismatch"
        return body, ""

    def _skip_damage(self, reason: str) -> Iterator[ScanStep]:
        """Find the start of the next record, and report the region before it. Yields steps."""
        start = self._offset
        following = self._by_size(start)
        if following is None:
            self._read_ledgers()
            following = start + 1
            while following < self._stop:
                found, following = self._search(following)
                if found:
                    break
                if self._work >= self._step_size:
                    yield self._step()
        self._offset = min(following, self._stop)
        self._report_damage(start, self._offset, reason)

    def _by_size(self, offset: int) -> int | None:
        """Return the end of the damaged record at `offset` if its size word leads to an intact record or to the end."""
        try:
            head = self._read(offset, fmt.RECORD_HEADER_SIZE)
        except OSError:
            return None
        if len(head) < fmt.RECORD_HEADER_SIZE:
            return None
        size = fmt.unpack_record_header(head)[1]
        end = offset + fmt.RECORD_HEADER_SIZE + size
        if not fmt.BODY_SIZE_MIN <= size <= fmt.BODY_SIZE_MAX or end > self._stop:
            return None
        return end if end == self._stop or self._record_at(end)[0] is not None else None

    def _read_ledgers(self) -> None:
        """Read the ledgers map, which makes a search faster and more reliable."""
        if self._ledgers is None and self._stop == self._size:
            try:
                self._ledgers = fmt.read_ledgers_map(self._file, path=self._path)
            except (BinderyError, OSError):
                self._ledgers = None

    def _search(self, offset: int) -> tuple[bool, int]:
        """Try each byte from `offset` on. Return (True, start of a record) or (False, offset to continue at)."""
        end = min(offset + _SEARCH_STEP_SIZE, self._stop)
        try:
            data = self._read(offset, min(end + _CANDIDATE_SIZE, self._stop) - offset)
        except OSError:
            return False, min((offset // _SECTOR_SIZE + 1) * _SECTOR_SIZE, self._stop)
        for match in _CANDIDATE.finditer(data):
            at = match.start()
            if offset + at >= end:
                break
            ledger_id = fmt.unpack_ids(data, at + fmt.RECORD_HEADER_SIZE)[0]
            if self._ledgers is not None and ledger_id >= 0 and ledger_id not in self._ledgers:
                continue
            self._work += min(fmt.unpack_record_header(data, at)[1], self._stop - offset)
            if self._record_at(offset + at)[0] is not None:
                return True, offset + at
            if self._work >= self._step_size:
                return False, offset + at + 1
        if end > self._stop - fmt.TRAILER_SIZE and self._ends_with_trailer():
            return True, self._stop - fmt.TRAILER_SIZE
        return False, end

    def _ends_with_trailer(self) -> bool:
        try:
            return _is_trailer(self._read(self._stop - fmt.TRAILER_SIZE, fmt.TRAILER_SIZE))
        except OSError:
            return False

    def _read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end of the file. Keeps one chunk in memory. Raises OSError."""
        at = offset - self._chunk_start
        if at < 0 or at + size > len(self._chunk):
            wanted = min(max(size, self._step_size), max(self._size - offset, 0))
            try:
                data = self._file.read_at(offset, wanted)
            except OSError:
                if size >= wanted:
                    raise
                data = self._file.read_at(offset, size)  # perhaps only bytes after these are unreadable
            self._work += len(data)
            self._chunk, self._chunk_start, at = data, offset, 0
        return self._chunk[at : at + size]


def _is_trailer(data: bytes) -> bool:
    return data == fmt.pack_trailer(int.from_bytes(data[4 : fmt.TRAILER_SIZE - 4]))


def _reason(error: BinderyError | OSError) -> str:
    if isinstance(error, DamagedStorage):
        return error.message
    return f"cannot be read: {error}"
