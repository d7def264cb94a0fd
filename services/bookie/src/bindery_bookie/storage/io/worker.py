"""Worker: the one door between the event loop and work that blocks.

The engine hands over a job and goes on; the job's result comes back to the loop in one call. Jobs of one worker run one
after the other in the order they were given, so that a worker is also the owner of the files it writes.

Cost: a hop to the thread and back needs the interpreter lock twice. While the loop is busy a thread waits for it up to
`sys.getswitchinterval()` (the process sets 0.2-0.5 ms; Python's default of 5 ms would show in every acknowledgement).
That is why jobs are batches: one for a whole journal group, one for all cold reads that piled up. A lone job that is
over sooner than two hops is better done in the loop itself: `submit_short`.
"""

import queue
import threading
import time
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections.abc import Callable, Sequence
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
        """Take no more jobs; the ones submitted still run. Returns when the last has (at most 30 s).

        In the event loop `close_worker` is meant."""
        ...


class ThreadWorker:
    """A Worker with a thread of its own."""

    CLOSE_TIMEOUT_S = 30.0

    def __init__(self, name: str, loop: AbstractEventLoop, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep`: of a thread, for seconds."""
        self._loop = loop
        self.sleep = sleep
        self._under_way = 0
        """Jobs whose `done` did not run yet. Event loop only."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._under_way += 1
        self._jobs.put((job, done))

    def run_here(self, job: Callable[[], Any], done: Done) -> None:
        """Run `job` in the event loop, which stands still meanwhile, and then `done`. `submit` it instead while others
        are under way, so that the order holds."""
        if self._under_way:
            self.submit(job, done)
            return
        self._under_way += 1
        try:
            result = job()
        except Exception as error:
            self._finished(done, None, error)
        else:
            self._finished(done, result, None)

    def _finished(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._under_way -= 1
        done(result, error)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            if not self._loop.is_closed():
                raise

    def ask_to_end(self) -> None:
        """After the jobs that are waiting. Returns at once."""
        self._jobs.put(None)

    def close(self) -> None:
        self.ask_to_end()
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
            del item, job, done  # do not keep a group's buffers alive while idle


def submit_short(worker: Worker, job: Callable[[], Any], done: Done) -> None:
    """Have `worker` do a job that is likely over before a hand-over would be: perhaps here and now, `done` included.

    Only threads are worth going without; other workers (a simulation's) take it as any job.
    """
    if isinstance(worker, ThreadWorker):
        worker.run_here(job, done)
    else:
        worker.submit(job, done)


def nap(worker: Worker, seconds: float) -> bool:
    """Have the event loop stand still for a moment, since its own timers know no less than a millisecond. False: it did
    not. Where no thread works, as in a simulation, there is no core to leave to others either."""
    if not isinstance(worker, ThreadWorker):
        return False
    worker.sleep(seconds)
    return True


async def close_worker(worker: Worker) -> None:
    """As its `close`, while the event loop goes on: nobody knows how long a job takes that is under way."""
    if isinstance(worker, ThreadWorker):
        await get_running_loop().run_in_executor(None, worker.close)
    else:
        worker.close()


async def close_workers(workers: Sequence[Worker]) -> None:
    """All of them end, also if the caller has no time to wait for it."""
    for worker in workers:
        if isinstance(worker, ThreadWorker):
            worker.ask_to_end()
    for worker in workers:
        await close_worker(worker)


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
