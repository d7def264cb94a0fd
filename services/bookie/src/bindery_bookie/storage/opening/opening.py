"""Check the files of a shard at a start, remove unfinished files, and rebuild the index if necessary.

| found                                              | result                                                       |
|----------------------------------------------------|--------------------------------------------------------------|
| no files                                           | a new bookie                                                 |
| no mark, but entry logs, index rows or journal     | refused: the mark was lost                                   |
| groups                                             |                                                              |
| the mark is damaged, or older than the index       | refused                                                      |
| a journal is damaged before its end, or missing    | refused                                                      |
| the mark's journal and all later ones are missing  | limbo: the journal was lost                                  |
| an entry log is missing or short                   | damage: its entries are answered IO_ERROR, and fetched from  |
|                                                    | other bookies                                                |
| a closed entry log has no trailer                  | the same, once a read, the scrub or a rebuild finds it       |
| the index generation is that of the mark, or one   | good; if one higher, the crash was between index and mark    |
| higher                                             |                                                              |
| the index is damaged, incomplete or older than the | rebuilt from the entry logs                                  |
| mark                                               |                                                              |
| the same, and an entry log is missing or damaged,  | limbo: the index is rebuilt from what can be read            |
| or no log has the key of a ledger with entries     |                                                              |
| the index generation is higher still               | refused: the mark is too old                                 |

The error of a refused start names the file, the offset and `bindery bookie salvage`, which puts the shard into limbo.
With a LIMBO marker in phase listing, fewer starts are refused: a lost mark is created again, and all readable groups of
the journals are replayed.

Everything here runs in a worker and may block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.corruption.limbo import LimboMarker, LimboPhase, read_marker, write_marker
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.entry_log.log_manifest import (
    LogManifest,
    is_sealed,
    read_manifest,
    unsealed_sizes,
    write_manifest,
)
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.kv import OpenKV
from bindery_bookie.storage.io.leveldb_check import check_files
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import needed_journals
from bindery_bookie.storage.journal.journal_writer import JournalWriter
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark, write_mark
from bindery_bookie.storage.opening.rebuild import IndexRebuild

log = structlog.get_logger(__name__)

REBUILD_REQUEST: Final = "rebuild-index"
"""Name of a file in the ledger directory's `current` that makes the next start rebuild the index in any case."""

SALVAGE: Final = (
    "if the file cannot be restored, run `bindery bookie salvage`: the bookie can then start and refill from the others"
)
"""Advice at the end of the errors that refuse a start."""


@dataclass(slots=True)
class Opened:
    """The result of opening the files of a shard."""

    index: Index
    mark: LastLogMark
    limbo: LimboMarker | None
    """The marker file; in phase listing the replay skips what it cannot read."""
    damage: list[Damage] = field(default_factory=list)
    """Missing or short entry logs that the index refers to."""


class _Opening:
    """The steps of one `open_storage`."""

    def __init__(
        self,
        disk: Disk,
        open_kv: OpenKV,
        destroy_kv: Callable[[str], None],
        *,
        journal_directory: str,
        ledger_directory: str,
        now_ms: int,
        refuse_lost: bool,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._disk = disk
        self._open_kv = open_kv
        self._destroy_kv = destroy_kv
        self._journals = journal_directory
        self._directory = ledger_directory
        self._index_path = f"{ledger_directory}/index"
        self._now_ms = now_ms
        self._refuse_lost = refuse_lost
        self._is_cancelled = is_cancelled
        self._marker: LimboMarker | None = None

    def run(self) -> Opened:
        self._disk.make_directories(self._journals)
        self._disk.make_directories(self._directory)
        self._marker = read_marker(self._disk, self._directory)
        mark = self._read_mark()
        index, reason = self._open_index()
        try:
            generation = index.generation() if index is not None else -1
            is_mark_new = mark is None
            if mark is None:
                if self._marker is None:
                    if index is None and generation < 0 and not self._is_index_empty():
                        raise DamagedStorage(
                            f"LastLogMark is missing, and the index is damaged; {SALVAGE}",
                            path=f"{self._directory}/LastLogMark",
                            offset=0,
                        )
                    check_new(self._disk, self._journals, self._directory, index)
                    mark = _make_new(self._disk, self._journals, self._directory)
                else:
                    mark = self._recreate_mark(max(generation, 0))
            if generation > mark.generation + 1:
                raise DamagedStorage(
                    f"LastLogMark is older than the index; {SALVAGE}",
                    path=f"{self._directory}/LastLogMark",
                    offset=0,
                    mark=mark.generation,
                    index=generation,
                )
            manifest, damage = self._check_logs(mark, index, is_mark_new=is_mark_new)
            if index is not None and generation >= mark.generation and index.switches() >= manifest.switches:
                damage = self._without_unused(index, damage)
            else:
                reason = reason or f"generation {generation} is below {mark.generation}, or a compaction is missing"
                damage = []  # the rebuild reports it
            self._check_journal(mark)
        except BaseException:
            if index is not None:
                index.close()
            raise
        if index is None or reason:
            index = self._rebuild(index, mark, reason)
        if index.generation() != mark.generation:
            # The crash was between index and mark. Correct the mark before the next flush increments the generation.
            mark = replace(mark, generation=index.generation())
            write_mark(self._disk, self._directory, mark)
        return Opened(index, mark, self._marker, damage)

    def _read_mark(self) -> LastLogMark | None:
        try:
            return read_mark(self._disk, self._directory)
        except DamagedStorage as error:
            raise DamagedStorage(f"{error.message}; {SALVAGE}", **error.facts) from error

    def _enter_limbo(self, reason: str, *, path: str) -> None:
        """Write the marker. It must be durable before a file is created that makes the shard look complete."""
        if self._refuse_lost and self._marker is None:
            raise DamagedStorage(f"{reason}, and on_lost_storage is `refuse`; {SALVAGE}", path=path, offset=0)
        self._marker = write_marker(self._disk, self._directory, reason, self._now_ms)

    # --- index

    def _open_index(self) -> tuple[Index | None, str]:
        """Return the index, or None and the reason why it must be rebuilt."""
        if REBUILD_REQUEST in self._disk.list_names(self._directory):
            return None, f"{self._directory}/{REBUILD_REQUEST} exists"
        kv = None
        try:
            check_files(self._disk, self._index_path)
            kv = self._open_kv(self._index_path)
            index = Index(kv)
            index.check_complete()
            index.generation()
        except DamagedStorage as error:
            if kv is not None:
                kv.close()
            log.error("index_damaged", error=str(error))
            return None, str(error)
        return index, ""

    def _is_index_empty(self) -> bool:
        return not self._disk.list_names(self._index_path)

    def _rebuild(self, index: Index | None, mark: LastLogMark, reason: str) -> Index:
        log.warning("index_rebuild", reason=reason, mark_generation=mark.generation)
        if index is not None:
            index.close()
        self._destroy_kv(self._index_path)
        index = Index(self._open_kv(self._index_path))
        try:
            IndexRebuild(
                self._disk,
                self._directory,
                index,
                mark,
                may_be_partial=True,
                before_valid=self._before_valid,
                is_cancelled=self._is_cancelled,
            ).run()
        except BaseException:
            index.close()
            raise
        if REBUILD_REQUEST in self._disk.list_names(self._directory):
            self._disk.remove(f"{self._directory}/{REBUILD_REQUEST}")
            self._disk.sync_directory(self._directory)
        return index

    def _before_valid(self, rebuild: IndexRebuild) -> None:
        if rebuild.damage:
            first = rebuild.damage[0]
            self._enter_limbo(
                f"the index was rebuilt without {len(rebuild.damage)} regions of entry logs that cannot be read, the "
                f"first: {first.path} at {first.offset}: {first.reason}",
                path=first.path,
            )
        elif self._marker is not None and self._marker.phase is not LimboPhase.LISTING:
            # Only ledger rows record which ledgers are in limbo, so the listing must be repeated.
            self._enter_limbo("the index was lost during the repair", path=self._index_path)

    # --- entry logs

    def _check_logs(
        self, mark: LastLogMark, index: Index | None, *, is_mark_new: bool
    ) -> tuple[LogManifest, list[Damage]]:
        """Remove the results of unfinished flushes and compactions; return the current manifest and the damage."""
        try:
            manifest = before = read_manifest(self._disk, self._directory)
        except DamagedStorage as error:
            log.error("log_manifest_damaged", error=str(error))
            manifest, before = LogManifest(), None
        for log_id in list_logs(self._disk, self._directory):
            # The header of a log shows that compaction wrote it. A manifest without the log was lost or is old.
            if not manifest.lists(log_id) and (order := self._order(log_id)) is not None:
                manifest = manifest.with_compacted(log_id, order)
        manifest = self._settle_compaction(manifest, mark, index, is_known=manifest == before)
        if manifest != before:
            write_manifest(self._disk, self._directory, manifest)
        damage = clean_logs(self._disk, self._directory, mark, manifest)
        before = manifest
        if manifest.unsealed is None or is_mark_new:
            found = unsealed_sizes(self._disk, self._directory, manifest, mark.log_id)
            manifest = manifest.with_unsealed({**found, **(manifest.unsealed or {})})
        is_from_flush = mark.log_id and mark.log_id not in manifest.compacted
        if is_from_flush and not is_sealed(self._disk, self._directory, mark.log_id):
            # No flush continues this log. Its size is only in the mark, which will move to another log.
            manifest = manifest.with_unsealed({mark.log_id: mark.log_offset})
        if manifest != before:
            write_manifest(self._disk, self._directory, manifest)
        return manifest, damage

    def _settle_compaction(
        self, manifest: LogManifest, mark: LastLogMark, index: Index | None, *, is_known: bool
    ) -> LogManifest:
        """Finish or undo a compaction that a crash interrupted: either its source or its target becomes absent.

        The batch that switches the index to the target also increments a counter. `is_known`: the counter of the
        manifest is reliable; otherwise the rows of the index decide.
        """
        switches = manifest.switches if index is None else max(index.switches(), manifest.switches)
        pairs = manifest.pairs(mark.log_id)
        is_known = is_known and switches <= manifest.switches + len(pairs) <= manifest.switches + 1
        present = set(list_logs(self._disk, self._directory))
        used = index.log_ids() if pairs and index is not None and not is_known else set()
        for source, target in pairs:
            is_switched = switches > manifest.switches if is_known else target in used
            removed = source if is_switched or source not in present else target
            log.info("compaction_settled", source=source, target=target, removed=removed)
            manifest = manifest.with_absent(removed)
        return replace(manifest, switches=switches)

    def _order(self, log_id: int) -> int | None:
        """Return the order number of a log that compaction wrote; None for other logs and for an unreadable header."""
        path = f"{self._directory}/{entry_log_format.file_name(log_id)}"
        file = self._disk.open_read(path)
        try:
            return entry_log_format.check_file_header(file, path=path, log_id=log_id)
        except DamagedStorage:
            return None
        finally:
            file.close()

    def _without_unused(self, index: Index, damage: list[Damage]) -> list[Damage]:
        """Return the damage of logs that the (good) index refers to; the others contain no stored entry.

        The manifest continues to expect the others too. They may contain keys and fences, which an index that is
        rebuilt without them would lack.
        """
        used = index.log_ids() if damage else ()
        return [found for found in damage if log_id_of(found.path) in used]

    # --- mark and journal

    def _recreate_mark(self, generation: int) -> LastLogMark:
        """Create a mark at the end of all entry logs and before all existing journals. Only in limbo."""
        logs = list_logs(self._disk, self._directory)
        start = self._first_group()
        if not logs and start is None and not generation:
            return _make_new(self._disk, self._journals, self._directory)
        log_id, log_offset = 0, 0
        if logs:
            file = self._disk.open_read(f"{self._directory}/{entry_log_format.file_name(logs[-1])}")
            log_id, log_offset = logs[-1], file.size()
            file.close()
        if start is None:
            journals = journal_files.list_journals(self._disk, self._journals)
            start = JournalPosition((journals[-1] if journals else 0) + 1, journal_format.HEADER_SIZE, 1)
        # Never 0 if there are logs: a lost index has generation 0, and must count as older than the mark.
        mark = LastLogMark(max(generation, 1 if logs else 0), start, log_id, log_offset)
        write_mark(self._disk, self._directory, mark)
        log.warning("mark_recreated", generation=mark.generation, journal_id=start.journal_id, log_id=log_id)
        return mark

    def _first_group(self) -> JournalPosition | None:
        """Return the position of the first readable group of all journals."""
        for journal_id, group in journal_files.readable_groups(self._disk, self._journals, JournalPosition(0, 0, 0)):
            return JournalPosition(journal_id, group.offset, group.sequence)
        return None

    def _check_journal(self, mark: LastLogMark) -> None:
        wanted = mark.journal.journal_id
        if any(found >= wanted for found in journal_files.list_journals(self._disk, self._journals)):
            return  # the replay checks them
        path = f"{self._journals}/{journal_format.file_name(wanted)}"
        self._enter_limbo(f"the journal was lost: LastLogMark refers to {path}, which is missing", path=path)


def open_storage(
    disk: Disk,
    open_kv: OpenKV,
    destroy_kv: Callable[[str], None],
    *,
    journal_directory: str,
    ledger_directory: str,
    now_ms: int = 0,
    refuse_lost: bool = False,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Opened:
    """Check the existing files and create missing ones. The index agrees with the mark on return.

    `now_ms`: wall-clock time for the marker of a limbo that begins here. `refuse_lost`: raise DamagedStorage where
    limbo would begin. `is_cancelled`: checked during an index rebuild, which may take minutes. Raises DamagedStorage,
    StartCancelled.
    """
    return _Opening(
        disk,
        open_kv,
        destroy_kv,
        journal_directory=journal_directory,
        ledger_directory=ledger_directory,
        now_ms=now_ms,
        refuse_lost=refuse_lost,
        is_cancelled=is_cancelled,
    ).run()


def request_rebuild(disk: Disk, directory: str, reason: str) -> None:
    """Make the next start rebuild the index of a shard. Durable on return.

    `directory`: `current` of its ledger directory.
    """
    if REBUILD_REQUEST not in disk.list_names(directory):
        file = disk.create(f"{directory}/{REBUILD_REQUEST}")
        try:
            file.write_at(reason.encode()[:4096] + b"\n", 0)
            file.sync()
        finally:
            file.close()
        disk.sync_directory(directory)
        log.warning("index_rebuild_requested", directory=directory, reason=reason)


def log_id_of(path: str) -> int | None:
    """Return the id of the entry log at `path`; None for any other file."""
    return entry_log_format.parse_file_name(path.rpartition("/")[2])


def clean_logs(disk: Disk, directory: str, mark: LastLogMark, manifest: LogManifest) -> list[Damage]:
    """Remove what an unfinished flush wrote, and logs that the manifest lists as absent. Return missing and short logs.

    An unfinished flush wrote everything after the mark; the journal still has its entries. The index may still refer
    to entries of missing logs.
    """
    damage: list[Damage] = []
    for name in disk.list_names(directory):
        if name.endswith(entry_log_format.COMPACTING_SUFFIX):
            disk.remove(f"{directory}/{name}")
    existing = list_logs(disk, directory)
    for log_id in existing:
        path = f"{directory}/{entry_log_format.file_name(log_id)}"
        if manifest.is_absent(log_id) or (log_id > mark.log_id and log_id not in manifest.compacted):
            disk.remove(path)
        elif log_id == mark.log_id and log_id not in manifest.compacted:
            file = disk.open_read(path)
            size = file.size()
            file.close()
            if size < mark.log_offset:
                damage.append(Damage(path, size, f"entry log is short: {size} bytes, expected {mark.log_offset}"))
            elif size > mark.log_offset:
                disk.truncate(path, mark.log_offset)
        elif manifest.unsealed is not None and (end := manifest.unsealed.get(log_id)) is not None:
            file = disk.open_read(path)
            size = file.size()
            file.close()
            if size < end:
                damage.append(Damage(path, size, f"entry log is short: {size} bytes, expected {end}"))
    disk.sync_directory(directory)
    present = set(existing)
    for log_id in manifest.expected(mark.log_id):
        if log_id not in present:
            damage.append(Damage(f"{directory}/{entry_log_format.file_name(log_id)}", 0, "entry log is missing"))
    return damage


def _make_new(disk: Disk, journal_directory: str, ledger_directory: str) -> LastLogMark:
    """Create the first journal, then the mark that refers to it. Remove empty files of an earlier first start."""
    for journal_id in journal_files.list_journals(disk, journal_directory):
        disk.remove(f"{journal_directory}/{journal_format.file_name(journal_id)}")
    writer = JournalWriter(disk, journal_directory, file_size=journal_format.HEADER_SIZE, clock=lambda: 0.0)
    writer.create(1)
    writer.close()
    mark = LastLogMark(0, JournalPosition(1, journal_format.HEADER_SIZE, 1), log_id=0, log_offset=0)
    write_mark(disk, ledger_directory, mark)
    return mark


def check_new(disk: Disk, journal_directory: str, ledger_directory: str, index: Index | None) -> None:
    """Raise DamagedStorage unless nothing was ever stored here."""
    path = f"{ledger_directory}/LastLogMark"
    if list_logs(disk, ledger_directory) or (index is not None and index.generation()):
        raise DamagedStorage(
            f"LastLogMark is missing, but there are entry logs or an index; {SALVAGE}", path=path, offset=0
        )
    for journal_id in needed_journals(disk, journal_directory):
        journal_path = f"{journal_directory}/{journal_format.file_name(journal_id)}"
        raise DamagedStorage(
            f"LastLogMark is missing, but a journal with records is needed; {SALVAGE}",
            path=path,
            offset=0,
            journal=journal_path,
        )
    for journal_id in journal_files.list_journals(disk, journal_directory):
        journal_path = f"{journal_directory}/{journal_format.file_name(journal_id)}"
        file = disk.open_read(journal_path)
        try:
            if journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE) is not None:
                raise DamagedStorage(
                    f"LastLogMark is missing, but a journal has records; {SALVAGE}",
                    path=path,
                    offset=0,
                    journal=journal_path,
                )
        finally:
            file.close()
