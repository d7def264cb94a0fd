"""SmoothedRate: how fast something goes, told soon after it began.

An average that starts at zero says for a while that everything takes far longer than it does. This one is weighted by
what has been seen since it began, so that its first value is the first rate.
"""

from typing import Final

SMOOTHING: Final = 0.3
"""Weight of the newest rate."""


class SmoothedRate:
    """Of anything a second. Zeros before the first other rate are no part of it, nor after a long rest."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def see(self, rate: float) -> None:
        """`rate`: >= 0, of one interval; all are of about the same length."""
        if not rate and not self._weight:
            return
        self._sum += SMOOTHING * (rate - self._sum)
        self._weight += SMOOTHING * (1 - self._weight)
        if not rate and self.value < 1:
            self._sum = self._weight = 0.0
