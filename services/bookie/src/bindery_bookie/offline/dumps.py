"""Read the files of a bookie record by record, skipping damage, for `journal dump`, `log dump` and `index dump`.

Each function yields facts, one dictionary per line of output. A dictionary with the key `problem` reports damage.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bindery_core.errors import BadRequest, BinderyError, DamagedStorage

from bindery_bookie.offline.places import find_places
from bindery_bookie.offline.views import record_facts
from bindery_bookie.storage.entry_log import entry_log_format as log_format
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner, LogRecord
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_files import list_journals

Facts = dict[str, Any]
"""One line of output: the key `what` has its kind."""


# --- journals


def journal_files(target: str, disk: Disk) -> list[tuple[str, int]]:
    """Return (path, journal id) of a file, or of all files of the places in a directory. Raises BadRequest."""
    path = Path(target)
    if path.is_file():
        journal_id = journal_format.parse_file_name(path.name)
        if journal_id is None:
            raise BadRequest("the name of a journal is <hex id>.txn", path=target)
        return [(target, journal_id)]
    places = [place for place in find_places([target]) if place.has_journal]
    if not places:
        raise BadRequest("no journal here", path=target)
    return [
        (f"{place.path}/{journal_format.file_name(journal_id)}", journal_id)
        for place in places
        for journal_id in list_journals(disk, place.path)
    ]


def dump_journal(path: str, journal_id: int, disk: Disk, *, records: bool = True) -> Iterator[Facts]:
    """Yield header, groups, their records, damage and the end of one journal file. It continues after damage."""
    file = disk.open_read(path)
    try:
        head: Facts = {"what": "journal", "path": path, "journal_id": journal_id, "size": file.size()}
        try:
            if not journal_format.is_file_header_valid(file, journal_id=journal_id):
                head["problem"] = "journal header is damaged"
            else:
                journal_format.check_size(file, path=path)
        except BinderyError as error:
            head["problem"] = str(error)
        yield head
        offset = journal_format.HEADER_SIZE
        while True:
            sequence = journal_format.sequence_at(file, journal_id=journal_id, offset=offset)
            problem = ""
            has_gap = False
            try:
                for group in journal_format.read_groups(
                    file, path=path, journal_id=journal_id, offset=offset, sequence=sequence or 0
                ):
                    yield {
                        "what": "group",
                        "offset": group.offset,
                        "size": group.size,
                        "sequence": group.sequence,
                        "records": len(group.records),
                        **({} if (following := journal_format.following(group)) is None else {"goes_on_in": following}),
                    }
                    if records:
                        yield from ({"what": "record", **record_facts(record)} for record in group.records)
                    offset = group.offset + group.size
            except DamagedStorage as error:
                problem = error.message
                offset = int(error.facts.get("offset", offset))
                has_gap = "found" in error.facts  # the group at this offset is good, and earlier ones are missing
            next_offset = offset + (0 if has_gap else journal_format.SECTOR_SIZE)
            next_group = journal_format.find_group(file, journal_id=journal_id, offset=next_offset)
            if problem:
                end = file.size() if next_group is None else next_group
                yield {"what": "damage", "offset": offset, "size": end - offset, "problem": problem}
            if next_group is None:
                break
            offset = next_group
        yield {"what": "end", "offset": offset}
    finally:
        file.close()


# --- entry logs


def log_files(target: str, log_id: str | None) -> list[tuple[str, int]]:
    """Return (directory, log id) of a file, or of one or all logs of a directory. `log_id`: hex, as in file names."""
    path = Path(target)
    if path.is_file():
        found = log_format.parse_file_name(path.name)
        if found is None:
            raise BadRequest("the name of an entry log is <hex id>.log", path=target)
        return [(str(path.parent), found)]
    wanted = None if log_id is None else parse_log_id(log_id)
    places = [place for place in find_places([target]) if place.has_ledgers]
    files = []
    for place in places:
        for name in sorted(entry.name for entry in Path(place.path).iterdir()):
            found = log_format.parse_file_name(name)
            if found is not None and wanted in (None, found):
                files.append((place.path, found))
    if wanted is not None and not files:
        raise BadRequest("no such entry log", path=target, log=log_format.file_name(wanted))
    return sorted(files)


def parse_log_id(text: str) -> int:
    """Parse `1f`, `0x1f` or `1f.log`. Raises BadRequest."""
    try:
        log_id = int(text.removesuffix(log_format.FILE_SUFFIX), 16)
    except ValueError:
        raise BadRequest("not a log id; pass it in hex, as in the file name", log=text) from None
    return log_id


def dump_log(directory: str, log_id: int, disk: Disk, *, ledger_id: int | None = None) -> Iterator[Facts]:
    """Yield the records of one log, or those of one ledger, and damaged regions, ascending by offset."""
    scanner = EntryLogScanner(disk, directory)
    yield {"what": "log", "path": scanner.path(log_id), "log_id": log_id, "size": scanner.size(log_id)}
    for item in scanner.scan(log_id):
        if isinstance(item, DamagedRegion):
            yield {"what": "damage", "offset": item.offset, "size": item.size, "problem": item.reason}
        elif ledger_id is None or item.ledger_id == ledger_id:
            yield log_record(item)


def log_record(record: LogRecord) -> Facts:
    """Return the facts of one record of an entry log."""
    facts: Facts = {"what": "record", "offset": record.offset, **record_facts(record.body)}
    if not record.is_anchored:
        facts["after_damage"] = True
    return facts


def dump_log_map(directory: str, log_id: int, disk: Disk) -> Iterator[Facts]:
    """Yield the bytes of records by ledger, from the map in the log or counted."""
    scanner = EntryLogScanner(disk, directory)
    ledgers = scanner.ledgers(log_id)
    head: Facts = {
        "what": "log",
        "path": scanner.path(log_id),
        "log_id": log_id,
        "size": scanner.size(log_id),
        "ledgers": len(ledgers.sizes),
        "sealed": ledgers.is_sealed,
    }
    if not ledgers.is_complete:
        head["problem"] = "parts of it cannot be read, and may belong to any ledger"
    yield head
    for ledger_id, size in sorted(ledgers.sizes.items()):
        yield {"what": "ledger", "ledger_id": ledger_id, "size": size}


# --- the index


def dump_index(index: Index, *, ledger_id: int | None, runs: bool) -> Iterator[Facts]:
    """Yield generation, ledger rows and, with `runs`, their runs, without master keys. Raises DamagedStorage."""
    yield {"what": "index", "generation": index.generation()}
    for found in [ledger_id] if ledger_id is not None else index.ledger_ids():
        row = index.ledger_row(found)
        if row is not None:
            yield {
                "what": "ledger",
                "ledger_id": found,
                "last_entry_id": row.last_entry_id,
                "lac": row.lac,
                "fenced": row.is_fenced,
                "limbo": row.is_limbo,
                "key_size": len(row.master_key),
                "explicit_lac": row.explicit_lac is not None,
            }
        if runs:
            for run in index.runs(found):
                count = sum(1 for size in run.sizes if size)
                yield {
                    "what": "run",
                    "ledger_id": found,
                    "first_entry_id": run.first_entry_id,
                    "last_entry_id": run.last_entry_id,
                    "entries": count,
                    "size": sum(run.sizes),
                    "log": log_format.file_name(run.location >> log_format.OFFSET_BITS),
                    "offset": run.location & log_format.OFFSET_MASK,
                }
