"""Producers that are known by name are counted and limited. No broker, no clock."""

import pytest
from bindery_broker.errors import TooManyProducers
from bindery_broker.producers.connected import IDLE_S, NAMES_MAX, ConnectedProducers


def test_a_producer_counts_until_it_is_idle() -> None:
    producers = ConnectedProducers()
    producers.join("a", now=0, producers_max=0)
    producers.join("b", now=10, producers_max=0)
    producers.join("a", now=20, producers_max=0)
    assert [producers.count(now) for now in (20, 10 + IDLE_S - 1, 10 + IDLE_S, 20 + IDLE_S)] == [2, 2, 1, 0]


def test_a_new_producer_above_the_maximum_is_refused_until_another_is_idle() -> None:
    producers = ConnectedProducers()
    producers.join("a", now=0, producers_max=2)
    producers.join("b", now=5, producers_max=2)
    with pytest.raises(TooManyProducers) as caught:
        producers.join("c", now=6, producers_max=2)
    assert caught.value.facts == {"producer": "c", "producers": 2, "limit": 2, "retry_after_s": IDLE_S - 6}
    producers.join("a", now=7, producers_max=2)
    producers.join("c", now=5 + IDLE_S, producers_max=2)
    assert producers.count(5 + IDLE_S) == 2


def test_a_lower_maximum_ends_no_producer() -> None:
    producers = ConnectedProducers()
    for name in "abc":
        producers.join(name, now=0, producers_max=3)
    for name in "abc":
        producers.join(name, now=1, producers_max=1)
    with pytest.raises(TooManyProducers):
        producers.join("d", now=2, producers_max=1)
    assert producers.count(2) == 3


def test_the_number_of_names_is_bounded() -> None:
    producers = ConnectedProducers()
    for number in range(NAMES_MAX + 5):
        producers.join(str(number), now=0, producers_max=0)
    assert producers.count(0) == NAMES_MAX
    producers.join("0", now=0, producers_max=NAMES_MAX + 1)
