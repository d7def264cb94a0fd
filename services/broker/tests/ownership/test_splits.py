"""Where bundles are split: the values of Pulsar 4.0.7's algorithms."""

import pytest
from bindery_broker.ownership.bundles import BOUNDARIES_DEFAULT, HASH_MAX, Bundle, bundles_of
from bindery_broker.ownership.splits import (
    ALGORITHMS,
    BY_POSITIONS,
    BY_RANGE,
    BY_TOPICS,
    POSITIONS_MAX,
    Split,
    largest,
)
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName


class At(TopicName):
    """A name with any hash."""

    bundle_position = property(lambda self: int(self.local, 16))  # type: ignore[assignment]


def at(*hashes: int) -> list[TopicName]:
    return [At.of(tenant="t", namespace="n", local=hex(one)) for one in hashes]


BUNDLE = Bundle("t", "n", 100, 200)


def test_a_range_is_divided_in_the_middle_whatever_its_topics():
    assert Split().points(BUNDLE, []) == (150,)
    assert Split().points(Bundle("t", "n", 0, HASH_MAX), at(1, 2)) == (2**31 - 1,)
    assert Split().points(Bundle("t", "n", 7, 9), []) == (8,)


@pytest.mark.parametrize(
    ("hashes", "point"),
    [((), ()), ((150,), ()), ((110, 120), (115,)), ((110, 111), (110,)), ((101, 102, 190), (101,)), ((100, 101), ())],
)
def test_topics_are_divided_equally(hashes, point):
    """Of an odd number the smaller part is the first. A point at the begin of the bundle would not divide it."""
    assert Split(BY_TOPICS).points(BUNDLE, at(*hashes, 5, 250, 200)) == point


def test_halves_of_topics_have_as_many_each():
    topics = at(*(100 + 7 * number % 100 for number in range(64)))
    (point,) = Split(BY_TOPICS).points(BUNDLE, topics)
    counts = [sum(map(part.contains, topics)) for part in BUNDLE.parts((point,))]
    assert sum(counts) == 64
    assert abs(counts[0] - counts[1]) <= 2


def test_positions_outside_of_the_bundle_have_no_effect():
    wanted = Split(BY_POSITIONS, (180, 120, 100, 200, 5, 120, 300))
    assert wanted.points(BUNDLE, at(110, 130)) == (120, 180)
    assert wanted.points(BUNDLE, at(110)) == ()
    assert Split(BY_POSITIONS, (5,)).points(BUNDLE, at(110, 130)) == ()


def test_parts_cover_the_bundle_and_nothing_else():
    last = bundles_of("t", "n")[3]
    parts = last.parts((2**32 - 2**29, 2**32 - 2))
    assert [part.name for part in parts] == [
        "0xc0000000_0xe0000000",
        "0xe0000000_0xfffffffe",
        "0xfffffffe_0xffffffff",
    ]
    (name,) = at(HASH_MAX)
    assert [part.contains(name) for part in parts] == [False, False, True]


def test_what_cannot_be_split_is_refused():
    for algorithm in ALGORITHMS:
        with pytest.raises(BadRequest, match="one hash"):
            Split(algorithm, (5,)).points(Bundle("t", "n", 7, 8), at(7, 7))
    with pytest.raises(BadRequest, match="no such algorithm"):
        Split("flow_or_qps_equally_divide")
    with pytest.raises(BadRequest, match="needs positions"):
        Split(BY_POSITIONS)
    with pytest.raises(BadRequest, match="too many positions"):
        Split(BY_RANGE, (1,) * (POSITIONS_MAX + 1))


def test_the_largest_bundle_has_the_most_topics():
    bundles = bundles_of("t", "n", BOUNDARIES_DEFAULT)
    assert largest(bundles, []) is None
    assert largest(bundles, at(1, 2, 2**31, 2**31 + 1, 2**31 + 2)) == bundles[2]
    assert largest(bundles, at(2**30, 1)) == bundles[0]
