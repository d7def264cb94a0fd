"""Journal: makes records durable, many with one fdatasync.

Flow: `append` puts records into the pending group. While the disk is idle the group leaves at the end of this turn of
the event loop; what arrives while one group is being written is the next group. The worker does one write and one
fdatasync per group and comes back to the loop once, where the group's callbacks run in the order of their records.

Invariants: at most one group is at the disk; groups are written in sequence without gaps; a callback hears True only
after its records were synced (or written, when it asked for no more); after one failed write nothing is accepted again,
because a page cache that failed to write once cannot be trusted (fail-stop, and `stats.journal_failed` says so).
"""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from bindery_bookie.storage import journal_format as fmt
from bindery_bookie.storage.disk import Disk, WritableFile
from bindery_bookie.storage.journal_format import JournalPosition
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.worker import Worker

log = structlog.get_logger(__name__)

Synced = Callable[[bool], None]
"""Hears once whether the records are durable; False: the journal failed, it is not known what the disk holds."""

_Batch = tuple[Sequence[bytes], int, Synced, bool]
"""Record parts, their bytes, who waits, and whether it waits for the write only."""


def record_parts(body: bytes) -> tuple[bytes, bytes]:
    """One record as `append` takes it."""
    return fmt.pack_record_size(len(body)), body


class JournalWriter:
    """Owns the file being written. All methods run in the journal's worker."""

    def __init__(self, disk: Disk, directory: str, *, file_size: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._disk = disk
        self._directory = directory
        self._file_size = file_size
        self._clock = clock
        self._file: WritableFile | None = None
        self._journal_id = 0

    def create(self, journal_id: int) -> None:
        """Start a new file, durable itself and in its directory before a record relies on it."""
        self.close()
        file = self._disk.create(f"{self._directory}/{fmt.file_name(journal_id)}", allocate=self._file_size)
        try:
            file.write_at(fmt.pack_file_header(journal_id), 0)
            file.sync()
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            raise
        self._file, self._journal_id = file, journal_id

    def write(self, group: bytes, position: JournalPosition, written: Callable[[], None] | None) -> float:
        """Write and sync one group. Returns the seconds that took. `written` runs between the two."""
        if position.journal_id != self._journal_id:
            self.create(position.journal_id)
        assert self._file is not None
        start = self._clock()
        self._file.write_at(group, position.offset)
        if written is not None:
            written()
        self._file.datasync()
        return self._clock() - start

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Journal:
    """The event loop's side: groups records and tells who waits."""

    def __init__(
        self,
        *,
        writer: JournalWriter,
        worker: Worker,
        loop: AbstractEventLoop,
        settings: StorageSettings,
        stats: StorageStats,
        start: JournalPosition,
    ) -> None:
        """`start`: the first group's place; its file exists already."""
        self._writer = writer
        self._worker = worker
        self._loop = loop
        self._group_size_max = settings.journal_group_size_max
        self._file_size_max = settings.journal_file_size_max
        self._stats = stats
        self._next = start
        self._pending: deque[_Batch] = deque()
        self._at_disk: list[Synced] | None = None
        self._scheduled = False
        self._failed = False

    @property
    def position(self) -> JournalPosition:
        """The end of all groups handed to the disk: records appended from now on stand behind it."""
        return self._next

    @property
    def failed(self) -> bool:
        return self._failed

    def append(self, parts: Sequence[bytes], size: int, synced: Synced, *, when_written: bool = False) -> None:
        """Take records (size words and bodies alternating, `size` bytes in all); `synced` hears of them later.

        The caller bounds how much is appended; the parts are held until they were written.
        """
        if self._failed:
            synced(False)
            return
        self._pending.append((parts, size, synced, when_written))
        self._stats.journal_queue_size += size
        self._stats.journal_queue_groups += 1
        if self._at_disk is None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def barrier(self, synced: Synced) -> None:
        """`synced` hears once everything appended so far is durable; at once when it is."""
        if self._failed:
            synced(False)
        elif self._pending:
            self._pending.append(((), 0, synced, False))
            self._stats.journal_queue_groups += 1
        elif self._at_disk is not None:
            self._at_disk.append(synced)
            self._stats.journal_queue_groups += 1
        else:
            synced(True)

    def _dispatch(self) -> None:
        """Hand the next group to the worker."""
        self._scheduled = False
        if self._at_disk is not None or not self._pending or self._failed:
            return
        parts: list[bytes] = []
        waiting: list[Synced] = []
        early: list[Synced] = []
        size = 0
        pending = self._pending
        # A barrier has no size and goes with the records before it: a group is never without records.
        while pending and (not size or not pending[0][1] or size + pending[0][1] <= self._group_size_max):
            batch_parts, batch_size, synced, when_written = pending.popleft()
            parts += batch_parts
            size += batch_size
            (early if when_written else waiting).append(synced)
        self._stats.journal_queue_size -= size
        group = fmt.pack_group(b"".join(parts), journal_id=self._journal_id_for(size), sequence=self._next.sequence)
        position = self._next
        self._next = JournalPosition(position.journal_id, position.offset + len(group), position.sequence + 1)
        self._at_disk = waiting
        written = None
        if early:
            waiting.insert(0, self._unless_told(early))
            self._stats.journal_queue_groups += 1
            written = self._tell_written(early)
        self._worker.submit(lambda: self._writer.write(group, position, written), self._synced)
        self._stats.journal_groups += 1
        self._stats.journal_bytes += len(group)
        self._stats.observe_group_size(len(group))

    def _journal_id_for(self, records_size: int) -> int:
        """The file the next group goes to; moves on to a new one when it does not fit."""
        here = self._next
        is_first = here.offset == fmt.HEADER_SIZE
        if not is_first and here.offset + fmt.group_size_on_disk(records_size) > self._file_size_max:
            self._next = JournalPosition(here.journal_id + 1, fmt.HEADER_SIZE, here.sequence)
            self._stats.journal_files_created += 1
        return self._next.journal_id

    def _tell_written(self, early: list[Synced]) -> Callable[[], None]:
        """What the worker calls between write and sync."""
        return lambda: self._worker.post(self._tell, early, True)

    def _unless_told(self, early: list[Synced]) -> Synced:
        """Tells those who waited for the write only, if the write itself failed."""
        return lambda ok: self._tell(early, ok)

    def _tell(self, waiting: list[Synced], ok: bool) -> None:
        told = waiting[:]
        waiting.clear()
        self._stats.journal_queue_groups -= len(told)
        for synced in told:
            synced(ok)

    def _synced(self, seconds: float | None, error: BaseException | None) -> None:
        """The worker is back with one group."""
        waiting, self._at_disk = self._at_disk, None
        assert waiting is not None
        if error is not None or seconds is None:
            self._fail(error)
        else:
            self._stats.journal_sync_s += seconds
            self._stats.observe_sync_s(seconds)
            self._dispatch()  # first keep the disk busy, then talk
        self._tell_group(waiting, error is None)

    def _tell_group(self, waiting: list[Synced], ok: bool) -> None:
        self._stats.journal_queue_groups -= len(waiting)
        for synced in waiting:
            synced(ok)

    def _fail(self, error: BaseException | None) -> None:
        """Stop for good and tell everyone who waits."""
        log.error("journal_failed", error=repr(error), journal_id=self._next.journal_id, sequence=self._next.sequence)
        self._failed = True
        self._stats.journal_failed = True
        pending, self._pending = self._pending, deque()
        self._stats.journal_queue_size = 0
        # Behind the group that failed, in order: call_soon runs after the caller told that group.
        self._loop.call_soon(self._tell_group, [synced for _, _, synced, _ in pending], False)
