"""The search over crash points covers each kind of write and is repeatable, and it finds no broken promise."""

from bindery_simulation.runner import quietly
from bindery_simulation.storage import crash

SEEDS = (104, 114, 121)
"""Seeds with short runs that together cover each kind of write."""


def notes(seed: int) -> tuple[list[str], crash.Outcome]:
    text: list[str] = []
    return text, crash.play(seed, note=text.append, wanted=lambda operation: operation % 40 == 7)


def test_acknowledged_data_survives_a_power_cut_before_any_write() -> None:
    points = replayed = rebuilt = 0
    for seed in SEEDS:
        outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation % 6 == 1), seed)
        assert not outcome.problems, f"seed {seed}: {outcome.problems[0]}"
        points += outcome.points
        replayed += outcome.reached["entries replayed"]
        rebuilt += outcome.reached["index lost and rebuilt"]
        assert outcome.reached["acknowledged entries read"] > 0
    assert points > 60
    assert replayed > 100, "too few entries were replayed for a check"
    assert rebuilt > 3


def test_the_power_is_cut_during_compaction() -> None:
    outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation % 3 == 1), 176)
    assert not outcome.problems
    assert outcome.reached["entry logs compacted"] > 0
    assert outcome.kinds["compacted log rename"] > 0
    assert outcome.kinds["entry-logs rename"] > 0


def test_the_power_is_cut_before_each_kind_of_write() -> None:
    kinds = {kind for seed in SEEDS for kind in crash.play(seed, wanted=lambda operation: False).kinds}
    assert kinds >= {
        "journal create",
        "journal write",
        "journal datasync",
        "journal directory sync",
        "journal remove",
        "entry log create",
        "entry log write",
        "entry log datasync",
        "entry log sync",
        "index batch",
        "LastLogMark create",
        "LastLogMark write",
        "LastLogMark sync",
        "LastLogMark rename",
        "ledgers directory sync",
    }


def test_equal_seeds_give_equal_histories() -> None:
    text, outcome = notes(11)
    again, repeated = notes(11)
    assert text == again
    assert len(text) > 20
    assert (outcome.operations, outcome.points, outcome.reached) == (
        repeated.operations,
        repeated.points,
        repeated.reached,
    )


def test_a_single_point_equals_the_same_point_among_others() -> None:
    """Snapshots do not influence the run."""
    many = crash.play(12, wanted=lambda operation: operation < 60, problems_max=10**9)
    one = crash.play(12, wanted=lambda operation: operation == 59)
    assert many.points == 60
    assert one.points == 1
    assert one.operations == many.operations
