"""Power cuts by seed: what was acknowledged is there after the restart, and nothing else that was never sent.

The search itself, and that it notices broken promises, is in `bindery_simulation.storage`. A failure names its point:
`python -m bindery_simulation storage crash --point SEED:OPERATION` replays it alone.
"""

import time

from bindery_simulation.storage import crash
from bindery_simulation.storage.runner import quietly

BUDGET_S = 3.0
"""Of the processor: a busy machine takes longer and sees as much."""


def test_acknowledged_writes_survive_power_cuts() -> None:
    until = time.process_time() + BUDGET_S
    seed = points = read = 0
    while time.process_time() < until:
        outcome = quietly(crash.play, seed)
        assert not outcome.problems, f"{seed}:{outcome.problems[0].operation}: {outcome.problems[0]}"
        points += outcome.points
        read += outcome.reached["acknowledged entries read"]
        seed += 1
    assert points >= 20
    assert read > 500, "the seeds acknowledged hardly anything: this checks nothing"


def test_every_operation_of_one_life_is_cut() -> None:
    outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation < 120), 1)
    assert not outcome.problems, str(outcome.problems[0])
    assert outcome.points == min(120, outcome.operations)
