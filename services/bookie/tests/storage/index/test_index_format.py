"""Rows of the index: golden bytes, and runs that contain every entry."""

import random
from itertools import pairwise

from bindery_bookie.storage.entry_log.entry_log_format import RECORD_HEADER_SIZE
from bindery_bookie.storage.index import index_format as index
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
    for _ in range(50):
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
