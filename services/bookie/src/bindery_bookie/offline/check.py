"""Check a shard offline: every byte of journal and entry logs against its digest, and all parts against one another.

| part        | checked                                                                                               |
|-------------|-------------------------------------------------------------------------------------------------------|
| LastLogMark | is whole; its journal and its entry log are there and long enough                                     |
| journal     | groups from the mark on: digests, sequence, no damage but a torn end                                  |
| entry logs  | all are there that should be, none that should not; every record's digest                            |
| index       | its files are whole; generation fits the mark; rows are whole; runs do not overlap                    |
| across      | each location in the index holds that very entry; each entry of a known ledger is in the index; keys  |
|             | and fences are the same in logs and index                                                             |

An entry that is in a log but not in the index would be denied: silent loss, which no digest shows. The check reads the
logs once, in order, and needs memory by ledger, not by entry.

A damaged region of an entry log counts as damage if the index places an entry in it or cannot be read. Otherwise its
bytes are dead: their ledger was deleted, or the entries were stored again elsewhere, as a bookie does that repairs
itself. Dead bytes are reported with a severity of their own and do not make a shard damaged. Keys and fences that such
a region may have held are in the index, and compaction writes them again from there.
"""

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from bindery_core.errors import BinderyError, DamagedStorage
from bindery_core.formats import cookie

from bindery_bookie.offline.places import INDEX, Place, ReadOnlyDisk, ShardPlaces, opened_index
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.entry_log import entry_log_format as log_format
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest, read_manifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.mark import FILE_NAME as MARK_NAME
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bindery_bookie.storage.opening import opening

DAMAGE: Final = "damage"
DEAD: Final = "dead"
"""Damaged bytes that hold no live entry."""
NOTE: Final = "note"
EXAMPLES_MAX: Final = 20
"""Entries of one ledger that are reported one by one; the rest is counted."""

FIX_HEAL: Final = "start the bookie and run `bindery bookie scrub run`: it fetches these from the other bookies"
FIX_REGION: Final = (
    "start the bookie and run `bindery bookie scrub run`: it fetches the live entries from the other bookies; dead "
    "bytes are removed when the log is compacted"
)
FIX_DEAD: Final = "none needed: no live entry is stored there; compaction of the log removes these bytes"

_PREFIXES: Final = {DAMAGE: "DAMAGE", DEAD: "dead  ", NOTE: "note  "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the check."""

    severity: str
    """DAMAGE, DEAD or NOTE. Only DAMAGE makes a shard damaged."""
    path: str
    text: str
    offset: int | None = None
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        place = {"offset": self.offset} if self.offset is not None else {}
        return {"severity": self.severity, "path": self.path, **place, "text": self.text, **self.facts, "fix": self.fix}

    def line(self, *, last_fix: str = "") -> str:
        """As text. `last_fix`: of the finding before; the same fix is not repeated."""
        at = "" if self.offset is None else f" at {self.offset}"
        facts = "".join(f" {name}={value}" for name, value in self.facts.items())
        fix = f"\n    fix: {self.fix}" if self.fix not in ("", last_fix) else ""
        return f"{_PREFIXES[self.severity]}  {self.path}{at}: {self.text}{facts}{fix}"


@dataclass(slots=True)
class Totals:
    """What was checked."""

    journal_groups: int = 0
    journal_records: int = 0
    logs: int = 0
    log_bytes: int = 0
    records: int = 0
    ledgers: int = 0
    entries: int = 0
    """In the index."""
    dead_records: int = 0
    """Of ledgers that were deleted."""


@dataclass(slots=True)
class _Ledger:
    """One ledger in index and logs."""

    row: LedgerRow
    indexed: int = 0
    matched: int = 0
    """Indexed entries found in the logs at exactly their location."""
    missing: int = 0
    """Entries found in the logs and not in the index."""
    missing_examples: list[LogRecord] = field(default_factory=list)
    doubtful_logs: set[int] = field(default_factory=set)
    """Logs with records behind a damaged region that may be entries missing in the index."""
    is_fenced_in_log: bool = False
    key_in_log: bytes | None = None


class ShardCheck:
    """One shard, once: `run`, then `totals`."""

    def __init__(self, places: ShardPlaces, *, advance: Callable[[int], None] = lambda size: None) -> None:
        """`advance` is called with the number of bytes read since the last call."""
        self._places = places
        self._advance = advance
        self._disk = ReadOnlyDisk()
        self.totals = Totals()
        self._marker: limbo.LimboMarker | None = None
        self._ledgers: dict[int, _Ledger] = {}
        self._index_is_good = False
        self._logs_are_done = False
        self._regions: list[DamagedRegion] = []
        """Damaged regions of the logs, until the index has shown whether they hold live entries."""

    def run(self) -> Iterator[Finding]:
        """Yield findings while the check runs. Raises OSError where the disk cannot be read at all."""
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
            yield self._damage_of(error, ledgers.path, fix=_salvage(ledgers, self._places.journal))
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
            yield from self._logs_and_index(ledgers, mark, manifest)

    # --- small files

    def _identity(self, ledgers: Place) -> Iterator[Finding]:
        path = f"{ledgers.directory}/current/{cookie.FILE_NAME}"
        try:
            file = self._disk.open_read(path)
        except OSError:
            yield Finding(NOTE, path, "there is no VERSION file: the bookie of these data is unknown")
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
        """In limbo without LastLogMark, as `salvage` leaves it: nothing says how far logs and journal go."""
        text = (
            "no LastLogMark, and in limbo: the next start writes it, replays the whole journal and fetches what is "
            "missing from the other bookies; entry logs and index can be checked after it"
        )
        yield Finding(NOTE, f"{ledgers.path}/{MARK_NAME}", text)
        if self._places.journal is not None:
            directory = self._places.journal.path
            journal_ids = opening.list_journals(self._disk, directory)
            yield from self._journals_alone(directory, journal_ids, _salvage(ledgers, self._places.journal))

    def _manifest(self, ledgers: Place) -> Generator[Finding, None, LogManifest]:
        """As a start reads it: compaction's logs say so themselves, whatever the list says."""
        try:
            manifest = read_manifest(self._disk, ledgers.path)
        except BinderyError as error:
            yield self._damage_of(error, ledgers.path, fix="none needed: the next start writes it again")
            manifest = LogManifest()
        for name in self._disk.list_names(ledgers.path):
            path = f"{ledgers.path}/{name}"
            log_id = log_format.parse_file_name(name)
            if log_id is not None and not manifest.knows(log_id):
                order = self._order(path, log_id)
                manifest = manifest if order is None else manifest.with_compacted(log_id, order)
            elif name.endswith(log_format.COMPACTING_SUFFIX):
                yield Finding(NOTE, path, "left by a compaction that did not finish; the next start removes it")
            elif name == opening.REBUILD_WISH:
                yield Finding(NOTE, path, "the next start rebuilds the index")
        return manifest

    def _order(self, path: str, log_id: int) -> int | None:
        """Where a log stands that compaction wrote."""
        file = self._disk.open_read(path)
        try:
            return log_format.check_file_header(file, path=path, log_id=log_id)
        except BinderyError:
            return None  # the scan tells
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
                    "LastLogMark is missing beside entry logs",
                    fix=_salvage(ledgers, self._places.journal),
                )
            else:
                yield Finding(NOTE, path, "no LastLogMark: nothing was ever stored here")

    def _damage_of(self, error: BinderyError, path: str, *, fix: str) -> Finding:
        facts = dict(error.facts)
        where = str(facts.pop("path", path))
        offset = facts.pop("offset", None)
        return Finding(DAMAGE, where, error.message, offset if isinstance(offset, int) else None, fix, facts)

    # --- the journal

    def _journal(self, directory: str, mark: LastLogMark | None) -> Iterator[Finding]:
        places = self._places
        fix = "restore the file" if places.ledgers is None else _salvage(places.ledgers, places.journal)
        journal_ids = opening.list_journals(self._disk, directory)
        if mark is None:
            if places.ledgers is None:
                yield from self._journals_alone(directory, journal_ids, fix)
                return
            try:
                opening.check_new(self._disk, directory, places.ledgers.path, None)
            except BinderyError as error:
                yield self._damage_of(error, directory, fix=fix)
            return
        for journal_id in journal_ids:
            if journal_id < mark.journal.journal_id:
                path = f"{directory}/{journal_format.file_name(journal_id)}"
                yield Finding(NOTE, path, "older than LastLogMark: no longer needed")
        try:
            for _, group in opening.replay_groups(self._disk, directory, mark.journal):
                self.totals.journal_groups += 1
                self.totals.journal_records += len(group.records)
                self._advance(group.size)
                if any(len(record) < control.CONTROL_SIZE_MIN for record in group.records):
                    yield Finding(DAMAGE, directory, "journal record is short", group.offset, fix)
        except BinderyError as error:
            yield self._damage_of(error, directory, fix=fix)

    def _journals_alone(self, directory: str, journal_ids: list[int], fix: str) -> Iterator[Finding]:
        """Without LastLogMark: each file by itself, and that none is missing between them or behind the last."""
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
        """Returns the journal that this one goes on in; 0: none. A crash may leave a file that was never finished, but
        not one that `must_be_whole`."""
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
            yield Finding(NOTE, path, f"{head}, and it is empty: the bookie died while it created the file")
        return linked

    # --- entry logs and index

    def _logs_and_index(self, ledgers: Place, mark: LastLogMark, manifest: LogManifest) -> Iterator[Finding]:
        rebuild = f"stop the bookie, then: bindery bookie rebuild-index {ledgers.directory}; a start does it too"
        index_path = f"{ledgers.path}/{INDEX}"
        try:
            with opened_index(ledgers) as index:
                if index is None:
                    yield Finding(DAMAGE, index_path, "the index is lost", fix=rebuild)
                else:
                    yield from self._index(index, index_path, mark, manifest, rebuild)
                yield from self._logs(ledgers, mark, manifest, index if self._index_is_good else None)
                if index is not None and self._index_is_good:
                    yield from self._across(ledgers, index, index_path, rebuild)
        except (BinderyError, OSError) as error:
            if isinstance(error, OSError) and not str(error).startswith("index"):
                raise
            text = error.message if isinstance(error, BinderyError) else str(error)
            yield Finding(DAMAGE, index_path, text, fix=rebuild)
            if not self._logs_are_done:  # once more, without the index
                self._regions = []
                self.totals = replace(self.totals, logs=0, log_bytes=0, records=0, dead_records=0)
                yield from self._logs(ledgers, mark, manifest, None)

    def _index(
        self, index: Index, path: str, mark: LastLogMark, manifest: LogManifest, rebuild: str
    ) -> Iterator[Finding]:
        facts: dict[str, Any]
        generation = index.generation()
        if not mark.generation <= generation <= mark.generation + 1:
            wrong = "lost flushes" if generation < mark.generation else "is newer than LastLogMark"
            facts = {"index_generation": generation, "mark_generation": mark.generation}
            yield Finding(DAMAGE, path, f"the index {wrong}", fix=rebuild, facts=facts)
            if generation < mark.generation:
                return
        if index.switches() < manifest.switches:
            facts = {"index_switches": index.switches(), "switches": manifest.switches}
            yield Finding(DAMAGE, path, "the index lost a compaction", fix=rebuild, facts=facts)
        expected = set(manifest.expected(mark.log_id))
        if generation > mark.generation:  # the crash came between index and mark: a start cuts neither
            expected |= set(EntryLogScanner(self._disk, path.rpartition("/")[0]).log_ids())
        for ledger_id in index.ledger_ids():
            row = index.ledger_row(ledger_id)
            assert row is not None
            ledger = self._ledgers[ledger_id] = _Ledger(row)
            last: Run | None = None
            lost_logs: set[int] = set()
            for run in index.runs(ledger_id):
                ledger.indexed += sum(1 for size in run.sizes if size)
                if last is not None and last.last_entry_id >= run.first_entry_id:
                    facts = {"ledger_id": ledger_id, "first_entry_id": run.first_entry_id}
                    yield Finding(DAMAGE, path, "runs overlap", fix=rebuild, facts=facts)
                last = run
                log_id = run.location >> log_format.OFFSET_BITS
                if log_id not in expected and log_id not in lost_logs:
                    lost_logs.add(log_id)
                    facts = {"ledger_id": ledger_id, "log": log_format.file_name(log_id)}
                    yield Finding(
                        DAMAGE, path, "the index points into an entry log that is not in use", fix=rebuild, facts=facts
                    )
            if last is not None and row.last_entry_id < last.last_entry_id:
                facts = {"ledger_id": ledger_id, "row": row.last_entry_id, "indexed": last.last_entry_id}
                yield Finding(DAMAGE, path, "the ledger row ends before its entries", fix=rebuild, facts=facts)
            if row.is_limbo:
                yield Finding(NOTE, path, "a ledger is in limbo", facts={"ledger_id": ledger_id})
            self.totals.ledgers += 1
            self.totals.entries += ledger.indexed
        self._index_is_good = True

    def _logs(self, ledgers: Place, mark: LastLogMark, manifest: LogManifest, index: Index | None) -> Iterator[Finding]:
        scanner = EntryLogScanner(self._disk, ledgers.path)
        there = scanner.log_ids()
        expected = manifest.expected(mark.log_id)
        is_ahead = index is not None and index.generation() > mark.generation
        damaged = False
        used = set(expected) if index is None else index.log_ids()
        for log_id in sorted(set(there) - set(expected)):
            if is_ahead and log_id > mark.log_id:
                expected.append(log_id)
            else:
                yield Finding(
                    NOTE,
                    scanner.path(log_id),
                    "left by a flush or compaction that did not finish; the next start removes it",
                )
        for log_id in expected:
            if log_id not in there and log_id not in used:
                yield Finding(NOTE, scanner.path(log_id), "entry log is missing, and nothing in it is needed")
                continue
            if log_id not in there:
                yield Finding(DAMAGE, scanner.path(log_id), "entry log is missing", fix=FIX_HEAL)
                damaged = True
                continue
            end = manifest.end(log_id, mark=(mark.log_id, mark.log_offset))
            if log_id == mark.log_id and is_ahead:
                end = LogEnd()
            stop = end.stop
            if stop is not None and scanner.size(log_id) > stop:
                text = "written by a flush that did not finish; the next start cuts it off"
                yield Finding(NOTE, scanner.path(log_id), text, offset=stop)
            self._log(scanner, log_id, end, index)
        yield from self._judged_regions(index)
        damaged = damaged or bool(self._regions)
        self._logs_are_done = True
        if damaged and index is None:
            text = "the index and parts of the entry logs are lost: the index cannot be rebuilt completely"
            fix = "start the bookie: it goes into limbo and fetches what is lost from the other bookies"
            yield Finding(DAMAGE, ledgers.path, text, fix=fix)

    def _log(self, scanner: EntryLogScanner, log_id: int, end: LogEnd, index: Index | None) -> None:
        self.totals.logs += 1
        self.totals.log_bytes += scanner.size(log_id) if end.stop is None else end.stop
        cached: Run | None = None
        for step in scanner.steps(log_id, stop=end.stop, is_sealed=end.is_sealed):
            self._regions += step.damage
            self.totals.records += len(step.records)
            self._advance(step.work_size)
            if index is None:
                continue
            for record in step.records:
                cached = self._record(record, index, cached)

    def _judged_regions(self, index: Index | None) -> Iterator[Finding]:
        """Report the damaged regions: as dead bytes where the index shows that no entry is stored there."""
        live = set(self._regions) if index is None or not self._regions else self._regions_with_entries(index)
        # In limbo, the index may lack what a region held. Behind a region, entries that the index lost are not reported
        # one by one. In both cases the index proves nothing about the region.
        doubtful = {log_id for ledger in self._ledgers.values() for log_id in ledger.doubtful_logs}
        for region in self._regions:
            is_proven = self._marker is None and region not in live and region.log_id not in doubtful
            # The head of a log belongs to every entry in it. An empty region is the end of a log that was cut.
            is_dead = is_proven and region.offset >= log_format.HEADER_SIZE and region.size > 0
            severity, fix = (DEAD, FIX_DEAD) if is_dead else (DAMAGE, FIX_REGION)
            yield Finding(severity, region.path, region.reason, region.offset, fix, {"size": region.size})

    def _regions_with_entries(self, index: Index) -> set[DamagedRegion]:
        by_log: dict[int, list[DamagedRegion]] = {}
        for region in self._regions:
            by_log.setdefault(region.log_id, []).append(region)
        found: set[DamagedRegion] = set()
        for ledger_id in self._ledgers:
            for run in index.runs(ledger_id):
                regions = by_log.get(run.location >> log_format.OFFSET_BITS)
                if not regions:
                    continue
                for _, location, size in run.entries():
                    start = (location & log_format.OFFSET_MASK) - log_format.RECORD_HEADER_SIZE
                    stop = start + log_format.RECORD_HEADER_SIZE + size
                    at = bisect_left(regions, stop, key=lambda region: region.offset) - 1
                    while at >= 0 and regions[at].offset + regions[at].size > start:
                        found.add(regions[at])
                        at -= 1
        return found

    def _record(self, record: LogRecord, index: Index, cached: Run | None) -> Run | None:
        """Compare a record with the index. Returns the run that its neighbour is likely in."""
        ledger = self._ledgers.get(record.ledger_id)
        if ledger is None:
            self.totals.dead_records += 1
            return cached
        if record.entry_id >= 0:
            run = cached
            if run is None or run.ledger_id != record.ledger_id or not _covers(run, record.entry_id):
                run = index.run_before(record.ledger_id, record.entry_id)
            located = run.find(record.entry_id) if run is not None else None
            if located is None and record.is_anchored:
                ledger.missing += 1
                if len(ledger.missing_examples) < EXAMPLES_MAX:
                    ledger.missing_examples.append(record)
            elif located is None:
                ledger.doubtful_logs.add(record.log_id)
            elif located == (record.location, len(record.body)):
                ledger.matched += 1
            return run
        if record.entry_id == control.DELETED:
            ledger.missing, ledger.missing_examples = 0, []
            ledger.doubtful_logs.clear()
            ledger.is_fenced_in_log, ledger.key_in_log = False, None
        elif record.entry_id == control.FENCE:
            ledger.is_fenced_in_log = True
        elif record.entry_id == control.MASTER_KEY and ledger.key_in_log is None:
            ledger.key_in_log = control.unpack_sized(record.body)
        return cached

    # --- across

    def _across(self, ledgers: Place, index: Index, path: str, rebuild: str) -> Iterator[Finding]:
        for ledger_id, ledger in self._ledgers.items():
            facts: dict[str, Any] = {"ledger_id": ledger_id}
            for record in ledger.missing_examples:
                where = f"{ledgers.path}/{log_format.file_name(record.log_id)}"
                yield Finding(
                    DAMAGE, where, "this entry is missing in the index", record.offset, rebuild,
                    {**facts, "entry_id": record.entry_id},
                )  # fmt: skip
            if ledger.missing > len(ledger.missing_examples):
                more = ledger.missing - len(ledger.missing_examples)
                yield Finding(DAMAGE, path, "more entries that are missing in the index", facts={**facts, "more": more})
            if ledger.matched != ledger.indexed:
                yield from self._bad_locations(ledgers, index, ledger_id)
            if ledger.is_fenced_in_log and not ledger.row.is_fenced:
                yield Finding(
                    DAMAGE,
                    path,
                    "the ledger is fenced in the entry logs and not in the index",
                    fix=rebuild,
                    facts=facts,
                )
            if ledger.key_in_log is not None and ledger.row.master_key and ledger.key_in_log != ledger.row.master_key:
                yield Finding(DAMAGE, path, "entry logs and index have different keys", fix=rebuild, facts=facts)

    def _bad_locations(self, ledgers: Place, index: Index, ledger_id: int) -> Iterator[Finding]:
        """Which entries of the ledger cannot be read where the index says."""
        reader = EntryLogReader(self._disk, ledgers.path, open_logs_max=16)
        told = 0
        try:
            for run in index.runs(ledger_id):
                for entry in run.entries():
                    try:
                        reader.read([entry], ledger_id=ledger_id)
                        continue
                    except DamagedStorage as error:
                        problem = error
                    told += 1
                    if told <= EXAMPLES_MAX:
                        place = entry[1]
                        where = f"{ledgers.path}/{log_format.file_name(place >> log_format.OFFSET_BITS)}"
                        facts = {"ledger_id": ledger_id, "entry_id": entry[0]}
                        yield Finding(
                            DAMAGE, where, f"entry cannot be read: {problem.message}", place & log_format.OFFSET_MASK,
                            FIX_HEAL, facts,
                        )  # fmt: skip
        finally:
            reader.close()
        if told > EXAMPLES_MAX:
            facts = {"ledger_id": ledger_id, "more": told - EXAMPLES_MAX}
            yield Finding(DAMAGE, ledgers.path, "more entries that cannot be read", fix=FIX_HEAL, facts=facts)


def work_size(places: ShardPlaces) -> int:
    """Bytes that `run` will read, roughly."""
    disk = ReadOnlyDisk()
    total = 0
    if places.ledgers is not None:
        scanner = EntryLogScanner(disk, places.ledgers.path)
        total += sum(scanner.size(log_id) for log_id in scanner.log_ids())
    return total


def _covers(run: Run, entry_id: int) -> bool:
    return run.first_entry_id <= entry_id <= run.last_entry_id


def _salvage(ledgers: Place, journal: Place | None) -> str:
    # Not the directories that they share with other shards: those have other ledgers, and other journals.
    directories = dict.fromkeys([*([] if journal is None else [journal.own_directory]), ledgers.own_directory])
    return f"stop the bookie, then: bindery bookie salvage {' '.join(directories)}"
