"""When a ledger is rolled, at the exact limits."""

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.writing.rolling import CHECK_PAUSE_S_MIN, next_check_s, rest_due, roll_due

SETTINGS = ManagedLedgerSettings(entries_max=10, size_max=100, age_s_min=60, age_s_max=600, inactive_s_max=900)


@pytest.mark.parametrize(
    ("entries", "size", "age_s", "is_due"),
    [
        (10, 1, 60, True),
        (9, 100, 60, True),
        (9, 99, 60, False),
        (10, 100, 59.9, False),
        (1, 1, 600, True),
        (1, 1, 599.9, False),
        (0, 0, 600, False),
    ],
)
def test_a_ledger_is_rolled_when_it_is_full_and_not_too_young_or_when_it_is_old(
    entries: int, size: int, age_s: float, is_due: bool
) -> None:
    record = LedgerRecord(ledger_id=1, entries=entries, size=size)
    assert roll_due(record, SETTINGS, age_s=age_s) is is_due


@pytest.mark.parametrize(
    ("age_s", "wait_s"), [(0, 60), (59, 1), (60, 540), (599, 1), (600, 600), (700, 600), (59.999, CHECK_PAUSE_S_MIN)]
)
def test_the_age_is_checked_at_each_limit_and_then_once_per_maximum_age(age_s: float, wait_s: float) -> None:
    assert next_check_s(SETTINGS, age_s=age_s, idle_s=0) == pytest.approx(wait_s)


@pytest.mark.parametrize(("idle_s", "wait_s"), [(700, 200), (899.999, CHECK_PAUSE_S_MIN), (900, 600), (1_000, 600)])
def test_an_old_ledger_is_checked_when_it_was_not_used_for_long(idle_s: float, wait_s: float) -> None:
    assert next_check_s(SETTINGS, age_s=1_000, idle_s=idle_s) == pytest.approx(wait_s)


@pytest.mark.parametrize(("idle_s", "is_due"), [(0, False), (899.9, False), (900, True)])
def test_a_ledger_rests_if_nothing_was_added_for_long(idle_s: float, is_due: bool) -> None:
    assert rest_due(SETTINGS, idle_s=idle_s) is is_due
