"""Search simulated clusters by seed, and count their faults and repairs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from bindery_simulation.service.healing.plan import HealingKind
from bindery_simulation.service.world import Outcome, run_seed

Healing = HealingKind | bool | None
"""Kind of cluster with auditors; True: any kind; False: no auditors; None: determined by the seed."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one seed, without its trace."""

    seed: int
    faults: list[str]
    violation: str | None
    kind: str | None
    """Kind of cluster with auditors; None: no auditors."""
    marks_removed: int
    copies: int


@dataclass(slots=True)
class Tally:
    """Sums over seeds. `healing`: the kind of clusters that were searched."""

    unit: ClassVar[str] = "service seeds"

    healing: Healing = None
    count: int = 0
    first: int | None = None
    """The lowest seed that was run."""
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of clusters with auditors, by kind."""
    marks_removed: int = 0
    copies: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(seed, violation)."""

    def add(self, result: Result) -> None:
        self.count += 1
        self.first = result.seed if self.first is None else min(self.first, result.seed)
        self.faults.update(result.faults)
        if result.kind is not None:
            self.kinds[result.kind] += 1
        self.marks_removed += result.marks_removed
        self.copies += result.copies
        if result.violation is not None:
            self.failed.append((result.seed, result.violation))

    def text(self, seconds: float, jobs: int) -> str:
        injected = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        per_minute = 60 * self.count / seconds if seconds else 0.0
        return (
            f"{self.count} service seeds from {self.first} in {seconds:.1f} s ({per_minute:.0f} a minute), "
            f"{self.faults.total()} faults injected, {len(self.failed)} violations\n"
            f"faults: {injected or 'none'}\n"
            f"with auditors: {self.kinds.total()} ({kinds or 'none'}), {self.marks_removed} marks removed, "
            f"{self.copies} copies made"
        )

    def failures(self) -> Iterator[str]:
        for seed, violation in sorted(self.failed):
            yield f"seed {seed}: VIOLATED {violation}\nreplay: {replay_command(seed, *healing_options(self.healing))}"


def run_one(seed: int, *, healing: Healing) -> Result:
    """Run one seed."""
    outcome = run_seed(seed, healing=healing)
    return Result(
        seed,
        outcome.faults,
        None if outcome.violation is None else str(outcome.violation),
        None if outcome.healing is None else outcome.healing.kind.value,
        outcome.marks_removed,
        outcome.entries_healed,
    )


def healing_options(healing: Healing) -> list[str]:
    """Return the command-line options that select this kind of clusters."""
    if healing is None:
        return []
    return ["--healing", "any" if healing is True else str(healing or "none")]


def replay_command(seed: int, *options: str) -> str:
    """Return a command line that runs the seed again, with its trace."""
    return f"make sim SEED={seed}" + (f' ARGS="{" ".join(options)}"' if options else "")


def report(outcome: Outcome, *options: str, trace: bool) -> str:
    """Return a description of the result and the command to run the seed again.

    With `trace`, or if an invariant was violated, the description includes all events.
    """
    text = "".join(outcome.trace.lines()) if trace or outcome.violation is not None else ""
    text += (
        f"seed {outcome.seed}: {outcome.ledgers} ledgers, {outcome.acknowledged} entries acknowledged, "
        f"{outcome.simulated_s:.1f} s simulated, faults: {', '.join(outcome.faults) or 'none'}\n"
    )
    if outcome.healing is not None:
        text += (
            f"healing ({outcome.healing.kind}): {outcome.marks_removed} marks removed, "
            f"{outcome.entries_healed} copies made\n"
        )
    text += f"trace: {len(outcome.trace.events)} events, sha256 {outcome.trace.digest()}\n"
    if outcome.violation is None:
        return text + "every invariant holds"
    return text + f"VIOLATED {outcome.violation}\nreplay: {replay_command(outcome.seed, *options)}"
