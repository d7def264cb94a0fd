"""Quorum arithmetic compared with a naive implementation, for all small sizes."""

from itertools import combinations

import pytest
from bindery_core.placement.quorum import can_be_covered, denials_needed, failures_bearable, is_covered
from bindery_core.placement.write_set import write_set
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = [(e, w, a) for e in range(1, 7) for w in range(1, e + 1) for a in range(1, w + 1)]


def hides_an_entry(silent: set[int], ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether an entry may have its ack quorum among the silent bookies alone."""
    for entry_id in range(ensemble_size):
        holders = set(write_set(entry_id=entry_id, ensemble_size=ensemble_size, write_quorum=write_quorum))
        if any(set(ackers) <= silent for ackers in combinations(sorted(holders), ack_quorum)):
            return True
    return False


@pytest.mark.parametrize(("ensemble_size", "write_quorum", "ack_quorum"), SIZES)
def test_with_coverage_silent_bookies_hide_no_entry(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    sizes = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}
    everyone = set(range(ensemble_size))
    for count in range(ensemble_size + 1):
        for answered in map(set, combinations(range(ensemble_size), count)):
            expected = not hides_an_entry(everyone - answered, ensemble_size, write_quorum, ack_quorum)
            assert is_covered(answered, **sizes) == expected
            assert can_be_covered(everyone - answered, **sizes) == expected


@pytest.mark.parametrize(("ensemble_size", "write_quorum", "ack_quorum"), [s for s in SIZES if s[0] == s[1]])
def test_coverage_without_striping_depends_only_on_the_number_of_replies(
    ensemble_size: int, write_quorum: int, ack_quorum: int
) -> None:
    sizes = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}
    for count in range(ensemble_size + 1):
        assert is_covered(range(count), **sizes) == (count >= ensemble_size - ack_quorum + 1)


@pytest.mark.parametrize(("_", "write_quorum", "ack_quorum"), SIZES)
def test_after_enough_denials_no_ack_quorum_is_possible(_: int, write_quorum: int, ack_quorum: int) -> None:
    needed = denials_needed(write_quorum=write_quorum, ack_quorum=ack_quorum)
    assert write_quorum - needed < ack_quorum
    assert write_quorum - (needed - 1) >= ack_quorum
    assert failures_bearable(write_quorum=write_quorum, ack_quorum=ack_quorum) == needed - 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ensemble_size=st.integers(1, 12))
def test_a_covering_set_contains_a_bookie_of_every_ack_quorum(data: st.DataObject, ensemble_size: int) -> None:
    """Recovery depends on this: its responses intersect with the ack quorum of each acknowledged entry."""
    write_quorum = data.draw(st.integers(1, ensemble_size))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    answered = data.draw(st.sets(st.integers(0, ensemble_size - 1)))
    sizes = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}
    entry_id = data.draw(st.integers(0, 100))
    holders = write_set(entry_id=entry_id, ensemble_size=ensemble_size, write_quorum=write_quorum)
    ackers = data.draw(st.permutations(holders))[:ack_quorum]
    if is_covered(answered, **sizes):
        assert answered & set(ackers)
