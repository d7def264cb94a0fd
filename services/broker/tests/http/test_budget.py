"""The budget of buffered bytes: what does not fit is refused, and takes nothing."""

import pytest
from bindery_broker.http.budget import ByteBudget
from bindery_core.errors import TooManyRequests


def test_a_new_budget_is_unused() -> None:
    budget = ByteBudget(10)
    assert (budget.total, budget.used, budget.refused) == (10, 0, 0)


def test_bytes_are_taken_up_to_the_total_and_returned() -> None:
    budget = ByteBudget(10)
    budget.take(4)
    budget.take(6)
    assert (budget.used, budget.refused) == (10, 0)
    budget.give(4)
    assert budget.used == 6
    budget.take(4)
    assert budget.used == 10


def test_bytes_beyond_the_total_are_refused_and_counted() -> None:
    budget = ByteBudget(10)
    budget.take(4)
    for refused in (1, 2):
        with pytest.raises(TooManyRequests) as caught:
            budget.take(7)
        assert caught.value.facts == {"wanted": 7, "used": 4, "limit": 10}
        assert (budget.used, budget.refused) == (4, refused)
    budget.take(6)
    assert budget.used == 10


def test_more_than_was_taken_is_never_returned() -> None:
    budget = ByteBudget(10)
    budget.take(4)
    with pytest.raises(AssertionError):
        budget.give(5)
