"""When garbage collection lists the metadata again."""

import pytest
from bindery_bookie.maintenance.run_schedule import COST_PARTS, RunSchedule


def a_schedule() -> RunSchedule:
    return RunSchedule(wait_min_s=15, wait_max_s=600, written_max=1000)


def test_the_first_run_is_soon() -> None:
    schedule = a_schedule()
    assert not schedule.is_due(waited_s=14.9, written=10**9)
    assert schedule.is_due(waited_s=15, written=0)


def test_the_wait_doubles_while_nothing_is_deleted_and_is_short_again_after_a_deletion() -> None:
    schedule = a_schedule()
    waits = []
    for deleted in (0, 0, 0, 0, 0, 0, 0, 7, 0):
        schedule.run_ended(seconds=0.01, deleted=deleted)
        waits.append(schedule.wait_s)
    assert waits == [30, 60, 120, 240, 480, 600, 600, 15, 30]


def test_a_run_is_due_once_much_was_written() -> None:
    schedule = a_schedule()
    schedule.run_ended(seconds=0.01, deleted=0)
    schedule.run_ended(seconds=0.01, deleted=0)
    assert not schedule.is_due(waited_s=15, written=999)
    assert schedule.is_due(waited_s=15, written=1000)
    assert schedule.is_due(waited_s=60, written=0)


@pytest.mark.parametrize("deleted", [0, 5])
def test_slow_runs_are_rare_whatever_they_delete_and_whatever_is_written(deleted: int) -> None:
    schedule = a_schedule()
    schedule.run_ended(seconds=4, deleted=deleted)
    assert not schedule.is_due(waited_s=4 * COST_PARTS - 1, written=10**9)
    assert schedule.is_due(waited_s=4 * COST_PARTS, written=10**9)
    schedule.run_ended(seconds=10_000, deleted=deleted)
    assert schedule.is_due(waited_s=600, written=0), "never later than the maximum"


def test_a_minimum_above_the_maximum_has_no_effect() -> None:
    schedule = RunSchedule(wait_min_s=900, wait_max_s=600, written_max=0)
    for deleted in (1, 0, 1):
        assert not schedule.is_due(waited_s=599, written=10**9)
        assert schedule.is_due(waited_s=600, written=0)
        schedule.run_ended(seconds=0.0, deleted=deleted)
