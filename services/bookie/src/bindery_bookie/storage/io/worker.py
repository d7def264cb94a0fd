"""Worker: run blocking jobs outside the event loop.

All blocking work of the storage goes through a worker. The engine submits a job and continues; the job's result comes
back to the loop in one call. The jobs of a worker run one after the other, in the order of their submission, so that a
worker can own the files that it writes.

Cost: passing a job to the thread and its result back needs the interpreter lock twice. While the loop is busy, a thread
waits for the lock up to `sys.getswitchinterval()` (the process sets 0.2-0.5 ms; Python's default of 5 ms would delay
every acknowledgement). Jobs are therefore batches: one for a whole journal group, one for all waiting cold reads. A
single job that takes less time than this is better run in the loop itself: see `submit_short`.
"""

import queue
import threading
import time
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Done = Callable[[Any, BaseException | None], None]
"""Called with (result, None) or (None, error), in the event loop."""


class Worker(Protocol):
    """Runs jobs in order, without blocking the caller."""

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        """Run `job` after the jobs submitted before, then `done` in the loop. Never blocks."""
        ...

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback(*args)` in the loop, before the `done` of the current job. Called by jobs."""
        ...

    def close(self) -> None:
        """Accept no more jobs, and return once the submitted ones have ended, after 30 s at the latest.

        In the event loop, use `close_worker`.
        """
        ...


class ThreadWorker:
    """A Worker with its own thread."""

    CLOSE_TIMEOUT_S = 30.0

    def __init__(self, name: str, loop: AbstractEventLoop, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep`: block the calling thread for this number of seconds."""
        self._loop = loop
        self.sleep = sleep
        self._unfinished = 0
        """Number of jobs whose `done` did not run yet. Event loop only."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._unfinished += 1
        self._jobs.put((job, done))

    def run_here(self, job: Callable[[], Any], done: Done) -> None:
        """Run `job` in the event loop, which blocks it, and then `done`. If other jobs are unfinished, submit it, to
        keep the order."""
        if self._unfinished:
            self.submit(job, done)
            return
        self._unfinished += 1
        try:
            result = job()
        except Exception as error:
            self._finished(done, None, error)
        else:
            self._finished(done, result, None)

    def _finished(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._unfinished -= 1
        done(result, error)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed, so the result is not needed
            if not self._loop.is_closed():
                raise

    def request_stop(self) -> None:
        """Make the thread end after the submitted jobs. Returns at once."""
        self._jobs.put(None)

    def close(self) -> None:
        self.request_stop()
        self._thread.join(self.CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                result = job()
            except BaseException as error:
                self.post(self._finished, done, None, error)
            else:
                self.post(self._finished, done, result, None)
            del item, job, done  # do not keep the buffers of a group in memory while idle


def submit_short(worker: Worker, job: Callable[[], Any], done: Done) -> None:
    """Run a short job and `done` in the caller if possible, because passing the job to a thread may take longer.

    Only a ThreadWorker does so. Other workers, such as those of a simulation, run it like any job.
    """
    if isinstance(worker, ThreadWorker):
        worker.run_here(job, done)
    else:
        worker.submit(job, done)


def pause(worker: Worker, seconds: float) -> bool:
    """Block the event loop for less than a millisecond, which is below the resolution of its timers.

    Return False, without a pause, if `worker` has no thread, as in a simulation: a pause would then free no processor
    time for other threads.
    """
    if not isinstance(worker, ThreadWorker):
        return False
    worker.sleep(seconds)
    return True


async def close_worker(worker: Worker) -> None:
    """Close a worker without blocking the event loop, because a running job may take long."""
    if isinstance(worker, ThreadWorker):
        await get_running_loop().run_in_executor(None, worker.close)
    else:
        worker.close()


async def close_workers(workers: Sequence[Worker]) -> None:
    """Close workers. All are requested to stop before the first wait, in case the caller is cancelled."""
    for worker in workers:
        if isinstance(worker, ThreadWorker):
            worker.request_stop()
    for worker in workers:
        await close_worker(worker)


async def run_in(worker: Worker, job: Callable[[], T]) -> T:
    """Run one job and return its result; raises the job's error. Cancelling the caller does not stop the job."""
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
