"""BackPressureBudget: waiters resume once, in order, when half of the budget is free."""

import asyncio
import time
from functools import partial

import pytest
from bindery_bookie.server.back_pressure import BackPressureBudget


def test_waiters_resume_in_order_when_the_budget_is_low() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    budget.take(150)
    assert budget.is_over
    budget.when_low(lambda: calls.append("first"))
    budget.when_low(lambda: calls.append("second"))
    budget.give(99)
    assert calls == []
    budget.give(1)
    assert calls == ["first", "second"]
    budget.give(50)
    assert calls == ["first", "second"]


def test_a_waiter_that_fills_the_budget_again_leaves_the_others_waiting() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []

    def greedy() -> None:
        calls.append("greedy")
        budget.take(100)

    budget.take(100)
    budget.when_low(greedy)
    budget.when_low(lambda: calls.append("patient"))
    budget.give(100)
    assert calls == ["greedy"]
    budget.give(100)
    assert calls == ["greedy", "patient"]


def test_giving_more_than_was_taken_is_an_error() -> None:
    budget = BackPressureBudget(100)
    with pytest.raises(AssertionError):
        budget.give(1)


async def test_wait_empty_returns_when_everything_was_given_back() -> None:
    budget = BackPressureBudget(100)
    await budget.wait_empty()
    budget.take(10)
    waiting = asyncio.create_task(budget.wait_empty())
    await asyncio.sleep(0)
    budget.give(9)
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give(1)
    async with asyncio.timeout(30):
        await waiting


def test_a_forgotten_waiter_is_not_called() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []

    def gone() -> None:
        calls.append("gone")

    budget.take(100)
    budget.when_low(gone)
    budget.when_low(lambda: calls.append("there"))
    budget.forget(gone)
    assert budget.waiting == 1
    budget.give(100)
    assert (calls, budget.waiting) == (["there"], 0)


def test_forgetting_does_not_search() -> None:
    """Thousands of connections may end at once."""
    budget = BackPressureBudget(100)
    budget.take(100)
    waiters = [partial(int, number) for number in range(50_000)]
    for waiter in waiters:
        budget.when_low(waiter)
    began = time.process_time()
    for waiter in reversed(waiters):
        budget.forget(waiter)
    assert time.process_time() - began < 5
    assert budget.waiting == 0


def test_thousands_of_waiters_do_not_recurse() -> None:
    budget = BackPressureBudget(100)
    calls: list[int] = []

    def quick(number: int) -> None:
        calls.append(number)
        budget.take(10)
        budget.give(10)

    budget.take(100)
    for number in range(5000):
        budget.when_low(partial(quick, number))
    budget.give(100)
    assert calls == list(range(5000))
    assert budget.used == 0


def test_a_waiter_that_fails_does_not_stop_the_others() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    budget.take(100)
    budget.when_low(lambda: 1 // 0)
    budget.when_low(lambda: calls.append("next"))
    with pytest.raises(ZeroDivisionError):
        budget.give(100)
    budget.give(0)
    assert calls == ["next"]


def test_groups_take_turns() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    budget.take(100)
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        budget.when_low(partial(calls.append, name), group=name[0])
    assert budget.waiting == 6
    budget.give(100)
    assert calls == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert budget.waiting == 0


def test_a_group_whose_waiters_are_forgotten_has_no_turn() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    gone = partial(calls.append, "gone")
    budget.take(100)
    budget.when_low(gone, group="a")
    budget.when_low(partial(calls.append, "there"), group="b")
    budget.forget(gone, group="a")
    assert budget.waiting == 1
    budget.give(100)
    assert calls == ["there"]


def test_one_may_wait_behind_others_although_the_budget_is_not_used_up() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    budget.take(100)
    budget.when_low(partial(calls.append, "first"))
    budget.give(30)
    budget.when_low(partial(calls.append, "second"))
    budget.give(20)
    assert calls == ["first", "second"]


def test_a_group_with_nothing_in_progress_need_not_wait_for_others() -> None:
    budget = BackPressureBudget(100, serves_idle_groups=True)
    budget.take(120, group="a")
    assert (budget.is_free_for("a"), budget.is_free_for("b")) == (False, True)
    budget.take(20, group="b")
    assert not budget.is_free_for("b")
    assert budget.is_free_for("c")
    budget.take(10, group="c")
    assert not budget.is_free_for("d"), "there is a limit to this"
    budget.give(20, group="b")
    assert budget.is_free_for("b")


def test_a_waiter_is_called_once_its_group_has_nothing_in_progress() -> None:
    budget = BackPressureBudget(100, serves_idle_groups=True)
    calls: list[str] = []

    def next_one() -> None:
        calls.append("b1")
        budget.take(5, group="b")

    budget.take(110, group="a")
    budget.take(10, group="b")
    budget.when_low(partial(calls.append, "a"), group="a")
    budget.when_low(next_one, group="b")
    budget.when_low(partial(calls.append, "b2"), group="b")
    budget.give(9, group="b")
    assert calls == []
    budget.give(1, group="b")
    assert calls == ["b1"]
    budget.give(5, group="b")
    assert (calls, budget.waiting) == (["b1", "b2"], 1)
    budget.give(110, group="a")
    assert (calls[-1], budget.used, budget._used_of) == ("a", 0, {})


def test_a_group_cannot_give_what_another_took() -> None:
    budget = BackPressureBudget(100)
    budget.take(10, group="a")
    with pytest.raises(AssertionError):
        budget.give(10, group="b")


def test_a_group_with_nothing_in_progress_goes_on_once_others_exceed_the_limit_by_less_than_half() -> None:
    budget = BackPressureBudget(100, serves_idle_groups=True)
    calls: list[str] = []
    budget.take(200, group="a")
    budget.when_low(partial(calls.append, "a"), group="a")
    budget.when_low(partial(calls.append, "b1"), group="b")
    budget.when_low(partial(calls.append, "b2"), group="b")
    budget.give(50, group="a")
    assert calls == []
    budget.give(1, group="a")
    assert calls == ["b1", "b2"]
    budget.give(99, group="a")
    assert calls == ["b1", "b2", "a"]
    assert budget.waiting == 0


def test_groups_with_nothing_in_progress_wait_unless_the_budget_serves_them() -> None:
    budget = BackPressureBudget(100)
    calls: list[str] = []
    budget.take(110, group="a")
    assert not budget.is_free_for("b")
    budget.when_low(partial(calls.append, "b"), group="b")
    budget.give(59, group="a")
    assert calls == []
    budget.give(1, group="a")
    assert calls == ["b"]
