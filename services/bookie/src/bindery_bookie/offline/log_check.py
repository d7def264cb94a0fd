"""LogCheck: check a shard's entry logs and index offline, and compare them.

See `check` for what is checked, and for when a damaged region counts as damage.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BinderyError, DamagedStorage

from bindery_bookie.offline.findings import DAMAGE, DEAD, NOTE, Finding, Totals
from bindery_bookie.offline.places import INDEX, Place, ReadOnlyDisk, opened_index
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as log_format
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.journal.mark import LastLogMark

EXAMPLES_MAX: Final = 20
"""Maximum number of entries of one ledger that are reported one by one; the others are only counted."""

FIX_HEAL: Final = "start the bookie and run `bindery bookie scrub run`: it copies these from other bookies"
FIX_REGION: Final = (
    "start the bookie and run `bindery bookie scrub run`: it copies the live entries from other bookies; dead "
    "bytes are removed when the log is compacted"
)
FIX_DEAD: Final = "none needed: no live entry is stored there; compaction of the log removes these bytes"


@dataclass(slots=True)
class _Ledger:
    """One ledger in index and logs."""

    row: LedgerRow
    indexed: int = 0
    matched: int = 0
    """Number of indexed entries that the logs have at their location."""
    missing: int = 0
    """Number of entries in the logs that are not in the index."""
    missing_examples: list[LogRecord] = field(default_factory=list)
    doubtful_logs: set[int] = field(default_factory=set)
    """Logs with records after a damaged region that may be entries missing in the index."""
    is_fenced_in_log: bool = False
    key_in_log: bytes | None = None


class LogCheck:
    """One check of one shard."""

    def __init__(
        self,
        disk: ReadOnlyDisk,
        place: Place,
        mark: LastLogMark,
        manifest: LogManifest,
        totals: Totals,
        *,
        is_in_limbo: bool,
        advance: Callable[[int], None],
    ) -> None:
        """`advance` is called with the number of bytes read since the last call."""
        self._disk = disk
        self._place = place
        self._mark = mark
        self._manifest = manifest
        self._totals = totals
        self._is_in_limbo = is_in_limbo
        self._advance = advance
        self._ledgers: dict[int, _Ledger] = {}
        self._index_is_good = False
        self._logs_are_done = False
        self._regions: list[DamagedRegion] = []
        """Damaged regions of the logs, until the index has shown whether they hold live entries."""

    def run(self) -> Iterator[Finding]:
        """Yield findings. Raises OSError if the disk cannot be read."""
        ledgers = self._place
        rebuild = f"stop the bookie, then: bindery bookie rebuild-index {ledgers.directory}; a start does it too"
        index_path = f"{ledgers.path}/{INDEX}"
        try:
            with opened_index(ledgers) as index:
                if index is None:
                    yield Finding(DAMAGE, index_path, "the index is lost", fix=rebuild)
                else:
                    yield from self._index(index, index_path, rebuild)
                yield from self._logs(index if self._index_is_good else None)
                if index is not None and self._index_is_good:
                    yield from self._across(index, index_path, rebuild)
        except (BinderyError, OSError) as error:
            if isinstance(error, OSError) and not str(error).startswith("index"):
                raise
            text = error.message if isinstance(error, BinderyError) else str(error)
            yield Finding(DAMAGE, index_path, text, fix=rebuild)
            if not self._logs_are_done:  # repeat the check of the logs without the index
                self._regions = []
                self._totals.logs = self._totals.log_bytes = self._totals.records = self._totals.dead_records = 0
                yield from self._logs(None)

    def _index(self, index: Index, path: str, rebuild: str) -> Iterator[Finding]:
        mark, manifest = self._mark, self._manifest
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
        if generation > mark.generation:  # a crash between the writes of index and mark: a start truncates neither
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
                yield Finding(
                    DAMAGE,
                    path,
                    "the last entry id in the ledger row is lower than that of the ledger's last run",
                    fix=rebuild,
                    facts=facts,
                )
            if row.is_limbo:
                yield Finding(NOTE, path, "a ledger is in limbo", facts={"ledger_id": ledger_id})
            self._totals.ledgers += 1
            self._totals.entries += ledger.indexed
        self._index_is_good = True

    def _logs(self, index: Index | None) -> Iterator[Finding]:
        ledgers, mark, manifest = self._place, self._mark, self._manifest
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
                text = "written by a flush that did not finish; the next start removes it"
                yield Finding(NOTE, scanner.path(log_id), text, offset=stop)
            self._log(scanner, log_id, end, index)
        yield from self._judged_regions(index)
        damaged = damaged or bool(self._regions)
        self._logs_are_done = True
        if damaged and index is None:
            text = "the index and parts of the entry logs are lost: the index cannot be rebuilt completely"
            fix = "start the bookie: it goes into limbo and copies the lost entries from other bookies"
            yield Finding(DAMAGE, ledgers.path, text, fix=fix)

    def _log(self, scanner: EntryLogScanner, log_id: int, end: LogEnd, index: Index | None) -> None:
        self._totals.logs += 1
        self._totals.log_bytes += scanner.size(log_id) if end.stop is None else end.stop
        cached: Run | None = None
        for step in scanner.steps(log_id, stop=end.stop, is_sealed=end.is_sealed):
            self._regions += step.damage
            self._totals.records += len(step.records)
            self._advance(step.work_size)
            if index is None:
                continue
            for record in step.records:
                cached = self._record(record, index, cached)

    def _judged_regions(self, index: Index | None) -> Iterator[Finding]:
        """Report each damaged region: as dead bytes if the index places no entry in it, otherwise as damage."""
        live = set(self._regions) if index is None or not self._regions else self._regions_with_entries(index)
        # In limbo, the index may miss entries of a region. Entries after a region that the index lost are not reported
        # one by one. In both cases the index proves nothing about the region.
        doubtful = {log_id for ledger in self._ledgers.values() for log_id in ledger.doubtful_logs}
        for region in self._regions:
            is_proven = not self._is_in_limbo and region not in live and region.log_id not in doubtful
            # Every entry of a log needs the header of the log. An empty region is the end of a truncated log.
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
        """Compare a record with the index. Return the run that probably has the next record, too."""
        ledger = self._ledgers.get(record.ledger_id)
        if ledger is None:
            self._totals.dead_records += 1
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

    def _across(self, index: Index, path: str, rebuild: str) -> Iterator[Finding]:
        ledgers = self._place
        for ledger_id, ledger in self._ledgers.items():
            facts: dict[str, Any] = {"ledger_id": ledger_id}
            for record in ledger.missing_examples:
                where = f"{ledgers.path}/{log_format.file_name(record.log_id)}"
                yield Finding(
                    DAMAGE,
                    where,
                    "this entry is missing in the index",
                    record.offset,
                    rebuild,
                    {**facts, "entry_id": record.entry_id},
                )
            if ledger.missing > len(ledger.missing_examples):
                more = ledger.missing - len(ledger.missing_examples)
                yield Finding(DAMAGE, path, "more entries that are missing in the index", facts={**facts, "more": more})
            if ledger.matched != ledger.indexed:
                yield from self._bad_locations(index, ledger_id)
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

    def _bad_locations(self, index: Index, ledger_id: int) -> Iterator[Finding]:
        """Report the entries of the ledger that cannot be read at their location in the index."""
        ledgers = self._place
        reader = EntryLogReader(self._disk, ledgers.path, open_logs_max=16)
        count = 0
        try:
            for run in index.runs(ledger_id):
                for entry in run.entries():
                    try:
                        reader.read([entry], ledger_id=ledger_id)
                        continue
                    except DamagedStorage as error:
                        problem = error
                    count += 1
                    if count <= EXAMPLES_MAX:
                        place = entry[1]
                        where = f"{ledgers.path}/{log_format.file_name(place >> log_format.OFFSET_BITS)}"
                        facts = {"ledger_id": ledger_id, "entry_id": entry[0]}
                        yield Finding(
                            DAMAGE,
                            where,
                            f"entry cannot be read: {problem.message}",
                            place & log_format.OFFSET_MASK,
                            FIX_HEAL,
                            facts,
                        )
        finally:
            reader.close()
        if count > EXAMPLES_MAX:
            facts = {"ledger_id": ledger_id, "more": count - EXAMPLES_MAX}
            yield Finding(DAMAGE, ledgers.path, "more entries that cannot be read", fix=FIX_HEAL, facts=facts)


def _covers(run: Run, entry_id: int) -> bool:
    return run.first_entry_id <= entry_id <= run.last_entry_id
