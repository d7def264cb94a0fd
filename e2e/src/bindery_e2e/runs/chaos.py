"""Generate an endless random sequence of faults. The seed determines the faults, their targets and their order.

Two faults overlap only if together they make at most one process of each component unavailable (`Fault.takes`), because
the cluster promises to survive only that.
"""

import random
from collections.abc import Iterator
from typing import Final

from bindery_e2e.faults.faults import WHOLE, Fault, catalogue
from bindery_e2e.runs.runner import Step

PAIR_SHARE: Final = 0.35
"""Share of the steps that inject two faults at once, if the two may overlap."""
WEIGHTS: Final = {
    "rolling restart of the bookies": 1,
    "scale the bookies up, drain, and down": 1,
    "helm upgrade, changed values": 1,
    "helm upgrade to a new version and rollback": 1,
    "lose the volume of bookie": 2,
    "stop node": 2,
    "partition node": 2,
}
"""Relative frequency of a fault; COMMON_WEIGHT for all others."""
COMMON_WEIGHT: Final = 4


def fit(first: Fault, second: Fault) -> bool:
    """Whether the two faults may overlap."""
    together = first.takes | second.takes
    return WHOLE not in together and not first.takes & second.takes


def random_steps(seed: int) -> Iterator[Step]:
    """An endless series of steps; the same for the same seed."""
    rng = random.Random(f"chaos {seed}")
    make = catalogue()
    names = list(make)
    weights = [WEIGHTS.get(name, COMMON_WEIGHT) for name in names]
    while True:
        first, second = (make[name](rng.random()) for name in rng.choices(names, weights, k=2))
        is_pair = rng.random() < PAIR_SHARE
        yield [first, second] if is_pair and fit(first, second) else [first]
