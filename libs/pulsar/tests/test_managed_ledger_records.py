"""Records of topic metadata as values."""

import dataclasses

import pytest
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position


def test_positions_are_ordered_by_ledger_and_then_by_entry() -> None:
    ordered = [Position(1, -1), Position(1, 0), Position(1, 20), Position(2, -1), Position(10, 3)]
    assert sorted(set(ordered)) == ordered


def test_a_position_is_shown_as_ledger_and_entry() -> None:
    assert str(Position(7, -1)) == "7:-1"
    assert str(Position(ledger_id=12, entry_id=3)) == "12:3"


def test_a_record_of_a_new_ledger_is_empty_and_not_closed() -> None:
    assert LedgerRecord(ledger_id=7) == LedgerRecord(ledger_id=7, entries=0, size=0, closed_ms=0, extension=b"")


def test_a_record_cannot_be_changed() -> None:
    record = LedgerRecord(ledger_id=7, entries=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.entries = 3  # type: ignore[misc]
    assert dataclasses.replace(record, entries=3) == LedgerRecord(ledger_id=7, entries=3)
