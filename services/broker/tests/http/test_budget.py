"""The budget of buffered bytes: complete bodies are kept, arriving ones yield, and what does not fit is refused."""

import pytest
from bindery_broker.http.budget import ByteBudget
from bindery_core.errors import TooManyRequests
from bindery_kit.limits.held_bytes import HeldBytes


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
    """An arriving body that records its eviction."""

    def __init__(self) -> None:
        self.evicted: list[int] = []

    def evict(self, kind: str, held_size: int) -> None:
        assert kind == "bodies"
        self.evicted.append(held_size)


def test_arriving_bodies_are_evicted_for_complete_ones_the_oldest_first() -> None:
    arriving, first, second = HeldBytes("bodies", 10), Body(), Body()
    budget = ByteBudget(10, arriving=arriving)
    arriving.hold(first, 3)
    arriving.hold(second, 4)
    assert budget.used == 7
    budget.take(3)
    assert (first.evicted, second.evicted, budget.used) == ([], [], 10)
    budget.take(1)
    assert (first.evicted, second.evicted, budget.used) == ([3], [], 8)
    arriving.release(first)
    arriving.release(second)
    assert budget.used == 4


def test_complete_bodies_are_not_evicted_for_arriving_ones() -> None:
    arriving, older, newer = HeldBytes("bodies", 10), Body(), Body()
    budget = ByteBudget(10, arriving=arriving)
    budget.take(8)
    assert arriving.hold(older, 2)
    assert not arriving.hold(newer, 3)
    assert (older.evicted, newer.evicted, budget.used) == ([2], [3], 8)
    budget.give(8)
    assert arriving.hold(newer, 10)
    assert budget.used == 10


def test_nothing_fits_beside_complete_bodies_that_fill_the_budget() -> None:
    arriving, body = HeldBytes("bodies", 10), Body()
    budget = ByteBudget(10, arriving=arriving)
    budget.take(10)
    assert not arriving.hold(body, 1)
    with pytest.raises(TooManyRequests):
        budget.take(1)
    assert budget.used == 10
    budget.take(0)
    budget.give(10)
    assert budget.used == 0


def test_a_complete_body_that_is_refused_evicts_none() -> None:
    arriving, body = HeldBytes("bodies", 10), Body()
    budget = ByteBudget(10, arriving=arriving)
    budget.take(6)
    arriving.hold(body, 4)
    with pytest.raises(TooManyRequests):
        budget.take(5)
    assert (body.evicted, budget.used, budget.refused) == ([], 10, 1)


@pytest.mark.parametrize(("total", "limit", "room"), [(10, 20, 10), (20, 10, 10)])
def test_the_smaller_limit_applies_to_arriving_bodies(total: int, limit: int, room: int) -> None:
    arriving = HeldBytes("bodies", limit)
    budget = ByteBudget(total, arriving=arriving)
    assert arriving.room == room
    budget.take(4)
    assert arriving.room == min(limit, total - 4)
    budget.give(4)
    assert arriving.room == room
