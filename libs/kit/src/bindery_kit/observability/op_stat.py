"""OpStat: count, sum and quantiles of one number, as in BookKeeper's metrics of operations.

Observing is plain arithmetic, done once per group of requests. Quantiles cover the last one to two minutes, and are up
to 10 % too large, never too small.
"""

import math
from collections.abc import Callable
from typing import Final

QUANTILES: Final = (0.5, 0.75, 0.95, 0.99, 0.999, 0.9999, 1.0)
"""Quantiles in the metrics, in ascending order."""
WINDOW_S: Final = 60.0
"""Time in seconds after which a new set of counts begins. Quantiles cover the current and the previous set."""
_SUB_BUCKETS = 8
"""Buckets per doubling: each is 9 % wide."""
_SMALLEST = 2.0**-10
_BUCKETS = 40 * _SUB_BUCKETS
_LOG_SMALLEST = math.log2(_SMALLEST)


class OpStat:
    """Distribution of one number (ms or bytes), cumulative count and sum, quantiles over a sliding window."""

    __slots__ = ("_clock", "_counts", "_older", "_turn_at", "count", "sum")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts = [0] * _BUCKETS
        self._older = [0] * _BUCKETS
        self._turn_at = clock() + WINDOW_S
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Observe `value` `count` times, in one call for a whole group."""
        if self._clock() >= self._turn_at:
            self._turn()
        self.count += count
        self.sum += value * count
        if value <= _SMALLEST:
            self._counts[0] += count
        else:
            at = int((math.log2(value) - _LOG_SMALLEST) * _SUB_BUCKETS) + 1
            self._counts[min(at, _BUCKETS - 1)] += count

    def quantile(self, part: float) -> float:
        """Return the upper edge of the bucket with the quantile `part` of the window; nan without observations."""
        return self.quantiles((part,))[0]

    def quantiles(self, parts: tuple[float, ...] = QUANTILES) -> list[float]:
        """Return the quantiles `parts`, which ascend, in one pass."""
        self._turn()
        total = (sum(self._counts) + sum(self._older)) if self.count else 0
        if not total:
            return [math.nan] * len(parts)
        wanted = [math.ceil(part * total) for part in parts]
        found: list[float] = []
        seen = 0
        for at, (new, old) in enumerate(zip(self._counts, self._older, strict=True)):
            seen += new + old
            while seen >= wanted[len(found)]:
                found.append(float(2.0 ** (_LOG_SMALLEST + at / _SUB_BUCKETS)))
                if len(found) == len(wanted):
                    return found
        raise AssertionError("counts changed during the pass")

    def _turn(self) -> None:
        now = self._clock()
        if now < self._turn_at:
            return
        idle = now >= self._turn_at + WINDOW_S
        self._older = [0] * _BUCKETS if idle else self._counts
        self._counts = [0] * _BUCKETS
        self._turn_at = now + WINDOW_S


class Operation:
    """Latency in ms of one kind of request, by outcome."""

    __slots__ = ("failure", "success")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.success = OpStat(clock)
        self.failure = OpStat(clock)

    def observe(self, latency_s: float, *, ok: bool, count: int = 1) -> None:
        (self.success if ok else self.failure).observe(latency_s * 1000, count)
