"""Which broker gets a bundle."""

from collections import Counter

from bindery_broker.balancing.choice import PENDING_S, Candidate, Pending, choose
from bindery_broker.balancing.weights import BUNDLE_UNITS
from hypothesis import given
from hypothesis import strategies as st

candidates = st.lists(
    st.builds(Candidate, st.sampled_from([f"b{i}:80" for i in range(9)]), st.floats(0, 1e6)),
    unique_by=lambda one: one.name,
)


@given(candidates, st.text(max_size=20), st.sets(st.sampled_from([f"b{i}:80" for i in range(9)])), st.randoms())
def test_the_choice_is_one_of_the_least_loaded_in_any_order(brokers, bundle, exclude, random):
    chosen = choose(bundle, brokers, exclude=exclude)
    left = [one for one in brokers if one.name not in exclude]
    if not left:
        assert chosen is None
        return
    mean = sum(one.weight for one in left) / len(left)
    weights = {one.name: one.weight for one in left}
    assert weights[chosen] <= min(weights.values()) + max(BUNDLE_UNITS, 0.1 * mean)
    random.shuffle(brokers)
    assert choose(bundle, brokers, exclude=exclude) == chosen


def test_equal_brokers_get_about_as_many_bundles():
    brokers = [Candidate(f"b{i}:80", 0.0) for i in range(4)]
    counts = Counter(choose(f"t/n/{i}", brokers) for i in range(400))
    assert all(60 <= counts[one.name] <= 140 for one in brokers), counts


def test_a_hundred_bundles_between_two_reports_do_not_all_go_to_the_empty_broker():
    pending, now = Pending(), 5.0
    for i in range(100):
        known = pending.weights(now)
        brokers = [Candidate(f"b{b}:80", known.get(f"b{b}:80", 0.0)) for b in range(4)]
        pending.add(f"t/n/{i}", choose(f"t/n/{i}", brokers), weight=BUNDLE_UNITS, now=now)
    counts = pending.weights(now)
    assert len(pending) == 100
    assert max(counts.values()) - min(counts.values()) <= 4 * BUNDLE_UNITS


def test_a_choice_counts_until_it_is_reported_or_too_old():
    pending = Pending()
    pending.add("a", "b0", weight=10, now=0)
    pending.add("b", "b0", weight=10, now=1)
    pending.reported("b1", ["a"])
    assert pending.weights(1) == {"b0": 20}
    pending.reported("b0", ["a"])
    assert pending.weights(1) == {"b0": 10}
    assert pending.weights(1 + PENDING_S) == {}
