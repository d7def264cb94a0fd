"""Run a service process: event loop, signals, the link to its parent, and the final message.

`run(main)` starts uvloop, passes a `Shutdown` to `main`, and returns the exit code. SIGTERM and SIGINT request the
shutdown; a second signal after SECOND_SIGNAL_DELAY_S ends the process at once. `run_service` also reports the reason of
an exit code other than 0 through `last_words`: the error that ended `main`, or the reason of the shutdown.

Importing this module is cheap: a bookie serves its ledger port before any HTTP code is loaded.
"""

import asyncio
import atexit
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import uvloop
from bindery_core.errors import BinderyError
from bindery_core.version import VERSION

from bindery_kit.observability import last_words
from bindery_kit.observability.logs import error_fields, get_logger

SWITCH_INTERVAL_S: Final = 0.0005
"""Thread switch interval in seconds. Python's default of 5 ms would delay each fsync that ends while the loop is busy;
half a millisecond has no measurable cost."""

SECOND_SIGNAL_DELAY_S: Final = 1.0
"""Seconds in which a repeated signal is ignored: a process group, a parent that ends and its supervisor may each send
one."""

THREADS_TIMEOUT_S: Final = 2.0
"""Maximum seconds that helper threads delay the end after `main`. Waiting for a name server could take longer."""

DIE_WITH_PARENT: Final = "BINDERY_DIE_WITH_PARENT"
"""Name of the environment variable with the parent's pid. `bindery standalone` sets it for its children."""

OPEN_FILES_MAX: Final = 65_536
"""Value to which the limit of open files is raised."""

EXIT_OK: Final = 0
EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
CANCEL_TIMEOUT_S: Final = 1.0
"""Maximum seconds that cancelled work takes to release its resources."""
_PR_SET_PDEATHSIG: Final = 1

T = TypeVar("T")

log = get_logger(__name__)


class Shutdown:
    """The request to end the process, by a signal or by a part that cannot continue."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        self.exit_code = EXIT_OK

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str, *, exit_code: int = EXIT_OK) -> None:
        """Request the end of the process; only the first request counts."""
        if not self._event.is_set():
            self.reason = reason
            self.exit_code = exit_code
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def give_up(self, error: BaseException, *, exit_code: int = EXIT_ERROR) -> int:
        """End the process because of `error`, even if a shutdown was requested before. Returns `exit_code`."""
        self._event.set()
        self.reason = last_words.sentence_of(error)
        self.exit_code = exit_code
        return exit_code


async def unless_shutdown(shutdown: Shutdown, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or raise its error. If the shutdown comes first, cancel `work` and return None."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(shutdown.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        stopping.cancel()
        for _ in range(2):  # the second one also cancels its clean-up
            working.cancel()
            await asyncio.wait({working}, timeout=CANCEL_TIMEOUT_S)
        if working.done() and not working.cancelled():
            working.exception()  # retrieve the error, so that asyncio does not report it


Main = Callable[[Shutdown], Awaitable[int | None]]


def run_service(main: Main, *, program: str) -> int:
    """Like `run`, but report an error of `main` as the final message and return EXIT_ERROR.

    The process must end next: helper threads delay its end by THREADS_TIMEOUT_S at most.
    """

    async def with_last_words(shutdown: Shutdown) -> int:
        try:
            code = await main(shutdown)
        except (BinderyError, OSError) as error:
            log.error("process_failed", **error_fields(error))
            code = shutdown.give_up(error)
        except Exception as error:
            log.error("process_failed", exc_info=True, **error_fields(error))
            code = shutdown.give_up(error)
        code = shutdown.exit_code if code is None else code
        if code != EXIT_OK:
            last_words.say(program, shutdown.reason)
        _end_soon(code)
        return code

    return run(with_last_words)


def _end_soon(code: int) -> None:
    """End the process after THREADS_TIMEOUT_S even if a thread still waits. Everything is closed at this point."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.setitimer(signal.ITIMER_REAL, THREADS_TIMEOUT_S)
    # Disable the alarm when the threads have ended. Soon afterwards the interpreter removes all signal handlers, and
    # the alarm would kill the process.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def run(main: Main) -> int:
    """Run `main` and return its exit code, or that of the shutdown if it returns None. Raises the errors of `main`."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_open_files()
    parent = os.environ.pop(DIE_WITH_PARENT, None)
    if parent is not None and not die_with_parent(expected_parent=int(parent)):
        return EXIT_ERROR
    return uvloop.run(_with_signals(main))


def raise_open_files() -> None:
    """Raise the limit of open files to the hard limit, at most OPEN_FILES_MAX.

    Shells and init systems set 1024, which a few hundred clients and the logs of a bookie exceed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # not allowed on some systems; the limit stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _with_signals(main: Main) -> int:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()

    first_at: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            log.info("shutdown_requested", signal=number.name)
            shutdown.request(number.name)
        elif loop.time() - first_at >= SECOND_SIGNAL_DELAY_S:
            log.warning("killed_while_stopping", signal=number.name)
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    log.info("process_started", version=VERSION)
    try:
        code = await main(shutdown)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return shutdown.exit_code if code is None else code


def die_with_parent(*, expected_parent: int | None = None, number: signal.Signals = signal.SIGTERM) -> bool:
    """Have the kernel send this process the signal `number` when its parent ends, even by kill -9. Only on Linux.

    Returns False if the parent has already ended. Also usable as `preexec_fn` of a foreign program: it survives exec.
    """
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return expected_parent is None or os.getppid() == expected_parent
