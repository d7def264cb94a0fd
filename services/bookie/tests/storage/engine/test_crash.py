"""Power losses by seed: after the restart all acknowledged entries are stored, and no entry that was never sent.

The search, and tests that it detects violations, are in `bindery_simulation.storage`. A failure names its point:
`python -m bindery_simulation storage crash --point SEED:OPERATION` replays it alone.
"""

import time

from bindery_simulation.runner import quietly
from bindery_simulation.storage import crash

BUDGET_S = 3.0
"""Processor time of the search in seconds, so that a busy machine takes longer and checks as many points."""


def test_acknowledged_writes_survive_power_loss() -> None:
    until = time.process_time() + BUDGET_S
    seed = points = read = 0
    while time.process_time() < until:
        outcome = quietly(crash.play, seed)
        assert not outcome.problems, f"{seed}:{outcome.problems[0].operation}: {outcome.problems[0]}"
        points += outcome.points
        read += outcome.reached["acknowledged entries read"]
        seed += 1
    assert points >= 20
    assert read > 500, "too few entries were acknowledged for a meaningful check"


def test_acknowledged_writes_survive_a_power_loss_at_every_operation_of_one_run() -> None:
    outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation < 120), 1)
    assert not outcome.problems, str(outcome.problems[0])
    assert outcome.points == min(120, outcome.operations)
