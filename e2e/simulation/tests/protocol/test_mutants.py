"""An invariant reports each mutant of the protocol, and each invariant reports at least one mutant."""

from functools import cache

import pytest
from bindery_simulation.mutant import Catch
from bindery_simulation.protocol.mutants import MUTANTS

pytestmark = pytest.mark.timeout(600)  # the first test that needs all mutants hunts them all
HISTORIES_MAX = 8_000
"""Maximum number of histories per mutant, up to twenty seconds of one core. The mutant with the fewest violations needs
half of them from seed 0."""


@cache
def hunted(name: str) -> Catch | None:
    return MUTANTS.hunt(name, cost_max=HISTORIES_MAX)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_reported_by_its_invariant(name: str) -> None:
    found = hunted(name)
    assert found is not None, f"{HISTORIES_MAX} histories report no violation"
    assert found.trial.invariant in MUTANTS[name].caught_by, found.trial.text


def test_each_invariant_reports_a_mutant() -> None:
    """The exception is `machine-assertions`, which reports only defects that no other invariant reports."""
    caught = {hunted(name).trial.invariant for name in MUTANTS}  # type: ignore[union-attr]
    assert len(MUTANTS) >= 16
    assert caught == {
        "acknowledged-entries-readable",
        "no-divergence-of-writer-and-metadata",
        "no-ack-after-fence",
        "lac-never-beyond-safe",
        "covered-lac-reads-are-recent",
        "ids-dense",
        "metadata-segments-valid",
        "closed-is-final",
        "copies-agree",
        "mark-removed-means-whole",
        "recovery-terminates",
    }
