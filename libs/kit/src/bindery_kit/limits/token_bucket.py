"""TokenBucket: limit a rate of anything that can be counted. Pure; times are monotonic seconds.

A bucket holds the tokens of one period at most, its burst, and is refilled evenly. Tokens may be taken below zero: the
debt is then waited for by those that follow. There are two ways to use it:

| the user waits                              | in any span of t seconds at most passes                        |
|---------------------------------------------|----------------------------------------------------------------|
| `wait_s`, then takes any number             | rate * t + burst + one request                                 |
| takes a number, waits for what              | rate * t + burst, or rate * t + one request if that is larger  |
| `wait_for_s` said before                    | than the burst                                                 |

Source: Pulsar's AsyncTokenBucket.
"""

from typing import Final

EARLY_S: Final = 1e-6
"""Seconds by which a token may be taken too early, because sums of times are rounded."""


class TokenBucket:
    """Tokens of one kind. Invariant: at most `rate * period_s` tokens."""

    __slots__ = ("_filled_at", "_rate", "_tokens", "_tokens_max")

    def __init__(self, *, rate: float, period_s: float, now: float) -> None:
        """`rate`: tokens per second, above 0."""
        self._rate = rate
        self._tokens_max = rate * period_s
        self._tokens = self._tokens_max
        self._filled_at = now

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self._rate

    @property
    def burst(self) -> float:
        """Maximum number of tokens."""
        return self._tokens_max

    def change(self, *, rate: float, period_s: float, now: float) -> None:
        """Change the limit. What was taken before still counts."""
        self._tokens = min(self.tokens(now), rate * period_s)
        self._rate = rate
        self._tokens_max = rate * period_s

    def tokens(self, now: float) -> float:
        """Return the tokens at `now`; below 0: the debt."""
        if now > self._filled_at:
            self._tokens = min(self._tokens_max, self._tokens + (now - self._filled_at) * self._rate)
            self._filled_at = now
        return self._tokens

    def is_full(self, now: float) -> bool:
        """Return whether nothing is left of what was taken: a new bucket would be the same."""
        return self.tokens(now) >= self._tokens_max

    def wait_s(self, now: float) -> float:
        """Return the seconds until tokens may be taken; 0: now."""
        missing = -self.tokens(now) / self._rate
        return missing + EARLY_S if missing > -EARLY_S else 0.0

    def wait_for_s(self, count: float, now: float) -> float:
        """Return the seconds until `count` tokens are there, or the bucket is full; 0: now.

        Who takes them at once and goes on after this time is in turn with all others that do.
        """
        return max(0.0, (min(count, self._tokens_max) - self.tokens(now)) / self._rate)

    def take(self, count: float, now: float) -> None:
        self._tokens = self.tokens(now) - count
