"""Progress of a job: the bar on a terminal, the lines elsewhere, and the fraction of Spark's tasks within a group."""

import io
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_spark import progress as module
from bindery_spark.progress import TerminalProgress

MIB = 1_048_576


class Bar:
    """Replaces rich's bar: records what it shows."""

    def __init__(self, *_: object, console: Any, transient: bool, disable: bool) -> None:
        self.transient, self.disabled = transient, disable
        self.is_running = False
        self.shown: dict[str, Any] = {}
        self.on_update: Callable[[], None] = lambda: None

    def add_task(self, description: str, **fields: Any) -> str:
        self.shown = {"description": description, **fields}
        return "the task"

    def update(self, task: str, **fields: Any) -> None:
        assert task == "the task"
        self.shown |= fields
        self.on_update()

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False


class Stages:
    """Replaces Spark: its active stages as (tasks, completed tasks); None: Spark forgot the stage meanwhile."""

    def __init__(self, *stages: tuple[int, int] | None) -> None:
        self.stages = stages
        self._polls = 0
        self._polled = threading.Condition()
        self.sparkContext = self

    def polled(self) -> None:
        """Return after a whole poll that began after this call."""
        with self._polled:
            begun = self._polls
            assert self._polled.wait_for(lambda: self._polls >= begun + 2, timeout=60)

    def statusTracker(self) -> "Stages":
        return self

    def getActiveStageIds(self) -> list[int]:
        with self._polled:
            self._polls += 1
            self._polled.notify_all()
        return list(range(len(self.stages)))

    def getStageInfo(self, stage: int) -> SimpleNamespace | None:
        found = self.stages[stage]
        return None if found is None else SimpleNamespace(numTasks=found[0], numCompletedTasks=found[1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class World:
    """A progress with a given clock, a recorded bar and scripted stages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stream: io.TextIOBase, *stages: tuple[int, int] | None) -> None:
        bars: list[Bar] = []

        def made(*columns: object, **settings: Any) -> Bar:
            bars.append(Bar(*columns, **settings))
            return bars[-1]

        monkeypatch.setattr(module, "Progress", made)
        monkeypatch.setattr(sys, "stderr", stream)
        self.now_s = 0.0
        self.spark = Stages(*stages)
        self.progress = TerminalProgress(self.spark, clock=lambda: self.now_s)  # type: ignore[arg-type]
        (self.bar,) = bars


def test_without_a_terminal_a_line_is_printed_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.BytesIO()
    world = World(monkeypatch, io.TextIOWrapper(seen, write_through=False))
    assert world.bar.disabled
    world.now_s = 1.0
    world.progress.plan(40 * MIB, 10 * MIB, 4)
    for number, (now_s, line) in enumerate(
        [
            (9.99, ""),
            # Two groups of 6 MiB, 1 MiB more than their sizes, in 400 s; 22 of 44 MiB are left.
            (401.0, "20.0 of 40.0 MiB read, about 733 s left"),
            (410.99, ""),
            (411.0, "30.0 of 40.0 MiB read, about 171 s left"),
        ]
    ):
        seen.truncate(seen.seek(0))
        world.now_s = now_s
        world.progress.group(number, 3, 5 * MIB)
        world.progress.done(5 * MIB)
        assert seen.getvalue().decode().strip() == line, "printed at once, although the stream has a buffer"


def test_the_estimate_of_a_slow_job_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    world = World(monkeypatch, stream)
    world.progress.plan(0, 0, 2)
    world.now_s = 2.0 * MIB
    world.progress.done(0)
    assert stream.getvalue() == f"0.0 of 0.0 MiB read, about {2 * MIB} s left\n"


def test_on_a_terminal_a_bar_shows_groups_sizes_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    world = World(monkeypatch, stream)
    bar, progress = world.bar, world.progress
    assert (bar.disabled, bar.transient) == (False, True)
    before = set(threading.enumerate())
    with progress as entered:
        assert entered is progress
        assert bar.is_running
        (poller,) = set(threading.enumerate()) - before
        assert poller.daemon, "it does not delay the end of a process that fails"
        progress.plan(40 * MIB, 10 * MIB, 4)
        assert bar.shown == {
            "description": "starting",
            "total": 44 * MIB,
            "completed": 10 * MIB,
            "size": "10.0 of 40.0 MiB",
        }
        progress.group(1, 3, 5 * MIB)
        assert bar.shown["description"] == "group 2 of 4, 3 ledgers"
        world.now_s = 1_000.0
        progress.done(5 * MIB)
        assert (bar.shown["completed"], bar.shown["size"]) == (16 * MIB, "15.0 of 40.0 MiB")
        progress.phase("confirming")
        assert bar.shown["description"] == "confirming"
    assert not bar.is_running
    assert not poller.is_alive()
    assert stream.getvalue() == "", "no lines beside the bar"


def test_within_a_group_the_bar_follows_the_completed_tasks_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    world = World(monkeypatch, Terminal(), (6, 2), None, (4, 2))
    moved = threading.Event()
    world.progress.plan(40 * MIB, 10 * MIB, 4)
    world.bar.on_update = moved.set
    with world.progress as progress:
        world.spark.polled()
        assert not moved.is_set(), "no group has begun"
        progress.group(0, 3, 9 * MIB)
        world.spark.polled()
        assert world.bar.shown["completed"] == 14 * MIB, "4 of 10 tasks of 10 MiB"
        progress.done(9 * MIB)
        world.spark.polled()
        moved.clear()
        world.spark.polled()
        assert not moved.is_set(), "the group has ended"


def test_without_tasks_the_bar_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    world = World(monkeypatch, Terminal())
    with world.progress as progress:
        progress.plan(40 * MIB, 0, 4)
        progress.group(0, 3, 9 * MIB)
        world.spark.polled()
        assert world.bar.shown["completed"] == 0
