"""Runner: numbered pieces of work, in as many processes as asked, until the time is over or enough has failed.

A piece that hangs, in native code too, ends its process with a traceback of every thread: a failure, and no wait.
"""

import faulthandler
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import Final, TypeVar

import structlog

T = TypeVar("T")

PIECE_S_MAX: Final = 300
"""Seconds that one piece may take on a busy machine. They take two to five."""


def quietly(work: Callable[[int], T], piece: int) -> T:
    """Run one piece without the product's log lines, watched. In the process that does the work."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    faulthandler.dump_traceback_later(PIECE_S_MAX, exit=True, file=2)
    try:
        return work(piece)
    finally:
        faulthandler.cancel_dump_traceback_later()
        structlog.configure(**before)
        gc.collect()


def run_pieces(
    work: Callable[[int], T], pieces: Iterable[int], *, jobs: int, goes_on: Callable[[], bool]
) -> Iterator[tuple[int, T]]:
    """(piece, result) in the order in which they are done. Raises BrokenProcessPool when a process died."""
    remaining = iter(pieces)
    if jobs == 1:
        for piece in remaining:
            if not goes_on():
                return
            yield piece, quietly(work, piece)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running: dict[Future[T], int] = {}
        while True:
            if goes_on():
                for piece in islice(remaining, jobs + 1 - len(running)):
                    running[pool.submit(quietly, work, piece)] = piece
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
