"""Run the jobs of a storage engine in the event loop, without threads. Each job runs without interruption, after a
random time."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from bindery_simulation.loop import SimLoop


class PowerLost(BaseException):
    """Raised when a machine has lost power. Not an Exception, so that no code of the product handles it."""


class SimWorker:
    """A `bindery_bookie.storage.io.worker.Worker`. `job_s` returns the random time in seconds of the next job."""

    def __init__(self, loop: SimLoop, job_s: Callable[[], float]) -> None:
        self._loop = loop
        self._job_s = job_s
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()

    def submit(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._jobs.append((job, done))
        if len(self._jobs) == 1:
            self._loop.call_later(self._job_s(), self._run)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(callback, *args)

    def close(self) -> None:
        """Check that no job is left, because this call cannot wait for jobs."""
        assert not self._jobs

    def _run(self) -> None:
        job, done = self._jobs[0]
        try:
            result, error = job(), None
        except PowerLost:
            return
        except Exception as raised:
            result, error = None, raised
        self._jobs.popleft()
        if self._jobs:
            self._loop.call_later(self._job_s(), self._run)
        done(result, error)


def job_times(rng: random.Random, *, slow: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns the random time of a job in seconds.

    The time is about 0.5 ms, or sometimes 10 ms, multiplied by `slow()`, which is above 1 for a slow disk.
    """

    def draw() -> float:
        base_s = 0.010 if rng.random() < 0.05 else 0.0005
        return base_s * (0.5 + rng.random()) * slow()

    return draw
