"""Lines about refused requests are bounded, whatever clients do."""

import random

from bindery_kit.access.denial_counts import (
    ADDRESSES_MAX,
    LINES_MAX,
    LINES_PER_ADDRESS_MAX,
    OTHERS,
    REPORTED_MAX,
    WINDOW_S,
    DenialCounts,
)


def test_the_first_refusals_of_an_address_get_lines_and_the_rest_a_count():
    counts = DenialCounts()
    admitted = [counts.admit("10.0.0.1", now_s=5.0) for _ in range(LINES_PER_ADDRESS_MAX + 7)]
    assert admitted == [True] * LINES_PER_ADDRESS_MAX + [False] * 7
    assert counts.admit("10.0.0.2", now_s=6.0)
    assert counts.ends_s == 5.0 + WINDOW_S
    assert counts.end() == [("10.0.0.1", 7)]


def test_a_new_window_begins_with_the_next_refusal():
    counts = DenialCounts()
    for _ in range(LINES_PER_ADDRESS_MAX + 1):
        counts.admit("a", now_s=0.0)
    counts.end()
    assert counts.ends_s is None
    assert counts.admit("a", now_s=100.0)
    assert counts.ends_s == 100.0 + WINDOW_S
    assert counts.end() == []


def test_addresses_beyond_the_limit_are_counted_together():
    counts = DenialCounts()
    for number in range(ADDRESSES_MAX + 50):
        counts.admit(f"a{number}", now_s=0.0)
    ended = counts.end()
    assert ended[-1] == (OTHERS, ADDRESSES_MAX - LINES_MAX - REPORTED_MAX + 50)
    assert len(ended) == REPORTED_MAX + 1


def test_every_refusal_is_a_line_or_counted_once_and_lines_are_bounded():
    """Random refusals of up to 2,000 addresses, against a plain sum."""
    randomness = random.Random(7)
    for addresses in (1, 5, 400, 2_000):
        counts = DenialCounts()
        total = randomness.randrange(1, 20_000)
        lines = sum(counts.admit(f"a{randomness.randrange(addresses)}", now_s=0.0) for _ in range(total))
        ended = counts.end()
        assert lines + sum(count for _, count in ended) == total
        assert lines <= LINES_MAX
        assert len(ended) <= REPORTED_MAX + 1
