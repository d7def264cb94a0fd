"""Journals, entry logs and the index are read record by record, and reading continues behind damage."""

import struct
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.offline.dumps import (
    Facts,
    dump_index,
    dump_journal,
    dump_log,
    dump_log_map,
    journal_files,
    log_files,
    parse_log_id,
)
from bindery_bookie.offline.places import ReadOnlyDisk
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal import journal_format
from bindery_core.errors import BadRequest
from bookie_directory import body, flip, location

DISK = ReadOnlyDisk()
FENCE = control.pack_fence(7)


def group(sequence: int, *records: bytes, journal_id: int = 1) -> bytes:
    data = b"".join(journal_format.pack_record_size(len(record)) + record for record in records)
    return journal_format.pack_group(data, journal_id=journal_id, sequence=sequence)


def journal_of(path: Path, *groups: bytes, unwritten: int = 1024, size: int | None = None) -> list[Facts]:
    """Write journal 1 with these groups and zeros after them, and return its dump."""
    data = b"".join(groups) + bytes(unwritten)
    header = journal_format.pack_file_header(1, file_size=size or 512 + len(data))
    path.write_bytes(header + data)
    return list(dump_journal(str(path), 1, DISK))


# --- journals


def test_a_journal_has_a_head_groups_records_and_an_end(tmp_path: Path) -> None:
    path = tmp_path / "1.txn"
    found = journal_of(path, group(5, FENCE, b"short"), group(6, FENCE))
    fence = {"what": "record", "kind": "fence", "ledger_id": 7, "size": 16}
    assert found == [
        {"what": "journal", "path": str(path), "journal_id": 1, "size": 2560},
        {"what": "group", "offset": 512, "size": 512, "sequence": 5, "records": 2},
        fence,
        {"what": "record", "kind": "short", "size": 5},
        {"what": "group", "offset": 1024, "size": 512, "sequence": 6, "records": 1},
        fence,
        {"what": "end", "offset": 1536},
    ]
    assert list(dump_journal(str(path), 1, DISK, records=False)) == [one for one in found if one["what"] != "record"]


def test_an_empty_journal_ends_after_its_header(tmp_path: Path) -> None:
    assert journal_of(tmp_path / "1.txn")[1:] == [{"what": "end", "offset": 512}]


def test_a_link_names_the_next_journal(tmp_path: Path) -> None:
    link = journal_format.pack_link(journal_id=1, sequence=1, next_journal_id=2)
    assert journal_of(tmp_path / "1.txn", link)[1:] == [
        {"what": "group", "offset": 512, "size": 512, "sequence": 1, "records": 1, "goes_on_in": 2},
        {"what": "record", "kind": "continued", "next_journal_id": 2},
        {"what": "end", "offset": 1024},
    ]


def test_a_damaged_group_is_skipped_up_to_the_next(tmp_path: Path) -> None:
    bad = bytearray(group(2, FENCE * 40))
    bad[100] ^= 0xFF
    found = journal_of(tmp_path / "1.txn", group(1, FENCE), bytes(bad), group(3, FENCE))
    assert [(one["what"], one["offset"], one.get("size")) for one in found[1:] if one["what"] != "record"] == [
        ("group", 512, 512),
        ("damage", 1024, 1024),
        ("group", 2048, 512),
        ("end", 2560, None),
    ]
    assert [one["problem"] for one in found if one["what"] == "damage"] == ["journal group is damaged"]


def test_damage_at_the_end_reaches_the_end_of_the_file(tmp_path: Path) -> None:
    bad = bytearray(group(2, FENCE + b"x" * 440))
    bad[100] ^= 0xFF
    found = journal_of(tmp_path / "1.txn", group(1, FENCE), bytes(bad), b"\1" * 512, unwritten=0)
    assert found[-2:] == [
        {"what": "damage", "offset": 1024, "size": 1024, "problem": "journal group is damaged"},
        {"what": "end", "offset": 1024},
    ]


def test_missing_groups_are_damage_of_no_size_before_the_next_group(tmp_path: Path) -> None:
    found = journal_of(tmp_path / "1.txn", group(1, FENCE), group(4, FENCE))
    assert [one for one in found[1:] if one["what"] != "record"] == [
        {"what": "group", "offset": 512, "size": 512, "sequence": 1, "records": 1},
        {"what": "damage", "offset": 1024, "size": 0, "problem": "journal groups are missing"},
        {"what": "group", "offset": 1024, "size": 512, "sequence": 4, "records": 1},
        {"what": "end", "offset": 1536},
    ]


def test_zeroed_groups_are_damage(tmp_path: Path) -> None:
    found = journal_of(tmp_path / "1.txn", bytes(1024), group(3, FENCE))
    assert [(one["what"], one["offset"], one.get("size")) for one in found[1:] if one["what"] != "record"] == [
        ("damage", 512, 1024),
        ("group", 1536, 512),
        ("end", 2048, None),
    ]


def test_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    torn = group(2, FENCE * 40)[:512] + bytes(512)
    found = journal_of(tmp_path / "1.txn", group(1, FENCE), torn)
    assert found[-1] == {"what": "end", "offset": 1024}
    assert not any("problem" in one for one in found)


def test_a_damaged_header_and_a_short_file_are_problems_of_the_head(tmp_path: Path) -> None:
    path = tmp_path / "1.txn"
    head, *rest = journal_of(path, group(1, FENCE), size=99_999)
    assert head["problem"].startswith("journal is short")
    assert [one["what"] for one in rest] == ["group", "record", "end"]
    flip(path, 10)
    head, *rest = dump_journal(str(path), 1, DISK)
    assert head["problem"] == "journal header is damaged"
    assert [one["what"] for one in rest] == ["group", "record", "end"], "the groups have digests of their own"


def test_journals_are_named_by_a_file_or_by_the_places_in_a_directory(tmp_path: Path) -> None:
    current = tmp_path / "j" / "current"
    current.mkdir(parents=True)
    for name in ("1f.txn", "a.txn", "notes"):
        (current / name).touch()
    assert journal_files(f"{current}/1f.txn", DISK) == [(f"{current}/1f.txn", 31)]
    assert journal_files(str(tmp_path), DISK) == [(f"{current}/a.txn", 10), (f"{current}/1f.txn", 31)]
    with pytest.raises(BadRequest, match="the name of a journal is <hex id>"):
        journal_files(f"{current}/notes", DISK)
    (tmp_path / "l").mkdir()
    (tmp_path / "l" / "1.log").touch()
    with pytest.raises(BadRequest, match="no journal here"):
        journal_files(f"{tmp_path}/l", DISK)


# --- entry logs


def test_entry_logs_are_named_by_a_file_or_by_id(tmp_path: Path) -> None:
    for name in ("l0/current/1f.log", "l0/current/a.log", "l1/current/a.log", "l1/current/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    first, second = f"{tmp_path}/l0/current", f"{tmp_path}/l1/current"
    assert log_files(f"{first}/1f.log", None) == [(first, 31)]
    assert log_files(str(tmp_path), None) == [(first, 10), (first, 31), (second, 10)]
    assert log_files(str(tmp_path), "0xa") == [(first, 10), (second, 10)]
    with pytest.raises(BadRequest, match="no such entry log") as raised:
        log_files(str(tmp_path), "2")
    assert raised.value.facts == {"path": str(tmp_path), "log": "2.log"}
    with pytest.raises(BadRequest, match="the name of an entry log is <hex id>"):
        log_files(f"{second}/x.txt", None)


def test_a_place_without_ledgers_has_no_logs(tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "1.txn").touch()
    assert log_files(str(tmp_path), None) == []


def test_a_log_id_is_hex_in_any_form() -> None:
    assert [parse_log_id(text) for text in ("1f", "0x1f", "1f.log", "10")] == [31, 31, 31, 16]
    with pytest.raises(BadRequest, match="not a log id"):
        parse_log_id("xyz")


def log_of(directory: Path, *records: bytes) -> int:
    """Write log 1, and return its size."""
    data = entry_log_format.pack_file_header(1) + b"".join(map(entry_log_format.pack_record, records))
    (directory / "1.log").write_bytes(data)
    return len(data)


def test_a_log_has_a_head_and_its_records(tmp_path: Path) -> None:
    size = log_of(tmp_path, FENCE, body(3, 2))
    found = list(dump_log(str(tmp_path), 1, DISK))
    assert found == [
        {"what": "log", "path": f"{tmp_path}/1.log", "log_id": 1, "size": size},
        {"what": "record", "offset": 40, "kind": "fence", "ledger_id": 7, "size": 16},
        {
            "what": "record",
            "offset": 64,
            "kind": "entry",
            "ledger_id": 3,
            "size": len(body(3, 2)),
            "entry_id": 2,
            "lac": 1,
        },
    ]
    assert list(dump_log(str(tmp_path), 1, DISK, ledger_id=3)) == [found[0], found[2]]


def test_damage_in_a_log_is_shown_for_every_ledger(bookie: Path, current: Path, log: Path) -> None:
    offset = location(log, 3, 2)
    flip(log, offset + 50)
    found = list(dump_log(str(current), 1, DISK, ledger_id=3))
    damage = {
        "what": "damage",
        "offset": offset - entry_log_format.RECORD_HEADER_SIZE,
        "size": 284,
        "problem": "entry digest mismatch",
    }
    assert damage in found
    entries = [(one["entry_id"], one.get("after_damage")) for one in found if one.get("kind") == "entry"]
    assert entries == [(0, None), (1, None), (3, True), (4, True)]


def test_the_map_of_an_open_log_is_counted(tmp_path: Path) -> None:
    size = log_of(tmp_path, body(9, 0), FENCE, body(9, 1))
    assert list(dump_log_map(str(tmp_path), 1, DISK)) == [
        {"what": "log", "path": f"{tmp_path}/1.log", "log_id": 1, "size": size, "ledgers": 2, "sealed": False},
        {"what": "ledger", "ledger_id": 7, "size": 24},
        {"what": "ledger", "ledger_id": 9, "size": 2 * (8 + len(body(9, 0)))},
    ]


def test_the_map_of_a_damaged_log_may_miss_ledgers(tmp_path: Path) -> None:
    log_of(tmp_path, body(9, 0), FENCE)
    flip(tmp_path / "1.log", 100)
    head, *ledgers = dump_log_map(str(tmp_path), 1, DISK)
    assert head["problem"] == "parts of it cannot be read, and may belong to any ledger"
    assert [one["ledger_id"] for one in ledgers] == [7]


def test_the_map_of_a_sealed_log_is_read(tmp_path: Path) -> None:
    made = bookie_directory.make_compacted(tmp_path / "bookie") / "ledgers" / "current"
    log_id = max(found for _, found in log_files(str(made), None) if found in (3, 4))
    head, *ledgers = dump_log_map(str(made), log_id, DISK)
    assert head["sealed"] is True
    assert "problem" not in head
    assert len(ledgers) == head["ledgers"] > 0


# --- the index


def test_an_index_has_its_generation_rows_and_runs() -> None:
    index = Index(MemoryKV())
    packet = struct.pack(">qqI", 7, 4, 0)
    place = 31 << entry_log_format.OFFSET_BITS | 40
    index.commit(
        runs=[(index_format.run_key(7, 2), index_format.pack_run(place, [100, 0, 30]))],
        merges={},
        ledgers={7: LedgerRow(b"key", True, 3, 4, packet, True), 8: LedgerRow(b"", False, -1, -1, None)},
        deleted=(),
        generation=5,
    )
    first = {
        "what": "ledger",
        "ledger_id": 7,
        "last_entry_id": 4,
        "lac": 3,
        "fenced": True,
        "limbo": True,
        "key_size": 3,
        "explicit_lac": True,
    }
    second = {
        "what": "ledger",
        "ledger_id": 8,
        "last_entry_id": -1,
        "lac": -1,
        "fenced": False,
        "limbo": False,
        "key_size": 0,
        "explicit_lac": False,
    }
    run = {
        "what": "run",
        "ledger_id": 7,
        "first_entry_id": 2,
        "last_entry_id": 4,
        "entries": 2,
        "size": 130,
        "log": "1f.log",
        "offset": 40,
    }
    head = {"what": "index", "generation": 5}
    assert list(dump_index(index, ledger_id=None, runs=False)) == [head, first, second]
    assert list(dump_index(index, ledger_id=None, runs=True)) == [head, first, run, second]
    assert list(dump_index(index, ledger_id=7, runs=True)) == [head, first, run]
    assert list(dump_index(index, ledger_id=0, runs=True)) == [head]
