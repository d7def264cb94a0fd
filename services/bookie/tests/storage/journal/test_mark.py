"""LastLogMark: golden bytes, detection of every damage, and a replacement that keeps the old mark if it fails."""

import pytest
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_core.errors import BadVersion, DamagedStorage
from storage_formats import flips, golden

MARK = LastLogMark(9, JournalPosition(10, 4096, 77), 6, 1234)


def test_the_golden_mark_is_read_and_written_byte_for_byte() -> None:
    stored = golden("last-log-mark-v1")
    assert stored == MARK.pack()
    assert LastLogMark.unpack(stored, path="/m") == MARK


def test_every_flipped_byte_of_a_mark_is_detected() -> None:
    for _, flipped in flips(MARK.pack()):
        with pytest.raises((DamagedStorage, BadVersion)):
            LastLogMark.unpack(flipped, path="/m")


def test_every_truncation_of_a_mark_is_detected() -> None:
    for size in range(len(MARK.pack())):
        with pytest.raises(DamagedStorage):
            LastLogMark.unpack(MARK.pack()[:size], path="/m")
