"""The budget of buffered bytes: complete bodies are kept, incomplete ones yield, and what does not fit is refused."""

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


class Body:
    """An incomplete body that records its eviction."""

    def __init__(self) -> None:
        self.evicted: list[int] = []

    def evict(self, kind: str, held_size: int) -> None:
        assert kind == "bodies"
        self.evicted.append(held_size)


def test_incomplete_bodies_are_evicted_for_complete_ones_the_oldest_first() -> None:
    budget, first, second = ByteBudget(10), Body(), Body()
    budget.hold(first, 3)
    budget.hold(second, 4)
    assert budget.used == 7
    budget.take(3)
    assert (first.evicted, second.evicted, budget.used) == ([], [], 10)
    budget.take(1)
    assert (first.evicted, second.evicted, budget.used) == ([3], [], 8)
    budget.release(first)
    budget.release(second)
    assert budget.used == 4


def test_complete_bodies_are_not_evicted_for_incomplete_ones() -> None:
    budget, older, newer = ByteBudget(10), Body(), Body()
    budget.take(8)
    budget.hold(older, 2)
    with pytest.raises(TooManyRequests):
        budget.hold(newer, 3)
    assert (older.evicted, newer.evicted, budget.used) == ([2], [3], 8)
    budget.give(8)
    budget.hold(newer, 10)
    assert budget.used == 10


def test_nothing_fits_beside_complete_bodies_that_fill_the_budget() -> None:
    budget, body = ByteBudget(10), Body()
    budget.take(10)
    with pytest.raises(TooManyRequests):
        budget.hold(body, 1)
    with pytest.raises(TooManyRequests):
        budget.take(1)
    assert budget.used == 10
    budget.take(0)
    budget.give(10)
    assert budget.used == 0
