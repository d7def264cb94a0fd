"""Opening: finds out what the disks hold, and refuses to guess when that contradicts itself.

| found                                             | verdict                                                          |
|---------------------------------------------------|------------------------------------------------------------------|
| nothing at all                                    | a new bookie                                                     |
| entry logs, index rows or journal groups, no mark | refused: the mark was lost                                       |
| the mark damaged, or older than the index         | refused                                                          |
| a journal damaged before its end, or one missing  | refused                                                          |
| all journals from the mark's on missing           | limbo: the journal was lost                                      |
| an entry log missing or short                     | damage: its entries are answered IO_ERROR, and fetched from peers|
| an entry log that was closed, without its trailer | the same, when a read, the scrub or a rebuild finds it           |
| index generation is the mark's, or one more       | good; one more: the crash came between index and mark            |
| index damaged, incomplete or behind the mark      | rebuilt from the entry logs                                      |
| that, and an entry log missing or damaged, or     | limbo: the index is rebuilt as far as the logs can be read       |
| entries of a ledger whose key is in none          |                                                                  |
| index generation further ahead                    | refused: the mark is an old one                                  |

What is refused names file and offset and `bindery bookie salvage`, which puts the shard into limbo. With a LIMBO marker
there (phase listing) much less is refused: a lost mark is made anew, and of the journals everything is replayed that
can be read.

Everything here runs in a worker and may block.
"""

from collections.abc import Callable, Iterator
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
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal import JournalWriter
from bindery_bookie.storage.journal.journal_format import Group, JournalPosition
from bindery_bookie.storage.journal.journal_needed import needed_journals
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark, write_mark
from bindery_bookie.storage.opening.rebuild import IndexRebuild

log = structlog.get_logger(__name__)

REBUILD_WISH: Final = "rebuild-index"
"""A file in the ledger directory's `current`: the next start rebuilds the index, whatever it looks like."""

SALVAGE: Final = (
    "if the file cannot be restored, `bindery bookie salvage` lets the bookie start and heal from the others"
)


@dataclass(slots=True)
class Opened:
    """What a start goes on with."""

    index: Index
    mark: LastLogMark
    limbo: LimboMarker | None
    """The marker that stands there; replay is lenient while it says listing."""
    damage: list[Damage] = field(default_factory=list)
    """Entry logs of which something is missing though the index knows their entries."""


class _Opening:
    """One shard's. `open_storage` runs it."""

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
        is_given_up: Callable[[], bool],
    ) -> None:
        self._disk = disk
        self._open_kv = open_kv
        self._destroy_kv = destroy_kv
        self._journals = journal_directory
        self._directory = ledger_directory
        self._index_path = f"{ledger_directory}/index"
        self._now_ms = now_ms
        self._refuse_lost = refuse_lost
        self._is_given_up = is_given_up
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
                            f"LastLogMark is missing beside a damaged index; {SALVAGE}",
                            path=f"{self._directory}/LastLogMark",
                            offset=0,
                        )
                    check_new(self._disk, self._journals, self._directory, index)
                    mark = _make_new(self._disk, self._journals, self._directory)
                else:
                    mark = self._make_mark_anew(max(generation, 0))
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
                damage = []  # the rebuild finds it again
            self._check_journal(mark)
        except BaseException:
            if index is not None:
                index.close()
            raise
        if index is None or reason:
            index = self._rebuild(index, mark, reason)
        if index.generation() != mark.generation:
            # The crash came between index and mark. Say so in the mark before another flush counts on.
            mark = replace(mark, generation=index.generation())
            write_mark(self._disk, self._directory, mark)
        return Opened(index, mark, self._marker, damage)

    def _read_mark(self) -> LastLogMark | None:
        try:
            return read_mark(self._disk, self._directory)
        except DamagedStorage as error:
            raise DamagedStorage(f"{error.message}; {SALVAGE}", **error.facts) from error

    def _enter_limbo(self, reason: str, *, path: str) -> None:
        """Durable before anything is made that would look whole."""
        if self._refuse_lost and self._marker is None:
            raise DamagedStorage(f"{reason}, and on_lost_storage is `refuse`; {SALVAGE}", path=path, offset=0)
        self._marker = write_marker(self._disk, self._directory, reason, self._now_ms)

    # --- index

    def _open_index(self) -> tuple[Index | None, str]:
        """The index, or None and why it must be rebuilt."""
        if REBUILD_WISH in self._disk.list_names(self._directory):
            return None, f"{self._directory}/{REBUILD_WISH} asks for it"
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
                is_given_up=self._is_given_up,
            ).run()
        except BaseException:
            index.close()
            raise
        if REBUILD_WISH in self._disk.list_names(self._directory):
            self._disk.remove(f"{self._directory}/{REBUILD_WISH}")
            self._disk.sync_directory(self._directory)
        return index

    def _before_valid(self, rebuild: IndexRebuild) -> None:
        if rebuild.damage:
            first = rebuild.damage[0]
            self._enter_limbo(
                f"the index was rebuilt without {len(rebuild.damage)} places of entry logs that cannot be read, the "
                f"first: {first.path} at {first.offset}: {first.reason}",
                path=first.path,
            )
        elif self._marker is not None and self._marker.phase is not LimboPhase.LISTING:
            # Only ledger rows say which ledgers are in limbo: they must be found out anew.
            self._enter_limbo("the index was lost during the repair", path=self._index_path)

    # --- entry logs

    def _check_logs(
        self, mark: LastLogMark, index: Index | None, *, is_mark_new: bool
    ) -> tuple[LogManifest, list[Damage]]:
        """Remove what no flush or compaction finished; the manifest in force, and what is missing."""
        try:
            manifest = before = read_manifest(self._disk, self._directory)
        except DamagedStorage as error:
            log.error("log_manifest_damaged", error=str(error))
            manifest, before = LogManifest(), None
        for log_id in list_logs(self._disk, self._directory):
            # Compaction's logs say so themselves. One that the manifest does not know: the manifest was lost or is old.
            if not manifest.knows(log_id) and (order := self._order(log_id)) is not None:
                manifest = manifest.with_compacted(log_id, order)
        manifest = self._settled(manifest, mark, index, is_known=manifest == before)
        if manifest != before:
            write_manifest(self._disk, self._directory, manifest)
        damage = clean_logs(self._disk, self._directory, mark, manifest)
        before = manifest
        if manifest.unsealed is None or is_mark_new:
            found = unsealed_sizes(self._disk, self._directory, manifest, mark.log_id)
            manifest = manifest.with_unsealed({**found, **(manifest.unsealed or {})})
        is_flushs = mark.log_id and mark.log_id not in manifest.compacted
        if is_flushs and not is_sealed(self._disk, self._directory, mark.log_id):
            # No flush goes on with it, and the mark that knows its end will leave it.
            manifest = manifest.with_unsealed({mark.log_id: mark.log_offset})
        if manifest != before:
            write_manifest(self._disk, self._directory, manifest)
        return manifest, damage

    def _settled(self, manifest: LogManifest, mark: LastLogMark, index: Index | None, *, is_known: bool) -> LogManifest:
        """The manifest after the end of a compaction that a crash cut off: of source and target one goes. The index
        switched to the target in one batch that counts, or it did not; `is_known`: the count can be relied on."""
        switches = manifest.switches if index is None else max(index.switches(), manifest.switches)
        pairs = manifest.pairs(mark.log_id)
        is_known = is_known and switches <= manifest.switches + len(pairs) <= manifest.switches + 1
        present = set(list_logs(self._disk, self._directory))
        used = index.log_ids() if pairs and index is not None and not is_known else set()
        for source, target in pairs:
            is_switched = switches > manifest.switches if is_known else target in used
            gone = source if is_switched or source not in present else target
            log.info("compaction_settled", source=source, target=target, gone=gone)
            manifest = manifest.with_absent(gone)
        return replace(manifest, switches=switches)

    def _order(self, log_id: int) -> int | None:
        """Where a log stands that compaction wrote; None for all others, and where it cannot be read."""
        path = f"{self._directory}/{entry_log_format.file_name(log_id)}"
        file = self._disk.open_read(path)
        try:
            return entry_log_format.check_file_header(file, path=path, log_id=log_id)
        except DamagedStorage:
            return None
        finally:
            file.close()

    def _without_unused(self, index: Index, damage: list[Damage]) -> list[Damage]:
        """Missing logs that the (good) index does not point to cost no entry. The list of logs goes on to expect them:
        there may have been keys and fences in them, which an index rebuilt without them would lack."""
        used = index.log_ids() if damage else ()
        return [found for found in damage if log_id_of(found.path) in used]

    # --- mark and journal

    def _make_mark_anew(self, generation: int) -> LastLogMark:
        """In limbo: a mark behind all entry logs and before all journals that are there."""
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
            journals = list_journals(self._disk, self._journals)
            start = JournalPosition((journals[-1] if journals else 0) + 1, journal_format.HEADER_SIZE, 1)
        # Never 0 beside logs: an index that was lost has generation 0, and must look older than the mark.
        mark = LastLogMark(max(generation, 1 if logs else 0), start, log_id, log_offset)
        write_mark(self._disk, self._directory, mark)
        log.warning("mark_made_anew", generation=mark.generation, journal_id=start.journal_id, log_id=log_id)
        return mark

    def _first_group(self) -> JournalPosition | None:
        """The first group that can be read in any journal."""
        for journal_id, group in readable_groups(self._disk, self._journals, JournalPosition(0, 0, 0)):
            return JournalPosition(journal_id, group.offset, group.sequence)
        return None

    def _check_journal(self, mark: LastLogMark) -> None:
        wanted = mark.journal.journal_id
        if any(found >= wanted for found in list_journals(self._disk, self._journals)):
            return  # replay finds out what is wrong with them
        path = f"{self._journals}/{journal_format.file_name(wanted)}"
        self._enter_limbo(f"the journal was lost: LastLogMark says to begin with {path}, which is missing", path=path)


def open_storage(
    disk: Disk,
    open_kv: OpenKV,
    destroy_kv: Callable[[str], None],
    *,
    journal_directory: str,
    ledger_directory: str,
    now_ms: int = 0,
    refuse_lost: bool = False,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Opened:
    """Check what is there, make what is not. The index agrees with the mark on return. Raises DamagedStorage.

    `now_ms`: the time of day, for a limbo that begins here. `refuse_lost`: raise where else limbo would begin.
    `is_given_up`: asked while the index is rebuilt, which may take minutes; then raises StartGivenUp.
    """
    return _Opening(
        disk,
        open_kv,
        destroy_kv,
        journal_directory=journal_directory,
        ledger_directory=ledger_directory,
        now_ms=now_ms,
        refuse_lost=refuse_lost,
        is_given_up=is_given_up,
    ).run()


def ask_rebuild(disk: Disk, directory: str, reason: str) -> None:
    """Let the next start rebuild the index of the shard whose ledger `current` is `directory`. Durable on return."""
    if REBUILD_WISH not in disk.list_names(directory):
        file = disk.create(f"{directory}/{REBUILD_WISH}")
        try:
            file.write_at(reason.encode()[:4096] + b"\n", 0)
            file.sync()
        finally:
            file.close()
        disk.sync_directory(directory)
        log.warning("index_rebuild_asked", directory=directory, reason=reason)


def log_id_of(path: str) -> int | None:
    """The id of the entry log at `path`; None for any other file."""
    return entry_log_format.parse_file_name(path.rpartition("/")[2])


def clean_logs(disk: Disk, directory: str, mark: LastLogMark, manifest: LogManifest) -> list[Damage]:
    """Remove what lies behind the mark: a flush wrote it that did not finish, and its journal is kept. And what
    `manifest` calls absent. What should be there and is not is told: the index still knows what was in it."""
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
    there = set(existing)
    for log_id in manifest.expected(mark.log_id):
        if log_id not in there:
            damage.append(Damage(f"{directory}/{entry_log_format.file_name(log_id)}", 0, "entry log is missing"))
    return damage


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
        raise DamagedStorage(f"LastLogMark is missing beside entry logs or an index; {SALVAGE}", path=path, offset=0)
    for journal_id in needed_journals(disk, journal_directory):
        journal_path = f"{journal_directory}/{journal_format.file_name(journal_id)}"
        raise DamagedStorage(
            f"LastLogMark is missing, and a journal was needed; {SALVAGE}", path=path, offset=0, journal=journal_path
        )
    for journal_id in list_journals(disk, journal_directory):
        journal_path = f"{journal_directory}/{journal_format.file_name(journal_id)}"
        file = disk.open_read(journal_path)
        try:
            if journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE) is not None:
                raise DamagedStorage(
                    f"LastLogMark is missing beside a journal; {SALVAGE}", path=path, offset=0, journal=journal_path
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
    linked = start.journal_id
    """The last file that must be there, and whole."""
    needed = {found for found in needed_journals(disk, directory) if found > start.journal_id}
    for expected, journal_id in enumerate(journal_ids, start=start.journal_id):
        path = f"{directory}/{journal_format.file_name(journal_id)}"
        if journal_id != expected:
            raise DamagedStorage(
                "journal is missing", path=f"{directory}/{journal_format.file_name(expected)}", offset=0
            )
        file = disk.open_read(path)
        try:
            offset = start.offset if journal_id == start.journal_id else journal_format.HEADER_SIZE
            must_be_whole = (
                journal_id <= linked
                or journal_id in needed
                or journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE) is not None
            )
            if not must_be_whole:
                continue  # the crash came while it was being created, or before its first group
            if not journal_format.is_file_header_valid(file, journal_id=journal_id):
                raise DamagedStorage("journal header is damaged", path=path, offset=0)
            journal_format.check_size(file, path=path)
            # A tear in an earlier file is fine while nothing follows: were there a group, its sequence would not fit.
            for group in journal_format.read_groups(
                file, path=path, journal_id=journal_id, offset=offset, sequence=sequence
            ):
                yield journal_id, group
                sequence = group.sequence + 1
                linked = max(linked, journal_format.following(group) or 0)
        finally:
            file.close()
    if (last := max((linked, *needed))) > journal_ids[-1]:
        raise DamagedStorage("journal is missing", path=f"{directory}/{journal_format.file_name(last)}", offset=0)


def readable_groups(disk: Disk, directory: str, start: JournalPosition) -> Iterator[tuple[int, Group]]:
    """As `replay_groups`, for a journal that is known to be damaged: every group from `start` on that can be read.

    Groups are in order, but some may be missing in between. Only for a shard in limbo, which denies nothing.
    """
    sequence = start.sequence
    for journal_id in list_journals(disk, directory):
        if journal_id < start.journal_id:
            continue
        path = f"{directory}/{journal_format.file_name(journal_id)}"
        file = disk.open_read(path)
        try:
            offset = start.offset if journal_id == start.journal_id else journal_format.HEADER_SIZE
            while (begin := journal_format.find_group(file, journal_id=journal_id, offset=offset)) is not None:
                offset = begin
                found = journal_format.sequence_at(file, journal_id=journal_id, offset=offset)
                assert found is not None
                try:
                    for group in journal_format.read_groups(
                        file, path=path, journal_id=journal_id, offset=offset, sequence=found
                    ):
                        offset = group.offset + group.size
                        found = group.sequence + 1
                        if group.sequence >= sequence:
                            sequence = found
                            yield journal_id, group
                except DamagedStorage as error:
                    log.error("journal_part_skipped", error=str(error))
                if offset == begin:  # this very group is the bad one
                    offset += journal_format.SECTOR_SIZE
        finally:
            file.close()
