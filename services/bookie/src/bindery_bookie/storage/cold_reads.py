"""Cold reads: entries that are in no cache. Batched: all that pile up while one job runs are the next job.

Read-ahead grows like a file system's: a reader that goes on where the last window ended gets twice the window, one that
jumps around gets a small one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import Status

from bindery_bookie.storage.entry_log import EntryLogReader
from bindery_bookie.storage.entry_log_format import RECORD_HEADER_SIZE
from bindery_bookie.storage.index import Index
from bindery_bookie.storage.index_format import RUN_HOLE_MAX, Located, Run
from bindery_bookie.storage.settings import StorageSettings

log = structlog.get_logger(__name__)

WINDOW_ENTRIES_MIN: Final = 16
_WINDOWS_MAX: Final = 4096
"""Ledgers whose reading position is remembered."""

_FAILURES_LOGGED_MAX: Final = 10
"""Failed reads of one job that get a line each."""


@dataclass(slots=True)
class ColdRead:
    """What one job found."""

    answers: list["bytes | int"] = field(default_factory=list)
    """In the order asked: the entry, or a Status."""
    ahead: list[tuple[tuple[int, int], bytes]] = field(default_factory=list)
    """((ledger id, entry id), entry) for the read cache: what was asked for, too."""
    damage: int = 0
    disk_reads: int = 0


class ColdReader:
    """Reads through index and entry logs. For one thread."""

    def __init__(self, index: Index, logs: EntryLogReader, settings: StorageSettings) -> None:
        self._index = index
        self._logs = logs
        self._entries_max = settings.read_ahead_entries_max
        self._size_max = settings.read_ahead_size_max
        self._windows: dict[int, tuple[int, int]] = {}
        """Ledger id -> (entry id after the last window, entries in that window)."""

    def read(self, keys: Sequence[tuple[int, int]]) -> ColdRead:
        """Answer (ledger id, entry id) pairs; entry id -1: the last one. Never raises for what a disk can do."""
        result = ColdRead()
        found: dict[tuple[int, int], bytes] = {}
        failed = 0
        for key in keys:
            body = found.get(key)
            if body is not None:
                result.answers.append(body)
                continue
            try:
                result.answers.append(self._read_one(key[0], key[1], found, result))
            except (DamagedStorage, OSError) as error:
                if isinstance(error, DamagedStorage):
                    result.damage += 1
                failed += 1
                if failed <= _FAILURES_LOGGED_MAX:
                    log.error("read_failed", ledger_id=key[0], entry_id=key[1], error=str(error))
                result.answers.append(Status.IO_ERROR)
        if failed > _FAILURES_LOGGED_MAX:
            log.error("reads_failed", reads=failed)
        result.ahead = list(found.items())
        return result

    def entry_ids(self, ledger_id: int) -> list[int]:
        """Entry ids in the index, ascending."""
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
            if row.last_entry_id < 0:
                return Status.NO_ENTRY
            entry_id = row.last_entry_id
        run = self._index.run_before(ledger_id, entry_id)
        if run is None or run.find(entry_id) is None:
            return self._absent(ledger_id, entry_id)
        entries = self._window(run, entry_id)
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
            if len(bodies) < len(part):
                break
            at += len(part)
        return found[ledger_id, entry_id]

    def _absent(self, ledger_id: int, entry_id: int) -> int:
        """NO_LEDGER or NO_ENTRY, unless the ledger's own row says that the entry must be there."""
        row = self._index.ledger_row(ledger_id)
        if row is None:
            return Status.NO_LEDGER
        if row.last_entry_id == entry_id:
            raise DamagedStorage("entry is missing from the index", ledger_id=ledger_id, entry_id=entry_id)
        return Status.NO_ENTRY

    def _window(self, run: Run, entry_id: int) -> list[Located]:
        """The entry and those to read ahead, ascending."""
        ledger_id = run.ledger_id
        next_id, entries_count = self._windows.pop(ledger_id, (0, WINDOW_ENTRIES_MIN))
        is_sequential = next_id <= entry_id <= next_id + RUN_HOLE_MAX
        count = min(entries_count * 2 if is_sequential else WINDOW_ENTRIES_MIN, self._entries_max) + 1
        entries: list[Located] = []
        size = 0
        for located in self._from(run, entry_id):
            if len(entries) == count or (entries and size + located[2] > self._size_max):
                break
            entries.append(located)
            size += located[2] + RECORD_HEADER_SIZE
        if len(self._windows) >= _WINDOWS_MAX:
            del self._windows[next(iter(self._windows))]
        self._windows[ledger_id] = (entries[-1][0] + 1, max(count - 1, WINDOW_ENTRIES_MIN))
        return entries

    def _from(self, run: Run, entry_id: int) -> Iterator[Located]:
        """Entries of the ledger from `entry_id` (in `run`) on."""
        yield from (located for located in run.entries() if located[0] >= entry_id)
        for later in self._index.runs(run.ledger_id, first=run.first_entry_id + 1):
            yield from later.entries()


def _adjacent(entries: Sequence[Located], at: int) -> Sequence[Located]:
    """The longest part from `at` on whose entries lie one after the other in one log."""
    end = at + 1
    location, size = entries[at][1], entries[at][2]
    while end < len(entries) and entries[end][1] == location + size + RECORD_HEADER_SIZE:
        location, size = entries[end][1], entries[end][2]
        end += 1
    return entries[at:end]
