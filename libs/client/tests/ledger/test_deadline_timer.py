"""DeadlineTimer: it fires at the earliest of the deadlines that a state machine set."""

import asyncio

import pytest
from bindery_client.ledger.deadline_timer import DeadlineTimer


async def test_a_timer_wakes_at_the_earliest_deadline_and_again_only_if_armed() -> None:
    loop = asyncio.get_running_loop()
    woken: list[float] = []
    timer = DeadlineTimer(lambda: woken.append(loop.time()))
    began = loop.time()
    timer.arm(began + 0.05)
    timer.arm(began + 0.02)
    timer.arm(None)
    await asyncio.sleep(0.1)
    assert len(woken) == 1
    assert woken[0] == pytest.approx(began + 0.02)
    timer.arm(loop.time() + 0.01)
    await asyncio.sleep(0.05)
    assert len(woken) == 2


async def test_a_cancelled_timer_does_not_wake() -> None:
    loop = asyncio.get_running_loop()
    woken: list[int] = []
    timer = DeadlineTimer(lambda: woken.append(1))
    timer.arm(loop.time() + 0.01)
    timer.cancel()
    timer.arm(loop.time() + 0.01)
    await asyncio.sleep(0.03)
    assert woken == []
