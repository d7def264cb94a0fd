"""Run a coroutine on simulated time: hours pass in milliseconds, and every run is the same."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from bindery_simulation.loop import Process, SimLoop

T = TypeVar("T")


def simulate(work: Coroutine[Any, Any, T], *, time_max: float = 30 * 86_400.0, callbacks_max: int = 5_000_000) -> T:
    """Return the result of `work`. Raises Stuck if it waits for an event that cannot happen, and any exception of a
    callback."""
    loop = SimLoop()
    broken: list[dict[str, Any]] = []
    loop.on_exception = broken.append
    task = Process(loop, "here").spawn(work)
    try:
        loop.run_until(task.done, time_max=time_max, callbacks_max=callbacks_max)
        result = task.result()
        assert not broken, broken
        return result
    finally:
        loop.dispose()
