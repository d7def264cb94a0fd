"""Exponential back-off: how long to wait before an operation that failed is tried again.

The delay after the first failure is `first_s`. Each further failure multiplies it by `factor`, up to `max_s`. With a
`jitter` of 0.25, each delay is then made up to 25 % shorter or longer at random, so that clients that failed together
do not all return together. Jitter may lengthen a delay beyond `max_s`.

The class is pure: it reads no clock and does not sleep. There are two ways to use it. Callers that count failures
themselves, for example in stored records, call `delay_s(failures)`. All others keep one object per operation, call
`next_delay_s()` after a failure and `reset()` after a success.

    backoff = Backoff(0.1, 2.0)
    while not await attempt():
        await asyncio.sleep(backoff.next_delay_s())
"""

from typing import Final

from bindery_core.sources import RandomFloats

_EXPONENT_MAX: Final = 64
"""Largest exponent that is computed. It keeps `factor ** failures` a finite number."""


class Backoff:
    """Delays of one operation that is retried. Invariant: without jitter, first_s <= every delay <= max_s."""

    __slots__ = ("_factor", "_first_s", "_jitter", "_max_s", "_randomness", "failures")

    def __init__(
        self,
        first_s: float,
        max_s: float,
        *,
        factor: float = 2.0,
        jitter: float = 0.0,
        randomness: RandomFloats | None = None,
    ) -> None:
        """`first_s`, `max_s`: delays in seconds. `jitter`: share of a delay, 0 to 1; it needs a `randomness`."""
        assert 0 < first_s <= max_s
        assert factor >= 1
        assert 0 <= jitter <= 1
        assert jitter == 0 or randomness is not None, "jitter needs a random source"
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._jitter = jitter
        self._randomness = randomness
        self.failures = 0
        """Number of failures that `next_delay_s` counted since the last reset."""

    def delay_s(self, failures: int) -> float:
        """Return the delay in seconds after `failures` failures in a row, at least 1. Does not change `failures`."""
        assert failures >= 1
        delay_s = min(self._max_s, self._first_s * self._factor ** min(failures - 1, _EXPONENT_MAX))
        if self._jitter and self._randomness is not None:
            delay_s *= 1 + self._jitter * (2 * self._randomness.random() - 1)
        return delay_s

    def next_delay_s(self) -> float:
        """Count one more failure and return the delay in seconds that follows it."""
        self.failures += 1
        return self.delay_s(self.failures)

    def reset(self) -> None:
        """Forget all failures, because the operation succeeded: the next delay is `first_s` again."""
        self.failures = 0
