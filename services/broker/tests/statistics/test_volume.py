"""Sums of what went in and out."""

from bindery_broker.statistics.volume import Volume


def test_volumes_are_added() -> None:
    total = Volume(1, 2, 3, 4)
    total.add(Volume(10, 20, 30, 40))
    assert total == Volume(11, 22, 33, 44)
