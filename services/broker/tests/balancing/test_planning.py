"""Which bundles the leader moves."""

from collections import Counter

from bindery_broker.balancing.planning import Loaded, is_even, plan
from hypothesis import given
from hypothesis import strategies as st

weights = st.lists(st.floats(10, 10_000), max_size=30)
clusters = st.lists(weights, min_size=1, max_size=6)


def loaded(cluster):
    return [
        Loaded(f"b{b}:80", sum(found), {f"t/n/{b}-{i}": one for i, one in enumerate(found)})
        for b, found in enumerate(cluster)
    ]


def applied(brokers, moves):
    bundles = {one.name: dict(one.bundles) for one in brokers}
    for move in moves:
        bundles[move.destination][move.bundle] = bundles[move.source].pop(move.bundle)
    return [Loaded(name, sum(found.values()), found) for name, found in bundles.items()]


def spread(brokers):
    return sum(one.weight**2 for one in brokers)


@given(clusters, st.integers(1, 20))
def test_each_round_is_bounded_and_makes_the_load_more_even(cluster, moves_max):
    brokers = loaded(cluster)
    moves = plan(brokers, threshold=0.15, moves_max=moves_max)
    assert len(moves) <= moves_max
    assert len({move.bundle for move in moves}) == len(moves)
    if is_even([one.weight for one in brokers], threshold=0.15):
        assert moves == []
    if moves:
        assert spread(applied(brokers, moves)) < spread(brokers)


@given(clusters)
def test_constant_load_comes_to_rest(cluster):
    brokers = loaded(cluster)
    for _ in range(200):
        moves = plan(brokers, threshold=0.15, moves_max=8)
        if not moves:
            return
        brokers = applied(brokers, moves)
    raise AssertionError("the moves do not end")


@given(st.lists(st.integers(0, 60), min_size=2, max_size=6))
def test_equal_bundles_end_within_one_bundle_of_even(counts):
    brokers = loaded([[10.0] * count for count in counts])
    for _ in range(100):
        moves = plan(brokers, threshold=0.15, moves_max=8)
        if not moves:
            break
        brokers = applied(brokers, moves)
    numbers = [len(one.bundles) for one in brokers]
    mean = sum(numbers) / len(numbers)
    assert max(numbers) - min(numbers) <= 1 or all(abs(one - mean) <= 0.15 * mean for one in numbers), numbers


def test_a_new_broker_gets_its_share_in_one_round():
    brokers = loaded([[10.0] * 16, []])
    moves = plan(brokers, threshold=0.15, moves_max=32)
    assert Counter(move.destination for move in moves) == {"b1:80": 8}


def test_three_and_two_bundles_do_not_go_back_and_forth():
    """Whatever the rates of the five vary by a quarter, nothing moves: no move would make it more even for long."""
    assert plan(loaded([[10, 12, 9], [11, 8]]), threshold=0.15, moves_max=8) == []


def test_resting_bundles_and_those_heavier_than_the_difference_stay():
    assert plan(loaded([[1000.0], [10.0]]), threshold=0.15, moves_max=8) == []
    brokers = loaded([[10.0] * 4, []])
    moves = plan(brokers, threshold=0.15, moves_max=8, resting={f"t/n/0-{i}" for i in range(3)})
    assert [move.bundle for move in moves] == ["t/n/0-3"]
