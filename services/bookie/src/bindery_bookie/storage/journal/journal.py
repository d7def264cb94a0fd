"""Journal: makes records durable, many with one fdatasync.

Flow: `append` puts records into the pending group. While the disk is idle the group leaves at the end of this turn of
the event loop; what arrives while one group is being written is the next group. The worker does one write and one
fdatasync per group and comes back to the loop once, where the group's callbacks run in the order of their records.
All but large groups are written by the loop itself while syncs are quick: the way to the worker and back, through the
interpreter lock, costs more than the disk does, and what arrives meanwhile is read from the sockets in one go. It
does so in a turn of its own, so that nobody who waits for a group that the worker wrote waits for the next one too.

Pace. Clients with many adds under way send the next ones as soon as the last are answered. On a quick disk that makes
many small groups, each with the system calls of a large one, here and at every client. So groups that the loop writes
itself begin at least `journal_pace_s` apart while the last held COMPANY_MIN records or more: it rests for what is left
of that, and reads the sockets once more. A lone add finds the last group small, and goes at once.

No space. A group goes only to allocated space, so a full disk shows when a file is to be created: nothing was written
yet, and nothing is wrong. The writer then makes a short file, just for the group, if need be in the room of the
reserve. Is there no room for that either, the journal is *full*: who waits hears False at once, the records are kept in
their order (they are in the write caches, and a flush must not pass a journal that lacks them), and writing is tried
again every `journal_retry_s`. Whoever hands over adds looks at `is_full` first, so no more than what was under way is
kept. A journal is `is_short` from its first short file until a file of full size is made.

Invariants: at most one group is at the disk; groups are written in sequence without gaps; a callback hears True only
after its records were synced (or written, when it asked for no more); after one failed write nothing is accepted again,
because a page cache that failed to write once cannot be trusted (fail-stop, and `stats.journal_failed` says so).
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from bindery_bookie.storage.io.disk import Disk, WritableFile, is_no_space
from bindery_bookie.storage.io.errors import JournalFull
from bindery_bookie.storage.io.reserve import Reserve
from bindery_bookie.storage.io.worker import Worker, nap, submit_short
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import write_needed
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

SHORT_FILE_SIZE: Final = 1024 * 1024
"""Bytes of a short file, unless its group is larger."""

ZEROS_AHEAD: Final = bytes(256 * 1024)
"""Written behind a group now and then. A sync of bytes that were only allocated makes the file system record that they
are written now, in a journal of its own, for which it waits: half as long again, and longer while a flush is at it.
So the sync of one group does that for the next ones too. The bytes were zeros before; larger steps cost more than they
save."""

ZEROS_UNIT: Final = 4096
"""They end where a block of the file system does: it would fill half a one up by itself, with a write of its own."""

ZEROS_GROUP_SIZE_MAX: Final = 64 * 1024
"""Bytes of the largest group worth it: the sync of a larger one takes its time anyway."""

INLINE_TIME_MAX_S: Final = 0.001
"""How quick the last syncs must have been for the event loop to write a group itself: it stands still as long, and as
a flush's slice."""

COMPANY_MIN: Final = 4
"""Records of a group after which more are expected soon."""

Synced = Callable[[bool], None]
"""Hears once whether the records are durable; False: the journal failed, it is not known what the disk holds, or it is
full."""

_Batch = tuple[Sequence[bytes], int, Synced, bool]
"""Record parts, their bytes, who waits, and whether it waits for the write only."""


def record_parts(body: bytes) -> tuple[bytes, bytes]:
    """One record as `append` takes it."""
    return fmt.pack_record_size(len(body)), body


class JournalWriter:
    """Owns the file being written. All methods run in the journal's worker."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        file_size: int,
        clock: Callable[[], float],
        reserve: Reserve | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `reserve`: given up when there is no room for a short file."""
        self._disk = disk
        self._directory = directory
        self._file_size = file_size
        self.clock = clock
        self._reserve = reserve
        self._file: WritableFile | None = None
        self._journal_id = 0
        self._spoilt_id = 0
        """A file of this id may have been left behind by a `create` that failed. It holds no group."""
        self._linked: WritableFile | None = None
        """The file before, while it lacks its link to the one being written."""
        self.room = 0
        """Bytes allocated for the file being written. Read by the event loop while no job is under way."""
        self._zeros_end = 0
        """Where the zeros end that were written ahead."""
        self._is_unnamed = False
        """Whether nothing says yet that the file being written must be there: no link, no LastLogMark."""

    @property
    def is_short(self) -> bool:
        """Whether there was no room for a file of full size."""
        return self.room < self._file_size

    @property
    def path(self) -> str:
        """Of the file being written."""
        return f"{self._directory}/{fmt.file_name(self._journal_id)}"

    def say_needed(self) -> None:
        """LastLogMark stays behind the file that was created: its first group says that it is needed."""
        self._is_unnamed = True

    def create(self, journal_id: int, *, group_size: int = 0) -> None:
        """Start a new file with room for a group of `group_size`, durable itself and in its directory before a record
        relies on it. Raises JournalFull when there is no room, and OSError."""
        self._close_file()
        path = f"{self._directory}/{fmt.file_name(journal_id)}"
        needed = fmt.HEADER_SIZE + group_size + (fmt.LINK_SIZE if group_size else 0)
        sizes = [max(self._file_size, needed)]
        if self._reserve is not None:
            sizes += [max(min(SHORT_FILE_SIZE, self._file_size), needed)] * 2
        for attempt, size in enumerate(sizes):
            if attempt == 2 and self._reserve is not None:
                self._reserve.release()
            try:
                self._make(journal_id, path, size)
            except OSError as error:
                if not is_no_space(error):
                    raise
                last = error
            else:
                self.room = size
                return
        raise JournalFull("no room for a journal file", path=path, size=sizes[-1]) from last

    def _make(self, journal_id: int, path: str, size: int) -> None:
        if journal_id == self._spoilt_id:
            with suppress(FileNotFoundError):
                self._disk.remove(path)
        file = self._disk.create(path, allocate=size)
        self._spoilt_id = journal_id
        try:
            file.write_at(fmt.pack_file_header(journal_id, file_size=size), 0)
            file.sync()
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            with suppress(OSError):
                self._disk.remove(path)
            raise
        self._file, self._journal_id, self._spoilt_id = file, journal_id, 0
        self._zeros_end = 0

    def write(
        self, group: bytes, position: JournalPosition, written: Callable[[], None] | None, link: "_Link | None" = None
    ) -> float:
        """Write and sync one group. Returns the seconds that took. `written` runs between the two.

        `link`: the last group of the file before, when this one begins a file. Raises JournalFull, when nothing was
        written, or OSError.
        """
        if position.journal_id != self._journal_id:
            if link is not None and self._file is not None:
                self._linked, self._file = self._file, None
            self.create(position.journal_id, group_size=len(group))
            if link is not None:
                self._write_link(link)
            # A link names nothing if it stands in a file that may be lost unseen.
            self._is_unnamed = self._is_unnamed or link is None
        if self._is_unnamed:
            self._write_needed()
        assert self._file is not None
        start = self.clock()
        end = position.offset + len(group)
        if end > self._zeros_end and len(group) <= ZEROS_GROUP_SIZE_MAX:
            self._zeros_end = min(end + len(ZEROS_AHEAD) - end % ZEROS_UNIT, self.room - self.room % fmt.SECTOR_SIZE)
            group += ZEROS_AHEAD[: max(0, self._zeros_end - end)]
        self._file.write_at(group, position.offset)
        if written is not None:
            written()
        self._file.datasync()
        return self.clock() - start

    def _write_needed(self) -> None:
        try:
            write_needed(self._disk, self._directory, self._journal_id)
        except OSError as error:
            if not is_no_space(error):
                raise
            raise JournalFull("no room to say that a journal file is needed", path=self.path) from error
        self._is_unnamed = False

    def _write_link(self, link: "_Link") -> None:
        assert self._linked is not None
        self._linked.write_at(link.group, link.offset)
        self._linked.datasync()
        self._linked.close()
        self._linked = None

    def close(self) -> None:
        if self._linked is not None:
            self._linked.close()
            self._linked = None
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._journal_id, self.room = None, 0, 0


@dataclass(frozen=True, slots=True)
class JournalStart:
    """Where a run's journal begins."""

    position: JournalPosition
    """In the file that the writer has open, or, with `next_journal_id`, the end of all there is."""
    next_journal_id: int | None = None
    """There was no room for a file. The first group begins this one."""


@dataclass(frozen=True, slots=True)
class _Link:
    """The group that ends a file, and where."""

    group: bytes
    offset: int


@dataclass(slots=True)
class _Stuck:
    """A group that found no room."""

    group: bytes
    position: JournalPosition
    link: _Link | None


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
        start: JournalStart,
        full: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`full` hears why, and of which file, when the journal becomes full or short."""
        self._writer = writer
        self._worker = worker
        self._loop = loop
        self._group_size_max = settings.journal_group_size_max
        self._inline_size_max = settings.journal_inline_size_max
        self._pace_s = settings.journal_pace_s
        self._retry_s = settings.journal_retry_s
        self._stats = stats
        self._next = start.position
        self._next_journal_id = start.next_journal_id
        self._tell_full = full
        self._stuck: _Stuck | None = None
        self._retry_timer: TimerHandle | None = None
        self._was_short = start.next_journal_id is not None or writer.is_short
        self._is_stopped = False
        self._pending: deque[_Batch] = deque()
        self._at_disk: list[Synced] | None = None
        self._first_at = self._group_first_at = 0.0
        """When the oldest record that waits, and that of the group at the disk, came."""
        self._group_records = 0
        self._group_at = 0.0
        """When that group was handed to the disk."""
        self._has_rested = False
        """For the group to come."""
        self._scheduled = False
        self._failed = False
        self._expected_s = 0.0
        """What a group took of late to write and sync."""

    @property
    def position(self) -> JournalPosition:
        """The end of all groups handed to the disk: records appended from now on stand behind it."""
        return self._next

    @property
    def failed(self) -> bool:
        return self._failed

    @property
    def is_full(self) -> bool:
        """Whether records wait for room on the disk. Adds are to be refused; what is appended hears False."""
        return self._stuck is not None

    def stop(self) -> None:
        """Try no more to write what found no room."""
        self._is_stopped = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def append(self, parts: Sequence[bytes], size: int, synced: Synced, *, when_written: bool = False) -> None:
        """Take records (size words and bodies alternating, `size` bytes in all); `synced` hears of them later.

        The caller bounds how much is appended; the parts are held until they were written.
        """
        if self._failed:
            synced(False)
            return
        if self._stuck is not None:
            self._pending.append((parts, size, _nobody, False))
            self._stats.journal_queue_size += size
            self._stats.journal_queue_groups += 1
            synced(False)
            return
        if not self._pending:
            self._first_at = self._writer.clock()
        self._pending.append((parts, size, synced, when_written))
        self._stats.journal_queue_size += size
        self._stats.journal_queue_groups += 1
        if self._at_disk is None:
            self._dispatch_soon()

    def barrier(self, synced: Synced) -> None:
        """`synced` hears once everything appended so far is durable; at once when it is."""
        if self._failed or self._stuck is not None:
            synced(False)
        elif self._pending:
            self._pending.append(((), 0, synced, False))
            self._stats.journal_queue_groups += 1
        elif self._at_disk is not None:
            self._at_disk.append(synced)
            self._stats.journal_queue_groups += 1
        else:
            synced(True)

    def _dispatch_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch, True)

    def _dispatch(self, is_scheduled: bool) -> None:
        """Have the next group written: if `is_scheduled` perhaps here and now, and then whoever waits for it was told
        when this returns."""
        if is_scheduled:
            self._scheduled = False
        if self._at_disk is not None or not self._pending or self._failed or self._stuck is not None:
            return
        if is_scheduled and self._rested():
            self._dispatch_soon()
            return
        self._has_rested = False
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
        link = self._move_on(size)
        position = self._next
        group = fmt.pack_group(b"".join(parts), journal_id=position.journal_id, sequence=position.sequence)
        self._next = JournalPosition(position.journal_id, position.offset + len(group), position.sequence + 1)
        self._at_disk = waiting
        written = None
        if early:
            waiting.insert(0, self._unless_told(early))
            self._stats.journal_queue_groups += 1
            written = self._tell_written(early)
        first_at, records = self._first_at, len(parts) // 2
        self._group_at = self._writer.clock()
        waited_s = self._group_at - first_at
        self._group_first_at, self._group_records = first_at, records
        self._stats.journal_at_disk = 1
        is_inline = is_scheduled and self._is_quick(len(group))
        self._submit(_Stuck(group, position, link), written, is_inline=is_inline)  # it may be back already
        self._stats.journal_groups += 1
        self._stats.journal_bytes += len(group)
        self._stats.observe_journal_queue(waited_s, records)
        self._stats.observe_group_size(len(group))

    def _rested(self) -> bool:
        """Rest, once a group, if that keeps the pace."""
        if self._has_rested or self._group_records < COMPANY_MIN or not self._is_quick(self._stats.journal_queue_size):
            return False
        left_s = self._group_at + self._pace_s - self._writer.clock()
        self._has_rested = left_s > 0 and nap(self._worker, min(left_s, self._pace_s))
        return self._has_rested

    def _submit(self, one: _Stuck, written: Callable[[], None] | None, *, is_inline: bool) -> None:
        def job() -> float:
            return self._writer.write(one.group, one.position, written, one.link)

        def done(seconds: float | None, error: BaseException | None) -> None:
            self._synced(one, seconds, error)

        if is_inline and one.link is None and one.position.offset > fmt.HEADER_SIZE and self._stuck is None:
            submit_short(self._worker, job, done)
        else:
            self._worker.submit(job, done)

    def _is_quick(self, size: int) -> bool:
        """Whether the event loop may write a group of `size` bytes itself."""
        return size <= self._inline_size_max and self._expected_s <= INLINE_TIME_MAX_S

    def _move_on(self, records_size: int) -> _Link | None:
        """Begin a new file if the next group does not fit into this one beside a link. That link, if there is one."""
        here = self._next
        journal_id, self._next_journal_id = self._next_journal_id, None
        sequence, link = here.sequence, None
        if journal_id is None and (
            here.offset + fmt.group_size_on_disk(records_size) + fmt.LINK_SIZE > self._writer.room
        ):
            journal_id, sequence = here.journal_id + 1, here.sequence + 1
            group = fmt.pack_link(journal_id=here.journal_id, sequence=here.sequence, next_journal_id=journal_id)
            link = _Link(group, here.offset)
        if journal_id is not None:
            self._next = JournalPosition(journal_id, fmt.HEADER_SIZE, sequence)
            self._stats.journal_files_created += 1
        return link

    def _tell_written(self, early: list[Synced]) -> Callable[[], None]:
        """What the worker calls between write and sync."""
        return lambda: self._worker.post(self._tell, early, True)

    def _unless_told(self, early: list[Synced]) -> Synced:
        """Tells those who waited for the write only, if the write itself failed."""
        return lambda ok: self._tell(early, ok)

    def _tell(self, waiting: list[Synced], ok: bool) -> None:
        told = waiting[:]
        waiting.clear()
        self._tell_group(told, ok)

    def _synced(self, written: _Stuck, seconds: float | None, error: BaseException | None) -> None:
        """The worker is back with one group."""
        waiting, self._at_disk = self._at_disk, None
        assert waiting is not None
        self._stats.journal_at_disk = 0
        if isinstance(error, JournalFull):
            self._keep(written, error)
        elif error is not None or seconds is None:
            self._fail(error)
        else:
            # One sync that had to wait for a flush's does not tell of the next.
            self._expected_s += (min(seconds, 4 * INLINE_TIME_MAX_S) - self._expected_s) / 8
            self._stuck = None
            self._look_at_room()
            first_at, records = self._group_first_at, self._group_records
            if self._pending:
                if self._is_quick(fmt.group_size_on_disk(self._stats.journal_queue_size)):
                    self._dispatch_soon()  # by the loop itself: these would have waited for it too
                else:
                    self._dispatch(False)  # first keep the disk busy, then talk
            self._tell_group(waiting, True)
            self._stats.journal_sync_s += seconds
            self._stats.observe_sync_s(seconds)
            self._stats.observe_journal_add(self._writer.clock() - first_at, records)
            return
        self._tell_group(waiting, False)

    def _tell_group(self, waiting: list[Synced], ok: bool) -> None:
        self._stats.journal_queue_groups -= len(waiting)
        for synced in waiting:
            try:
                synced(ok)
            except Exception:  # the answers of others are not to be lost with one
                log.exception("journal_answer_broke")

    def _keep(self, stuck: _Stuck, error: JournalFull) -> None:
        """There is no room: tell everyone who waits, keep the records, try again."""
        if self._stuck is None:
            log.error("journal_full", error=str(error))
            pending, self._pending = self._pending, deque()
            told = [synced for _, _, synced, _ in pending]
            for parts, size, _, _ in pending:
                if size:
                    self._pending.append((parts, size, _nobody, False))
            self._stats.journal_queue_groups += len(self._pending)
            self._loop.call_soon(self._tell_group, told, False)  # behind the group itself
            self._tell_full(str(error))
        self._stuck = stuck
        self._stats.journal_full = True
        if not self._is_stopped:
            self._retry_timer = self._loop.call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        if self._stuck is not None and not self._failed:
            self._at_disk = []
            self._submit(self._stuck, None, is_inline=False)

    def _look_at_room(self) -> None:
        """Say so when the journal turns short, or is as it should be again."""
        if self._stats.journal_full:
            log.info("journal_has_room_again", is_short=self._writer.is_short)
            self._stats.journal_full = False
        if self._writer.is_short != self._was_short:
            self._was_short = self._writer.is_short
            if self._was_short:
                self._tell_full(f"there is no room for a journal file of full size: {self._writer.path}")

    def _fail(self, error: BaseException | None) -> None:
        """Stop for good and tell everyone who waits."""
        log.error("journal_failed", error=repr(error), journal_id=self._next.journal_id, sequence=self._next.sequence)
        self._failed = True
        self._stuck = None
        self._stats.journal_failed = True
        self._stats.journal_full = False
        pending, self._pending = self._pending, deque()
        self._stats.journal_queue_size = 0
        # Behind the group that failed, in order: call_soon runs after the caller told that group.
        self._loop.call_soon(self._tell_group, [synced for _, _, synced, _ in pending], False)


def _nobody(_: bool) -> None:
    """Was told already."""
