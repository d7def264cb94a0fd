"""MinimumRate: a deadline that moves with the bytes that were transferred."""

import pytest
from bindery_kit.limits.minimum_rate import MinimumRate


@pytest.mark.parametrize(
    ("began_s", "size", "deadline_s"),
    [(0.0, 0, 10.0), (100.0, 0, 110.0), (100.0, 500, 110.5), (100.0, 1000, 111.0), (100.0, 60_000, 170.0)],
)
def test_each_byte_moves_the_deadline(began_s: float, size: int, deadline_s: float) -> None:
    assert MinimumRate(grace_s=10.0, bytes_per_s=1000.0).deadline_s(began_s, size) == deadline_s
