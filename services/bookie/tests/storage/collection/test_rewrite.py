"""Rewrite: live entries reach the new log unchanged, and a log with unreadable live entries is not replaced."""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection import rewrite
from bindery_bookie.storage.collection.log_usage import usage_of
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from entry_log_source import FENCE_RECORD, HEADER, KEY_RECORD, LAC_RECORD, PATH, RECORD, TEMPORARY, LogSource, at


@pytest.fixture
def source(kit: Any) -> LogSource:
    return LogSource(kit)


def complete_log(records: bytes, sizes: Mapping[int, int], deletions: Iterable[int] = ()) -> bytes:
    ledgers_map = fmt.pack_record(fmt.pack_ledgers_map(sizes, frozenset(deletions)))
    end = HEADER + len(records)
    return fmt.pack_file_header(9, order=2) + records + ledgers_map + fmt.pack_trailer(end + 8)


# --- the new log ------------------------------------------------------------------------------------------------------


def test_the_new_log_has_the_live_ledgers_with_their_keys_and_entries(source: LogSource) -> None:
    first = source.put_many(3, range(2))
    source.put_many(4, range(5))
    second = source.put_many(6, [7])
    copy = source.rewrite([3, 6])
    assert list(copy.steps()) == [2 * 100 + 100]  # entries read; the only write follows them
    records = source.key_record(3) + first + source.key_record(6) + second
    assert source.written() == complete_log(records, {3: 248, 6: 148})
    assert source.disk.log == [f"create {TEMPORARY}", f"write {TEMPORARY}", f"sync {TEMPORARY}"]
    assert (copy.path, copy.temporary_path, copy.source_path) == ("/d/9.log", TEMPORARY, PATH)
    assert copy.target == usage_of(9, 2, len(source.written()), {3: 248, 6: 148}, [])
    assert copy.ledgers == [(3, 0, 1), (6, 7, 7)]
    assert copy.copied_bytes == 300
    assert copy.damage == []


def test_the_new_log_begins_with_the_needed_deleted_records(source: LogSource) -> None:
    entry = source.put(3, 0)
    copy = source.rewrite([3], deletions=[8, 2])
    list(copy.steps())
    deleted = [fmt.pack_record(control.pack_deleted(ledger_id)) for ledger_id in (2, 8)]
    records = b"".join(deleted) + source.key_record(3) + entry
    assert source.written() == complete_log(records, {2: 24, 3: 148, 8: 24}, [2, 8])
    assert copy.target.deletions == {2, 8}
    assert list(copy.target.ledger_ids) == [2, 3, 8]
    assert copy.ledgers == [(3, 0, 0)]


def test_fence_and_explicit_lac_are_written_before_the_entries(source: LogSource) -> None:
    entries = source.put(3, 0), source.put(4, 0)
    packet = source.kit.lac_packet(4, 7)
    rows = {3: source.row(is_fenced=True), 4: source.row(is_fenced=True, explicit_lac=packet)}
    copy = source.rewrite([3, 4], rows=rows)
    list(copy.steps())
    fences = [fmt.pack_record(control.pack_fence(ledger_id)) for ledger_id in (3, 4)]
    lac = fmt.pack_record(control.pack_explicit_lac(4, packet))
    records = source.key_record(3) + fences[0] + entries[0] + source.key_record(4) + fences[1] + lac + entries[1]
    sizes = {3: KEY_RECORD + FENCE_RECORD + RECORD, 4: KEY_RECORD + FENCE_RECORD + LAC_RECORD + RECORD}
    assert source.written() == complete_log(records, sizes)


def test_a_ledger_deleted_since_is_not_copied(source: LogSource) -> None:
    source.put(3, 0)
    entry = source.put(4, 0)
    copy = source.rewrite([3, 4], rows={4: source.row()})
    list(copy.steps())
    assert source.written() == complete_log(source.key_record(4) + entry, {4: 148})


def test_a_ledger_whose_entries_are_in_other_logs_keeps_its_control_records(source: LogSource) -> None:
    source.located[3] = [(0, at(HEADER, log_id=6), 92)]
    copy = source.rewrite([3])
    list(copy.steps())
    assert source.written() == complete_log(source.key_record(3), {3: 48})
    assert copy.ledgers == []
    assert copy.copied_bytes == 0


def test_live_ledgers_that_the_log_does_not_have_are_written_only_if_parts_of_the_log_are_unreadable(
    kit: Any,
) -> None:
    for is_exact in (True, False):
        source = LogSource(kit)
        entry = source.put(3, 0)
        list(source.rewrite([2, 3, 5], is_exact=is_exact).steps())
        if is_exact:
            assert source.written() == complete_log(source.key_record(3) + entry, {3: 148})
        else:
            records = source.key_record(2) + source.key_record(3) + entry + source.key_record(5)
            assert source.written() == complete_log(records, {2: 48, 3: 148, 5: 48})


# --- locations --------------------------------------------------------------------------------------------------------


def test_copied_parts_are_found_by_their_old_location(source: LogSource) -> None:
    """The ledgers are not in the order of their ids, as in an interleaved log."""
    source.put_many(4, range(2))  # offset 32
    source.put_many(3, [0, 1])  # 232
    source.put(8, 0)  # 432, not live
    source.put(3, 2)  # 532
    copy = source.rewrite([3, 4])
    list(copy.steps())
    ledger_3 = HEADER + KEY_RECORD
    ledger_4 = ledger_3 + 3 * RECORD + KEY_RECORD
    assert copy.moved(40, 92) == at(ledger_4)
    assert copy.moved(140, 92) == at(ledger_4 + 100)
    assert copy.moved(40, 192) == at(ledger_4)
    assert copy.moved(240, 92) == at(ledger_3)
    assert copy.moved(340, 92) == at(ledger_3 + 100)
    assert copy.moved(540, 92) == at(ledger_3 + 200)


def test_what_was_not_copied_as_one_piece_has_no_new_location(source: LogSource) -> None:
    source.put(8, 0)  # offset 32, not live
    source.put_many(3, [0, 1])  # 132
    source.put(8, 1)  # 332, not live
    source.put(3, 2)  # 432
    copy = source.rewrite([3])
    list(copy.steps())
    assert copy.moved(40, 92) is None
    assert copy.moved(340, 92) is None
    assert copy.moved(140, 193) is None
    assert copy.moved(140, 392) is None
    assert copy.moved(540, 1) is None
    assert copy.moved(140, 192) == at(HEADER + KEY_RECORD)


def test_adjacent_runs_are_copied_as_one_part(source: LogSource) -> None:
    source.put(3, 0)
    source.put(8, 0)
    many = source.put_many(3, range(1, 301))  # three rows of the index
    copy = source.rewrite([3])
    list(copy.steps())
    assert source.written()[HEADER + KEY_RECORD + RECORD :].startswith(many)
    assert copy.moved(240, 300 * RECORD - 8) == at(HEADER + KEY_RECORD + RECORD)
    assert copy.ledgers == [(3, 0, 300)]


def test_the_smallest_record_of_the_format_is_copied(source: LogSource) -> None:
    record = fmt.pack_record(struct.pack(">qq", 3, 0))
    source.located[3] = [(0, at(HEADER, log_id=5), 16)]
    source.data += record
    copy = source.rewrite([3])
    list(copy.steps())
    assert copy.damage == []
    assert source.written() == complete_log(source.key_record(3) + record, {3: KEY_RECORD + 24})


def test_the_range_of_copied_entries_covers_all_parts(source: LogSource) -> None:
    source.put(3, 5)
    source.put(8, 0)
    source.put(3, 300)
    source.put(8, 1)
    source.put(3, 700)
    copy = source.rewrite([3])
    list(copy.steps())
    assert copy.ledgers == [(3, 5, 700)]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_is_a_quarter_of_a_mebibyte(source: LogSource) -> None:
    source.put_many(3, range(96), size=8192)
    copy = source.rewrite([3])
    # Reads of 32 records and writes in turns; the first write has the header and the key, the last is not counted.
    assert list(copy.steps()) == [262144, 262144 + HEADER + KEY_RECORD, 262144, 262144, 262144, 262144, 0]
    assert copy.copied_bytes == 96 * 8192


def test_reads_and_writes_are_limited_per_step(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 1000)
    records = source.put_many(3, range(34), size=90)
    copy = source.rewrite([3])
    # A read has 11 whole records. The header and the key are in the first write.
    assert list(copy.steps()) == [990 + 1070, 990 + 990, 1980, 90]
    assert source.written() == complete_log(source.key_record(3) + records, {3: 48 + 34 * 90})


def test_a_full_buffer_is_written_after_its_ledger(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", HEADER + 2 * KEY_RECORD)
    for ledger_id in range(3, 7):
        source.located[ledger_id] = [(0, at(HEADER, log_id=6), 92)]
    copy = source.rewrite([3, 4, 5, 6])
    # The rows of the other log, 29 bytes each, and one write after the second ledger.
    assert list(copy.steps()) == [2 * 29 + HEADER + 2 * KEY_RECORD, 2 * 29]
    assert source.disk.log == [f"create {TEMPORARY}", f"write {TEMPORARY}", f"write {TEMPORARY}", f"sync {TEMPORARY}"]


def test_many_rows_of_other_logs_count_as_work(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 58)
    source.located[3] = [(entry_id * 20, at(HEADER + 100 * entry_id, log_id=6), 92) for entry_id in range(5)]
    copy = source.rewrite([3])
    # A row is 29 bytes: a key of 17, a location of 8, and a size of 4. The last step writes the header and the key.
    assert list(copy.steps()) == [58, 58, 29 + HEADER + KEY_RECORD, 0]


@pytest.mark.parametrize(
    ("sync_size", "expected"),
    [(2000, "wwdwwdww"), (2001, "wwdwwwdw"), (2080, "wwdwwwdw"), (2081, "wwwdwww")],
    ids=["at the second time", "below it", "at the first time", "below that"],
)
def test_the_new_log_is_synced_every_sync_size_bytes(
    source: LogSource, monkeypatch: pytest.MonkeyPatch, sync_size: int, expected: str
) -> None:
    """The first write has 1080 bytes, the next four have 1000, and the last one has the map. `d` is a datasync."""
    monkeypatch.setattr(rewrite, "STEP_SIZE", 1000)
    source.put_many(3, range(50))
    copy = source.rewrite([3], sync_size=sync_size)
    list(copy.steps())
    assert "".join(line[0] for line in source.disk.log) == "c" + expected + "s"


def test_an_entry_larger_than_a_step_is_read_at_once(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 1000)
    records = source.put(3, 0, size=200) + source.put(3, 1, size=3000) + source.put(3, 2, size=1000)
    copy = source.rewrite([3])
    list(copy.steps())
    assert source.written() == complete_log(source.key_record(3) + records, {3: 48 + 4200})
    assert copy.damage == []


def test_a_stopped_rewrite_closes_both_files(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 100)
    source.put_many(3, range(20))
    closed: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "close":
            closed.append(path)

    source.faults = note
    copy = source.rewrite([3])
    steps = copy.steps()
    next(steps)
    assert closed == []
    steps.close()
    assert closed == [PATH, TEMPORARY]
    assert source.disk.paths() == [PATH, TEMPORARY]


def test_a_failed_write_is_raised(source: LogSource) -> None:
    source.put(3, 0)
    source.faults = lambda operation, path: OSError(28, "no space") if operation == "write_at" else None
    with pytest.raises(OSError, match="no space"):
        list(source.rewrite([3]).steps())


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_of(ledger_id: int, entry_id: int | None, offset: int, reason: str) -> Damage:
    return Damage(PATH, offset, reason, ledger_id, entry_id)


@pytest.mark.parametrize(
    ("offset", "mask", "reason"),
    [
        (0, 0x01, "entry digest mismatch"),
        (7, 0x01, "entry size differs"),
        (6, 0x10, "entry size differs"),
        (4, 0xFF, "entry size differs"),
        (50, 0x01, "entry digest mismatch"),
        (99, 0x80, "entry digest mismatch"),
    ],
    ids=["digest", "smaller size", "size beyond the part", "size out of range", "body", "last byte"],
)
def test_a_damaged_live_entry_is_reported_and_no_log_is_completed(
    source: LogSource, offset: int, mask: int, reason: str
) -> None:
    source.put_many(3, range(4))
    copy = source.rewrite([3])
    source.disk.corrupt(PATH, HEADER + 2 * RECORD + offset, mask)
    list(copy.steps())
    assert copy.damage == [damage_of(3, 2, HEADER + 2 * RECORD + 8, reason)]
    assert source.disk.log == [f"create {TEMPORARY}"]


def test_all_damaged_entries_of_all_ledgers_are_reported(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 100)
    source.put_many(3, range(10))
    source.put_many(4, range(10))
    source.put_many(6, range(10))
    source.put(7, 0)
    source.put(9, 0)
    copy = source.rewrite([3, 4, 6, 7, 9])
    for record in (2, 5, 20, 29):
        source.disk.corrupt(PATH, HEADER + RECORD * record + 20)
    # Two reads and writes, then all readable entries of ledgers 4, 7 and 9.
    assert list(copy.steps()) == [100, HEADER + KEY_RECORD + RECORD, 100, 100, *[100] * 12]
    assert [(one.ledger_id, one.entry_id, one.offset) for one in copy.damage] == [
        (3, 2, 240),
        (3, 5, 540),
        (6, 0, 2040),
        (6, 9, 2940),
    ]
    # The entries before the first damage were written; nothing is written after it.
    assert source.disk.log == [f"create {TEMPORARY}", f"write {TEMPORARY}", f"write {TEMPORARY}"]


def test_damage_of_dead_records_does_not_matter(source: LogSource) -> None:
    source.put_many(8, range(3))
    entry = source.put(3, 0)
    copy = source.rewrite([3])
    for offset in (0, 6, 50):
        source.disk.corrupt(PATH, HEADER + RECORD + offset)
    list(copy.steps())
    assert copy.damage == []
    assert source.written() == complete_log(source.key_record(3) + entry, {3: 148})


@pytest.mark.parametrize("wrong", [(4, 1), (3, 2)], ids=["ledger id", "entry id"])
def test_a_record_with_other_ids_than_the_index_is_damage(source: LogSource, wrong: tuple[int, int]) -> None:
    source.put(3, 0)
    source.put(*wrong)
    source.located = {3: [*source.located[3][:1], (1, at(HEADER + RECORD, log_id=5), 92)]}
    source.put(3, 2)
    copy = source.rewrite([3])
    if wrong[0] == 3:  # the ledger's own records are only compared with the index once something is damaged
        source.disk.corrupt(PATH, HEADER + 2 * RECORD + 20)
    list(copy.steps())
    assert copy.damage[0] == damage_of(3, 1, 140, "the record's ledger id or entry id differs from the index")


@pytest.mark.parametrize(
    ("cut", "damaged"), [(1, [2]), (100, [2]), (101, [1, 2])], ids=["in the last", "between", "in both"]
)
def test_entries_missing_at_the_end_of_the_log_are_damage(source: LogSource, cut: int, damaged: list[int]) -> None:
    source.put_many(3, range(3))
    copy = source.rewrite([3])
    source.disk.truncate(PATH, len(source.data) - cut)
    list(copy.steps())
    end = len(source.data) - cut
    assert copy.damage == [damage_of(3, one, HEADER + 100 * one + 8, "entry log is short") for one in damaged]
    assert source.disk.contents(PATH)[end:] == b""


def test_an_unreadable_sector_is_damage_of_its_entries(source: LogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "STEP_SIZE", 200)
    source.put_many(3, range(6))
    copy = source.rewrite([3])
    real = source.disk.open_read(PATH)
    bad = range(HEADER + 250, HEADER + 320)

    class Sectors:
        """The log, with some bytes that cannot be read."""

        def read_at(self, offset: int, size: int) -> bytes:
            if offset < bad.stop and bad.start < offset + size:
                raise OSError(5, "Input/output error")
            return real.read_at(offset, size)

        def close(self) -> None:
            return None

    monkeypatch.setattr(source.disk, "open_read", lambda path: Sectors())
    list(copy.steps())
    reason = "cannot be read: [Errno 5] Input/output error"
    assert copy.damage == [damage_of(3, 2, 240, reason), damage_of(3, 3, 340, reason)]


def test_a_log_is_kept_if_a_part_was_unreadable_only_once(source: LogSource) -> None:
    """The entries may have been stored elsewhere meanwhile; the next run decides again."""
    source.put_many(3, range(2))
    source.put(8, 0)
    source.put_many(3, range(2, 4))
    reads: list[str] = []

    def fail_once(operation: str, path: str) -> OSError | None:
        if operation != "read_at":
            return None
        reads.append(path)
        return OSError(5, "Input/output error") if len(reads) == 2 else None

    source.faults = fail_once
    copy = source.rewrite([3])
    list(copy.steps())
    assert copy.damage == [damage_of(3, None, HEADER + 3 * RECORD, "entries cannot be read")]
    assert source.disk.log == [f"create {TEMPORARY}"]


def test_at_most_a_thousand_damaged_entries_are_reported(source: LogSource) -> None:
    source.put_many(3, range(600))
    source.put_many(4, range(600))
    copy = source.rewrite([3, 4])
    source.disk.truncate(PATH, HEADER)
    list(copy.steps())
    assert len(copy.damage) == 1000
    assert (copy.damage[-1].ledger_id, copy.damage[-1].entry_id) == (4, 399)


@pytest.mark.parametrize("bit", [0x01, 0x10], ids=["64 KiB", "1 MiB"])
def test_a_damaged_size_beyond_the_part_ends_the_rewrite(
    source: LogSource, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is longer than a step, so the record could be a large one."""
    monkeypatch.setattr(rewrite, "STEP_SIZE", 1000)
    source.put_many(3, range(30))
    copy = source.rewrite([3])
    source.disk.corrupt(PATH, HEADER + 5, bit)
    list(copy.steps())
    assert copy.damage == [damage_of(3, 0, 40, "entry size differs")]
