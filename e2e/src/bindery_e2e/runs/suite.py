"""The quick suite: each fault once, in an order in which each finds a cluster that got over the one before."""

import random
from collections.abc import Iterator, Sequence
from typing import Final

from bindery_e2e.faults.faults import catalogue
from bindery_e2e.runs.runner import Step

STEPS: Final = (
    ("delete bookie",),
    ("kill -9 bookie", "delete auditor leader"),
    ("kill -9 broker owner", "delete zookeeper follower"),
    ("delete broker owner",),
    ("kill -9 zookeeper leader",),
    ("kill -9 auditor leader", "kill -9 zookeeper follower"),
    ("SIGSTOP bookie",),
    ("SIGSTOP broker owner",),
    ("SIGSTOP zookeeper leader",),
    ("delete zookeeper leader",),
    ("stop node",),
    ("partition node",),
    ("lose the volume of bookie",),
    ("rolling restart of the bookies",),
    ("scale the bookies up, drain, and down",),
    ("helm upgrade, changed values",),
    ("helm upgrade to a new version and rollback",),
)


def quick_steps(seed: int, *, only: Sequence[str] = ()) -> Iterator[Step]:
    """`seed` chooses the targets. `only`: faults whose name has one of these; none: all."""
    lots = random.Random(f"quick {seed}")
    make = catalogue()
    for names in STEPS:
        step = [make[name](lots.random()) for name in names]
        chosen = [fault for fault in step if not only or any(text in fault.name for text in only)]
        if chosen:
            yield chosen
