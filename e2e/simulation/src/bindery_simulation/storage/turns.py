"""Run an engine in simulated time. Jobs of its workers run in the loop, after a random number of turns of the loop.

Many defects of a store appear only if two operations overlap. The seed determines how they overlap. A `TurnWorker` runs
a job without interruption. A `SteppingWorker` sometimes pauses a job before an operation of its disk, so that the loop
and the other workers continue.
"""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from bindery_simulation.disk import CrashableDisk
from bindery_simulation.loop import SimLoop

T = TypeVar("T")

TIME_S_MAX: Final = 600.0
"""Maximum simulated time of one run in seconds."""
CALLBACKS_MAX: Final = 2_000_000
"""Maximum number of callbacks of one run."""
_TURNS: Final = (0, 0, 1, 5)
_STEPPED_SHARE: Final = 0.5
_PAUSES_SHARE: Final = 0.3
_PAUSE_TURNS: Final = (0, 1, 5, 20)

Done = Callable[[Any, BaseException | None], None]
"""Called with the result and the error of a job."""


class TurnWorker:
    """A `bindery_bookie.storage.io.worker.Worker` without a thread."""

    def __init__(self, rng: random.Random) -> None:
        """Create the worker. Must be called in the event loop."""
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._is_running = False

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.append((job, done))
        if not self._is_running:
            self._is_running = True
            self._wait(self._rng.choice(_TURNS))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(callback, *args)

    def close(self) -> None:
        assert not self._jobs

    def _wait(self, turns: int) -> None:
        if turns:
            self._loop.call_soon(self._wait, turns - 1)
        else:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        job, done = self._jobs.popleft()
        self._finish(done, *_outcome(job))

    def _finish(self, done: Done, result: Any, error: Exception | None) -> None:
        if self._jobs:
            self._wait(self._rng.choice(_TURNS))
        else:
            self._is_running = False
        done(result, error)


def _outcome(job: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return job(), None
    except Exception as error:
        return None, error


class SteppingWorker(TurnWorker):
    """Runs some jobs in steps: between two operations of a `SteppingDisk`, the loop runs for some turns.

    A job that runs in steps has a thread, but the job and the loop never run at the same time.
    """

    def _run(self) -> None:
        if self._rng.random() >= _STEPPED_SHARE:
            super()._run()
            return
        job, done = self._jobs.popleft()
        self._continue(_Steps(job, self._rng), done)

    def _continue(self, steps: "_Steps", done: Done) -> None:
        turns = steps.run()
        if turns is None:
            assert steps.outcome is not None
            self._finish(done, *steps.outcome)
        else:
            self._rest(turns, steps, done)

    def _rest(self, turns: int, steps: "_Steps", done: Done) -> None:
        if turns:
            self._loop.call_soon(self._rest, turns - 1, steps, done)
        else:
            self._loop.call_soon(self._continue, steps, done)


class _Steps:
    """One job that runs in steps."""

    def __init__(self, job: Callable[[], Any], rng: random.Random) -> None:
        self.outcome: tuple[Any, Exception | None] | None = None
        self._rng = rng
        self._turns = 0
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, args=(job,), daemon=True)
        self._thread.start()

    def run(self) -> int | None:
        """Run to the next pause. Return the length of the pause in turns of the loop; None: the job is done."""
        self._go.release()
        self._back.acquire()
        if self.outcome is None:
            return self._turns
        self._thread.join()
        return None

    def pause(self) -> None:
        """Pause the job with probability _PAUSES_SHARE. Must be called in its thread."""
        if self._rng.random() < _PAUSES_SHARE:
            self._turns = self._rng.choice(_PAUSE_TURNS)
            self._back.release()
            self._go.acquire()

    def _work(self, job: Callable[[], Any]) -> None:
        self._go.acquire()
        _running.steps = self
        self.outcome = _outcome(job)
        self._back.release()


_running = threading.local()


class SteppingDisk(CrashableDisk):
    """A CrashableDisk that lets jobs of a `SteppingWorker` pause before operations of disk and index."""

    def _check_power(self) -> None:
        steps: _Steps | None = getattr(_running, "steps", None)
        if steps is not None:
            steps.pause()
        super()._check_power()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new loop. Raises the exception of `work`, the first exception of a callback, or Stuck."""
    loop = SimLoop()  # type: ignore[abstract]
    raised: list[BaseException] = []

    def remember(context: dict[str, Any]) -> None:
        raised.append(context.get("exception") or RuntimeError(context["message"]))

    loop.on_exception = remember
    task = loop.create_task(work)
    try:
        loop.run_until(lambda: task.done() or bool(raised), time_max=TIME_S_MAX, callbacks_max=CALLBACKS_MAX)
        if raised:
            raise raised[0]
        return task.result()
    finally:
        loop.dispose()
