"""Failed parts are restarted; a part that fails repeatedly ends the process. On a simulated clock."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from bindery_recovery.death_watcher import DeathWatcher
from simulated import simulate


class Part:
    """Runs until the test ends it with a result or an error."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.cancelled = 0
        self._end: asyncio.Future[None] | None = None

    async def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        self.starts.append(loop.time())
        self._end = loop.create_future()
        try:
            await self._end
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def fail(self, error: Exception) -> None:
        assert self._end is not None
        self._end.set_exception(error)

    def stop(self) -> None:
        assert self._end is not None
        self._end.set_result(None)


def failing_after(seconds: float) -> tuple[Callable[[], Awaitable[None]], list[float]]:
    starts: list[float] = []

    async def part() -> None:
        starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        raise ValueError("broken")

    return part, starts


def test_a_part_that_raises_or_returns_is_started_again_and_the_others_run_on() -> None:
    async def scenario() -> None:
        exits: list[str] = []
        watcher, one, other = DeathWatcher(ask_exit=exits.append, pause_s=1.0), Part(), Part()
        watcher.add("one", one)
        watcher.add("other", other)
        running = asyncio.create_task(watcher.run())
        await asyncio.sleep(10)
        one.fail(ValueError("broken"))
        await asyncio.sleep(0.5)
        assert watcher.dead == ["one"]
        await asyncio.sleep(0.6)
        assert watcher.dead == []
        one.stop()
        await asyncio.sleep(2.1)
        assert one.starts == [0, 11.0, 13.1]
        assert other.starts == [0]
        state = watcher.states["one"]
        assert (state.deaths, state.last_error) == (2, "it returned")
        running.cancel()
        await asyncio.wait([running])
        assert (one.cancelled, other.cancelled, exits) == (1, 1, [])

    simulate(scenario())


def test_pauses_double_up_to_a_limit_and_the_last_failure_requests_the_end_of_the_process() -> None:
    async def scenario() -> None:
        exits: list[str] = []
        watcher = DeathWatcher(ask_exit=exits.append, deaths_max=6, window_s=1000, pause_s=1.0, pause_max_s=5.0)
        part, starts = failing_after(0.0)
        other = Part()
        watcher.add("worker", part)
        watcher.add("other", other)
        await watcher.run()
        assert starts == [0, 1, 3, 7, 12, 17]
        assert exits == ["worker failed 6 times within 1000 s, the last time because: ValueError: broken"]
        assert other.cancelled == 1

    simulate(scenario())


def test_failures_far_apart_never_end_the_process() -> None:
    async def scenario() -> None:
        exits: list[str] = []
        watcher = DeathWatcher(ask_exit=exits.append, deaths_max=3, window_s=100, pause_s=1.0)
        part, starts = failing_after(60.0)
        watcher.add("worker", part)
        running = asyncio.create_task(watcher.run())
        await asyncio.sleep(10_000)
        assert exits == []
        assert len(starts) > 100
        assert all(later - earlier <= 62 for earlier, later in itertools.pairwise(starts))
        running.cancel()
        await asyncio.wait([running])

    simulate(scenario())


def test_a_part_whose_awaited_task_is_cancelled_is_restarted() -> None:
    async def scenario() -> None:
        exits: list[str] = []
        watcher = DeathWatcher(ask_exit=exits.append, deaths_max=3, window_s=100, pause_s=1.0)
        starts = []

        async def worker() -> None:
            starts.append(asyncio.get_running_loop().time())
            awaited = asyncio.ensure_future(asyncio.sleep(10))
            asyncio.get_running_loop().call_later(0.5, awaited.cancel)
            await awaited

        other = Part()
        watcher.add("worker", worker)
        watcher.add("other", other)
        await watcher.run()
        assert starts == [0, 1.5, 4]
        assert exits == [
            "worker failed 3 times within 100 s, the last time because: a task that it awaited was cancelled"
        ]
        assert other.cancelled == 1

    simulate(scenario())


def test_if_a_watching_task_ends_the_process_is_requested_to_end() -> None:
    async def scenario() -> None:
        exits: list[str] = []
        watcher = DeathWatcher(ask_exit=exits.append)
        other = Part()
        watcher.add("worker", Part())
        watcher.add("other", other)
        running = asyncio.create_task(watcher.run())
        await asyncio.sleep(1)
        (keeper,) = [task for task in asyncio.all_tasks() if task.get_name() == "keep-worker"]
        keeper.cancel()
        await asyncio.wait_for(running, 5)
        assert exits == ["keep-worker ended"]
        assert other.cancelled == 1

    simulate(scenario())
