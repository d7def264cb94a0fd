"""Mutants: the product, or a model of it, with one defect injected. A search must report each of them.

A search that finds no violation excludes only the defects that the search can detect. A mutant is a list of attributes
to replace, the invariants that may report it, the conditions under which few seeds are needed, and the first seed that
reports it under these conditions. Each search has one `MutantTable`; `command` lists and hunts all of them.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar
from unittest.mock import patch

C = TypeVar("C")

Replacement = tuple[Any, str, Any]
"""Owner, name and new value of an attribute."""
Defect = Callable[[], list[Replacement]]
"""Returns the replacements that inject a defect."""


class Kind(StrEnum):
    """The search that must report a mutant."""

    PROTOCOL = "protocol"
    SERVICE = "service"
    TOPICS = "topics"
    POLICIES = "policies"
    CRASH = "crash"
    DAMAGE = "damage"


@dataclass(frozen=True, slots=True)
class Mutant(Generic[C]):
    """One defect."""

    kind: Kind
    name: str
    breaks: str
    """What the defect does, as a sentence."""
    caught_by: tuple[str, ...]
    """Names of the invariants that may report the defect. The first one that is violated reports it."""
    seed: int
    """The first seed that reports the defect under `conditions`."""
    conditions: C
    """Conditions of the search, such as a profile or a set of faults."""
    defect: Defect

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inject the defect within the block."""
        with contextlib.ExitStack() as stack:
            for owner, attribute, value in self.defect():
                stack.enter_context(patch.object(owner, attribute, value))
            yield

    def seeds(self) -> Iterator[int]:
        """Yield the seed that is known to report the mutant, then every seed."""
        yield self.seed
        yield from (seed for seed in itertools.count() if seed != self.seed)


@dataclass(frozen=True, slots=True)
class Trial:
    """The run of one seed with a mutant."""

    seed: int
    cost: int
    """Cost of the run in the unit of its search: 1, or its number of crash points."""
    invariant: str | None
    """Name of the invariant that reported the mutant; None: not reported."""
    text: str = ""
    """Description of the violation."""


@dataclass(frozen=True, slots=True)
class Catch:
    """The first trial that reported a mutant, and the cost of all trials up to it."""

    trial: Trial
    cost: int


Trials = Callable[[Iterable[int], C], Iterator[Trial]]
"""Runs seeds under the conditions of a mutant."""
Row = tuple[str, str, Sequence[str], int, C, Defect]
"""The fields of a mutant, without its kind."""


class MutantTable(dict[str, Mutant[C]]):
    """The mutants of one search by name. `unit`: unit of the cost of a trial, in the plural."""

    def __init__(self, kind: Kind, trials: Trials[C], rows: Iterable[Row[C]] = (), *, unit: str) -> None:
        super().__init__()
        self.kind = kind
        self.unit = unit
        self._trials = trials
        for row in rows:
            self.add(*row)

    def add(self, name: str, breaks: str, caught_by: Sequence[str], seed: int, conditions: C, defect: Defect) -> None:
        """Add a mutant; the arguments are the fields of `Mutant`."""
        assert name not in self, name
        self[name] = Mutant(self.kind, name, breaks, tuple(caught_by), seed, conditions, defect)

    def hunt(
        self, name: str, *, cost_max: int, seconds_max: float = float("inf"), seeds: Iterable[int] | None = None
    ) -> Catch | None:
        """Run seeds with the mutant until an invariant reports it. Return None if that exceeds a limit.

        `seconds_max`: processor time. `seeds`: by default the known seed first, then all others.
        """
        mutant = self[name]
        began, cost = time.process_time(), 0
        with mutant.applied():
            for trial in self._trials(mutant.seeds() if seeds is None else seeds, mutant.conditions):
                cost += trial.cost
                if trial.invariant is not None:
                    return Catch(trial, cost)
                if cost >= cost_max or time.process_time() - began >= seconds_max:
                    return None
        return None


def no_replacement() -> list[Replacement]:
    """Return no replacements: the conditions of the mutant inject its defect, such as a disk that skips syncs."""
    return []
