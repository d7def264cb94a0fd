"""Search simulated clusters whose topics have policies by seed, and count what their runs reached."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from bindery_simulation.policies.world import Result, run_seed


@dataclass(slots=True)
class Tally:
    """Sums over seeds."""

    unit: ClassVar[str] = "policies seeds"

    count: int = 0
    first: int | None = None
    """The lowest seed that was run."""
    faults: Counter[str] = field(default_factory=Counter)
    hours: float = 0.0
    calls: int = 0
    trimmed: int = 0
    refused: int = 0
    released: int = 0
    deleted: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(seed, violation)."""

    def add(self, result: Result) -> None:
        self.count += 1
        self.first = result.seed if self.first is None else min(self.first, result.seed)
        self.faults.update(result.faults)
        self.hours += result.simulated_s / 3_600
        self.calls += result.calls
        self.trimmed += result.trimmed
        self.refused += result.refused
        self.released += result.released
        self.deleted += result.deleted
        if result.violation is not None:
            self.failed.append((result.seed, str(result.violation)))

    def text(self, seconds: float, jobs: int) -> str:
        injected = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        per_minute = 60 * self.count / seconds if seconds else 0.0
        return (
            f"{self.count} policies seeds from {self.first} in {seconds:.1f} s ({per_minute:.0f} a minute), "
            f"{self.hours:.0f} hours simulated, {self.faults.total()} faults injected, {len(self.failed)} violations\n"
            f"faults: {injected or 'none'}\n"
            f"{self.calls} calls, {self.refused} refused by quotas, {self.trimmed} ledgers trimmed, {self.released} "
            f"messages expired or evicted, {self.deleted} inactive topics deleted"
        )

    def failures(self) -> Iterator[str]:
        for seed, violation in sorted(self.failed):
            yield f"seed {seed}: VIOLATED {violation}\nreplay: {replay_command(seed)}"


def run_one(seed: int) -> Result:
    """Run one seed. The result has no trace, so that another process can send it."""
    result = run_seed(seed)
    result.trace.events.clear()
    return result


def replay_command(seed: int, *options: str) -> str:
    """Return a command line that runs the seed again, with its trace."""
    return f"make sim KIND=policies SEED={seed}" + (f' ARGS="{" ".join(options)}"' if options else "")


def report(result: Result, *options: str, trace: bool) -> str:
    """Return a description of the result and the command to run the seed again.

    With `trace`, or if an invariant was violated, the description includes all events.
    """
    text = "".join(result.trace.lines()) if trace or result.violation is not None else ""
    text += (
        f"seed {result.seed}: {result.calls} calls, {result.refused} refused by quotas, {result.trimmed} ledgers "
        f"trimmed, {result.released} messages expired or evicted, {result.deleted} inactive topics deleted, "
        f"{result.simulated_s:.1f} s simulated, faults: {', '.join(result.faults) or 'none'}\n"
        f"trace: {len(result.trace.events)} events, sha256 {result.trace.digest()}\n"
    )
    if result.violation is None:
        return text + "every invariant holds"
    return text + f"VIOLATED {result.violation}\nreplay: {replay_command(result.seed, *options)}"
