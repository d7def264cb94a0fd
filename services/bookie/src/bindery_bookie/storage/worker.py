"""Worker: the one door between the event loop and work that blocks.

The engine hands over a job and goes on; the job's result comes back to the loop in one call. Jobs of one worker run one
after the other in the order they were given, so that a worker is also the owner of the files it writes.

Cost: a hop to the thread and back needs the interpreter lock twice. While the loop is busy a thread waits for it up to
`sys.getswitchinterval()` (the process sets 0.2-0.5 ms; Python's default of 5 ms would show in every acknowledgement).
That is why jobs are batches: one for a whole journal group, one for all cold reads that piled up.
"""

import queue
import threading
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Done = Callable[[Any, BaseException | None], None]
"""Gets (result, None) or (None, error), in the event loop."""


class Worker(Protocol):
    """Runs jobs in order, away from the caller."""

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        """Run `job` after the jobs before it, then `done` in the loop. Never blocks."""
        ...

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """For jobs: run `callback(*args)` in the loop, before the job's own `done`."""
        ...

    def close(self) -> None:
        """Take no more jobs; the ones submitted still run. Returns when the last has (at most 30 s)."""
        ...


class ThreadWorker:
    """A Worker with a thread of its own."""

    CLOSE_TIMEOUT_S = 30.0

    def __init__(self, name: str, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.put((job, done))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            if not self._loop.is_closed():
                raise

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(self.CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                result = job()
            except BaseException as error:
                self.post(done, None, error)
            else:
                self.post(done, result, None)
            del item, job, done  # do not keep a group's buffers alive while idle


async def run_in(worker: Worker, job: Callable[[], T]) -> T:
    """Await one job's result; raises what it raised.

    Cancelling the caller does not stop the job.
    """
    future: Future[T] = get_running_loop().create_future()

    def done(result: T, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    worker.submit(job, done)
    return await future
