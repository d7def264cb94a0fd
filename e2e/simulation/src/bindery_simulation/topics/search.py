"""Search simulated clusters with brokers by seed, and count what their runs reached."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from bindery_simulation.topics.world import Outcome, run_seed


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one seed, without its trace."""

    seed: int
    faults: list[str]
    violation: str | None
    calls: int
    deliveries: int
    owners: int
    trimmed: int
    copies: int


@dataclass(slots=True)
class Tally:
    """Sums over seeds."""

    unit: ClassVar[str] = "topics seeds"

    count: int = 0
    first: int | None = None
    """The lowest seed that was run."""
    faults: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    deliveries: int = 0
    owners: int = 0
    trimmed: int = 0
    copies: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(seed, violation)."""

    def add(self, result: Result) -> None:
        self.count += 1
        self.first = result.seed if self.first is None else min(self.first, result.seed)
        self.faults.update(result.faults)
        self.calls += result.calls
        self.deliveries += result.deliveries
        self.owners += result.owners
        self.trimmed += result.trimmed
        self.copies += result.copies
        if result.violation is not None:
            self.failed.append((result.seed, result.violation))

    def text(self, seconds: float, jobs: int) -> str:
        injected = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        per_minute = 60 * self.count / seconds if seconds else 0.0
        return (
            f"{self.count} topics seeds from {self.first} in {seconds:.1f} s ({per_minute:.0f} a minute), "
            f"{self.faults.total()} faults injected, {len(self.failed)} violations\n"
            f"faults: {injected or 'none'}\n"
            f"{self.calls} calls, {self.deliveries} messages delivered, topics opened {self.owners} times, "
            f"{self.trimmed} ledgers trimmed, {self.copies} copies stored for other brokers"
        )

    def failures(self) -> Iterator[str]:
        for seed, violation in sorted(self.failed):
            yield f"seed {seed}: VIOLATED {violation}\nreplay: {replay_command(seed)}"


def run_one(seed: int) -> Result:
    """Run one seed."""
    outcome = run_seed(seed)
    violation = None if outcome.violation is None else str(outcome.violation)
    return Result(
        seed,
        outcome.faults,
        violation,
        outcome.calls,
        outcome.deliveries,
        outcome.owners,
        outcome.trimmed,
        outcome.copies,
    )


def replay_command(seed: int, *options: str) -> str:
    """Return a command line that runs the seed again, with its trace."""
    return f"make sim KIND=topics SEED={seed}" + (f' ARGS="{" ".join(options)}"' if options else "")


def report(outcome: Outcome, *options: str, trace: bool) -> str:
    """Return a description of the result and the command to run the seed again.

    With `trace`, or if an invariant was violated, the description includes all events.
    """
    text = "".join(outcome.trace.lines()) if trace or outcome.violation is not None else ""
    text += (
        f"seed {outcome.seed}: {outcome.calls} calls, {outcome.deliveries} messages delivered, "
        f"topics opened {outcome.owners} times, {outcome.trimmed} ledgers trimmed, "
        f"{outcome.copies} copies stored for other brokers, {outcome.simulated_s:.1f} s simulated, "
        f"faults: {', '.join(outcome.faults) or 'none'}\n"
        f"trace: {len(outcome.trace.events)} events, sha256 {outcome.trace.digest()}\n"
    )
    if outcome.violation is None:
        return text + "every invariant holds"
    return text + f"VIOLATED {outcome.violation}\nreplay: {replay_command(outcome.seed, *options)}"
