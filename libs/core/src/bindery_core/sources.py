"""Protocols for clocks and random sources that callers pass in.

No code outside the composition roots reads a clock or draws a random number by itself, so that tests and the simulation
can decide both. Every package that needs one of these types imports it from here.

`random.SystemRandom()` is the random source of a process and `random.Random(seed)` that of a test or a simulation; both
satisfy all three random protocols. A function declares the narrowest protocol that it needs.
"""

from typing import Protocol


class WallClock(Protocol):
    """The time of day. It may jump in either direction, so it must not be used to measure durations."""

    def __call__(self) -> int:
        """Return the milliseconds since 1970-01-01 00:00 UTC."""
        ...


class MonotonicClock(Protocol):
    """A clock that never goes backwards. Its zero is arbitrary: only differences have a meaning."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        ...


class RandomFloats(Protocol):
    """A source of uniformly distributed fractions."""

    def random(self) -> float:
        """Return a number at random from [0, 1)."""
        ...


class RandomBits(Protocol):
    """A source of random bits."""

    def getrandbits(self, k: int, /) -> int:
        """Return a non-negative integer of `k` random bits."""
        ...


class RandomSource(RandomFloats, RandomBits, Protocol):
    """A source of both fractions and bits."""
