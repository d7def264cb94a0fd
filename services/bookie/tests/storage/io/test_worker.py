"""ThreadWorker: jobs run in order, whether in the worker or in the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_bookie.storage.io.worker import ThreadWorker, close_worker, close_workers, submit_short


@pytest.fixture
def here() -> int:
    return threading.get_ident()


@pytest.fixture
async def worker() -> AsyncIterator[ThreadWorker]:
    worker = ThreadWorker("test", asyncio.get_running_loop())
    yield worker
    worker.close()


async def test_a_short_job_runs_in_the_loop_if_no_other_job_is_unfinished(worker: ThreadWorker, here: int) -> None:
    heard: list[Any] = []
    submit_short(worker, threading.get_ident, lambda result, error: heard.append((result, error)))
    assert heard == [(here, None)]


async def test_a_short_job_runs_after_unfinished_jobs(worker: ThreadWorker, here: int) -> None:
    ready, heard, over = threading.Event(), [], asyncio.Event()
    worker.submit(lambda: ready.wait(30) and "first", lambda result, error: heard.append(result))

    def done(result: Any, error: BaseException | None) -> None:
        heard.append("second" if result != here else "too soon")
        over.set()

    submit_short(worker, threading.get_ident, done)
    assert heard == []
    ready.set()
    await asyncio.wait_for(over.wait(), 30)
    assert heard == ["first", "second"]
    submit_short(worker, threading.get_ident, lambda result, error: heard.append(result))
    assert heard[2] == here


async def test_a_short_job_may_be_submitted_by_the_callback_of_another(worker: ThreadWorker, here: int) -> None:
    heard: list[Any] = []
    submit_short(
        worker,
        lambda: 1,
        lambda first, _: submit_short(worker, lambda: 2, lambda second, _: heard.extend((first, second))),
    )
    assert heard == [1, 2]


async def test_the_error_of_a_short_job_is_passed_to_its_callback(worker: ThreadWorker) -> None:
    heard: list[Any] = []
    submit_short(worker, lambda: 1 // 0, lambda result, error: heard.append((result, type(error))))
    assert heard == [(None, ZeroDivisionError)]
    submit_short(worker, lambda: 3, lambda result, error: heard.append(result))
    assert heard[1] == 3


async def test_other_workers_run_a_short_job_like_any_job() -> None:
    class Slow:
        def __init__(self) -> None:
            self.jobs: list[Any] = []

        def submit(self, job: Any, done: Any) -> None:
            self.jobs.append((job, done))

        def post(self, callback: Any, *args: Any) -> None: ...

        def close(self) -> None: ...

    slow = Slow()
    submit_short(slow, lambda: 1, lambda result, error: None)
    assert len(slow.jobs) == 1


async def test_closing_a_worker_waits_for_its_last_job_without_blocking_the_loop() -> None:
    worker = ThreadWorker("test", asyncio.get_running_loop())
    ready, heard = threading.Event(), []
    worker.submit(lambda: ready.wait(30), lambda result, error: heard.append(result))
    closing = asyncio.create_task(close_worker(worker))
    await asyncio.sleep(0.01)
    assert not closing.done()
    ready.set()
    await asyncio.wait_for(closing, 30)
    await asyncio.sleep(0)
    assert heard == [True]


async def test_all_workers_end_if_the_wait_for_the_first_is_cancelled() -> None:
    workers = [ThreadWorker(f"test-{number}", asyncio.get_running_loop()) for number in range(3)]
    ready = threading.Event()
    workers[0].submit(lambda: ready.wait(30), lambda result, error: None)
    closing = asyncio.create_task(close_workers(workers))
    await asyncio.sleep(0.01)
    closing.cancel()
    await asyncio.wait({closing})
    ready.set()
    async with asyncio.timeout(30):
        while any(thread.name.startswith("test-") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
