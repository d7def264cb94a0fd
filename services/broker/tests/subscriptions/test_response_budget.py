"""The bytes of messages in responses: room in the order of requests, and an end for responses that nobody reads."""

import asyncio

import pytest
from bindery_broker.subscriptions.response_budget import PACE, STALL_S, WAITING_MAX, Charge, ResponseBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> ResponseBudget:
    return ResponseBudget(100, now=clock.now)


def charge_of(budget: ResponseBudget, size: int) -> Charge:
    charge = budget.charge("a")
    assert charge.take(least=size, most=size) == size
    return charge


def test_a_charge_takes_what_fits_and_returns_it(budget: ResponseBudget) -> None:
    first, second = budget.charge("a"), budget.charge("a")
    assert first.take(least=10, most=60) == 60
    assert second.take(least=10, most=60) == 40
    assert budget.used == 100
    second.keep(5)
    assert first.take(least=10, most=80) == 80, "a charge may grow"
    first.release()
    first.release()
    second.release()
    assert budget.used == 0


def test_a_charge_for_which_there_is_no_room_takes_nothing(budget: ResponseBudget) -> None:
    charge_of(budget, 95)
    assert budget.charge("a").take(least=6, most=10) == 0
    assert budget.charge("a").take(least=5, most=10) == 5
    assert budget.used == 100


def test_one_response_may_exceed_the_budget_if_it_is_alone(budget: ResponseBudget) -> None:
    charge = budget.charge("a")
    assert charge.take(least=500, most=500) == 100
    charge.keep(500)
    assert budget.used == 500
    assert budget.charge("a").take(least=1, most=1) == 0
    charge.release()
    assert budget.used == 0


async def test_waiting_charges_get_room_in_their_order(budget: ResponseBudget) -> None:
    holder = charge_of(budget, 90)
    large, small = budget.charge("a"), budget.charge("a")
    first, second = large.wait(least=50, most=60), small.wait(least=5, most=8)
    assert (first.done(), second.done()) == (False, False), "a small one does not overtake"
    assert budget.charge("a").take(least=1, most=1) == 0, "nor does one that does not wait"
    holder.release()
    await asyncio.gather(first, second)
    assert (large.size, small.size, budget.used) == (60, 8, 68)


async def test_a_charge_holds_nothing_while_it_waits(budget: ResponseBudget) -> None:
    """Two charges that hold half each, and want more, would wait for one another."""
    first, second = charge_of(budget, 50), charge_of(budget, 50)
    one, other = first.wait(least=60, most=60), second.wait(least=60, most=60)
    await one
    assert (first.size, other.done(), budget.used) == (60, False, 60)
    first.release()
    await other


async def test_a_charge_that_stops_waiting_makes_way(budget: ResponseBudget) -> None:
    charge_of(budget, 90)
    first, second = budget.charge("a").wait(least=50, most=50), budget.charge("a").wait(least=5, most=5)
    first.cancel()
    async with asyncio.timeout(5):
        await second
    assert budget.used == 95


async def test_room_that_was_granted_before_the_wait_was_cancelled_is_released_with_the_charge(
    budget: ResponseBudget,
) -> None:
    charge = budget.charge("a")
    granted = charge.wait(least=50, most=50)
    assert granted.done()
    granted.cancel()
    assert budget.used == 50
    charge.release()
    assert budget.used == 0


def test_an_unread_response_is_given_up_only_if_others_need_its_room(clock: Clock, budget: ResponseBudget) -> None:
    given_up: list[str] = []
    unread = charge_of(budget, 90)
    unread.begin_sending(lambda: given_up.append("unread"))
    clock.now_s += 3600
    assert budget.charge("a").take(least=10, most=10) == 10
    assert not given_up
    assert budget.charge("a").take(least=50, most=50) == 50
    assert (given_up, budget.given_up, budget.used) == (["unread"], 1, 60)
    unread.release()
    assert budget.used == 60


def test_a_response_that_was_read_lately_is_kept(clock: Clock, budget: ResponseBudget) -> None:
    given_up: list[str] = []
    charge = charge_of(budget, 100)
    charge.begin_sending(lambda: given_up.append("read"))
    for _ in range(10):
        clock.now_s += STALL_S * 0.9
        charge.sent(int(PACE.bytes_per_s * STALL_S))
        assert budget.charge("a").take(least=1, most=1) == 0
    assert not given_up
    clock.now_s += STALL_S
    assert budget.charge("a").take(least=1, most=1) == 1
    assert given_up == ["read"]


def test_a_response_that_is_read_drop_by_drop_is_given_up(clock: Clock, budget: ResponseBudget) -> None:
    given_up: list[str] = []
    charge = charge_of(budget, 100)
    charge.begin_sending(lambda: given_up.append("drops"))
    clock.now_s += STALL_S * 0.9
    charge.sent(1)
    assert budget.charge("a").take(least=1, most=1) == 0
    clock.now_s += STALL_S * 0.9
    charge.sent(1)
    assert budget.charge("a").take(least=1, most=1) == 1
    assert given_up == ["drops"]


def test_a_response_that_is_not_being_sent_is_not_given_up(clock: Clock, budget: ResponseBudget) -> None:
    charge_of(budget, 100)
    clock.now_s += 3600
    assert budget.charge("a").take(least=1, most=1) == 0
    assert budget.given_up == 0


async def test_a_waiting_charge_gets_the_room_of_a_response_that_stalls_meanwhile(
    clock: Clock, budget: ResponseBudget
) -> None:
    given_up = asyncio.Event()
    unread = charge_of(budget, 100)
    unread.begin_sending(given_up.set)
    granted = budget.charge("a").wait(least=10, most=10)
    await asyncio.sleep(0.3)
    assert not granted.done()
    clock.now_s += STALL_S
    async with asyncio.timeout(5):
        await granted
    assert given_up.is_set()
    assert budget.used == 10


async def test_of_the_waiting_clients_the_one_that_holds_least_is_next(budget: ResponseBudget) -> None:
    """A client with many requests does not make others wait for all of them."""
    held = [budget.charge("many") for _ in range(2)]
    assert [one.take(least=50, most=50) for one in held] == [50, 50]
    many = [budget.charge("many").wait(least=50, most=50) for _ in range(10)]
    other = budget.charge("other")
    granted = other.wait(least=20, most=20)
    held[0].release()
    await granted
    assert [one.done() for one in many] == [False] * 10
    assert (other.size, budget.used) == (20, 70)
    other.release()
    assert many[0].done(), "now the first of the client that waits alone"
    assert not many[1].done()


async def test_clients_that_hold_equally_much_take_turns(budget: ResponseBudget) -> None:
    holder = charge_of(budget, 100)
    waiting = {name: budget.charge(name[0]) for name in ("a1", "a2", "a3", "b1", "b2")}
    granted = {name: charge.wait(least=30, most=30) for name, charge in waiting.items()}
    holder.release()
    assert [name for name in granted if granted[name].done()] == ["a1", "a2", "b1"]
    waiting["a1"].release()
    assert [name for name in granted if granted[name].done()] == ["a1", "a2", "a3", "b1"]


async def test_only_so_many_charges_should_wait(budget: ResponseBudget) -> None:
    full = charge_of(budget, 100)
    waiting = [budget.charge("a").wait(least=1, most=1) for _ in range(WAITING_MAX - 1)]
    late = budget.charge("a")
    assert (budget.waiting, late.may_wait) == (WAITING_MAX - 1, True)
    waiting.append(late.wait(least=1, most=1))
    assert not late.may_wait
    waiting.pop(0).cancel()
    await asyncio.sleep(0)
    assert late.may_wait
    full.release()
    for one in waiting:
        one.cancel()


async def test_a_client_of_which_no_charge_waits_may_always_wait(budget: ResponseBudget) -> None:
    charge_of(budget, 100)
    waiting = [budget.charge("a").wait(least=1, most=1) for _ in range(WAITING_MAX)]
    other = budget.charge("other")
    assert (budget.charge("a").may_wait, other.may_wait) == (False, True)
    other.wait(least=1, most=1)
    assert not budget.charge("other").may_wait
    for one in waiting:
        one.cancel()
