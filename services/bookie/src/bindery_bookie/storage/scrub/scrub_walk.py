"""ScrubWalk: one round of verification of everything that a shard stores, in small steps.

A step blocks, so it must run in a worker or a tool.

| phase   | checks                                                                                                |
|---------|-------------------------------------------------------------------------------------------------------|
| logs    | header and ledgers map of every entry log are intact, and every closed log has a ledgers map          |
| ledgers | every ledger row can be decoded, and its last entry is in the index                                   |
| entries | every run can be decoded, belongs to a ledger and overlaps no other run; the digest and the ids of    |
|         | every entry match                                                                                     |

Flushes, compactions and deletions continue during a round. Before damage is reported, the entry is therefore looked up
and read again. If a write cache has the entry, it was stored again, and damage of its old location does not matter. The
walk changes nothing, so it also works offline, on a copied directory.

Cost: one lookup and one read per run of up to 128 entries, one CRC32C per entry.
"""

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bindery_core.errors import BinderyError, DamagedStorage
from bindery_core.ids import ID_MAX
from crc32c import crc32c

from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.entry_log.entry_log_scan import CUT, EntryLogScanner
from bindery_bookie.storage.entry_log.log_manifest import LogEnd
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import Run
from bindery_bookie.storage.io.disk import Disk, ReadableFile

STEP_SIZE: Final = 128 * 1024
"""Maximum number of bytes read per step, unless one entry is larger."""

STEP_ENTRIES: Final = 256
"""Maximum number of entries per step: half a millisecond of processor time if they are small."""

_STEP_LEDGERS: Final = 32
_RUN_KEY_SIZE: Final = len(index_format.run_key(0, 0))
_CONFIRMATIONS: Final = 3
"""Maximum number of times that an entry is looked up and read again, because it may move during a check."""

_BAD_MEDIUM: Final = frozenset((errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN))
"""Read errors that mean damage of the disk. Others are temporary."""


class ScrubPhase(StrEnum):
    """A phase of a round, in the order of the table of the module."""

    LOGS = "logs"
    LEDGERS = "ledgers"
    ENTRIES = "entries"


@dataclass(frozen=True, slots=True)
class ScrubCursor:
    """The position of a round. Everything before it, in the order of phases and ids, was verified."""

    phase: ScrubPhase = ScrubPhase.LOGS
    first: int = 0
    """A log id in the first phase, a ledger id in the others."""
    entry_id: int = 0
    """Used in the last phase only."""


@dataclass(slots=True)
class ScrubStep:
    """The result of one step."""

    cursor: ScrubCursor | None = None
    """Start of the next step; None: the round is complete."""
    entries: int = 0
    size: int = 0
    """Bytes read."""
    damage: list[tuple[Damage, int]] = field(default_factory=list)
    """Damage, and the number of damaged bytes; 0: unknown."""


class ScrubWalk:
    """One round. Used by one thread. Files are open during a step only, so that the space of a removed log is freed."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        index: Index,
        *,
        durable_log_id: Callable[[], int] = lambda: fmt.LOG_ID_MAX,
        log_end: Callable[[int], LogEnd] = lambda log_id: LogEnd(),
        is_cached: Callable[[int, int], bool] = lambda ledger_id, entry_id: False,
    ) -> None:
        """`directory`: a ledger directory's `current`. `durable_log_id`: later logs may be incomplete and are skipped.

        `log_end`: returns the expected end of a log. `is_cached`: see WriteCaches.holds.
        """
        self._disk = disk
        self._directory = directory
        self._index = index
        self._durable_log_id = durable_log_id
        self._log_end = log_end
        self._is_cached = is_cached
        self._logs = EntryLogScanner(disk, directory)
        self._files: dict[int, ReadableFile] = {}
        self._missing: set[int] = set()
        """Missing logs, each of which is reported once."""
        self._last_run: Run | None = None
        """The last run of the previous step."""
        self._known_ledger = -1
        """The last ledger whose row was checked in this phase."""

    @property
    def index_path(self) -> str:
        return f"{self._directory}/index"

    def step(self, cursor: ScrubCursor) -> ScrubStep:
        """Verify from `cursor` on. Raises OSError for temporary errors such as too many open files: retry later."""
        step = ScrubStep()
        try:
            if cursor.phase is ScrubPhase.LOGS:
                step.cursor = self._step_logs(cursor, step)
            elif cursor.phase is ScrubPhase.LEDGERS:
                step.cursor = self._step_ledgers(cursor, step)
            else:
                step.cursor = self._step_entries(cursor, step)
        finally:
            self._close_files()
        return step

    def _report(self, step: ScrubStep, error: Exception, *, size: int = 0, path: str = "", **known: int) -> None:
        facts = error.facts if isinstance(error, BinderyError) else {}
        reason = error.message if isinstance(error, BinderyError) else f"cannot be read: {error}"
        offset = int(facts.get("offset", known.pop("offset", 0)))
        step.damage.append((Damage(str(facts.get("path") or path or self.index_path), offset, reason, **known), size))

    # --- logs

    def _step_logs(self, cursor: ScrubCursor, step: ScrubStep) -> ScrubCursor:
        last = self._durable_log_id()
        log_id = next((log_id for log_id in self._logs.log_ids() if log_id >= cursor.first), None)
        if log_id is None or log_id > last:
            return ScrubCursor(ScrubPhase.LEDGERS)
        for attempt in range(2):
            end = self._log_end(log_id)  # before the file is read, because the log may be closed at any time
            try:
                found = self._logs.ledgers_map(log_id)
                if found is None:
                    self._check_open_end(log_id, end)
            except FileNotFoundError:
                break  # removed since it was listed
            except (BinderyError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _BAD_MEDIUM:
                    raise
                if attempt:
                    self._report(step, error, path=self._logs.path(log_id))
            else:
                step.size += fmt.HEADER_SIZE + fmt.TRAILER_SIZE + 16 * len(found or ())
                break
        return ScrubCursor(ScrubPhase.LOGS, log_id + 1)

    def _check_open_end(self, log_id: int, end: LogEnd) -> None:
        """Check the size of a log without a ledgers map. Raises DamagedStorage if it was truncated, OSError."""
        size = self._logs.size(log_id)
        if end.is_sealed:
            raise DamagedStorage(CUT, path=self._logs.path(log_id), offset=size)
        if end.stop is not None and size < end.stop:
            raise DamagedStorage("entry log is short", path=self._logs.path(log_id), offset=size, expected=end.stop)

    # --- ledgers

    def _step_ledgers(self, cursor: ScrubCursor, step: ScrubStep) -> ScrubCursor:
        count = 0
        start = index_format.ledger_key(cursor.first)
        ledger_id = cursor.first
        try:
            for key, value in self._index.rows(start=start, stop=index_format.LEDGER_KEY_STOP):
                if count == _STEP_LEDGERS:
                    return ScrubCursor(ScrubPhase.LEDGERS, index_format.unpack_ledger_key(key))
                count += 1
                step.size += len(key) + len(value)
                ledger_id = index_format.unpack_ledger_key(key)
                self._check_ledger(ledger_id, value, step)
        except DamagedStorage as error:
            self._report(step, error, ledger_id=ledger_id)
            if ledger_id < ID_MAX and count > 1:
                return ScrubCursor(ScrubPhase.LEDGERS, ledger_id + 1)
        return ScrubCursor(ScrubPhase.ENTRIES)

    def _check_ledger(self, ledger_id: int, value: bytes, step: ScrubStep) -> None:
        try:
            row = index_format.unpack_ledger_row(value, ledger_id=ledger_id)
        except DamagedStorage as error:
            self._report(step, error, ledger_id=ledger_id)
            return
        for _ in range(_CONFIRMATIONS):
            last = row.last_entry_id
            if last < 0 or self._locate(ledger_id, last) is not None:
                return
            found = self._index.ledger_row(ledger_id)
            if found is None or (found.is_limbo and found.last_entry_id == last):
                return  # deleted meanwhile, or being repaired
            row = found
        missing = DamagedStorage("entry is missing from the index")
        self._report(step, missing, ledger_id=ledger_id, entry_id=row.last_entry_id)

    # --- entries

    def _step_entries(self, cursor: ScrubCursor, step: ScrubStep) -> ScrubCursor | None:
        last, self._last_run = self._last_run, None
        at: ScrubCursor | None = cursor
        ledger_id = cursor.first
        try:
            start = index_format.run_key(cursor.first, cursor.entry_id)
            if last is not None and (last.ledger_id, last.last_entry_id + 1) == (cursor.first, cursor.entry_id):
                start = _key_after(last)  # so that rows that begin inside the last run are not skipped
            else:
                # Continue in the last run if the previous step ended inside it, even if another row begins inside it.
                is_inside = (
                    last is not None and last.ledger_id == cursor.first and last.find(cursor.entry_id) is not None
                )
                begin = last.first_entry_id if last is not None and is_inside else cursor.entry_id
                last = self._index.run_before(cursor.first, begin)
                if last is not None and last.last_entry_id >= cursor.entry_id:
                    start = _key_after(last)
                    at = self._step_run(last, cursor, step)
            for key, value in self._index.rows(start=start, stop=index_format.RUN_KEY_STOP):
                if _is_full(step):
                    self._last_run = last
                    return at
                run = self._decode(key, value, step)
                if run is None:
                    continue
                if last is not None and last.ledger_id == run.ledger_id and last.last_entry_id >= run.first_entry_id:
                    self._check_overlap(run, step)
                last, ledger_id = run, run.ledger_id
                self._check_owner(run, step)
                at = self._step_run(run, ScrubCursor(ScrubPhase.ENTRIES, run.ledger_id, run.first_entry_id), step)
        except DamagedStorage as error:
            self._report(step, error, ledger_id=ledger_id)
            following = self._ledger_after(ledger_id)
            return None if following is None else ScrubCursor(ScrubPhase.ENTRIES, following)
        return at if _is_full(step) else None

    def _ledger_after(self, ledger_id: int) -> int | None:
        """Return the next ledger after an unreadable part of the index; None: there is none."""
        if ledger_id >= ID_MAX:
            return None
        start = index_format.ledger_key(ledger_id + 1)
        try:
            for key, _ in self._index.rows(start=start, stop=index_format.LEDGER_KEY_STOP):
                return index_format.unpack_ledger_key(key)
        except DamagedStorage:
            return None
        return None

    def _decode(self, key: bytes, value: bytes, step: ScrubStep) -> Run | None:
        try:
            return index_format.unpack_run(key, value)
        except DamagedStorage as error:
            step.size += len(key) + len(value)
            if len(key) == _RUN_KEY_SIZE:
                ledger_id, entry_id = fmt.unpack_ids(key, len(index_format.RUN_KEY_START))
                self._report(step, error, ledger_id=ledger_id, entry_id=entry_id)
            else:
                self._report(step, error)
            return None

    def _check_overlap(self, run: Run, step: ScrubStep) -> None:
        """Confirm that the run before this one overlaps it: either may have changed since it was read."""
        before = self._index.run_before(run.ledger_id, run.first_entry_id - 1)
        now = self._index.run_before(run.ledger_id, run.first_entry_id)  # after `before`: one batch changes both
        if before is None or now is None or now.first_entry_id != run.first_entry_id:
            return
        if before.last_entry_id >= run.first_entry_id:
            error = DamagedStorage("index rows overlap")
            self._report(step, error, ledger_id=run.ledger_id, entry_id=run.first_entry_id)

    def _check_owner(self, run: Run, step: ScrubStep) -> None:
        """Check that the run's ledger has a row. Without a row, reads would be answered with "no such ledger"."""
        if run.ledger_id == self._known_ledger:
            return
        self._known_ledger = run.ledger_id
        try:
            for _ in range(_CONFIRMATIONS):
                if self._index.ledger_row(run.ledger_id) is not None or self._locate(*_first(run)) is None:
                    return
            raise DamagedStorage("entries without a ledger row")
        except DamagedStorage as error:
            self._report(step, error, ledger_id=run.ledger_id)

    def _step_run(self, run: Run, at: ScrubCursor, step: ScrubStep) -> ScrubCursor | None:
        """Verify the run from `at` on, within the limits of a step. Return the next position, if any."""
        located = [entry for entry in run.entries() if entry[0] >= at.entry_id]
        while located:
            if _is_full(step):
                return ScrubCursor(ScrubPhase.ENTRIES, run.ledger_id, located[0][0])
            part = located[:1]
            size = located[0][2]
            for entry in located[1 : STEP_ENTRIES - step.entries]:
                size += entry[2] + fmt.RECORD_HEADER_SIZE
                if step.size + size > STEP_SIZE:
                    break
                part.append(entry)
            self._verify(run.ledger_id, part, step)
            located = located[len(part) :]
        if run.last_entry_id < ID_MAX:
            return ScrubCursor(ScrubPhase.ENTRIES, run.ledger_id, run.last_entry_id + 1)
        return ScrubCursor(ScrubPhase.ENTRIES, run.ledger_id + 1) if run.ledger_id < ID_MAX else None

    def _verify(self, ledger_id: int, part: list[Located], step: ScrubStep) -> None:
        """Read adjacent entries together and verify each; confirm failures one by one."""
        start = part[0][1] - fmt.RECORD_HEADER_SIZE
        end = part[-1][1] + part[-1][2]
        step.entries += len(part)
        step.size += end - start
        if start >> fmt.OFFSET_BITS in self._missing:
            return
        try:
            data = self._file(start >> fmt.OFFSET_BITS).read_at(start & fmt.OFFSET_MASK, end - start)
        except OSError:
            data = b""
        for entry_id, location, size in part:
            at = location - start
            if not _is_good(data[at - fmt.RECORD_HEADER_SIZE : at], data[at : at + size], ledger_id, entry_id, size):
                self._confirm(ledger_id, entry_id, step)

    def _confirm(self, ledger_id: int, entry_id: int, step: ScrubStep) -> None:
        """Report the damage, unless the entry was moved, stored again or deleted in the meantime."""
        found = self._locate(ledger_id, entry_id)
        for _ in range(_CONFIRMATIONS):
            if found is None:
                return
            error = self._error_of(ledger_id, entry_id, found)
            if error is None:
                return
            if self._is_cached(ledger_id, entry_id):
                return
            before = found
            found = self._locate(ledger_id, entry_id)  # after the caches, because a flush moves entries to the index
            if found == before:
                self._report_entry(ledger_id, entry_id, found, error, step)
                return

    def _error_of(self, ledger_id: int, entry_id: int, found: tuple[int, int]) -> Exception | None:
        location, size = found
        log_id, offset = location >> fmt.OFFSET_BITS, location & fmt.OFFSET_MASK
        path = self._logs.path(log_id)
        try:
            data = self._file(log_id).read_at(offset - fmt.RECORD_HEADER_SIZE, fmt.RECORD_HEADER_SIZE + size)
            header, body = data[: fmt.RECORD_HEADER_SIZE], data[fmt.RECORD_HEADER_SIZE :]
            if not _is_good(header, body, ledger_id, entry_id, size):
                fmt.check_record(header, body, path=path, offset=offset)
                return DamagedStorage(
                    "the record's ledger id or entry id differs from the index", path=path, offset=offset
                )
        except FileNotFoundError:
            return DamagedStorage("entry log is missing", path=path, offset=0)
        except DamagedStorage as error:
            return error
        except OSError as error:
            if error.errno not in _BAD_MEDIUM:
                raise
            return error
        return None

    def _report_entry(
        self, ledger_id: int, entry_id: int, found: tuple[int, int], error: Exception, step: ScrubStep
    ) -> None:
        log_id, offset = found[0] >> fmt.OFFSET_BITS, found[0] & fmt.OFFSET_MASK
        path = self._logs.path(log_id)
        if isinstance(error, DamagedStorage) and error.message == "entry log is missing":
            if log_id not in self._missing:  # one report for all its entries
                self._missing.add(log_id)
                self._report(step, error)
            return
        self._report(step, error, size=found[1], path=path, offset=offset, ledger_id=ledger_id, entry_id=entry_id)

    # --- helpers

    def _locate(self, ledger_id: int, entry_id: int) -> tuple[int, int] | None:
        run = self._index.run_before(ledger_id, entry_id)
        return None if run is None else run.find(entry_id)

    def _file(self, log_id: int) -> ReadableFile:
        file = self._files.get(log_id)
        if file is None:
            file = self._files[log_id] = self._disk.open_read(self._logs.path(log_id))
        return file

    def _close_files(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()


def _is_full(step: ScrubStep) -> bool:
    return step.size >= STEP_SIZE or step.entries >= STEP_ENTRIES


def _key_after(run: Run) -> bytes:
    return index_format.run_key(run.ledger_id, run.first_entry_id) + b"\0"


def _first(run: Run) -> tuple[int, int]:
    return run.ledger_id, run.first_entry_id


def _is_good(header: bytes, body: bytes, ledger_id: int, entry_id: int, size: int) -> bool:
    return (
        len(body) == size >= fmt.BODY_SIZE_MIN
        and header == fmt.pack_record_header(crc32c(body, size), size)
        and fmt.unpack_ids(body) == (ledger_id, entry_id)
    )


def total_size(disk: Disk, directory: str, log_ids: Iterable[int]) -> int:
    """Return the size of these logs in bytes, without logs that were removed in the meantime."""
    scanner = EntryLogScanner(disk, directory)
    total = 0
    for log_id in log_ids:
        try:
            total += scanner.size(log_id)
        except FileNotFoundError:
            continue
    return total
