"""Generate the steps of the quick suite, which injects each fault once. Each step begins on a recovered cluster.

A sample of the suite has one step of each kind of fault; the seed selects the steps.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bindery_e2e.faults.faults import NodeFault, catalogue
from bindery_e2e.judging.figures import FaultFigures
from bindery_e2e.runs.runner import Step

Names = tuple[str, ...]
"""Names of the faults of one step, which overlap."""
KINDS: Final[tuple[tuple[Names, ...], ...]] = (
    (("delete bookie",), ("delete broker owner",), ("delete zookeeper leader",)),
    (("kill -9 bookie", "delete auditor leader"), ("kill -9 broker owner", "delete zookeeper follower")),
    (("kill -9 zookeeper leader",), ("kill -9 auditor leader", "kill -9 zookeeper follower")),
    (("SIGSTOP bookie",), ("SIGSTOP broker owner",), ("SIGSTOP zookeeper leader",)),
    (("stop node",), ("partition node",)),
    (("lose the volume of bookie",),),
    (("rolling restart of the bookies",),),
    (("scale the bookies up, drain, and down",),),
    (("helm upgrade, changed values",), ("helm upgrade to a new version and rollback",)),
)
"""Steps by kind of fault. The suite plays all of them, a sample plays one of each kind."""
STEPS: Final = tuple(step for kind in KINDS for step in kind)


def quick_steps(seed: int, *, only: Sequence[str] = ()) -> Iterator[Step]:
    """`seed` chooses the targets. `only`: faults whose name contains one of these; empty: all."""
    for step in _made(STEPS, random.Random(f"quick {seed}")):
        chosen = [fault for fault in step if not only or any(text in fault.name for text in only)]
        if chosen:
            yield chosen


def sampled_steps(seed: int) -> Iterator[Step]:
    """One step of each kind; `seed` chooses the steps and the targets."""
    generator = random.Random(f"sample {seed}")
    yield from _made([generator.choice(kind) for kind in KINDS], generator)


def _made(steps: Iterable[Names], generator: random.Random) -> Iterator[Step]:
    make = catalogue()
    for names in steps:
        yield [make[name](generator.random()) for name in names]


def not_played(steps: Iterable[Step], played: Sequence[FaultFigures], *, has_nodes: bool) -> list[str]:
    """Faults of the plan that were not injected or not recovered from, with their outcomes.

    A fault that the cluster does not offer proves nothing. Only node faults may be missing, and only if the environment
    has no way to stop a node (`has_nodes` is false).
    """
    outcomes = [(one.fault, one.outcome or "never ended") for one in played]
    problems = []
    for fault in (fault for step in steps for fault in step):
        outcome = next((found for found in outcomes if found[0] == fault.name), None)
        if outcome is None:
            problems.append(f"{fault.name}: not begun")
            continue
        outcomes.remove(outcome)
        is_excused = outcome[1] == "not offered" and isinstance(fault, NodeFault) and not has_nodes
        if outcome[1] != "ok" and not is_excused:
            problems.append(f"{fault.name}: {outcome[1]}")
    return problems
