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


def sized(size: int, *, copies: int = 1, ledgers: int = 3, unwanted: int = 0) -> list[tuple[int, int]]:
    """Groups of `ledgers` ledgers of this size, after one of `unwanted` bytes that is not read."""
    skipped = [PlannedLedger(0, 1, unwanted, False)] if unwanted else []
    return groups(*skipped, *(PlannedLedger(i, copies, size) for i in range(1, ledgers + 1)))


def test_a_group_has_at_least_1_gib_and_at_most_4_gib_if_there_are_enough_ledgers() -> None:
    gib = 1_073_741_824
    assert sized(gib // 2) == [(0, 2), (3, ID_MAX)]
    assert sized(gib // 2 + 1) == [(0, 1), (2, 2), (3, ID_MAX)]
    assert sized(2 * gib, ledgers=30)[:2] == [(0, 2), (3, 4)], "a tenth of 60 GiB is more than the maximum"
    assert sized(2 * gib + 1, ledgers=30)[:2] == [(0, 1), (2, 2)]
    assert len(sized(gib, ledgers=20)) == 10, "a tenth of all bytes, between the limits"


def test_a_group_has_at_most_8_million_copies() -> None:
    assert sized(1, copies=4_000_000, ledgers=2) == [(0, ID_MAX)]
    assert sized(1, copies=4_000_001, ledgers=2) == [(0, 1), (2, ID_MAX)]
    assert list(batches([PlannedLedger(i, 4_000_000, 1) for i in range(2)], ledgers_max=9)) == [[0, 1]]
    assert list(batches([PlannedLedger(i, 4_000_001, 1) for i in range(2)], ledgers_max=9)) == [[0], [1]]


def test_a_batch_has_at_most_4_gib() -> None:
    assert list(batches([PlannedLedger(i, 1, 2**31) for i in range(2)], ledgers_max=9)) == [[0, 1]]
    assert list(batches([PlannedLedger(i, 1, 2**31 + i) for i in range(2)], ledgers_max=9)) == [[0], [1]]
    three = [PlannedLedger(0, 1, 2**31), PlannedLedger(1, 1, 2**30), PlannedLedger(2, 1, 2**30 + 1)]
    assert list(batches(three, ledgers_max=9)) == [[0, 1], [2]]


def test_more_than_256_mib_of_skipped_ledgers_are_a_gap() -> None:
    assert sized(1, unwanted=268_435_456) == [(0, ID_MAX)]
    assert sized(1, unwanted=268_435_457) == [(1, ID_MAX)]
    read = PlannedLedger(1, 1, 1)
    assert groups(read, PlannedLedger(5, 1, 268_435_456, False)) == [(0, ID_MAX)]
    assert groups(read, PlannedLedger(5, 1, 268_435_457, False)) == [(0, 1)]


def test_a_group_counts_its_ledgers_copies_and_bytes_including_a_small_gap() -> None:
    ledgers = [PlannedLedger(1, 10, 100), PlannedLedger(2, 20, 200, False), PlannedLedger(3, 30, 300)]
    plan = make_plan(ledgers, first=1, last=3)
    (group,) = plan.groups
    assert (group.number, group.first, group.last, group.ledgers, group.copies, group.size) == (0, 1, 3, 3, 60, 600)
    assert plan.size == 600
    assert [plan.covers(ledger_id) for ledger_id in range(5)] == [False, True, True, True, False]
    two = make_plan([PlannedLedger(1, 10, 100), PlannedLedger(2, 20, 200)], group_bytes=1)
    assert [(group.number, group.size) for group in two.groups] == [(0, 100), (1, 200)]
    assert two.size == 300


def test_a_range_of_one_id_has_a_group() -> None:
    assert [(group.first, group.last) for group in make_plan([], first=7, last=7).groups] == [(7, 7)]


def test_a_ledger_directly_after_a_gap_begins_the_next_group() -> None:
    assert groups(PlannedLedger(5, 1, GAP_BYTES + 1, False), PlannedLedger(6, 1, 1)) == [(6, ID_MAX)]


def test_nothing_is_read_of_a_ledger_with_unreadable_metadata() -> None:
    unreadable = {**ledger(7, [(0, ["a", "b"])], last=9), "problem": "garbage"}
    assert module.planned(Row(**unreadable)) == PlannedLedger(7, 0, 0, True)


def test_sizes_of_unusual_ledgers() -> None:
    ensemble = [(0, ["a", "b"])]
    assert module.planned(Row(**ledger(7, ensemble, last=None))) == PlannedLedger(7, 2_000, 2_048_000)
    without_length = {**ledger(7, ensemble, last=9), "length": None}
    assert module.planned(Row(**without_length), is_wanted=False) == PlannedLedger(7, 20, 0, False)
    assert module.planned(Row(**ledger(7, ensemble, last=-1))) == PlannedLedger(7, 0, 0)
    recovering = {**ledger(7, ensemble, last=9), "state": "in_recovery"}
    assert module.planned(Row(**recovering)) == PlannedLedger(7, 2_000, 2_048_000)
    no_end = {**ledger(7, ensemble, last=9), "last_entry_id": None}
    assert module.planned(Row(**no_end)) == PlannedLedger(7, 2_000, 2_048_000)
