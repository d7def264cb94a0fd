"""Rows of the index: golden bytes, and runs that contain every entry."""

import random
from itertools import pairwise

import pytest
from bindery_bookie.storage.entry_log.entry_log_format import RECORD_HEADER_SIZE
from bindery_bookie.storage.index import index_format as index
from bindery_bookie.storage.io.errors import DamagedIndex
from storage_formats import golden

ROW = index.LedgerRow(b"k" * 20, True, 41, 42, b"packet")


def test_the_golden_index_rows_are_read_and_written_byte_for_byte() -> None:
    run = index.pack_run(6 << 32 | 40, (16, 0, 700))
    rows = index.run_key(5, 0) + run + index.ledger_key(5) + index.pack_ledger_row(ROW) + index.pack_generation(9)
    stored = golden("index-rows-v1")
    assert stored == rows
    assert index.unpack_ledger_row(index.pack_ledger_row(ROW), ledger_id=5) == ROW
    decoded = index.unpack_run(index.run_key(5, 7), run)
    assert list(decoded.entries()) == [(7, 6 << 32 | 40, 16), (9, 6 << 32 | 64, 700)]
    assert decoded.find(8) is None
    assert decoded.find(9) == (6 << 32 | 64, 700)
    assert decoded.find(10) is None


def test_runs_contain_every_entry_at_any_location() -> None:
    """Compared with a naive list, for random holes, gaps in the log and lengths."""
    lots = random.Random(1)
    for _ in range(200):
        entries, entry_id, location = [], 0, 1 << 32
        for _ in range(lots.randint(1, 400)):
            entry_id += lots.choice((1, 1, 1, 2, 8, 9, 10, 300))
            size = lots.randint(16, 50)
            location += lots.choice((0, 0, 0, 0, 1000))
            entries.append((entry_id, location, size))
            location += size + RECORD_HEADER_SIZE
        rows = index.run_rows(5, entries)
        runs = [index.unpack_run(key, value) for key, value in rows]
        assert [entry for run in runs for entry in run.entries()] == entries
        for run, following in pairwise(runs):
            assert run.last_entry_id < following.first_entry_id
        for entry in entries:
            run = max((run for run in runs if run.first_entry_id <= entry[0]), key=lambda run: run.first_entry_id)
            assert run.find(entry[0]) == entry[1:]


def test_a_run_ends_at_its_last_slot_and_its_size_leaves_out_holes() -> None:
    run = index.Run(5, 7, 100, (16, 0, 700))
    assert run.last_entry_id == 9
    assert run.size == 16 + 8 + 700
    assert run.find(6) is None
    assert run.find(7) == (100, 16)


@pytest.mark.parametrize(
    "row", [index.LedgerRow(b"", False, -1, -1, None), index.LedgerRow(b"k", False, 1, 2, b"", True)]
)
def test_every_flag_of_a_ledger_row_is_read_back(row: index.LedgerRow) -> None:
    assert index.unpack_ledger_row(index.pack_ledger_row(row), ledger_id=5) == row


@pytest.mark.parametrize(
    "value",
    [
        bytes(21),
        b"\2" + bytes(21),
        b"\1\x08" + bytes(20),
        index.pack_ledger_row(index.LedgerRow(b"key", False, -1, -1, None)) + b"x",
        index.pack_ledger_row(index.LedgerRow(b"key", False, -1, -1, None))[:-1],
    ],
)
def test_a_damaged_ledger_row_is_refused(value: bytes) -> None:
    with pytest.raises(DamagedIndex) as raised:
        index.unpack_ledger_row(value, ledger_id=5)
    assert raised.value.facts["ledger_id"] == 5


@pytest.mark.parametrize(
    "value", [b"", bytes(8), bytes(8) + b"\0\0\0\1x", bytes(12), bytes(8) + b"\0\0\0\1" + bytes(4)]
)
def test_a_damaged_run_is_refused(value: bytes) -> None:
    with pytest.raises(DamagedIndex):
        index.unpack_run(index.run_key(5, 7), value)


def test_keys_and_numbers_of_another_size_are_refused() -> None:
    assert index.unpack_ledger_key(index.ledger_key(5)) == 5
    assert index.unpack_generation(index.pack_generation(9)) == 9
    for damaged in (lambda: index.unpack_ledger_key(b"L"), lambda: index.unpack_generation(bytes(9))):
        with pytest.raises(DamagedIndex):
            damaged()
    with pytest.raises(DamagedIndex):
        index.location_of(bytes(7))


def test_a_relocated_run_keeps_its_sizes() -> None:
    moved = index.relocated(index.pack_run(40, (16, 17)), 99)
    assert moved == index.pack_run(99, (16, 17))
    assert index.location_of(moved) == 99


def test_dense_rows_equal_those_of_single_entries() -> None:
    sizes = [16 + number % 5 for number in range(300)]
    entries, location = [], 1000
    for number, size in enumerate(sizes):
        entries.append((40 + number, location, size))
        location += size + RECORD_HEADER_SIZE
    rows = index.dense_run_rows(5, 40, 1000, sizes)
    assert rows == index.run_rows(5, entries)
    assert len(rows) == 3
