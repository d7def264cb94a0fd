"""Simulated time, the order of callbacks, and processes that are killed or paused."""

import asyncio

import pytest
from bindery_simulation.loop import Process, SimLoop, Stuck, current_process


def run(loop: SimLoop, process: Process, work, *, time_max: float = 1000.0):  # type: ignore[no-untyped-def]
    task = process.spawn(work)
    loop.run_until(task.done, time_max=time_max, callbacks_max=100_000)
    return task.result()


@pytest.fixture
def loop() -> SimLoop:
    return SimLoop()


@pytest.fixture
def process(loop: SimLoop) -> Process:
    return Process(loop, "host")


def test_an_hour_of_sleep_advances_the_simulated_clock_by_an_hour(loop, process) -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(loop, process, sleep(), time_max=4000) == 3600


def test_callbacks_run_in_order_of_time_and_then_of_scheduling(loop, process) -> None:
    seen: list[str] = []

    async def schedule() -> None:
        running = asyncio.get_running_loop()
        running.call_later(2, seen.append, "late")
        running.call_later(1, seen.append, "first at one")
        running.call_later(1, seen.append, "second at one")
        running.call_soon(seen.append, "soon")
        running.call_later(0, seen.append, "in no time")
        await asyncio.sleep(3)

    run(loop, process, schedule())
    assert seen == ["soon", "in no time", "first at one", "second at one", "late"]


def test_a_cancelled_timer_does_not_run(loop, process) -> None:
    seen: list[str] = []

    async def cancel() -> None:
        handle = asyncio.get_running_loop().call_later(1, seen.append, "no")
        handle.cancel()
        await asyncio.sleep(2)

    run(loop, process, cancel())
    assert seen == []


def test_timeouts_of_asyncio_work(loop, process) -> None:
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(loop, process, wait()) == 5


def test_exceptions_are_raised_in_the_awaiting_task(loop, process) -> None:
    async def fail() -> None:
        raise LookupError("here")

    async def wait() -> None:
        with pytest.raises(LookupError):
            await asyncio.ensure_future(fail())

    run(loop, process, wait())


def test_a_loop_without_callbacks_is_reported(loop, process) -> None:
    with pytest.raises(Stuck, match="no callback is left"):
        run(loop, process, asyncio.Event().wait())


def test_exceeding_the_time_limit_is_reported(loop, process) -> None:
    with pytest.raises(Stuck, match="the time limit is reached"):
        run(loop, process, asyncio.sleep(10), time_max=9)


def test_exceeding_the_number_of_callbacks_is_reported(loop, process) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="callbacks"):
        run(loop, process, spin())


def test_threads_and_sockets_raise_not_implemented(loop, process) -> None:
    async def ask() -> None:
        with pytest.raises(NotImplementedError):
            await asyncio.to_thread(len, "x")
        with pytest.raises(NotImplementedError):
            asyncio.get_running_loop().add_reader(0, print)

    run(loop, process, ask())


def test_a_killed_process_stops_without_running_finally(loop, process) -> None:
    victim = Process(loop, "victim")
    seen: list[str] = []

    async def live() -> None:
        try:
            while True:
                seen.append("lives")
                await asyncio.sleep(1)
        finally:
            seen.append("finally")

    async def watch() -> None:
        victim.spawn(live())
        await asyncio.sleep(2.5)
        victim.kill()
        await asyncio.sleep(5)

    run(loop, process, watch())
    assert seen == ["lives"] * 3


def test_a_paused_process_gets_all_callbacks_when_it_resumes(loop, process) -> None:
    victim = Process(loop, "victim")
    seen: list[tuple[float, int]] = []

    async def live() -> None:
        for number in range(4):
            seen.append((asyncio.get_running_loop().time(), number))
            await asyncio.sleep(1)

    async def watch() -> None:
        victim.spawn(live())
        await asyncio.sleep(0.5)
        victim.pause()
        await asyncio.sleep(5)
        victim.resume()
        await asyncio.sleep(5)

    run(loop, process, watch())
    assert seen == [(0.0, 0), (5.5, 1), (6.5, 2), (7.5, 3)]


def test_a_task_keeps_its_process_when_another_process_wakes_it(loop, process) -> None:
    other = Process(loop, "other")
    hosts: list[str] = []

    async def wait(event: asyncio.Event) -> None:
        await event.wait()
        found = current_process()
        assert found is not None
        hosts.append(found.host)

    async def wake() -> None:
        event = asyncio.Event()
        task = other.spawn(wait(event))
        await asyncio.sleep(1)
        event.set()
        await task

    run(loop, process, wake())
    assert hosts == ["other"]


def test_dispose_closes_unfinished_coroutines_without_warnings(loop, process, recwarn) -> None:
    seen: list[str] = []

    async def live() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("closed")
            asyncio.get_running_loop().call_soon(seen.append, "too late")

    process.spawn(live())
    run(loop, process, asyncio.sleep(1))
    loop.dispose()
    assert seen == ["closed"]
    assert not recwarn.list
