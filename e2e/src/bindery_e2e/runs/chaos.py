"""Random faults for as long as wanted. The seed decides which, on whom and when; time only decides how many.

Two faults overlap only where together they take away at most one of each kind (`Fault.takes`): more than that the
cluster does not promise to survive without a pause.
"""

import random
from collections.abc import Iterator
from typing import Final

from bindery_e2e.faults.faults import WHOLE, Fault, catalogue
from bindery_e2e.runs.runner import Step

PAIR_SHARE: Final = 0.35
"""Of the steps: two faults at once, where they fit together."""
WEIGHTS: Final = {
    "rolling restart of the bookies": 1,
    "scale the bookies up, drain, and down": 1,
    "helm upgrade, changed values": 1,
    "helm upgrade to a new version and rollback": 1,
    "lose the volume of bookie": 2,
    "stop node": 2,
    "partition node": 2,
}
"""How often a fault is drawn beside others; what is not named: COMMON_WEIGHT."""
COMMON_WEIGHT: Final = 4


def fit(first: Fault, second: Fault) -> bool:
    """Whether both at once stay within what the cluster survives."""
    together = first.takes | second.takes
    return WHOLE not in together and not first.takes & second.takes


def random_steps(seed: int) -> Iterator[Step]:
    """Without end; the same for the same seed."""
    lots = random.Random(f"chaos {seed}")
    make = catalogue()
    names = list(make)
    weights = [WEIGHTS.get(name, COMMON_WEIGHT) for name in names]
    while True:
        first, second = (make[name](lots.random()) for name in lots.choices(names, weights, k=2))
        is_pair = lots.random() < PAIR_SHARE
        yield [first, second] if is_pair and fit(first, second) else [first]
