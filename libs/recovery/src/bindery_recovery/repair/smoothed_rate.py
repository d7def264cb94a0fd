"""A smoothed rate without a slow start.

An average that starts at zero underestimates a rate for a while. This one is weighted by the time since it started, so
that its first value is the first rate.
"""

from typing import Final

SMOOTHING: Final = 0.3
"""Weight of the newest rate."""


class SmoothedRate:
    """A rate per second. Zeros before the first nonzero rate are ignored, also after a long idle time."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def see(self, rate: float) -> None:
        """Add the rate of one interval, >= 0. All intervals have about the same length."""
        if not rate and not self._weight:
            return
        self._sum += SMOOTHING * (rate - self._sum)
        self._weight += SMOOTHING * (1 - self._weight)
        if not rate and self.value < 1:
            self._sum = self._weight = 0.0
