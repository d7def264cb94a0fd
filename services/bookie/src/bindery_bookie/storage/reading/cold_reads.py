"""Cold reads: read entries that are in no cache from entry logs.

Read-ahead works as in a file system: a reader that continues at the end of the last window gets a window of twice the
size; a random read gets a small window. Several readers of one ledger at different positions do not affect each other.
When a reader is half-way through a window, the next window is read, before a client waits for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import Status

from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader
from bindery_bookie.storage.entry_log.entry_log_format import RECORD_HEADER_SIZE, Located
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import RUN_HOLE_MAX, Run
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.settings import StorageSettings

log = structlog.get_logger(__name__)

WINDOW_ENTRIES_MIN: Final = 16
"""Number of entries in the first window of a reader."""
_WINDOWS_MAX: Final = 4096
"""Maximum number of window ends recorded, at which readers may continue."""

_FAILURES_LOGGED_MAX: Final = 10
"""Maximum number of failed reads logged per job."""


@dataclass(slots=True)
class ColdRead:
    """The result of one job."""

    answers: list["bytes | int"] = field(default_factory=list)
    """The entry or a Status per request, in the order of the requests."""
    ahead: list[tuple[tuple[int, int], bytes]] = field(default_factory=list)
    """((ledger id, entry id), entry) for the read cache, including requested entries."""
    damage: list[Damage] = field(default_factory=list)
    next_windows: dict[tuple[int, int], int] = field(default_factory=dict)
    """(ledger id, entry id) of the start of a next window -> the entry id whose read triggers reading that window."""
    disk_reads: int = 0
    size: int = 0
    """Bytes of entries read."""


class ColdReader:
    """Reads from index and entry logs. Used by one thread."""

    def __init__(self, index: Index, logs: EntryLogReader, settings: StorageSettings) -> None:
        self._index = index
        self._logs = logs
        self._entries_max = settings.read_ahead_entries_max
        self._size_max = settings.read_ahead_size_max
        self._job_size_max = settings.read_job_size_max
        self._windows: dict[tuple[int, int], int] = {}
        """(ledger id, entry id after a window) -> number of entries in that window. The oldest are dropped first."""

    def read(self, keys: Sequence[tuple[int, int]]) -> ColdRead:
        """Read (ledger id, entry id) pairs; entry id -1: the last entry. Disk errors and damage are not raised."""
        result = ColdRead()
        found: dict[tuple[int, int], bytes] = {}
        failed = 0
        for key in keys:
            body = found.get(key)
            if body is not None:
                result.answers.append(body)
                continue
            if result.size >= self._job_size_max:  # the entries are much larger than expected
                result.answers.append(Status.TOO_MANY_REQUESTS)
                continue
            try:
                result.answers.append(self._read_one(key[0], key[1], found, result))
            except (DamagedStorage, OSError) as error:
                if isinstance(error, DamagedStorage) and not isinstance(error, DamagedIndex):
                    result.damage.append(_damage_of(error, key))  # `WatchedKV` reports damage of the index
                failed += 1
                if failed <= _FAILURES_LOGGED_MAX:
                    log.error("read_failed", ledger_id=key[0], entry_id=key[1], error=str(error))
                result.answers.append(Status.IO_ERROR)
        if failed > _FAILURES_LOGGED_MAX:
            log.error("reads_failed", reads=failed)
        result.ahead = list(found.items())
        return result

    def read_ahead(self, starts: Sequence[tuple[int, int]]) -> ColdRead:
        """Read the windows that begin at these (ledger id, entry id) pairs, before they are requested.

        Missing or unreadable entries are skipped; a request for them reports the error. Disk errors are not raised.
        """
        result = ColdRead()
        found: dict[tuple[int, int], bytes] = {}
        for ledger_id, entry_id in starts:
            if result.size >= self._job_size_max // 2:
                break
            try:
                run = self._index.run_before(ledger_id, entry_id)
                if run is not None and run.find(entry_id) is not None:
                    self._read_run(run, entry_id, found, result)
            except (DamagedStorage, OSError) as error:
                log.debug("read_ahead_failed", ledger_id=ledger_id, entry_id=entry_id, error=str(error))
        result.ahead = list(found.items())
        return result

    def entry_ids(self, ledger_id: int) -> list[int]:
        """Return the entry ids of a ledger in the index, ascending."""
        return [entry_id for run in self._index.runs(ledger_id) for entry_id, _, _ in run.entries()]

    def close(self) -> None:
        self._logs.close()

    def _read_one(
        self, ledger_id: int, entry_id: int, found: dict[tuple[int, int], bytes], result: ColdRead
    ) -> "bytes | int":
        if entry_id < 0:
            row = self._index.ledger_row(ledger_id)
            if row is None:
                return Status.NO_LEDGER
            if row.is_limbo:
                return Status.UNKNOWN_LEDGER_STATE
            if row.last_entry_id < 0:
                return Status.NO_ENTRY
            entry_id = row.last_entry_id
        run = self._index.run_before(ledger_id, entry_id)
        if run is None or run.find(entry_id) is None:
            try:
                return self._absent(ledger_id, entry_id)
            except DamagedStorage:
                run = self._index.run_before(ledger_id, entry_id)
                if run is None or run.find(entry_id) is None:
                    raise  # otherwise a flush has added the entry in between
        try:
            return self._read_run(run, entry_id, found, result)
        except (DamagedStorage, OSError):
            moved = self._index.run_before(ledger_id, entry_id)
            if moved is None or moved.find(entry_id) is None:
                return self._absent(ledger_id, entry_id)  # deleted in between, and its entry log removed
            if moved.find(entry_id) == run.find(entry_id):
                raise
            return self._read_run(moved, entry_id, found, result)  # compaction moved it

    def _read_run(self, run: Run, entry_id: int, found: dict[tuple[int, int], bytes], result: ColdRead) -> bytes:
        """Return the entry, which is in `run`; add it and its window to `found`. Raises DamagedStorage, OSError."""
        ledger_id = run.ledger_id
        entries = self._window(run, entry_id, result)
        if result.size >= self._job_size_max // 2:
            entries = entries[:1]  # the windows of many ledgers in one job could be gigabytes
        at = 0
        while at < len(entries):
            part = _adjacent(entries, at)
            try:
                bodies = self._logs.read(part, ledger_id=ledger_id)
            except (DamagedStorage, OSError):
                if at == 0:
                    raise
                break
            result.disk_reads += 1
            for (located_id, _, _), body in zip(part, bodies, strict=False):
                found[ledger_id, located_id] = body
                result.size += len(body)
            if len(bodies) < len(part):
                break
            at += len(part)
        return found[ledger_id, entry_id]

    def _absent(self, ledger_id: int, entry_id: int) -> int:
        """Return the status for an entry that is not in the index. Raises DamagedStorage if the ledger row names it."""
        row = self._index.ledger_row(ledger_id)
        if row is None:
            return Status.NO_LEDGER
        if row.is_limbo:
            return Status.UNKNOWN_LEDGER_STATE
        if row.last_entry_id == entry_id:
            raise DamagedStorage("entry is missing from the index", ledger_id=ledger_id, entry_id=entry_id)
        return Status.NO_ENTRY

    def _window(self, run: Run, entry_id: int, result: ColdRead) -> list[Located]:
        """Return the entry and the entries to read ahead, ascending."""
        ledger_id = run.ledger_id
        entries_count = self._window_before(ledger_id, entry_id)
        is_sequential = entries_count > 0
        count = min(entries_count * 2 if is_sequential else WINDOW_ENTRIES_MIN, self._entries_max) + 1
        entries: list[Located] = []
        size = 0
        following = -1
        for located in self._from(run, entry_id):
            if len(entries) == count or (entries and size + located[2] > self._size_max):
                following = located[0]
                break
            entries.append(located)
            size += located[2] + RECORD_HEADER_SIZE
        start = ledger_id, entries[-1][0] + 1
        if start not in self._windows and len(self._windows) >= _WINDOWS_MAX:
            del self._windows[next(iter(self._windows))]
        self._windows[start] = max(count - 1, WINDOW_ENTRIES_MIN)
        if is_sequential and following >= 0:
            result.next_windows[ledger_id, following] = entries[len(entries) // 2][0]
        return entries

    def _window_before(self, ledger_id: int, entry_id: int) -> int:
        """Return the size of the window that ended just before this entry (except for a hole); 0 if there was none."""
        for next_id in range(entry_id, max(entry_id - RUN_HOLE_MAX, 0) - 1, -1):
            count = self._windows.pop((ledger_id, next_id), 0)
            if count:
                return count
        return WINDOW_ENTRIES_MIN if entry_id <= RUN_HOLE_MAX else 0

    def _from(self, run: Run, entry_id: int) -> Iterator[Located]:
        """Yield the entries of the ledger from `entry_id`, which is in `run`."""
        yield from (located for located in run.entries() if located[0] >= entry_id)
        for later in self._index.runs(run.ledger_id, first=run.first_entry_id + 1):
            yield from later.entries()


def _damage_of(error: DamagedStorage, key: tuple[int, int]) -> Damage:
    """Return the error as Damage. An error without a path concerns the index, which has no offset."""
    ledger_id, entry_id = key
    return Damage(
        path=str(error.facts.get("path", "index")),
        offset=int(error.facts.get("offset", 0)),
        reason=error.message,
        ledger_id=ledger_id,
        entry_id=entry_id if entry_id >= 0 else None,
    )


def _adjacent(entries: Sequence[Located], at: int) -> Sequence[Located]:
    """Return the longest part from `at` on whose entries are adjacent in one log."""
    end = at + 1
    location, size = entries[at][1], entries[at][2]
    while end < len(entries) and entries[end][1] == location + size + RECORD_HEADER_SIZE:
        location, size = entries[end][1], entries[end][2]
        end += 1
    return entries[at:end]
