"""Steady ledgers: closed at both times, with the same metadata version."""

import pytest
from bindery_spark.audit.ledger_history import KnownLedger, LedgerHistory, is_steady


def known(state: str = "closed", version: int = 3) -> KnownLedger:
    return KnownLedger(1, state, version, 3, 9, 100, None)


@pytest.mark.parametrize(
    ("was", "now", "steady"),
    [
        pytest.param(known(), known(), True, id="unchanged"),
        pytest.param(known(), known(version=4), False, id="changed"),
        pytest.param(known("open"), known("open"), False, id="open"),
        pytest.param(known("open"), known(), False, id="closed meanwhile"),
        pytest.param(known(), known("in_recovery"), False, id="not closed any more"),
        pytest.param(None, known(), False, id="created meanwhile"),
        pytest.param(known(), None, False, id="deleted meanwhile"),
        pytest.param(None, None, False, id="unknown"),
    ],
)
def test_a_ledger_is_steady_if_it_is_closed_and_unchanged(
    was: KnownLedger | None, now: KnownLedger | None, steady: bool
) -> None:
    assert is_steady(was, now) is steady


def test_the_first_pass_and_the_second_pass_are_judged_separately() -> None:
    early = LedgerHistory({1: known()}, {1: known()}, {1: known(version=4)})
    assert (early.is_steady_before(1), early.is_steady_after(1)) == (True, False)
    late = LedgerHistory({1: known(version=2)}, {1: known()}, {1: known()})
    assert (late.is_steady_before(1), late.is_steady_after(1)) == (False, True)


def test_a_ledger_without_a_row_is_not_steady() -> None:
    history = LedgerHistory({1: known()}, {}, {1: known()})
    assert (history.is_steady_before(1), history.is_steady_after(1)) == (False, False)
    assert (history.is_steady_before(2), history.is_steady_after(2)) == (False, False)
