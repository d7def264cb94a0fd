"""Clusters of tests that run side by side keep out of each other's way."""

import random

import pytest
from bindery.standalone import throwaway
from bindery.standalone.throwaway import ThrowawayCluster


def test_two_clusters_have_different_ports_also_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway.random, "SystemRandom", lambda: random.Random(1))
    first = ThrowawayCluster(bookies=1)
    second = ThrowawayCluster(bookies=1)
    assert first.port_offset != second.port_offset
    first.close()
    third = ThrowawayCluster(bookies=1)
    assert third.port_offset == first.port_offset, "given back"
    second.close()
    third.close()
