"""A failed bookie may return to the ensemble at once the first time, then after delays that double."""

from bindery_client.ledger.replacement_backoff import DELAY_S_MAX, ReplacementBackoff
from bindery_core.ids import BookieId

A, B = BookieId("a"), BookieId("b")


def test_a_bookie_that_did_not_fail_is_not_excluded() -> None:
    backoff = ReplacementBackoff(first_s=5)
    backoff.add_choices([A, B], now=0)
    assert backoff.excluded(now=0) == {}
    backoff.add_failures([A], now=0)
    assert backoff.excluded(now=0) == {}, "the first return needs no delay"
    assert backoff.next_s(now=0) is None


def test_each_return_excludes_the_bookie_for_twice_as_long() -> None:
    backoff = ReplacementBackoff(first_s=5)
    backoff.add_failures([A, B], now=0)
    now, delays = 0.0, []
    for _ in range(9):
        backoff.add_choices([A], now=now)
        assert backoff.excluded(now=now).keys() == {A}
        delay_s = backoff.next_s(now=now)
        assert delay_s is not None
        delays.append(delay_s)
        now += delay_s
        assert backoff.excluded(now=now) == {}
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    backoff.add_choices([B], now=now)
    assert backoff.next_s(now=now) == 5, "each bookie has its own delays"


def test_delays_start_again_after_a_long_time_without_a_return() -> None:
    backoff = ReplacementBackoff(first_s=5)
    backoff.add_failures([A], now=0)
    backoff.add_choices([A], now=0)
    backoff.add_choices([A], now=5)
    assert backoff.next_s(now=5) == 10
    backoff.add_choices([A], now=15 + DELAY_S_MAX)
    assert backoff.next_s(now=15 + DELAY_S_MAX) == 5


def test_delays_start_again_when_the_bookie_served_longer_than_its_delay() -> None:
    backoff = ReplacementBackoff(first_s=5)
    backoff.add_failures([A, B], now=0)
    for now in (0, 60, 120):  # one restart per minute
        backoff.add_choices([A], now=now)
        assert backoff.next_s(now=now) == 5
        backoff.add_failures([A], now=now + 50)
        assert backoff.excluded(now=now + 50) == {}


def test_delays_do_not_start_again_while_the_bookie_keeps_failing() -> None:
    backoff = ReplacementBackoff(first_s=5)
    backoff.add_failures([A], now=0)
    backoff.add_choices([A], now=0)
    for now in (0.1, 4, 6, 20):  # it stays in the ensemble because there is no other bookie
        backoff.add_failures([A], now=now)
    backoff.add_choices([A], now=20)
    assert backoff.next_s(now=20) == 10
