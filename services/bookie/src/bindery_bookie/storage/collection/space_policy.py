"""Decide when compaction begins because of dead bytes, which logs it rewrites, and how fast. Pure.

*Dead bytes* are the bytes of entry logs whose ledgers are deleted. A shard may have `dead_allowed` of them:

    dead bytes <= dead_allowed   nothing to do; the intervals of minor and major compaction apply
    dead bytes >  dead_allowed   rewrite closed logs, the sparsest first, until GOAL times dead_allowed are left

The sparsest log costs least: a rewrite copies the live part of a log and frees the rest, so a log of which a tenth is
live costs one copied byte for nine freed ones. The log that is being written is closed only if the closed logs do not
suffice, because each close may leave a small log. Logs above the threshold of major compaction are never rewritten.

    disk of the entry logs <= live bytes + dead_allowed + what is deleted during a listing and a pass

`Speed` limits the rate. The more dead bytes exceed what is allowed, the faster compaction may copy; if adds take longer
than before it began, it slows down. It is never slower than the configured rate, which does not disturb adds.

| dead bytes / dead_allowed | <= 1 | 1.25 | 1.5 | 2 or more |
|---------------------------|-----:|-----:|----:|----------:|
| times the configured rate |    1 | 2.75 | 4.5 |         8 |
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from bindery_bookie.storage.collection.collection_interface import LogInfo, LogState

GOAL: Final = 0.75
"""Part of the allowed dead bytes at which a pass ends. Below 1, so that passes are few."""
SPEED_MAX: Final = 8.0
"""Maximum speed, in multiples of the configured rate."""
LATENCY_RATIO_MAX: Final = 1.3
"""Compaction slows down while adds take longer than this times their latency without compaction."""
SPEED_UP: Final = 1.25
"""Factor by which the speed grows with each observation of undisturbed adds."""
ADDS_MIN: Final = 20
"""Minimum number of adds of which a latency is computed."""

assert 0 < GOAL < 1 < SPEED_UP < SPEED_MAX


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """Logs to rewrite because of dead bytes. Nothing to do: no logs, and `closes_open` is False."""

    log_ids: tuple[int, ...] = ()
    """Closed logs, the sparsest first."""
    closes_open: bool = False
    """Whether the log that is being written must be closed first; make a new plan then."""


def dead_allowed(live_bytes: int, *, ratio_max: float, size_min: int) -> int:
    """Return the dead bytes that a shard with `live_bytes` may have."""
    return max(int(ratio_max * live_bytes), size_min)


def plan_space(
    logs: Collection[LogInfo], *, allowed: int, threshold: float, excluded: Collection[int], has_begun: bool
) -> SpacePlan:
    """Return what to rewrite.

    `logs`: all logs of the shard. `allowed`: see `dead_allowed`. `threshold`: only logs with a lower live ratio are
    rewritten. `excluded`: logs that could not be rewritten. `has_begun`: whether a pass runs, which ends at the goal.
    """
    dead = dead_bytes(logs)
    goal = int(GOAL * allowed)
    if dead <= (goal if has_begun else allowed):
        return SpacePlan()
    sparse = sorted(
        (one for one in logs if one.live_bytes and one.live_ratio < threshold and one.log_id not in excluded),
        key=lambda one: (one.live_ratio, one.log_id),
    )
    chosen: list[int] = []
    for one in sparse:
        if dead <= goal:
            break
        if one.state in (LogState.SEALED, LogState.COMPACTED):
            chosen.append(one.log_id)
            dead -= one.size - one.live_bytes
    if chosen:
        return SpacePlan(tuple(chosen))
    return SpacePlan(closes_open=any(one.state is LogState.OPEN for one in sparse))


def dead_bytes(logs: Iterable[LogInfo]) -> int:
    return sum(one.size - one.live_bytes for one in logs)


def wanted_speed(*, dead: int, allowed: int) -> float:
    """Return the speed without regard to latency, 1..SPEED_MAX."""
    excess = dead / allowed - 1 if allowed else 1.0
    return min(max(1.0, 1 + (SPEED_MAX - 1) * excess), SPEED_MAX)


class Speed:
    """The speed of compaction. Totals of adds are those of the shard since its start.

    Invariants: 1 <= `now` <= max(wanted, 1); without a reference latency the speed is 1.
    """

    def __init__(self) -> None:
        self.now = 1.0
        """Multiple of the configured rate."""
        self._adds = 0
        self._seconds = 0.0
        self._reference_s: float | None = None
        """Mean latency of adds while no log was rewritten."""

    def begin(self, *, adds: int, seconds: float) -> None:
        """A pass begins. `adds`, `seconds`: number of durable adds, and the sum of their latencies."""
        mean = self._mean_since(adds, seconds)
        if mean is not None:
            self._reference_s = mean
        self.now = 1.0

    def observe(self, *, adds: int, seconds: float, wanted: float) -> None:
        """Some time of the pass is over: set `now`. `wanted`: see `wanted_speed`."""
        mean = self._mean_since(adds, seconds)
        if mean is None:  # too few adds to be disturbed
            self.now = min(self.now * SPEED_UP, wanted)
        elif self._reference_s is None:
            self.now = 1.0
        elif mean > LATENCY_RATIO_MAX * self._reference_s:
            self.now = max(1.0, min(self.now / 2, wanted))
        else:
            self.now = max(1.0, min(self.now * SPEED_UP, wanted))

    def end(self, *, adds: int, seconds: float) -> None:
        """The pass is over: adds from now on are the reference for the next one."""
        self._adds, self._seconds = adds, seconds
        self.now = 1.0

    def _mean_since(self, adds: int, seconds: float) -> float | None:
        count = adds - self._adds
        if count < ADDS_MIN:
            return None
        mean = (seconds - self._seconds) / count
        self._adds, self._seconds = adds, seconds
        return mean
