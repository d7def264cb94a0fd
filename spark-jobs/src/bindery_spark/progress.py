"""How far an audit is, on stderr: a bar with what is left on a terminal, a line now and then elsewhere."""

import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

POLL_S: Final = 0.5
LINE_INTERVAL_S: Final = 10.0
MIB: Final = 2**20
SMALL: Final = 2**20
"""Bytes that a group counts at least: of ledgers without a known size something is read, too."""


class AuditProgress(Protocol):
    """What an audit or an export reports while it runs."""

    def plan(self, size: int, done: int, groups: int) -> None:
        """Report the plan: bytes of all groups, bytes that an earlier process read already, number of groups."""
        ...

    def group(self, number: int, ledgers: int, size: int) -> None:
        """Report that a group begins. `size`: its bytes."""
        ...

    def done(self, size: int) -> None:
        """Report that the group ended."""
        ...

    def phase(self, words: str) -> None: ...


class QuietProgress:
    """Prints nothing."""

    def plan(self, size: int, done: int, groups: int) -> None:
        pass

    def group(self, number: int, ledgers: int, size: int) -> None:
        pass

    def done(self, size: int) -> None:
        pass

    def phase(self, words: str) -> None:
        pass


class TerminalProgress:
    """A bar in bytes of payload of all copies. `with` it. `clock`: monotonic, seconds.

    Told are bytes; how far the bar is, and what is left, counts SMALL for each group besides.
    """

    def __init__(self, spark: SparkSession, *, clock: Callable[[], float]) -> None:
        self._spark = spark
        self._clock = clock
        console = Console(file=sys.stderr)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=console, transient=True, disable=not self._is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=None, told="")
        self._ended = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._groups = self._total = self._done = self._size = 0
        self._bytes_total = self._bytes_done = 0
        self._began = self._said = clock()

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        self._poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._bar.stop()
        self._poller.join()

    def plan(self, size: int, done: int, groups: int) -> None:
        self._groups, self._total, self._done = groups, size + groups * SMALL, done
        self._bytes_total, self._bytes_done = size, done
        self._bar.update(self._task, total=self._total, completed=done, told=self._told())
        self._began, self._done_before = self._clock(), done

    def group(self, number: int, ledgers: int, size: int) -> None:
        self._size = size + SMALL
        self._bar.update(self._task, description=f"group {number + 1} of {self._groups}, {ledgers} ledgers")

    def done(self, size: int) -> None:
        self._done += size + SMALL
        self._bytes_done += size
        self._size = 0
        self._bar.update(self._task, completed=self._done, told=self._told())
        self._say()

    def phase(self, words: str) -> None:
        self._bar.update(self._task, description=words)

    def _say(self) -> None:
        now = self._clock()
        if self._is_terminal or now - self._said < LINE_INTERVAL_S:
            return
        self._said = now
        rate = (self._done - self._done_before) / max(now - self._began, 0.001)
        left_s = (self._total - self._done) / rate if rate > 0 else 0.0
        print(f"{self._told()} read, about {left_s:.0f} s left", file=sys.stderr, flush=True)

    def _told(self) -> str:
        return f"{self._bytes_done / MIB:.1f} of {self._bytes_total / MIB:.1f} MiB"

    def _poll(self) -> None:
        """Between two groups the bar goes on by what Spark's tasks have done of the present one."""
        tracker = self._spark.sparkContext.statusTracker()
        while not self._ended.wait(POLL_S):
            infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = sum(info.numTasks for info in infos if info is not None)
            ready = sum(info.numCompletedTasks for info in infos if info is not None)
            if tasks and self._size:
                self._bar.update(self._task, completed=self._done + self._size * ready // tasks)
