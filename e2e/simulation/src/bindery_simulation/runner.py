"""Run a search: numbered pieces of work in several processes, within a budget, with progress on standard error.

Processes are forked, so that a mutant of the parent applies in them. If a piece hangs, even in native code, its process
ends with a traceback of every thread, and the search ends with an error.
"""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Final, Protocol, TypeVar

import structlog

T = TypeVar("T")

PIECE_S_MAX: Final = 300
"""Maximum time in seconds of one piece on a busy machine. Most pieces take less than five seconds."""
PROGRESS_S: Final = 10.0
"""Time in seconds between two lines of progress."""

_clock = time.monotonic


class Tally(Protocol):
    """Sums over the pieces of a search."""

    unit: ClassVar[str]
    """Unit of `count`, in the plural."""

    @property
    def count(self) -> int: ...
    @property
    def failed(self) -> Sequence[Any]: ...
    def add(self, part: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits at which a search ends. Pieces in progress are finished and counted."""

    seconds: float | None = None
    count_max: int = sys.maxsize
    """Limit of the tally's count."""
    failures_max: int = 5
    jobs: int = 1
    """Number of processes."""


def search(work: Callable[[int], Any], pieces: Iterable[int], tally: Tally, budget: Budget) -> float:
    """Run pieces and add their results to `tally` until no piece or no budget is left. Return the time in seconds."""
    began = reported = _clock()
    end = began + (float("inf") if budget.seconds is None else budget.seconds)

    def goes_on() -> bool:
        return tally.count < budget.count_max and len(tally.failed) < budget.failures_max and _clock() < end

    for part in run_pieces(work, pieces, jobs=budget.jobs, goes_on=goes_on):
        tally.add(part)
        if (now := _clock()) - reported >= PROGRESS_S:
            reported = now
            sys.stderr.write(f"... {tally.count} {tally.unit}, {len(tally.failed)} violations, {now - began:.0f} s\n")
    return _clock() - began


def run_pieces(
    work: Callable[[int], T], pieces: Iterable[int], *, jobs: int, goes_on: Callable[[], bool]
) -> Iterator[T]:
    """Yield the results in the order of completion. Raises BrokenProcessPool if a process has ended."""
    remaining = iter(pieces)
    if jobs == 1:
        for piece in remaining:
            if not goes_on():
                return
            yield quietly(work, piece)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        running: set[Future[T]] = set()
        while True:
            if goes_on():
                running |= {pool.submit(quietly, work, one) for one in islice(remaining, jobs + 1 - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def quietly(work: Callable[[int], T], piece: int) -> T:
    """Run one piece without the log lines of the product, and end the process if it takes longer than PIECE_S_MAX."""
    faulthandler.dump_traceback_later(PIECE_S_MAX, exit=True, file=2)
    try:
        with without_logs():
            return work(piece)
    finally:
        faulthandler.cancel_dump_traceback_later()
        collect()


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Suppress the log lines of the product within the block."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


_has_frozen = False


def collect() -> None:
    """Collect garbage between two runs. The first call exempts all modules imported so far from later collections."""
    global _has_frozen
    gc.collect()
    if not _has_frozen:
        _has_frozen = True
        gc.freeze()
