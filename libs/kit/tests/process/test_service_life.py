"""The life cycle of a service: the causes of its end, the order of its stop steps, and its exit code."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog
from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_kit.observability.health import Health
from bindery_kit.process.runtime import EXIT_ERROR, EXIT_OK, EXIT_USAGE, Shutdown
from bindery_kit.process.service_life import ServiceLife, run_life


class RecordingService:
    """A service whose start records two steps around its parts. `failure`: raised at the end of the start."""

    def __init__(self, *, failure: Exception | None = None, step_fails: bool = False) -> None:
        self.shutdown = Shutdown()
        self.health = Health()
        self.life = ServiceLife("test", self.shutdown, self.health)
        self.stopped: list[str] = []
        self._failure = failure
        self._step_fails = step_fails

    def step(self, name: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            self.stopped.append(name)
            if self._step_fails and name == "outer":
                raise RuntimeError(name)

        return run

    async def part(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.append("part")

    async def start(self) -> None:
        self.life.on_stop(self.step("outer"))
        self.life.on_stop(self.life.cancel_parts)
        self.life.on_stop(self.step("inner"), event="inner_failed")
        self.life.start_part("part", self.part())
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        await self.life.stop()


async def run(service: RecordingService, **options: object) -> int:
    async with asyncio.timeout(30):
        return await run_life(lambda: service, service.shutdown, **options)  # type: ignore[arg-type]


async def test_a_requested_stop_runs_the_stop_steps_in_reverse_order() -> None:
    service = RecordingService()
    asyncio.get_running_loop().call_later(0.01, service.shutdown.request, "SIGTERM")
    assert await run(service) == EXIT_OK
    assert service.stopped == ["inner", "part", "outer"]


async def test_a_failed_start_runs_the_stop_steps_and_exits_with_an_error() -> None:
    service = RecordingService(failure=MetadataUnavailable("no zookeeper"))
    with structlog.testing.capture_logs() as logs:
        assert await run(service, failed_event="test_failed") == EXIT_ERROR
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["test_failed"]
    assert service.shutdown.reason == "no zookeeper"
    assert service.stopped == ["inner", "part", "outer"]


async def test_a_failed_part_stops_the_process_and_fails_liveness() -> None:
    service = RecordingService()

    async def fails() -> None:
        raise OSError(5, "Input/output error", "/data")

    async def start() -> None:
        await RecordingService.start(service)
        service.life.start_part("scrub", fails())

    service.start = start  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logs:
        assert await run(service) == EXIT_ERROR
    assert [(line["event"], line["part"]) for line in logs if line["log_level"] == "error"] == [("part_died", "scrub")]
    assert service.shutdown.reason.startswith("scrub ended: cannot use /data: Input/output error")
    assert not service.health.is_live
    assert service.stopped == ["inner", "part", "outer"]


async def test_a_shutdown_during_the_start_cancels_it_and_runs_the_stop_steps() -> None:
    service = RecordingService()

    async def start() -> None:
        await RecordingService.start(service)
        await asyncio.Event().wait()

    service.start = start  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(0.01, service.shutdown.request, "SIGTERM")
    assert await run(service) == EXIT_OK
    assert service.stopped == ["inner", "part", "outer"]


async def test_a_usage_error_ends_the_process_before_the_start() -> None:
    shutdown = Shutdown()

    def make() -> RecordingService:
        raise BadRequest("port in use")

    with structlog.testing.capture_logs() as logs:
        code = await run_life(make, shutdown, not_started_event="test_not_started", usage_errors=(BadRequest,))
    assert (code, shutdown.reason) == (EXIT_USAGE, "port in use")
    assert [line["event"] for line in logs] == ["test_not_started"]


async def test_an_error_of_a_step_without_an_event_is_raised_after_the_other_steps() -> None:
    service = RecordingService(step_fails=True)
    asyncio.get_running_loop().call_later(0.01, service.shutdown.request, "SIGTERM")
    with pytest.raises(RuntimeError, match="outer"):
        await run(service)
    assert service.stopped == ["inner", "part", "outer"]


async def test_a_step_with_an_event_is_cancelled_at_its_timeout_and_logged() -> None:
    life = ServiceLife("test", Shutdown(), Health())
    stopped: list[str] = []

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def next_step() -> None:
        stopped.append("next")

    life.on_stop(next_step)
    life.on_stop(hangs, event="step_hangs", timeout_s=0.01)
    with structlog.testing.capture_logs() as logs:
        await life.stop()
        await life.stop()
    assert stopped == ["next"]
    assert [line["event"] for line in logs] == ["step_hangs"]
