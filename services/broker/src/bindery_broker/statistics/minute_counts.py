"""Count values by range, for the last full minute. Pure.

Pulsar's metrics of latencies and sizes are gauges of this kind: the number of values in a range, without those of lower
ranges, in the last full minute. Dashboards divide them by 60. Minutes begin at multiples of 60 of the clock that passes
the time, so no timer runs. Memory is taken with the first value.
Source: Pulsar's StatsBuckets and ManagedLedgerMBeanImpl.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

MINUTE_S: Final = 60.0
"""Seconds of a period, as in Pulsar's ManagedLedgerFactoryConfig."""
NEVER: Final = -2
"""A minute that is not followed by the present one."""


class MinuteCounts:
    """Invariant: the counts are of `_minute` and of the minute before it."""

    __slots__ = ("_before", "_bounds", "_minute", "_none", "_present")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the highest value of each range but the last one, ascending."""
        self._bounds = bounds
        self._minute = NEVER
        self._none: tuple[float, ...] = (0,) * (len(bounds) + 3)
        self._present: list[float] = []
        """Numbers by range, then the number of all values, then their sum."""
        self._before: Sequence[float] = self._none

    def add(self, value: float, count: int = 1, *, now: float) -> None:
        """Count a value `count` times. `now`: monotonic seconds."""
        minute = int(now // MINUTE_S)
        if minute != self._minute:
            self._before = self._present if minute == self._minute + 1 else self._none
            self._present = list(self._none)
            self._minute = minute
        present = self._present
        present[bisect_left(self._bounds, value)] += count
        present[-2] += count
        present[-1] += value * count

    def last(self, now: float) -> Sequence[float]:
        """Return the numbers of the last full minute by range, then of all values, then their sum.

        The caller must not change them.
        """
        minute = int(now // MINUTE_S)
        if minute == self._minute:
            return self._before
        return self._present if minute == self._minute + 1 else self._none
