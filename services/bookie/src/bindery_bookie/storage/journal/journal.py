"""Journal: make records durable, with one fdatasync per group of records.

Flow. `append` adds records to the pending group. If no group is being written, the pending group is written at the end
of the current iteration of the event loop; records that arrive while a group is being written form the next group. The
worker does one write and one fdatasync per group, then the callbacks of the group run in the loop, in the order of
their records.

Inline writes. While syncs are quick, the loop itself writes all but large groups: passing a group to the worker and
back, through the interpreter lock, takes longer than the disk, and requests that arrive during the write are read from
the sockets together. An inline write has its own iteration of the loop, so that the answers of the group before it are
not delayed.

Pace. Clients with many pending adds send the next ones as soon as the last are answered. On a quick disk this would
produce many small groups, each with the system calls of a large one, in the bookie and in each client. Inline groups
therefore begin at least `journal_pace_s` apart if the last group had BUSY_GROUP_RECORDS records or more: the loop
pauses for the rest of that time and then reads the sockets once more. A single add follows a small group and is
written at once.

No space. Groups are written only to allocated space, so a full disk is noticed when a file is created, before
anything is written. The writer then creates a short file for this group, if necessary in the space of the reserve. If
there is no space for that either, the journal is *full*: all waiting callbacks get False at once, the records are kept
in order (they are in the write caches, and no flush may advance past records that the journal lacks), and the write is
retried every `journal_retry_s`. Callers check `is_full` before they append adds, so only adds that were already on
their way are kept. `JournalWriter.is_short` is set from the first short file until a file of full size is created.

Invariants: at most one group is being written; groups are written in sequence without gaps; a callback gets True only
after its records were synced (or written, for deferred sync); after a failed write no more records are accepted,
because a page cache that failed to write once cannot be trusted (fail-stop; `stats.journal_failed` is set).
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from bindery_bookie.storage.io.errors import JournalFull
from bindery_bookie.storage.io.worker import Worker, pause, submit_short
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_writer import JournalWriter, Link
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

INLINE_TIME_MAX_S: Final = 0.001
"""Maximum average duration of recent syncs, in seconds, for inline writes. The event loop is blocked that long."""

BUSY_GROUP_RECORDS: Final = 4
"""Minimum number of records in a group after which more records are expected soon."""

Synced = Callable[[bool], None]
"""Called once. True: the records are durable. False: the journal is full (not durable) or failed (unknown)."""

_Batch = tuple[Sequence[bytes], int, Synced, bool]
"""Record parts, their bytes, the callback, and whether it waits for the write only."""


@dataclass(frozen=True, slots=True)
class JournalStart:
    """The position where the journal of a run begins."""

    position: JournalPosition
    """In the file that the writer has open, or, with `next_journal_id`, the end of the existing journals."""
    next_journal_id: int | None = None
    """Id of the file that the first group begins; set if there was no space for a file at the start."""


@dataclass(slots=True)
class _GroupWrite:
    """A group that is being written, or waits for space."""

    group: bytes
    position: JournalPosition
    link: Link | None


class Journal:
    """Group commit: collects records into groups and calls back once they are durable. Event loop only."""

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
        """`full` is called with the reason and the file when the journal becomes full or short."""
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
        self._report_full = full
        self._blocked: _GroupWrite | None = None
        """The group for which there is no space."""
        self._retry_timer: TimerHandle | None = None
        self._was_short = start.next_journal_id is not None or writer.is_short
        self._is_stopped = False
        self._pending: deque[_Batch] = deque()
        self._at_disk: list[Synced] | None = None
        self._first_at = self._group_first_at = 0.0
        """Arrival times of the oldest pending record, and of the oldest record in the last group."""
        self._group_records = 0
        """Number of records in the last group."""
        self._group_at = 0.0
        """Time at which the write of the last group began."""
        self._has_paused = False
        """Whether the loop paused before the next group."""
        self._scheduled = False
        self._failed = False
        self._expected_s = 0.0
        """Moving average of the seconds to write and sync a group."""

    @property
    def position(self) -> JournalPosition:
        """The end of all groups whose write has begun. Records appended from now on come after it."""
        return self._next

    @property
    def failed(self) -> bool:
        return self._failed

    @property
    def is_full(self) -> bool:
        """True while records wait for disk space. Adds must be refused; `append` calls back with False."""
        return self._blocked is not None

    def stop(self) -> None:
        """Stop the retries of a full journal."""
        self._is_stopped = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def append(self, parts: Sequence[bytes], size: int, synced: Synced, *, when_written: bool = False) -> None:
        """Append records: size words and bodies alternating, `size` bytes in total. `synced` is called later.

        `when_written`: call it after the write, before the sync. The parts are kept until they are written; the caller
        limits their total size.
        """
        if self._failed:
            synced(False)
            return
        if self._blocked is not None:
            self._pending.append((parts, size, _ignore, False))
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
        """Call `synced` once all records appended so far are durable; at once if they are."""
        if self._failed or self._blocked is not None:
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
        """Begin to write the next group. If `is_scheduled`, an inline write may complete, callbacks included."""
        if is_scheduled:
            self._scheduled = False
        if self._at_disk is not None or not self._pending or self._failed or self._blocked is not None:
            return
        if is_scheduled and self._paused():
            self._dispatch_soon()
            return
        self._has_paused = False
        parts: list[bytes] = []
        waiting: list[Synced] = []
        early: list[Synced] = []
        size = 0
        pending = self._pending
        # A barrier has no size and belongs to the group of the records before it, so no group is empty.
        while pending and (not size or not pending[0][1] or size + pending[0][1] <= self._group_size_max):
            batch_parts, batch_size, synced, when_written = pending.popleft()
            parts += batch_parts
            size += batch_size
            (early if when_written else waiting).append(synced)
        self._stats.journal_queue_size -= size
        link = self._next_file(size)
        position = self._next
        group = fmt.pack_group(b"".join(parts), journal_id=position.journal_id, sequence=position.sequence)
        self._next = JournalPosition(position.journal_id, position.offset + len(group), position.sequence + 1)
        self._at_disk = waiting
        written = None
        if early:
            waiting.insert(0, partial(self._notify_early, early))  # if the write fails, these get False
            self._stats.journal_queue_groups += 1
            written = partial(self._worker.post, self._notify_early, early, True)
        first_at, records = self._first_at, len(parts) // 2
        self._group_at = self._writer.clock()
        waited_s = self._group_at - first_at
        self._group_first_at, self._group_records = first_at, records
        self._stats.journal_at_disk = 1
        is_inline = is_scheduled and self._is_quick(len(group))
        self._submit(_GroupWrite(group, position, link), written, is_inline=is_inline)  # inline: complete on return
        self._stats.journal_groups += 1
        self._stats.journal_bytes += len(group)
        self._stats.observe_journal_queue(waited_s, records)
        self._stats.observe_group_size(len(group))

    def _paused(self) -> bool:
        """Pause if the last group was too recent, at most once per group; return True after a pause."""
        is_busy = self._group_records >= BUSY_GROUP_RECORDS
        if self._has_paused or not is_busy or not self._is_quick(self._stats.journal_queue_size):
            return False
        left_s = self._group_at + self._pace_s - self._writer.clock()
        self._has_paused = left_s > 0 and pause(self._worker, min(left_s, self._pace_s))
        return self._has_paused

    def _submit(self, write: _GroupWrite, written: Callable[[], None] | None, *, is_inline: bool) -> None:
        def job() -> float:
            return self._writer.write(write.group, write.position, written, write.link)

        def done(seconds: float | None, error: BaseException | None) -> None:
            self._synced(write, seconds, error)

        if is_inline and write.link is None and write.position.offset > fmt.HEADER_SIZE and self._blocked is None:
            submit_short(self._worker, job, done)
        else:
            self._worker.submit(job, done)

    def _is_quick(self, size: int) -> bool:
        """Return True if the event loop may write a group of `size` bytes inline."""
        return size <= self._inline_size_max and self._expected_s <= INLINE_TIME_MAX_S

    def _next_file(self, records_size: int) -> Link | None:
        """Begin a new file if the next group and a link do not fit into this one. Return the link, if there is one."""
        here = self._next
        journal_id, self._next_journal_id = self._next_journal_id, None
        sequence, link = here.sequence, None
        if journal_id is None and (
            here.offset + fmt.group_size_on_disk(records_size) + fmt.LINK_SIZE > self._writer.room
        ):
            journal_id, sequence = here.journal_id + 1, here.sequence + 1
            group = fmt.pack_link(journal_id=here.journal_id, sequence=here.sequence, next_journal_id=journal_id)
            link = Link(group, here.offset)
        if journal_id is not None:
            self._next = JournalPosition(journal_id, fmt.HEADER_SIZE, sequence)
            self._stats.journal_files_created += 1
        return link

    def _notify_early(self, early: list[Synced], ok: bool) -> None:
        """Call the callbacks that wait for the write only. A second call has no effect."""
        waiting = early[:]
        early.clear()
        self._notify(waiting, ok)

    def _synced(self, written: _GroupWrite, seconds: float | None, error: BaseException | None) -> None:
        """Handle the end of a group's write and sync."""
        waiting, self._at_disk = self._at_disk, None
        assert waiting is not None
        self._stats.journal_at_disk = 0
        if isinstance(error, JournalFull):
            self._keep(written, error)
        elif error is not None or seconds is None:
            self._fail(error)
        else:
            # Limited, because one sync that had to wait for the sync of a flush does not predict the next.
            self._expected_s += (min(seconds, 4 * INLINE_TIME_MAX_S) - self._expected_s) / 8
            self._blocked = None
            self._report_space()
            first_at, records = self._group_first_at, self._group_records
            if self._pending:
                if self._is_quick(fmt.group_size_on_disk(self._stats.journal_queue_size)):
                    self._dispatch_soon()  # inline: the callbacks below must not wait for it
                else:
                    self._dispatch(False)  # keep the disk busy while the callbacks run
            self._notify(waiting, True)
            self._stats.journal_sync_s += seconds
            self._stats.observe_sync_s(seconds)
            add_s = self._writer.clock() - first_at
            self._stats.journal_adds += records
            self._stats.journal_add_s += add_s * records
            self._stats.observe_journal_add(add_s, records)
            return
        self._notify(waiting, False)

    def _notify(self, waiting: list[Synced], ok: bool) -> None:
        self._stats.journal_queue_groups -= len(waiting)
        for synced in waiting:
            try:
                synced(ok)
            except Exception:  # one failing callback must not prevent the others
                log.exception("journal_callback_failed")

    def _keep(self, write: _GroupWrite, error: JournalFull) -> None:
        """Handle a full disk: call back with False, keep the records, retry later."""
        if self._blocked is None:
            log.error("journal_full", error=str(error))
            pending, self._pending = self._pending, deque()
            waiting = [synced for _, _, synced, _ in pending]
            for parts, size, _, _ in pending:
                if size:
                    self._pending.append((parts, size, _ignore, False))
            self._stats.journal_queue_groups += len(self._pending)
            self._loop.call_soon(self._notify, waiting, False)  # after the callbacks of the group itself
            self._report_full(str(error))
        self._blocked = write
        self._stats.journal_full = True
        if not self._is_stopped:
            self._retry_timer = self._loop.call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        if self._blocked is not None and not self._failed:
            self._at_disk = []
            self._submit(self._blocked, None, is_inline=False)

    def _report_space(self) -> None:
        """Report that a full journal has space again, and that a journal became short."""
        if self._stats.journal_full:
            log.info("journal_no_longer_full", is_short=self._writer.is_short)
            self._stats.journal_full = False
        if self._writer.is_short != self._was_short:
            self._was_short = self._writer.is_short
            if self._was_short:
                self._report_full(f"there is no room for a journal file of full size: {self._writer.path}")

    def _fail(self, error: BaseException | None) -> None:
        """Stop permanently, and call all pending callbacks with False."""
        log.error("journal_failed", error=repr(error), journal_id=self._next.journal_id, sequence=self._next.sequence)
        self._failed = True
        self._blocked = None
        self._stats.journal_failed = True
        self._stats.journal_full = False
        pending, self._pending = self._pending, deque()
        self._stats.journal_queue_size = 0
        # After the callbacks of the failed group, which the caller runs.
        self._loop.call_soon(self._notify, [synced for _, _, synced, _ in pending], False)


def _ignore(_: bool) -> None:
    """Replace a callback that was already called."""
