"""Ledgers and entries are read from index, entry logs and the part of the journal that is not flushed."""

import shutil
import struct
from pathlib import Path

import pytest
from bindery_bookie.offline.places import Place, ReadOnlyDisk, ShardPlaces, find_ledgers
from bindery_bookie.offline.views import JournalLedger, Shard, opened_shard, rebuilt_in_memory, record_facts
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_core.errors import DamagedStorage
from bookie_directory import KEY, body, flip, location

DISK = ReadOnlyDisk()


def places_of(*directories: Path) -> ShardPlaces:
    (pair,) = find_ledgers([str(directory) for directory in directories])
    return pair


def packet(lac: int) -> bytes:
    return struct.pack(">qqI", 1, lac, 7)


# --- a shard


def test_entries_in_index_and_journal_are_counted_once(pristine: Path) -> None:
    with opened_shard(places_of(pristine)) as shard:
        assert shard.index_problem == ""
        assert shard.number == 0
        assert shard.ledger_ids() == [1, 2, 3, 5, 9]
        assert shard.ledger_facts(1) == {
            "ledger_id": 1,
            "shard": 0,
            "path": f"{pristine}/ledgers/current",
            "entries": 64,
            "entries_in_journal_only": 4,
            "last_entry_id": 63,
            "size": sum(len(body(1, entry_id)) for entry_id in range(60)),
            "lac": 62,
            "fenced": False,
            "limbo": False,
            "explicit_lac": None,
        }
        facts = shard.ledger_facts(3)
        assert facts is not None
        assert (facts["entries"], facts["entries_in_journal_only"], facts["fenced"]) == (5, 0, True)
        assert (facts["last_entry_id"], facts["lac"]) == (4, 3)


def test_a_ledger_may_be_in_the_journal_only(pristine: Path) -> None:
    with opened_shard(places_of(pristine)) as shard:
        facts = shard.ledger_facts(9)
        assert facts is not None
        assert (facts["entries"], facts["entries_in_journal_only"], facts["last_entry_id"]) == (2, 2, 1)
        assert (facts["size"], facts["lac"]) == (0, 0)


def test_deleted_and_unknown_ledgers_have_no_facts(pristine: Path) -> None:
    with opened_shard(places_of(pristine)) as shard:
        assert shard.ledger_facts(4) is None
        assert shard.ledger_facts(77) is None


def test_without_a_journal_only_flushed_entries_are_shown(pristine: Path) -> None:
    with opened_shard(places_of(pristine / "ledgers")) as shard:
        assert shard.journal() == {}
        assert shard.ledger_ids() == [1, 2, 3, 5]
        facts = shard.ledger_facts(1)
        assert facts is not None
        assert (facts["entries"], facts["last_entry_id"], facts["lac"]) == (60, 59, 58)


def test_the_journal_after_the_mark_has_places_of_entries(pristine: Path) -> None:
    with opened_shard(places_of(pristine)) as shard:
        assert shard.mark is not None
        position = shard.mark.journal
        found = shard.journal()
        assert list(found) == [1, 9]
        assert found[1] == JournalLedger(
            entries={60 + at: (position, at) for at in range(4)}, is_fenced=False, has_key=False, lac=62
        )
        assert found[9].has_key
        assert sorted(found[9].entries) == [0, 1]
        assert shard.journal() is found, "the journal is read once"


def test_facts_combine_the_row_with_the_journal(tmp_path: Path) -> None:
    """A ledger in limbo with an explicit LAC whose journal has an older entry, a fence and a later LAC."""
    index = Index(MemoryKV())
    index.commit(
        runs=[], merges={}, ledgers={7: LedgerRow(KEY, False, 5, -1, packet(6), True)}, deleted=(), generation=1
    )
    shard = shard_of(tmp_path, [body(7, 3), control.pack_fence(7), body(7, 9)], index)
    facts = shard.ledger_facts(7)
    assert facts is not None
    assert (facts["fenced"], facts["limbo"], facts["explicit_lac"]) == (True, True, 6)
    assert (facts["lac"], facts["entries"], facts["last_entry_id"], facts["size"]) == (8, 2, 9, 0)
    assert facts["shard"] == 4


def test_the_lac_of_the_row_counts_if_it_is_greater(tmp_path: Path) -> None:
    index = Index(MemoryKV())
    index.commit(runs=[], merges={}, ledgers={7: LedgerRow(KEY, True, 50, -1, None)}, deleted=(), generation=1)
    shard = shard_of(tmp_path, [body(7, 3)], index)
    facts = shard.ledger_facts(7)
    assert facts is not None
    assert (facts["lac"], facts["fenced"], facts["limbo"]) == (50, True, False)


def test_a_ledger_without_a_key_in_the_journal_does_not_exist(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [body(7, 3), control.pack_master_key(8, KEY)], None)
    assert shard.ledger_ids() == [8]
    assert shard.ledger_facts(7) is None
    facts = shard.ledger_facts(8)
    assert facts is not None
    assert (facts["entries"], facts["last_entry_id"], facts["lac"]) == (0, -1, -1)


def test_entries_of_the_journal_are_found_without_an_index(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [control.pack_master_key(8, KEY), body(8, 0), body(8, 1)], None)
    facts = shard.ledger_facts(8)
    assert facts is not None
    assert (facts["entries"], facts["entries_in_journal_only"]) == (2, 2)
    found = shard.find(8, 1)
    assert found is not None
    assert found.body == body(8, 1)
    assert shard.find(8, 2) is None


def test_an_entry_of_24_bytes_in_the_journal_has_a_lac(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [struct.pack(">qqq", 8, 0, 5)], None)
    assert shard.journal()[8].lac == 5


def test_short_and_other_records_of_the_journal_add_no_ledger(tmp_path: Path) -> None:
    short_entry = struct.pack(">qq", 8, 0)
    shard = shard_of(tmp_path, [b"short", control.pack_continued(3), short_entry], None)
    assert shard.journal() == {8: JournalLedger(entries={0: (JournalPosition(1, 512, 1), 2)}, lac=-1)}


def test_without_a_mark_the_journal_is_not_read(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [control.pack_master_key(8, KEY)], None)
    shard.mark = None
    assert shard.journal() == {}


def shard_of(root: Path, records: list[bytes], index: Index | None) -> Shard:
    """Return a shard without entry logs whose journal has one group of these records."""
    from bindery_bookie.storage.io.disk import RealDisk
    from bindery_bookie.storage.journal.mark import LastLogMark, write_mark

    for name in ("j", "l"):
        (root / name).mkdir()
    data = b"".join(journal_format.pack_record_size(len(record)) + record for record in records)
    group = journal_format.pack_group(data, journal_id=1, sequence=1)
    (root / "j" / "1.txn").write_bytes(journal_format.pack_file_header(1, file_size=512 + len(group)) + group)
    write_mark(RealDisk(), str(root / "l"), LastLogMark(1, JournalPosition(1, 512, 1), 0, 0))
    places = ShardPlaces(
        Place(str(root / "l"), 4, has_journal=False, has_ledgers=True),
        Place(str(root / "j"), 4, has_journal=True, has_ledgers=False),
    )
    return Shard(places, index, "", DISK)


# --- entries


def test_a_flushed_entry_is_found_in_its_log(pristine: Path) -> None:
    log = pristine / "ledgers" / "current" / "1.log"
    with opened_shard(places_of(pristine)) as shard:
        found = shard.find(1, 7)
        assert found is not None
        assert (found.kind, found.path, found.offset) == ("entry log", str(log), location(log, 1, 7))
        assert (found.body, found.record, found.problem) == (body(1, 7), None, "")


def test_an_entry_that_is_not_flushed_is_found_in_the_journal(pristine: Path) -> None:
    (journal,) = (pristine / "journal" / "current").glob("*.txn")
    with opened_shard(places_of(pristine)) as shard:
        assert shard.mark is not None
        found = shard.find(1, 61)
        assert found is not None
        assert (found.kind, found.path, found.offset) == ("journal", str(journal), shard.mark.journal.offset)
        assert (found.body, found.record, found.problem) == (body(1, 61), 1, "")


@pytest.mark.parametrize("key", [(1, 64), (2, 1), (4, 0), (5, 3), (77, 0)])
def test_an_entry_that_is_nowhere_is_not_found(pristine: Path, key: tuple[int, int]) -> None:
    with opened_shard(places_of(pristine)) as shard:
        assert shard.find(*key) is None


def test_a_damaged_entry_is_returned_with_its_problem(bookie: Path, log: Path) -> None:
    offset = location(log, 1, 7)
    flip(log, offset + 100)
    with opened_shard(places_of(bookie)) as shard:
        found = shard.find(1, 7)
    assert found is not None
    assert found.problem.startswith("entry digest mismatch")
    assert (found.kind, found.path, found.offset) == ("entry log", str(log), offset)
    assert found.body == log.read_bytes()[offset : offset + len(body(1, 7))]


def test_an_entry_of_a_lost_log_is_returned_without_bytes(bookie: Path, log: Path) -> None:
    log.unlink()
    with opened_shard(places_of(bookie)) as shard:
        found = shard.find(1, 7)
    assert found is not None
    assert found.body == b""
    assert found.problem


def test_a_journal_group_that_is_gone_is_damage(bookie: Path, journal: Path) -> None:
    with opened_shard(places_of(bookie)) as shard:
        place = shard.journal()[9].entries[1]
        assert shard.journal_record(place) == body(9, 1)
        offset = place[0].offset
        data = journal.read_bytes()
        journal.write_bytes(data[:offset])
        with pytest.raises(DamagedStorage, match="journal group is gone") as raised:
            shard.journal_record(place)
    assert raised.value.facts == {"path": str(journal), "offset": offset}


# --- the index


def test_a_lost_index_is_replaced_by_one_from_the_logs(bookie: Path, current: Path) -> None:
    with opened_shard(places_of(bookie)) as shard:
        before = [shard.ledger_facts(ledger_id) for ledger_id in shard.ledger_ids()]
    shutil.rmtree(current / "index")
    with opened_shard(places_of(bookie)) as shard:
        assert shard.index_problem == "there is no index"
        assert [shard.ledger_facts(ledger_id) for ledger_id in shard.ledger_ids()] == before


def test_a_damaged_index_is_replaced_with_the_reason(bookie: Path, current: Path) -> None:
    (current / "index" / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    with opened_shard(places_of(bookie)) as shard:
        assert shard.index_problem.startswith("CURRENT of the index names no existing file")
        assert shard.ledger_ids() == [1, 2, 3, 5, 9]


def test_without_a_mark_no_index_is_built(current: Path) -> None:
    (current / "LastLogMark").unlink()
    place = Place(str(current), None, has_journal=False, has_ledgers=True)
    assert rebuilt_in_memory(place, DISK) is None
    shutil.rmtree(current / "index")
    with opened_shard(ShardPlaces(place, None)) as shard:
        assert shard.index is None
        assert shard.ledger_ids() == []
        assert shard.find(1, 7) is None


def test_the_error_of_a_damaged_mark_names_the_commands_that_work_without_it(bookie: Path, current: Path) -> None:
    flip(current / "LastLogMark", 20)
    with (
        pytest.raises(
            DamagedStorage, match="LastLogMark is damaged, so the ends of the other files are unknown"
        ) as raised,
        opened_shard(places_of(bookie)),
    ):
        raise AssertionError
    assert "`bindery bookie log dump`" in str(raised.value)
    assert raised.value.facts == {"path": f"{current}/LastLogMark", "offset": 0}


# --- records


def test_the_facts_of_an_entry_have_its_ids_and_its_lac() -> None:
    assert record_facts(body(7, 3)) == {
        "kind": "entry",
        "ledger_id": 7,
        "size": len(body(7, 3)),
        "entry_id": 3,
        "lac": 2,
    }


def test_an_entry_of_24_bytes_has_a_lac_and_a_shorter_one_none() -> None:
    assert record_facts(struct.pack(">qqq", 7, 3, 2)) == {
        "kind": "entry",
        "ledger_id": 7,
        "size": 24,
        "entry_id": 3,
        "lac": 2,
    }
    assert record_facts(struct.pack(">qq", 7, 3)) == {"kind": "entry", "ledger_id": 7, "size": 16, "entry_id": 3}
    assert record_facts(b"x" * 15) == {"kind": "short", "size": 15}


def test_the_facts_of_control_records_have_no_keys() -> None:
    assert record_facts(control.pack_master_key(7, b"secret")) == {"kind": "master key", "ledger_id": 7, "size": 26}
    assert record_facts(control.pack_fence(7)) == {"kind": "fence", "ledger_id": 7, "size": 16}
    assert record_facts(control.pack_deleted(7)) == {"kind": "deleted", "ledger_id": 7, "size": 16}
    assert record_facts(control.pack_continued(3)) == {"kind": "continued", "next_journal_id": 3}


def test_the_facts_of_an_explicit_lac_have_it_or_the_problem() -> None:
    good = control.pack_explicit_lac(7, packet(5))
    assert record_facts(good) == {"kind": "explicit lac", "ledger_id": 7, "size": 40, "lac": 5}
    cut = record_facts(good[:-1])
    assert cut["problem"].startswith("control record has the wrong size")
    assert "lac" not in cut
