"""The end of a process: after a signal, at once after a later second signal, and with its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from bindery_kit.process import runtime

SERVICE = """
import asyncio, os, sys
from bindery_kit.observability import logs
from bindery_kit.process import runtime

logs.configure(service="test")

async def main(shutdown):
    print("up", os.getpid(), flush=True)
    await shutdown.wait()
    print("stopping", shutdown.reason, flush=True)
    if "slow" in sys.argv:
        await asyncio.sleep(60)

sys.exit(runtime.run(main))
"""

PARENT = """
import os, subprocess, sys
environment = {**os.environ, "BINDERY_DIE_WITH_PARENT": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
child.wait()
"""


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_the_shutdown(number: signal.Signals) -> None:
    with started(SERVICE) as process:
        assert line(process).startswith("up")
        process.send_signal(number)
        assert line(process) == f"stopping {number.name}"
        assert process.wait(timeout=30) == 0


def test_a_later_second_signal_ends_the_process_at_once() -> None:
    with started(SERVICE, "slow") as process:
        assert line(process).startswith("up")
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("stopping")
        deadline = time.monotonic() + 30
        while process.poll() is None:
            assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == 128 + signal.SIGTERM


def test_an_immediate_second_signal_is_ignored() -> None:
    with started(SERVICE.replace("sleep(60)", "sleep(0.3)"), "slow") as process:
        assert line(process).startswith("up")
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("stopping")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    with started(PARENT, SERVICE) as parent:
        child = int(line(parent).split()[1])
        parent.kill()
        # The pipe ends when its last writer, the child, is gone.
        assert parent.stdout is not None
        assert parent.stdout.read() == "stopping SIGTERM\n"
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)  # succeeds only if this process adopts orphans
            try:
                os.kill(child, 0)
            except ProcessLookupError:
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_child_whose_parent_has_ended_does_not_start() -> None:
    environment = {**os.environ, "BINDERY_DIE_WITH_PARENT": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")


async def test_a_shutdown_cancels_work_even_if_its_cleanup_blocks() -> None:
    """Work whose clean-up takes long is cancelled a second time."""
    shutdown, cancelled = runtime.Shutdown(), []

    async def cling() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            await asyncio.Event().wait()

    working = asyncio.ensure_future(runtime.unless_shutdown(shutdown, cling()))
    await asyncio.sleep(0)
    shutdown.request("SIGTERM")
    began = time.monotonic()
    assert await working is None
    assert time.monotonic() - began < 2 * runtime.CANCEL_TIMEOUT_S + 15
    assert cancelled == [1]


async def test_work_that_ends_before_the_shutdown_returns_its_result_or_error() -> None:
    async def fail() -> None:
        raise ValueError("no")

    shutdown = runtime.Shutdown()
    assert await runtime.unless_shutdown(shutdown, asyncio.sleep(0, 5)) == 5
    with pytest.raises(ValueError, match="no"):
        await runtime.unless_shutdown(shutdown, fail())


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    script = """
import resource
from bindery_kit.process import runtime

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 700))

async def main(shutdown):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    return 0

runtime.run(main)
"""
    with started(script) as process:
        assert "process_started" in line(process)
        assert line(process) == "700 700"
