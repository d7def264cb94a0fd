"""States of copies as ranges of entries: one row for consecutive copies with the same state."""

from typing import Any

import pytest
from bindery_spark.audit.checks import copy_states as module
from bindery_spark.audit.checks.copy_states import COPY_STATES, copy_states
from bindery_spark.reading.blocks import CORRUPT, LISTED, MISSING, READ, UNKNOWN, UNREPORTED
from plain_frames import PlainFrame, functions


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "F", functions)


def block(states: list[int] | None, first: int, last: int, *, step: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "ledger_id": 7,
        "segment": 1,
        "bookie": "a",
        "expected": True,
        "first_entry": first,
        "last_entry": last,
        "step": step,
        "states": None if states is None else bytes(states),
        **more,
    }


def ranges(*blocks: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(first, last, state) of the states."""
    rows: Any = copy_states(PlainFrame(blocks))  # type: ignore[arg-type]
    return [(row["first"], row["last"], row["state"]) for row in rows.rows]


def test_a_row_names_the_copies_of_one_block() -> None:
    rows: Any = copy_states(PlainFrame([block([MISSING], 5, 5)]))  # type: ignore[arg-type]
    assert rows.rows == [
        {"ledger_id": 7, "segment": 1, "bookie": "a", "first": 5, "last": 5, "step": 1, "state": MISSING}
    ]
    assert rows.columns == [field.split()[0] for field in COPY_STATES.split(", ")]


def test_a_block_without_states_was_read_completely() -> None:
    assert ranges(block(None, 0, 1_023)) == [(0, 1_023, READ)]
    assert ranges(block(None, 9, 9)) == [(9, 9, READ)]
    assert ranges(block(None, 4, 16, step=3)) == [(4, 16, READ)]


def test_consecutive_copies_with_the_same_state_are_one_range() -> None:
    states = [READ, READ, MISSING, UNKNOWN, UNKNOWN, UNKNOWN, READ]
    assert ranges(block(states, 10, 16)) == [(10, 11, READ), (12, 12, MISSING), (13, 15, UNKNOWN), (16, 16, READ)]


def test_ranges_of_a_stripe_have_its_step() -> None:
    states = [CORRUPT, CORRUPT, LISTED]
    assert ranges(block(states, 4, 10, step=3)) == [(4, 7, CORRUPT), (10, 10, LISTED)]


def test_copies_that_were_not_reported_have_no_state() -> None:
    states = [MISSING, UNREPORTED, UNREPORTED, MISSING]
    assert ranges(block(states, 0, 3)) == [(0, 0, MISSING), (3, 3, MISSING)]
    assert ranges(block([UNREPORTED, READ], 0, 1)) == [(1, 1, READ)]


def test_orphaned_data_has_no_state() -> None:
    orphaned = block(None, 0, 9, expected=False)
    assert ranges(orphaned, block([MISSING], 3, 3, bookie="b"), orphaned) == [(3, 3, MISSING)]
