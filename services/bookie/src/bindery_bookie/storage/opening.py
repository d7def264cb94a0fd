"""Opening: finds out what the disks hold, and refuses to guess when that contradicts itself.

| found                                             | verdict                                                          |
|---------------------------------------------------|------------------------------------------------------------------|
| nothing at all                                    | a new bookie                                                     |
| entry logs, index rows or journal groups, no mark | damage: the mark was lost                                        |
| the mark's journal or entry log missing or short  | damage: the storage was lost                                     |
| index generation is the mark's, or one more       | good; one more: the crash came between index and mark            |
| index generation below the mark's, or no index    | the index lost something: rebuild it from the entry logs         |
| index generation further ahead                    | damage: the mark is an old one                                   |

Everything here runs in a worker and may block.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage import entry_log_format, journal_format
from bindery_bookie.storage.disk import Disk
from bindery_bookie.storage.entry_log import cut_logs, list_logs
from bindery_bookie.storage.index import Index
from bindery_bookie.storage.index_format import LedgerRow, Located
from bindery_bookie.storage.journal import JournalWriter
from bindery_bookie.storage.journal_format import Group, JournalPosition
from bindery_bookie.storage.kv import OpenKV
from bindery_bookie.storage.mark import LastLogMark, read_mark, write_mark

log = structlog.get_logger(__name__)

_REBUILD_ENTRIES_MAX = 100_000
"""Entries held while rebuilding, before they go to the index."""


def open_storage(
    disk: Disk, open_kv: OpenKV, destroy_kv: Callable[[str], None], *, journal_directory: str, ledger_directory: str
) -> tuple[Index, LastLogMark]:
    """Check what is there, make what is not. The index agrees with the mark on return. Raises DamagedStorage."""
    index_path = f"{ledger_directory}/index"
    disk.make_directories(journal_directory)
    disk.make_directories(ledger_directory)
    mark = read_mark(disk, ledger_directory)
    try:
        index: Index | None = Index(open_kv(index_path))
        generation = index.generation() if index is not None else 0
    except DamagedStorage as error:
        if mark is None:
            raise
        log.error("index_damaged", error=str(error))
        index, generation = None, -1
    if mark is None:
        check_new(disk, journal_directory, ledger_directory, index)
        mark = _make_new(disk, journal_directory, ledger_directory)
    if index is not None and generation > mark.generation + 1:
        raise DamagedStorage(
            "LastLogMark is older than the index",
            path=ledger_directory,
            offset=0,
            mark=mark.generation,
            index=generation,
        )
    cut_logs(disk, ledger_directory, log_id=mark.log_id, offset=mark.log_offset)
    if index is None or generation < mark.generation:
        log.warning("index_rebuild", index_generation=generation, mark_generation=mark.generation)
        if index is not None:
            index.close()
        destroy_kv(index_path)
        index = Index(open_kv(index_path))
        IndexRebuild(disk, ledger_directory, index, mark).run()
    if index.generation() != mark.generation:
        # The crash came between index and mark. Say so in the mark before another flush counts on.
        mark = replace(mark, generation=index.generation())
        write_mark(disk, ledger_directory, mark)
    return index, mark


def _make_new(disk: Disk, journal_directory: str, ledger_directory: str) -> LastLogMark:
    """A first journal, then the mark that points to it. Files of a first start that crashed are empty and go."""
    for journal_id in list_journals(disk, journal_directory):
        disk.remove(f"{journal_directory}/{journal_format.file_name(journal_id)}")
    writer = JournalWriter(disk, journal_directory, file_size=journal_format.HEADER_SIZE, clock=lambda: 0.0)
    writer.create(1)
    writer.close()
    mark = LastLogMark(0, JournalPosition(1, journal_format.HEADER_SIZE, 1), log_id=0, log_offset=0)
    write_mark(disk, ledger_directory, mark)
    return mark


def list_journals(disk: Disk, directory: str) -> list[int]:
    """Journal ids, ascending."""
    found = (journal_format.parse_file_name(name) for name in disk.list_names(directory))
    return sorted(journal_id for journal_id in found if journal_id is not None)


def journals_size(disk: Disk, directory: str, mark: LastLogMark) -> int:
    """Bytes of journal behind the mark, allocated ones included."""
    total = 0
    for journal_id in list_journals(disk, directory):
        if journal_id >= mark.journal.journal_id:
            file = disk.open_read(f"{directory}/{journal_format.file_name(journal_id)}")
            total += file.size()
            file.close()
    return total


def check_new(disk: Disk, journal_directory: str, ledger_directory: str, index: Index | None) -> None:
    """Raise DamagedStorage unless nothing was ever stored here."""
    path = f"{ledger_directory}/LastLogMark"
    if list_logs(disk, ledger_directory) or (index is not None and index.generation()):
        raise DamagedStorage("LastLogMark is missing beside entry logs or an index", path=path, offset=0)
    for journal_id in list_journals(disk, journal_directory):
        journal_path = f"{journal_directory}/{journal_format.file_name(journal_id)}"
        file = disk.open_read(journal_path)
        try:
            if journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE) is not None:
                raise DamagedStorage(
                    "LastLogMark is missing beside a journal", path=path, offset=0, journal=journal_path
                )
        finally:
            file.close()


def replay_groups(disk: Disk, directory: str, start: JournalPosition) -> Iterator[tuple[int, Group]]:
    """(journal id, group) of all groups from `start` on, in order. Raises DamagedStorage with path and offset.

    Ends at a tear, and makes sure that nothing comes after it.
    """
    journal_ids = [found for found in list_journals(disk, directory) if found >= start.journal_id]
    if not journal_ids or journal_ids[0] != start.journal_id:
        path = f"{directory}/{journal_format.file_name(start.journal_id)}"
        raise DamagedStorage("journal is missing", path=path, offset=start.offset)
    sequence = start.sequence
    for expected, journal_id in enumerate(journal_ids, start=start.journal_id):
        path = f"{directory}/{journal_format.file_name(journal_id)}"
        if journal_id != expected:
            raise DamagedStorage(
                "journal is missing", path=f"{directory}/{journal_format.file_name(expected)}", offset=0
            )
        file = disk.open_read(path)
        try:
            offset = start.offset if journal_id == start.journal_id else journal_format.HEADER_SIZE
            if not journal_format.is_file_header_valid(file, journal_id=journal_id):
                if (
                    journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE)
                    is not None
                ):
                    raise DamagedStorage("journal header is damaged", path=path, offset=0)
                continue  # the crash came while it was being created
            # A tear in an earlier file is fine while nothing follows: were there a group, its sequence would not fit.
            for group in journal_format.read_groups(
                file, path=path, journal_id=journal_id, offset=offset, sequence=sequence
            ):
                yield journal_id, group
                sequence = group.sequence + 1
        finally:
            file.close()


class IndexRebuild:
    """Fills an empty index from the entry logs up to the mark. What the logs do not say, the journal behind it does."""

    def __init__(self, disk: Disk, directory: str, index: Index, mark: LastLogMark) -> None:
        self._disk = disk
        self._directory = directory
        self._index = index
        self._mark = mark
        self._ledgers: dict[int, LedgerRow] = {}
        self._entries: dict[int, dict[int, Located]] = {}
        self._held = 0
        self.entries_count = 0

    def run(self) -> None:
        """Raises DamagedStorage when a log is missing or damaged: a partial index would turn damage into absence."""
        existing = list_logs(self._disk, self._directory)
        if existing != list(range(1, self._mark.log_id + 1)):
            missing = sorted(set(range(1, self._mark.log_id + 1)) - set(existing))
            path = f"{self._directory}/{entry_log_format.file_name(missing[0] if missing else existing[-1])}"
            raise DamagedStorage("index is lost and so is an entry log", path=path, offset=0)
        for log_id in existing:
            self._add_log(log_id)
        self._spill(is_last=True)
        log.warning("index_rebuilt", logs=len(existing), entries=self.entries_count, ledgers=len(self._ledgers))

    def _add_log(self, log_id: int) -> None:
        path = f"{self._directory}/{entry_log_format.file_name(log_id)}"
        file = self._disk.open_read(path)
        try:
            entry_log_format.check_file_header(file, path=path, log_id=log_id)
            stop = self._mark.log_offset if log_id == self._mark.log_id else file.size()
            for offset, body in entry_log_format.scan_records(file, path=path, stop=stop):
                self._add(body, log_id << entry_log_format.OFFSET_BITS | offset)
                if self._held >= _REBUILD_ENTRIES_MAX:
                    self._spill(is_last=False)
        finally:
            file.close()

    def _add(self, body: bytes, location: int) -> None:
        ledger_id, entry_id = control.unpack_ids(body)
        row = self._ledgers.get(ledger_id)
        if entry_id == control.MASTER_KEY:
            if row is None:  # a replay may have said it again
                self._ledgers[ledger_id] = LedgerRow(control.unpack_sized(body), False, -1, -1, None)
            return
        if entry_id == control.DELETED:
            self._spill(is_last=False)
            self._ledgers.pop(ledger_id, None)
            self._index.commit(runs=[], merges={}, ledgers={}, deleted=[ledger_id], generation=None, sync=False)
            return
        if row is None:
            log.warning("record_without_ledger", ledger_id=ledger_id, entry_id=entry_id)
            return
        if entry_id == control.FENCE:
            row = replace(row, is_fenced=True)
        elif entry_id == control.EXPLICIT_LAC:
            packet = control.unpack_sized(body)
            row = replace(row, explicit_lac=packet, lac=max(row.lac, control.lac_of_packet(packet)))
        elif entry_id >= 0:
            _, _, lac = control.unpack_ids_and_lac(body)
            if lac > row.lac or entry_id > row.last_entry_id:
                row = replace(row, lac=max(row.lac, lac), last_entry_id=max(row.last_entry_id, entry_id))
            self._entries.setdefault(ledger_id, {})[entry_id] = (entry_id, location, len(body))
            self._held += 1
            self.entries_count += 1
        self._ledgers[ledger_id] = row

    def _spill(self, *, is_last: bool) -> None:
        """Move what is held to the index; the last time with ledger rows and generation, which make it valid."""
        merges = {ledger_id: [held[key] for key in sorted(held)] for ledger_id, held in self._entries.items()}
        self._index.commit(
            runs=[],
            merges=merges,
            ledgers=self._ledgers if is_last else {},
            deleted=(),
            generation=self._mark.generation if is_last else None,
            sync=is_last,
        )
        self._entries, self._held = {}, 0
