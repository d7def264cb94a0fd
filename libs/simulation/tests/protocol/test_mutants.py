"""Goal: prove that the checks of the protocol simulation can fail, each for the reason that it names."""

import pytest
from bindery_core.ledger_writer import LedgerWriter
from bindery_simulation.protocol.mutants import MUTANTS, Mutant, applied, hunt

SEEDS_MAX = 8_000
"""About six seconds on one core; the rarest mutant needs a sixth of it, most need a few dozen."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    """By an invariant that fits it: not by an accident."""
    outcome, played = hunt(mutant, seeds_max=SEEDS_MAX)
    assert outcome is not None, f"{played} histories show nothing"
    assert outcome.violation is not None
    assert outcome.violation.invariant in mutant.caught_by, str(outcome.violation)


def test_there_are_mutants_enough_and_each_invariant_catches_one() -> None:
    """`machine-assertions` is a net under the others."""
    caught = {hunt(mutant, seeds_max=SEEDS_MAX)[0].violation.invariant.value for mutant in MUTANTS.values()}  # type: ignore[union-attr]
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


def test_a_mutant_leaves_nothing_behind() -> None:
    before = LedgerWriter._drain
    with applied(MUTANTS["entries are confirmed before the metadata change"]):
        assert LedgerWriter._drain is not before
    assert LedgerWriter._drain is before
