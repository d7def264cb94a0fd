"""Goal: prove that the checks of the protocol simulation can fail, each for the reason that it names."""

from functools import cache

import pytest
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_simulation.protocol.history import Outcome, play
from bindery_simulation.protocol.mutants import MUTANTS, applied, hunt

pytestmark = pytest.mark.timeout(600)  # the first that asks for all of them hunts them all
SEEDS_MAX = 8_000
"""Up to twenty seconds on one core; the rarest mutant needs half of them, most need a few dozen."""
SHOWN_BY = {
    "recovery reads do not fence (BookKeeper issue 2614)": 666,
    "recovery starts at -1 (BookKeeper issue 2615)": 2295,
    "a delete takes no notice of an ensemble change since it fenced": 4170,
}
"""The seed that is asked first. One that shows its mutant no longer costs a history, and all are asked as ever."""


@cache
def hunted(name: str) -> tuple[Outcome | None, int]:
    """The same every time, so once is enough."""
    if name in SHOWN_BY:
        with applied(MUTANTS[name]):
            outcome = play(SHOWN_BY[name], profile=MUTANTS[name].profile)
        if outcome.violation is not None:
            return outcome, 1
    return hunt(MUTANTS[name], seeds_max=SEEDS_MAX)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    """By an invariant that fits it: not by an accident."""
    outcome, played = hunted(name)
    assert outcome is not None, f"{played} histories show nothing"
    assert outcome.violation is not None
    assert outcome.violation.invariant in MUTANTS[name].caught_by, str(outcome.violation)


def test_there_are_mutants_enough_and_each_invariant_catches_one() -> None:
    """`machine-assertions` is a net under the others."""
    caught = {hunted(name)[0].violation.invariant.value for name in MUTANTS}  # type: ignore[union-attr]
    assert len(MUTANTS) >= 16
    assert SHOWN_BY.keys() <= MUTANTS.keys()
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
