"""Show the progress of a job on stderr: a bar on a terminal, otherwise a line every LINE_INTERVAL_S seconds."""

import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

POLL_S: Final = 0.5
"""Interval in seconds at which the bar is updated within a group."""
LINE_INTERVAL_S: Final = 10.0
"""Minimum interval in seconds between two lines."""
MIB: Final = 2**20
SMALL: Final = 2**20
"""Bytes that are added to the size of each group, because the size of some ledgers is unknown."""


class AuditProgress(Protocol):
    """Receives the progress of an audit or an export."""

    def plan(self, size: int, done: int, groups: int) -> None:
        """Report the plan: bytes of all groups, bytes that an earlier process read already, number of groups."""
        ...

    def group(self, number: int, ledgers: int, size: int) -> None:
        """Report that a group begins. `size`: its bytes."""
        ...

    def done(self, size: int) -> None:
        """Report that the group ended."""
        ...

    def phase(self, text: str) -> None:
        """Report what the audit does now."""
        ...


class QuietProgress:
    """Prints nothing."""

    def plan(self, size: int, done: int, groups: int) -> None:
        pass

    def group(self, number: int, ledgers: int, size: int) -> None:
        pass

    def done(self, size: int) -> None:
        pass

    def phase(self, text: str) -> None:
        pass


class TerminalProgress:
    """A progress bar in payload bytes of all copies. A context manager. `clock`: monotonic, in seconds.

    The text shows bytes. The bar and the estimate of the remaining time also count SMALL for each group.
    """

    def __init__(self, spark: SparkSession, *, clock: Callable[[], float]) -> None:
        self._spark = spark
        self._clock = clock
        console = Console(file=sys.stderr)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, size="")
        self._ended = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._groups = self._total = self._done = self._size = 0
        self._bytes_total = self._bytes_done = 0
        self._began = self._printed_at = clock()

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
        self._bar.update(self._task, total=self._total, completed=done, size=self._size_text())
        self._began, self._done_before = self._clock(), done

    def group(self, number: int, ledgers: int, size: int) -> None:
        self._size = size + SMALL
        self._bar.update(self._task, description=f"group {number + 1} of {self._groups}, {ledgers} ledgers")

    def done(self, size: int) -> None:
        self._done += size + SMALL
        self._bytes_done += size
        self._size = 0
        self._bar.update(self._task, completed=self._done, size=self._size_text())
        self._print_line()

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def _print_line(self) -> None:
        now = self._clock()
        if self._is_terminal or now - self._printed_at < LINE_INTERVAL_S:
            return
        self._printed_at = now
        rate = (self._done - self._done_before) / max(now - self._began, 0.001)
        left_s = (self._total - self._done) / rate if rate > 0 else 0.0
        print(f"{self._size_text()} read, about {left_s:.0f} s left", file=sys.stderr, flush=True)

    def _size_text(self) -> str:
        return f"{self._bytes_done / MIB:.1f} of {self._bytes_total / MIB:.1f} MiB"

    def _poll(self) -> None:
        """Advance the bar within a group by the fraction of Spark's tasks that are completed."""
        tracker = self._spark.sparkContext.statusTracker()
        while not self._ended.wait(POLL_S):
            infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = sum(info.numTasks for info in infos if info is not None)
            ready = sum(info.numCompletedTasks for info in infos if info is not None)
            if tasks and self._size:
                self._bar.update(self._task, completed=self._done + self._size * ready // tasks)
