"""The random sources and clocks of the standard library satisfy the protocols."""

import random
import time

from bindery_core.sources import MonotonicClock, RandomBits, RandomFloats, RandomSource, WallClock


def test_random_generators_satisfy_every_random_protocol() -> None:
    for generator in (random.SystemRandom(), random.Random(7)):
        source: RandomSource = generator
        floats: RandomFloats = source
        bits: RandomBits = source
        assert 0 <= floats.random() < 1
        assert 0 <= bits.getrandbits(8) < 256


def test_plain_functions_satisfy_the_clock_protocols() -> None:
    wall_clock: WallClock = lambda: time.time_ns() // 1_000_000  # noqa: E731
    monotonic: MonotonicClock = time.monotonic
    assert wall_clock() > 1_600_000_000_000
    assert monotonic() <= monotonic()
