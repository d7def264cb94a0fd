"""Goal: prove that the searches can fail, each for the reason that it names."""

import pytest
from bindery_bookie.storage.journal.journal import Journal
from bindery_simulation.storage.mutants import DAMAGE_MUTANTS, FIRST_SEEDS, MUTANTS, hunt
from bindery_simulation.storage.runner import quietly

POINTS_MAX = 1_000
"""Ten seconds of one core; nearly all need fewer than fifty."""


@pytest.mark.simulator
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_promise_is_noticed(name: str) -> None:
    """By a promise that fits it: not by an accident."""
    caught = quietly(lambda points: hunt(name, points_max=points, first=FIRST_SEEDS.get(name, 0)), POINTS_MAX)
    assert caught is not None, f"{POINTS_MAX} crash points show nothing"
    assert caught.broken.problem.name in MUTANTS[name].caught_by, str(caught.broken)


def test_there_are_mutants_enough() -> None:
    assert len(MUTANTS) >= 23
    assert FIRST_SEEDS.keys() <= MUTANTS.keys() | DAMAGE_MUTANTS.keys()


def test_a_mutant_leaves_nothing_behind() -> None:
    before = Journal.append
    with MUTANTS["ack-before-journal"].patch():
        assert Journal.append is not before
    assert Journal.append is before
