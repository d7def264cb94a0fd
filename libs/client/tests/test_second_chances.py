"""A bookie that failed in a ledger is taken back at once, once; then it rests, longer each time."""

from bindery_client.ledger.second_chances import PAUSE_S_MAX, SecondChances
from bindery_core.ids import BookieId

A, B = BookieId("a"), BookieId("b")


def test_one_that_never_failed_does_not_rest() -> None:
    chances = SecondChances(pause_s=5)
    chances.taken([A, B], now=0)
    assert chances.resting(now=0) == {}
    chances.failed([A], now=0)
    assert chances.resting(now=0) == {}, "it may be taken back at once"
    assert chances.next_s(now=0) is None


def test_one_that_was_taken_back_rests_and_each_time_longer() -> None:
    chances = SecondChances(pause_s=5)
    chances.failed([A, B], now=0)
    now, pauses = 0.0, []
    for _ in range(9):
        chances.taken([A], now=now)
        assert chances.resting(now=now).keys() == {A}
        pause_s = chances.next_s(now=now)
        assert pause_s is not None
        pauses.append(pause_s)
        now += pause_s
        assert chances.resting(now=now) == {}
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    chances.taken([B], now=now)
    assert chances.next_s(now=now) == 5, "each for itself"


def test_one_that_did_well_for_long_begins_anew() -> None:
    chances = SecondChances(pause_s=5)
    chances.failed([A], now=0)
    chances.taken([A], now=0)
    chances.taken([A], now=5)
    assert chances.next_s(now=5) == 10
    chances.taken([A], now=15 + PAUSE_S_MAX)
    assert chances.next_s(now=15 + PAUSE_S_MAX) == 5


def test_one_that_served_for_longer_than_its_rest_begins_anew_when_it_fails() -> None:
    chances = SecondChances(pause_s=5)
    chances.failed([A, B], now=0)
    for now in (0, 60, 120):  # a restart a minute
        chances.taken([A], now=now)
        assert chances.next_s(now=now) == 5
        chances.failed([A], now=now + 50)
        assert chances.resting(now=now + 50) == {}


def test_one_that_goes_on_failing_does_not_begin_anew() -> None:
    chances = SecondChances(pause_s=5)
    chances.failed([A], now=0)
    chances.taken([A], now=0)
    for now in (0.1, 4, 6, 20):  # it stays in the ensemble for want of others
        chances.failed([A], now=now)
    chances.taken([A], now=20)
    assert chances.next_s(now=20) == 10
