"""Groups of ledgers: every wanted ledger is in exactly one, and gaps are left only if they save enough."""

import random

import pytest
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_spark.arguments import bytes_of
from bindery_spark.audit import plan as module
from bindery_spark.audit.plan import (
    GAP_BYTES,
    GROUP_BYTES_MAX,
    GROUP_BYTES_MIN,
    GROUP_COPIES_MAX,
    Plan,
    PlannedLedger,
    batches,
    make_plan,
)
from frames import ledger
from pyspark.sql.types import Row

MIB = 2**20


def groups(*ledgers: PlannedLedger) -> list[tuple[int, int]]:
    return [(group.first, group.last) for group in make_plan(ledgers).groups]


def test_without_ledgers_one_group_covers_every_id() -> None:
    """Bookies may store data of ledgers that do not exist."""
    assert groups() == [(0, ID_MAX)]


def test_small_ledgers_share_a_group_and_large_ones_do_not() -> None:
    small = [PlannedLedger(i, 10, MIB) for i in range(10)]
    assert groups(*small) == [(0, ID_MAX)]
    large = [PlannedLedger(i, 10, GROUP_BYTES_MIN) for i in range(3)]
    assert groups(*large) == [(0, 0), (1, 1), (2, ID_MAX)]


def test_the_option_group_bytes_sets_the_size_of_groups() -> None:
    plan = make_plan([PlannedLedger(i, 10, MIB) for i in range(4)], group_bytes=2 * MIB)
    assert [(group.first, group.last) for group in plan.groups] == [(0, 1), (2, ID_MAX)]
    assert (bytes_of(""), bytes_of("7"), bytes_of("64MiB")) == (None, 7, 64 * MIB)
    for wrong in ("0", "64 MiB", "-1", "64MB"):
        with pytest.raises(BadRequest, match="not a size"):
            bytes_of(wrong)


def test_groups_are_limited_in_copies_as_well_as_in_bytes() -> None:
    assert groups(*(PlannedLedger(i, GROUP_COPIES_MAX // 2 + 1, 1) for i in range(2))) == [(0, 0), (1, ID_MAX)]


def test_unwanted_ledgers_become_a_gap_if_that_saves_enough() -> None:
    first, last = PlannedLedger(1, 1, 1), PlannedLedger(9, 1, 1)
    assert groups(first, PlannedLedger(5, 1, GAP_BYTES + 1, False), last) == [(0, 1), (6, ID_MAX)]
    assert groups(first, PlannedLedger(5, 1, 10, False), last) == [(0, ID_MAX)]
    assert groups(PlannedLedger(5, 1, GAP_BYTES + 1, False), last) == [(6, ID_MAX)]
    assert groups(first, PlannedLedger(5, 1, GAP_BYTES + 1, False)) == [(0, 1)]
    assert groups(first, PlannedLedger(5, 1, 10, False)) == [(0, ID_MAX)]
    assert groups(PlannedLedger(5, 1, 10, False)) == []


def test_unwanted_ledgers_in_a_small_gap_are_read() -> None:
    large, first, last = PlannedLedger(5, 1, GAP_BYTES + 1, False), PlannedLedger(1, 1, 1), PlannedLedger(9, 1, 1)
    with_gap = make_plan([first, PlannedLedger(3, 1, 10, False), PlannedLedger(4, 1, 1), large, last])
    assert [i for i in range(12) if not with_gap.covers(i)] == [5]
    assert not make_plan([PlannedLedger(5, 1, 10, False)]).covers(5), "nothing is read"


def test_ledgers_of_the_second_pass_are_divided_into_bounded_batches() -> None:
    small = [PlannedLedger(i, 1, 1) for i in range(5)]
    assert list(batches(small, ledgers_max=2)) == [[0, 1], [2, 3], [4]]
    assert list(batches([], ledgers_max=2)) == []
    large = [PlannedLedger(0, 1, GROUP_BYTES_MAX), PlannedLedger(1, GROUP_COPIES_MAX, 1), *small[2:]]
    assert list(batches(large, ledgers_max=9)) == [[0], [1], [2, 3, 4]]


def test_every_wanted_ledger_is_in_exactly_one_group() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ids = sorted(rng.sample(range(1000), rng.randint(1, 40)))
        ledgers = [PlannedLedger(i, rng.randint(0, 10**6), rng.randint(0, 400 * MIB), rng.random() < 0.7) for i in ids]
        plan = make_plan(ledgers)
        assert all(a.last < b.first for a, b in zip(plan.groups, plan.groups[1:], strict=False))
        for one in ledgers:
            holders = [group for group in plan.groups if group.first <= one.ledger_id <= group.last]
            assert len(holders) == 1 or not (holders or one.is_wanted)
        assert Plan.from_json(plan.to_json()) == plan


def test_sizes_come_from_the_metadata_and_are_estimated_for_open_ledgers() -> None:
    closed = module.planned(Row(**ledger(7, [(0, ["a", "b", "c"])], last=9, qw=2)))
    assert closed == PlannedLedger(7, 20, 200)
    still_open = module.planned(Row(**ledger(8, [(0, ["a", "b"])], last=None)))
    assert still_open.copies == 2 * module.OPEN_ENTRIES_GUESSED
