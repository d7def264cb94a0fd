"""Judge the disk space of bookies under churn, and the latency of adds with and without collection. Pure.

A run writes ledgers, most of which are deleted soon. Its time is divided into pairs of windows:

| phase      | deletions    | compaction                       |
|------------|--------------|----------------------------------|
| collecting | are executed | runs whenever the bookies decide |
| settling   | wait         | ends its current log             |
| quiet      | wait         | is suspended                     |

The disk of each bookie is compared with its live bytes in all phases. The latencies of a collecting window and of the
settling window after it, in which compaction still runs, are compared with those of the quiet window that follows,
because both have the same load from other processes, as far as possible. The ratio of a run is the median over all
pairs. Sizes are bytes, latencies seconds.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

COLLECTING: Final = "collecting"
SETTLING: Final = "settling"
QUIET: Final = "quiet"

DISK_PER_LIVE: Final = 3.0
ADDS_MIN: Final = 200
"""Minimum number of adds in both windows of a pair. Smaller pairs are not compared: their p99 is one or two adds."""


@dataclass(frozen=True, slots=True)
class SpaceSample:
    """One bookie at one time."""

    at_s: float
    """Seconds since the begin of the run."""
    disk: int
    """Bytes allocated on the disk: journal, entry logs, index, reserves."""
    live: int
    """Bytes of entries of ledgers that are not deleted, as the bookie received them."""
    written: int
    """Bytes of entries that the bookie received since the begin of the run."""


@dataclass(slots=True)
class Window:
    """The adds that began and ended in one window."""

    phase: str
    latencies_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the adds of one phase, or of one window."""

    adds: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.adds:,} adds: p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, longest {self.longest_ms:.0f} ms"
        )


@dataclass(frozen=True, slots=True)
class BookieSpace:
    """The disk of one bookie over a run. The *excess* is the disk without DISK_PER_LIVE times the live bytes."""

    disk_max: int
    live_max: int
    disk_end: int
    live_end: int
    written: int
    excess_max: int
    """The largest excess, which may not exceed the allowance."""
    excess_at_s: float


@dataclass(frozen=True, slots=True)
class ChurnLimits:
    allowance: int
    """Bytes of disk in addition to DISK_PER_LIVE times the live bytes."""
    latency_ratio_max: float
    """Of p50 and p99 while collecting, compared with quiet windows."""


@dataclass(slots=True)
class ChurnJudgement:
    bookies: dict[str, BookieSpace]
    collecting: Latency
    quiet: Latency
    pairs: int
    """Pairs of windows that were compared."""
    p50_ratio: float | None
    """Median over the pairs; None: there was no pair."""
    p99_ratio: float | None
    findings: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "BAD" if self.findings else "GOOD"


def latency_of(latencies_s: Iterable[float]) -> Latency:
    values = sorted(latencies_s)
    if not values:
        return Latency()

    def share(part: float) -> float:
        return 1000 * values[max(0, math.ceil(len(values) * part) - 1)]

    return Latency(len(values), share(0.5), share(0.99), 1000 * values[-1])


def space_of(samples: Sequence[SpaceSample]) -> BookieSpace:
    """Return the figures of one bookie. `samples`: by time, at least one."""
    worst = max(samples, key=_excess)
    return BookieSpace(
        disk_max=max(sample.disk for sample in samples),
        live_max=max(sample.live for sample in samples),
        disk_end=samples[-1].disk,
        live_end=samples[-1].live,
        written=samples[-1].written,
        excess_max=_excess(worst),
        excess_at_s=worst.at_s,
    )


def judge_churn(
    samples: Mapping[str, Sequence[SpaceSample]],
    windows: Sequence[Window],
    limits: ChurnLimits,
    *,
    errors: Sequence[str] = (),
) -> ChurnJudgement:
    """Judge a run. `samples`: by bookie. `errors`: failed adds and deletions, and live entries that were not readable.

    A run without a pair of windows is not GOOD unless `latency_ratio_max` is infinite.
    """
    pairs = [(latency_of(one.latencies_s), latency_of(other.latencies_s)) for one, other in _pairs(windows)]
    p50 = statistics.median(one.p50_ms / other.p50_ms for one, other in pairs) if pairs else None
    p99 = statistics.median(one.p99_ms / other.p99_ms for one, other in pairs) if pairs else None
    found = ChurnJudgement(
        {bookie: space_of(of_bookie) for bookie, of_bookie in samples.items()},
        _pooled(windows, COLLECTING, SETTLING),
        _pooled(windows, QUIET),
        len(pairs),
        p50,
        p99,
    )
    for bookie, space in found.bookies.items():
        if space.excess_max > limits.allowance:
            found.findings.append(
                f"space: at {space.excess_at_s:.0f} s the disk of {bookie} exceeded {DISK_PER_LIVE:g} times its live "
                f"bytes by {space.excess_max} bytes; at most {limits.allowance} are allowed"
            )
    for name, ratio in (("p50", p50), ("p99", p99)):
        if ratio is None:
            if math.isfinite(limits.latency_ratio_max):
                found.findings.append(f"latency: no pair of windows has {ADDS_MIN} adds, so {name} was not compared")
        elif ratio > limits.latency_ratio_max:
            found.findings.append(
                f"latency: {name} while collecting is {ratio:.2f} of that of quiet windows; at most "
                f"{limits.latency_ratio_max:g} is allowed"
            )
    found.findings += errors
    return found


def _excess(sample: SpaceSample) -> int:
    return sample.disk - int(DISK_PER_LIVE * sample.live)


def _pairs(windows: Sequence[Window]) -> list[tuple[Window, Window]]:
    """Return each collecting window, with the adds of its settling window, and the quiet one that follows."""
    found: list[tuple[Window, Window]] = []
    collecting: Window | None = None
    for window in windows:
        if window.phase == COLLECTING:
            collecting = window
        elif window.phase == SETTLING and collecting is not None:
            collecting = Window(COLLECTING, collecting.latencies_s + window.latencies_s)
        elif window.phase == QUIET and collecting is not None:
            if min(len(collecting.latencies_s), len(window.latencies_s)) >= ADDS_MIN:
                found.append((collecting, window))
            collecting = None
    return found


def _pooled(windows: Sequence[Window], *phases: str) -> Latency:
    return latency_of(value for window in windows if window.phase in phases for value in window.latencies_s)
