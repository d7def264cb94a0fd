"""ShardCheck: check a shard offline: the digests of journal and entry logs, and all parts against one another.

| part        | what is checked                                                                                       |
|-------------|-------------------------------------------------------------------------------------------------------|
| LastLogMark | it is whole; its journal and its entry log exist and are long enough                                  |
| journal     | groups after the mark: digests, sequence, no damage except for a torn end                             |
| entry logs  | all expected logs exist and no others; the digest of each record                                      |
| index       | its files are whole; its generation matches the mark; rows are whole; runs do not overlap             |
| across      | each location in the index has that entry; each entry of a known ledger is in the index; keys and     |
|             | fences are the same in logs and index                                                                 |

If an entry is in a log but not in the index, the bookie answers "no such entry": a silent loss, which no digest
shows. The check reads the logs once, in order; its memory depends on the number of ledgers, not of entries.

A damaged region of an entry log counts as damage if the index places an entry in it or cannot be read. Otherwise its
bytes are dead: their ledger was deleted, or the entries were stored again elsewhere, for example by a repair. Dead
bytes have a severity of their own and do not make a shard damaged. Keys and fences that such a region may have
contained are in the index, and compaction writes them again from there.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise

from bindery_core.errors import BinderyError
from bindery_core.formats import cookie

from bindery_bookie.offline.findings import DAMAGE, NOTE, Finding, Totals, damage_of
from bindery_bookie.offline.log_check import LogCheck
from bindery_bookie.offline.places import Place, ReadOnlyDisk, ShardPlaces
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.entry_log import entry_log_format as log_format
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.journal.mark import FILE_NAME as MARK_NAME
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bindery_bookie.storage.opening import opening


class ShardCheck:
    """One check of one shard: call `run`, then read `totals`."""

    def __init__(self, places: ShardPlaces, *, advance: Callable[[int], None] = lambda size: None) -> None:
        """`advance` is called with the number of bytes read since the last call."""
        self._places = places
        self._advance = advance
        self._disk = ReadOnlyDisk()
        self.totals = Totals()
        self._marker: limbo.LimboMarker | None = None

    def run(self) -> Iterator[Finding]:
        """Yield findings while the check runs. Raises OSError if the disk cannot be read."""
        ledgers = self._places.ledgers
        if ledgers is None:
            assert self._places.journal is not None
            yield Finding(NOTE, self._places.journal.path, "ledger directory not given: only the journal is checked")
            yield from self._journal(self._places.journal.path, None)
            return
        yield from self._identity(ledgers)
        try:
            mark = read_mark(self._disk, ledgers.path)
        except BinderyError as error:
            yield damage_of(error, ledgers.path, fix=_salvage(ledgers, self._places.journal))
            return
        manifest = yield from self._manifest(ledgers)
        if mark is None and self._marker is not None:
            yield from self._salvaged(ledgers)
            return
        yield from self._mark(ledgers, mark)
        if self._places.journal is None:
            yield Finding(NOTE, ledgers.path, "journal directory not given: the journal is not checked")
        else:
            yield from self._journal(self._places.journal.path, mark)
        if mark is not None:
            yield from LogCheck(
                self._disk,
                ledgers,
                mark,
                manifest,
                self.totals,
                is_in_limbo=self._marker is not None,
                advance=self._advance,
            ).run()

    # --- small files

    def _identity(self, ledgers: Place) -> Iterator[Finding]:
        path = f"{ledgers.directory}/current/{cookie.FILE_NAME}"
        try:
            file = self._disk.open_read(path)
        except OSError:
            yield Finding(NOTE, path, "there is no VERSION file: the owner of this data is unknown")
        else:
            try:
                cookie.parse(file.read_at(0, cookie.TEXT_SIZE_MAX))
            except BinderyError as error:
                yield Finding(DAMAGE, path, str(error), fix="bindery bookie cookie adopt")
            finally:
                file.close()
        marker = self._marker = limbo.read_marker(self._disk, ledgers.path)
        if marker is not None:
            yield Finding(NOTE, f"{ledgers.path}/{limbo.FILE_NAME}", f"in limbo ({marker.phase}): {marker.reason}")

    def _salvaged(self, ledgers: Place) -> Iterator[Finding]:
        """Check a shard in limbo without LastLogMark, as `salvage` leaves it. The ends of its logs are unknown."""
        text = (
            "no LastLogMark, and in limbo: the next start writes it, replays the whole journal and copies missing "
            "entries from other bookies; entry logs and index can be checked after it"
        )
        yield Finding(NOTE, f"{ledgers.path}/{MARK_NAME}", text)
        if self._places.journal is not None:
            directory = self._places.journal.path
            journal_ids = journal_files.list_journals(self._disk, directory)
            yield from self._journals_alone(directory, journal_ids, _salvage(ledgers, self._places.journal))

    def _manifest(self, ledgers: Place) -> Generator[Finding, None, LogManifest]:
        """Read the list of logs as a start does. Logs that compaction wrote are added by their own headers."""
        try:
            manifest = read_manifest(self._disk, ledgers.path)
        except BinderyError as error:
            yield damage_of(error, ledgers.path, fix="none needed: the next start writes it again")
            manifest = LogManifest()
        for name in self._disk.list_names(ledgers.path):
            path = f"{ledgers.path}/{name}"
            log_id = log_format.parse_file_name(name)
            if log_id is not None and not manifest.lists(log_id):
                order = self._order(path, log_id)
                manifest = manifest if order is None else manifest.with_compacted(log_id, order)
            elif name.endswith(log_format.COMPACTING_SUFFIX):
                yield Finding(NOTE, path, "left by a compaction that did not finish; the next start removes it")
            elif name == opening.REBUILD_REQUEST:
                yield Finding(NOTE, path, "the next start rebuilds the index")
        return manifest

    def _order(self, path: str, log_id: int) -> int | None:
        """Return the position in an index rebuild of a log that compaction wrote; None for any other log."""
        file = self._disk.open_read(path)
        try:
            return log_format.check_file_header(file, path=path, log_id=log_id)
        except BinderyError:
            return None  # the scan reports it
        finally:
            file.close()

    def _mark(self, ledgers: Place, mark: LastLogMark | None) -> Iterator[Finding]:
        path = f"{ledgers.path}/{MARK_NAME}"
        if mark is None:
            scanner = EntryLogScanner(self._disk, ledgers.path)
            if scanner.log_ids():
                yield Finding(
                    DAMAGE,
                    path,
                    "LastLogMark is missing, although there are entry logs",
                    fix=_salvage(ledgers, self._places.journal),
                )
            else:
                yield Finding(NOTE, path, "no LastLogMark: nothing was ever stored here")

    # --- the journal

    def _journal(self, directory: str, mark: LastLogMark | None) -> Iterator[Finding]:
        places = self._places
        fix = "restore the file" if places.ledgers is None else _salvage(places.ledgers, places.journal)
        journal_ids = journal_files.list_journals(self._disk, directory)
        if mark is None:
            if places.ledgers is None:
                yield from self._journals_alone(directory, journal_ids, fix)
                return
            try:
                opening.check_new(self._disk, directory, places.ledgers.path, None)
            except BinderyError as error:
                yield damage_of(error, directory, fix=fix)
            return
        for journal_id in journal_ids:
            if journal_id < mark.journal.journal_id:
                path = f"{directory}/{journal_format.file_name(journal_id)}"
                yield Finding(NOTE, path, "older than LastLogMark: no longer needed")
        try:
            for _, group in journal_files.replay_groups(self._disk, directory, mark.journal):
                self.totals.journal_groups += 1
                self.totals.journal_records += len(group.records)
                self._advance(group.size)
                if any(len(record) < control.CONTROL_SIZE_MIN for record in group.records):
                    yield Finding(DAMAGE, directory, "journal record is short", group.offset, fix)
        except BinderyError as error:
            yield damage_of(error, directory, fix=fix)

    def _journals_alone(self, directory: str, journal_ids: list[int], fix: str) -> Iterator[Finding]:
        """Check journals without a LastLogMark: each file, and that none is missing between them or after the last."""
        linked = 0
        for journal_id in journal_ids:
            must_be_whole = journal_id <= linked
            linked = max(linked, (yield from self._one_journal(directory, journal_id, fix, must_be_whole)))
        for before, journal_id in pairwise([*journal_ids, linked]):
            if journal_id > before + 1 or (journal_id > before and journal_id not in journal_ids):
                path = f"{directory}/{journal_format.file_name(before + 1)}"
                yield Finding(DAMAGE, path, "journal is missing", 0, fix)

    def _one_journal(
        self, directory: str, journal_id: int, fix: str, must_be_whole: bool
    ) -> Generator[Finding, None, int]:
        """Check one file, and return the id of the journal that continues it; 0: none.

        `must_be_whole`: a crash cannot have left the file incomplete.
        """
        from bindery_bookie.offline.dumps import dump_journal

        path = f"{directory}/{journal_format.file_name(journal_id)}"
        linked = groups = 0
        head = ""
        for facts in dump_journal(path, journal_id, self._disk, records=False):
            if facts["what"] == "journal":
                head = facts.get("problem", "")
            elif facts["what"] == "group":
                groups += 1
                self.totals.journal_records += facts["records"]
                self._advance(facts["size"])
                linked = facts.get("goes_on_in", linked)
            elif "problem" in facts:
                yield Finding(DAMAGE, path, facts["problem"], facts["offset"], fix)
        self.totals.journal_groups += groups
        if head and (groups or must_be_whole):
            yield Finding(DAMAGE, path, head, 0, fix)
        elif head:
            yield Finding(NOTE, path, f"{head}, and it is empty: the bookie ended while it created the file")
        return linked


def work_size(places: ShardPlaces) -> int:
    """Return the approximate number of bytes that `run` reads."""
    disk = ReadOnlyDisk()
    total = 0
    if places.ledgers is not None:
        scanner = EntryLogScanner(disk, places.ledgers.path)
        total += sum(scanner.size(log_id) for log_id in scanner.log_ids())
    return total


def _salvage(ledgers: Place, journal: Place | None) -> str:
    # Not a directory that several shards share, because the other shards have other ledgers and journals.
    directories = dict.fromkeys([*([] if journal is None else [journal.own_directory]), ledgers.own_directory])
    return f"stop the bookie, then: bindery bookie salvage {' '.join(directories)}"
