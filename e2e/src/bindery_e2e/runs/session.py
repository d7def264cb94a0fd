"""Install a release, play a run, write its report, and remove the release.

Both `python -m bindery_e2e` and the tests in e2e/kubernetes use this module, so both apply the same criteria.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bindery_e2e.cluster.cluster import Cluster
from bindery_e2e.cluster.commands import Nodes
from bindery_e2e.cluster.images import NEXT_VERSION, VERSION
from bindery_e2e.cluster.release import INSTALL_TIMEOUT_S, ROOT, VALUES, Release
from bindery_e2e.cluster.world import World
from bindery_e2e.reporting.report import Report, report_of, write_report
from bindery_e2e.runs.runner import Run, RunSettings, Step

REQUIRED: Final = ("undelivered", "diverged", "under-replicated", "not-ready", "fault-failed", "unavailable")
"""Kinds of errors that a GOOD run must have checked, in addition to those about messages."""
CHAOS_VALUES: Final = VALUES / "chaos.yaml"
SMALL_DISKS: Final = VALUES / "small-disks.yaml"
READY_S_MAX: Final = 120.0
"""Maximum seconds that an install without values may take."""


@contextlib.contextmanager
def installed(
    namespace: str,
    *,
    values: Sequence[Path] = (),
    settings: Sequence[str] = (),
    keep: bool = False,
    timeout_s: float = INSTALL_TIMEOUT_S,
    folder: Path | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Release]:
    """Install a release in its own namespace and wait until it is ready; remove it at the end unless `keep`.

    `folder`: receives the logs of the pods if the install or the block raises.
    """
    release = Release(Cluster.connect(namespace))
    release.make_namespace()
    try:
        try:
            seconds = release.install(values, settings, timeout_s=timeout_s)
            say(f"installed and ready in {seconds:.1f} s in namespace {namespace}")
            yield release
        except Exception:
            if folder is not None:
                release.collect(folder / "cluster")
            raise
    finally:
        if not keep:
            release.remove_namespace()


def world_of(release: Release, settings: RunSettings, *, say: Callable[[str], None] = print) -> World:
    return World(
        release.cluster,
        release,
        Nodes.from_environment(),
        topics=settings.traffic.topics,
        next_version=NEXT_VERSION,
        say=say,
    )


def facts_of(command: str) -> dict[str, Any]:
    """Facts needed to repeat a run: command, commit, images."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"command": command, "commit": commit or "unknown", "images": [VERSION, NEXT_VERSION]}


async def play(
    world: World, settings: RunSettings, steps: Iterable[Step], *, say: Callable[[str], None] = print
) -> Report:
    """Play a run and judge it. The report is also written after an error or a cancellation, which is then raised
    again."""
    run = Run(world, settings)
    try:
        await run.play(steps)
    finally:
        report = conclude(run, say=say)
    return report


def conclude(run: Run, *, say: Callable[[str], None] = print) -> Report:
    """Judge the history of a run and write its report, also if the run is incomplete."""
    report = report_of(run.history_path, required=REQUIRED)
    paths = write_report(report, run.settings.folder)
    say(paths.text.read_text())
    say(f"report: {paths.html}")
    return report
