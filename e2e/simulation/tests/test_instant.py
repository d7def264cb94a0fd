"""Time advances only when no callback is ready."""

import asyncio
import time

import pytest
from bindery_simulation.instant import InstantLoop


def run(work) -> object:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(work)


def test_a_day_of_sleep_takes_no_time() -> None:
    async def sleeps() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time() - began

    began = time.monotonic()
    assert run(sleeps()) == pytest.approx(86_400)
    assert time.monotonic() - began < 60


def test_ready_callbacks_run_before_time_advances() -> None:
    async def race() -> list[str]:
        told: list[str] = []

        async def long_way() -> None:
            for _ in range(10_000):
                await asyncio.sleep(0)
            told.append("walked")

        async def short_sleep() -> None:
            await asyncio.sleep(1e-6)
            told.append("slept")

        await asyncio.gather(short_sleep(), long_way())
        return told

    assert run(race()) == ["walked", "slept"]


def test_timers_fire_in_their_order() -> None:
    async def sleepers() -> list[float]:
        told: list[float] = []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            told.append(seconds)

        await asyncio.gather(*(sleep(seconds) for seconds in (3, 0.1, 2, 0.2)))
        return told

    assert run(sleepers()) == [0.1, 0.2, 2, 3]


def test_a_timeout_ends_a_task_that_waits_forever() -> None:
    async def waits() -> None:
        async with asyncio.timeout(30):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(waits())


def test_a_thread_wakes_a_loop_without_timers() -> None:
    assert run(asyncio.to_thread(lambda: "done")) == "done"
