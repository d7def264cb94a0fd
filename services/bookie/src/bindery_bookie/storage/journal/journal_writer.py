"""JournalWriter: creates journal files and writes groups to them, in the journal's worker."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bindery_bookie.storage.io.disk import Disk, WritableFile, is_no_space
from bindery_bookie.storage.io.errors import JournalFull
from bindery_bookie.storage.io.reserve import Reserve
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import write_needed

SHORT_FILE_SIZE: Final = 1024 * 1024
"""Size of a short file in bytes, unless its group is larger."""

ZEROS_AHEAD: Final = bytes(256 * 1024)
"""Zeros written after a group from time to time, over allocated bytes that read as zeros already.

The first sync of allocated bytes makes the file system record in its own journal that they are written now. Such a
sync takes 1.5 times as long as others, and longer during a flush. With the zeros, the sync of one group does this for
the next groups too. Larger steps cost more than they save.
"""

ZEROS_UNIT: Final = 4096
"""The zeros end at a multiple of this block size, because the file system would complete a partial block itself, with
an additional write."""

ZEROS_GROUP_SIZE_MAX: Final = 64 * 1024
"""Maximum size in bytes of a group that gets zeros after it. The sync of a larger group takes long in any case."""


@dataclass(frozen=True, slots=True)
class Link:
    """The group that ends a file, and its offset."""

    group: bytes
    offset: int


class JournalWriter:
    """Owns the file that is being written. All methods run in the journal worker."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        file_size: int,
        clock: Callable[[], float],
        reserve: Reserve | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `reserve`: released if there is no space for a short file."""
        self._disk = disk
        self._directory = directory
        self._file_size = file_size
        self.clock = clock
        self._reserve = reserve
        self._file: WritableFile | None = None
        self._journal_id = 0
        self._incomplete_id = 0
        """Id of a file that a failed `create` may have left behind. It has no group."""
        self._linked: WritableFile | None = None
        """The previous file, until its link to the current one is written."""
        self.room = 0
        """Bytes allocated for the current file. Read by the event loop while no job is running."""
        self._zeros_end = 0
        """End offset of the zeros written ahead."""
        self._is_unnamed = False
        """True while neither a link nor LastLogMark names the current file, so that its loss would not be detected."""

    @property
    def is_short(self) -> bool:
        """True if there was no space for a file of full size."""
        return self.room < self._file_size

    @property
    def path(self) -> str:
        """Path of the current file."""
        return f"{self._directory}/{fmt.file_name(self._journal_id)}"

    def require_needed_file(self) -> None:
        """Write a `.needed` file before the first group of the current file, because LastLogMark does not name it."""
        self._is_unnamed = True

    def create(self, journal_id: int, *, group_size: int = 0) -> None:
        """Start a new file with room for a group of `group_size` bytes.

        The file and its directory entry are durable on return. Raises JournalFull if there is no space, OSError.
        """
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
        if journal_id == self._incomplete_id:
            with suppress(FileNotFoundError):
                self._disk.remove(path)
        file = self._disk.create(path, allocate=size)
        self._incomplete_id = journal_id
        try:
            file.write_at(fmt.pack_file_header(journal_id, file_size=size), 0)
            file.sync()
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            with suppress(OSError):
                self._disk.remove(path)
            raise
        self._file, self._journal_id, self._incomplete_id = file, journal_id, 0
        self._zeros_end = 0

    def write(
        self, group: bytes, position: JournalPosition, written: Callable[[], None] | None, link: Link | None = None
    ) -> float:
        """Write and sync one group; return the seconds taken. `written` is called between write and sync.

        `link`: the last group of the previous file, if this group begins a file. Raises JournalFull if nothing was
        written, OSError.
        """
        if position.journal_id != self._journal_id:
            if link is not None and self._file is not None:
                self._linked, self._file = self._file, None
            self.create(position.journal_id, group_size=len(group))
            if link is not None:
                self._write_link(link)
            # A link in a file whose loss would not be detected is not sufficient.
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
            raise JournalFull("no room for the .needed file of a journal file", path=self.path) from error
        self._is_unnamed = False

    def _write_link(self, link: Link) -> None:
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
