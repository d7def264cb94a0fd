"""Read ledgers and entries from a shard's files: index, entry logs, and the part of the journal that is not flushed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BinderyError, DamagedStorage

from bindery_bookie.offline.places import Place, ReadOnlyDisk, ShardPlaces, opened_index
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as log_format
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bindery_bookie.storage.opening.rebuild import IndexRebuild

# Entry id of a control record -> its `kind` in the output.
CONTROL_NAMES: Final = {
    control.MASTER_KEY: "master key",
    control.FENCE: "fence",
    control.EXPLICIT_LAC: "explicit lac",
    control.DELETED: "deleted",
    control.CONTINUED: "continued",
}


JournalPlace = tuple[JournalPosition, int]
"""The position of a group, and the index of the record in it."""


@dataclass(slots=True)
class JournalLedger:
    """One ledger in the journal after LastLogMark."""

    entries: dict[int, "JournalPlace"] = field(default_factory=dict)
    is_fenced: bool = False
    has_key: bool = False
    lac: int = -1


class Shard:
    """One shard, opened read-only by `opened_shard`."""

    def __init__(self, places: ShardPlaces, index: Index | None, index_problem: str, disk: Disk) -> None:
        assert places.ledgers is not None
        self.places = places
        self.ledgers_path = places.ledgers.path
        self.disk = disk
        self.index = index
        self.index_problem = index_problem
        """Why `index` was rebuilt in memory or is None; empty if it is the shard's own."""
        self.mark = _mark_of(disk, self.ledgers_path)
        self._journal: dict[int, JournalLedger] | None = None

    @property
    def number(self) -> int:
        """Number of the shard; 0 if the path does not have it."""
        assert self.places.ledgers is not None
        return self.places.ledgers.shard or 0

    def journal(self) -> dict[int, JournalLedger]:
        """Return the ledgers in the journal by id; empty without a journal. Raises DamagedStorage."""
        if self._journal is None:
            self._journal = {}
            if self.places.journal is not None and self.mark is not None:
                for journal_id, group in journal_files.replay_groups(
                    self.disk, self.places.journal.path, self.mark.journal
                ):
                    position = JournalPosition(journal_id, group.offset, group.sequence)
                    for at, record in enumerate(group.records):
                        _add_record(self._journal, record, (position, at))
        return self._journal

    def journal_path(self, journal_id: int) -> str:
        assert self.places.journal is not None
        return f"{self.places.journal.path}/{journal_format.file_name(journal_id)}"

    def journal_record(self, place: JournalPlace) -> bytes:
        """Return a record that `journal` found. Raises DamagedStorage."""
        position, at = place
        path = self.journal_path(position.journal_id)
        file = self.disk.open_read(path)
        try:
            for group in journal_format.read_groups(
                file, path=path, journal_id=position.journal_id, offset=position.offset, sequence=position.sequence
            ):
                return group.records[at]
        finally:
            file.close()
        raise DamagedStorage("journal group is gone", path=path, offset=position.offset)

    def ledger_facts(self, ledger_id: int) -> dict[str, Any] | None:
        """Return facts of a ledger for JSON; None if neither index nor journal has it."""
        row = None if self.index is None else self.index.ledger_row(ledger_id)
        new = self.journal().get(ledger_id)
        if row is None and (new is None or not new.has_key):
            return None
        entries = size = 0
        last = -1
        for run in self.index.runs(ledger_id) if self.index is not None and row is not None else ():
            for entry_id, _, body_size in run.entries():
                last = entry_id
                entries += 1
                size += body_size
        only_journal = [
            entry_id
            for entry_id in (new.entries if new else ())
            if row is None or not self._is_indexed(ledger_id, entry_id)
        ]
        return {
            "ledger_id": ledger_id,
            "shard": self.number,
            "path": self.ledgers_path,
            "entries": entries + len(only_journal),
            "entries_in_journal_only": len(only_journal),
            "last_entry_id": max([last, *only_journal]),
            "size": size,
            "lac": max(row.lac if row else -1, new.lac if new else -1),
            "fenced": bool(row and row.is_fenced) or bool(new and new.is_fenced),
            "limbo": bool(row and row.is_limbo),
            "explicit_lac": control.lac_of_packet(row.explicit_lac) if row and row.explicit_lac else None,
        }

    def ledger_ids(self) -> list[int]:
        """Return the ids of all ledgers, including those in the journal, ascending."""
        indexed = set(self.index.ledger_ids()) if self.index is not None else set()
        return sorted(indexed | {ledger_id for ledger_id, new in self.journal().items() if new.has_key})

    def find(self, ledger_id: int, entry_id: int) -> "Found | None":
        """Find the newest copy of an entry. If it is damaged in an entry log, it is returned with `problem`.

        Raises DamagedStorage if the journal is damaged.
        """
        new = self.journal().get(ledger_id)
        if new is not None and entry_id in new.entries:
            position, at = place = new.entries[entry_id]
            body = self.journal_record(place)
            return Found("journal", self.journal_path(position.journal_id), position.offset, body, record=at)
        run = self.index.run_before(ledger_id, entry_id) if self.index is not None else None
        located = run.find(entry_id) if run is not None else None
        if located is None:
            return None
        location, size = located
        log_id, offset = location >> log_format.OFFSET_BITS, location & log_format.OFFSET_MASK
        path = f"{self.ledgers_path}/{log_format.file_name(log_id)}"
        reader = EntryLogReader(self.disk, self.ledgers_path, open_logs_max=1)
        try:
            (body,) = reader.read([(entry_id, location, size)], ledger_id=ledger_id)
        except DamagedStorage as error:
            return Found("entry log", path, offset, _raw(self.disk, path, offset, size), problem=str(error))
        finally:
            reader.close()
        return Found("entry log", path, offset, body)

    def _is_indexed(self, ledger_id: int, entry_id: int) -> bool:
        run = self.index.run_before(ledger_id, entry_id) if self.index is not None else None
        return run is not None and run.find(entry_id) is not None


@dataclass(frozen=True, slots=True)
class Found:
    """An entry's bytes and where they are."""

    kind: str
    """`entry log` or `journal`."""
    path: str
    offset: int
    """Offset of the body in an entry log, or of the group in a journal."""
    body: bytes
    record: int | None = None
    """Index of the record in the group of a journal; None in an entry log."""
    problem: str = ""
    """Which of the bookie's digest, size and ids does not match the bytes; empty if all match."""


@contextmanager
def opened_shard(places: ShardPlaces) -> Iterator[Shard]:
    """Open a shard with its index, or with one rebuilt in memory from the entry logs if its own is lost or damaged."""
    assert places.ledgers is not None
    disk = ReadOnlyDisk()
    index, problem = None, "there is no index"
    with ExitStack() as stack:
        try:
            index = stack.enter_context(opened_index(places.ledgers))
            if index is not None:
                index.generation()
                problem = ""
        except DamagedStorage as error:
            index, problem = None, str(error)
        if index is None:
            index = rebuilt_in_memory(places.ledgers, disk)
        yield Shard(places, index, problem, disk)


def rebuilt_in_memory(place: Place, disk: Disk) -> Index | None:
    """Build the index from the entry logs, in memory; None without LastLogMark. Raises DamagedStorage."""
    mark = _mark_of(disk, place.path)
    if mark is None:
        return None
    index = Index(MemoryKV())
    IndexRebuild(disk, place.path, index, mark).run()
    return index


def _mark_of(disk: Disk, directory: str) -> LastLogMark | None:
    """Return the LastLogMark. Raises DamagedStorage with the commands that work without it."""
    try:
        return read_mark(disk, directory)
    except DamagedStorage as error:
        raise DamagedStorage(
            f"{error.message}, so the ends of the other files are unknown; `bindery bookie log dump` shows the entry "
            "logs, `bindery bookie check` how to repair it",
            **error.facts,
        ) from error


def record_facts(body: bytes) -> dict[str, Any]:
    """Return a record of a journal or an entry log as JSON, without master keys."""
    if len(body) < control.CONTROL_SIZE_MIN:
        return {"kind": "short", "size": len(body)}
    ledger_id, entry_id = control.unpack_ids(body)
    facts: dict[str, Any] = {"kind": "entry", "ledger_id": ledger_id, "size": len(body)}
    if entry_id in CONTROL_NAMES:
        facts["kind"] = CONTROL_NAMES[entry_id]
        if entry_id == control.CONTINUED:
            return {"kind": "continued", "next_journal_id": control.unpack_continued(body)}
        if entry_id == control.EXPLICIT_LAC:
            try:
                facts["lac"] = control.lac_of_packet(control.unpack_sized(body))
            except (BinderyError, ValueError) as error:
                facts["problem"] = str(error)
        return facts
    facts["entry_id"] = entry_id
    if len(body) >= control.ENTRY_SIZE_MIN:
        facts["lac"] = control.unpack_ids_and_lac(body)[2]
    return facts


def _add_record(ledgers: dict[int, JournalLedger], record: bytes, place: JournalPlace) -> None:
    if len(record) < control.CONTROL_SIZE_MIN:
        return
    ledger_id, entry_id = control.unpack_ids(record)
    if ledger_id == control.NO_LEDGER:
        return
    ledger = ledgers.setdefault(ledger_id, JournalLedger())
    if entry_id >= 0:
        ledger.entries[entry_id] = place
        if len(record) >= control.ENTRY_SIZE_MIN:
            ledger.lac = max(ledger.lac, control.unpack_ids_and_lac(record)[2])
    elif entry_id == control.MASTER_KEY:
        ledger.has_key = True
    elif entry_id == control.FENCE:
        ledger.is_fenced = True


def _raw(disk: Disk, path: str, offset: int, size: int) -> bytes:
    try:
        file = disk.open_read(path)
    except OSError:
        return b""
    try:
        return file.read_at(offset, size)
    finally:
        file.close()
