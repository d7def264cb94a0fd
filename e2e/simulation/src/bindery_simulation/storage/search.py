"""Search crash points and damaged files by seed, and count them."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from bindery_simulation.storage import crash, damage


@dataclass(slots=True)
class CrashTally:
    """Sums over the seeds from `first` on."""

    unit: ClassVar[str] = "crash points"

    first: int
    count: int = 0
    seeds: int = 0
    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, crash.Broken]] = field(default_factory=list)
    """(seed, broken promise)."""

    def add(self, outcome: crash.Outcome) -> None:
        self.count += outcome.points
        self.seeds += 1
        self.operations += outcome.operations
        self.kinds.update(outcome.kinds)
        self.reached.update(outcome.reached)
        self.failed += [(outcome.seed, broken) for broken in outcome.problems]

    def text(self, seconds: float, jobs: int) -> str:
        return (
            f"{_counted('cut before, of', self.kinds)}\n{_counted('points that saw', self.reached)}\n"
            f"{self.count} crash points, {len(self.failed)} violations; seeds from {self.first}: {self.seeds} of "
            f"{self.operations} operations, {seconds:.1f} s, {self.count / max(seconds, 1e-9):.0f}/s, {jobs} jobs"
        )

    def failures(self) -> Iterator[str]:
        for seed, broken in self.failed:
            yield f"seed {seed} operation {broken.operation}: VIOLATED {broken}\n" + replay_command(
                "crash", f"--point {seed}:{broken.operation}"
            )


@dataclass(slots=True)
class DamageTally:
    """Sums over damaged files from the seed `first` on."""

    unit: ClassVar[str] = "damaged files"

    first: int
    cases: damage.Tally = field(default_factory=damage.Tally)

    @property
    def count(self) -> int:
        return self.cases.count

    @property
    def failed(self) -> list[damage.Outcome]:
        return self.cases.failed

    def add(self, part: damage.Tally) -> None:
        self.cases.add(part)

    def text(self, seconds: float, jobs: int) -> str:
        cases = self.cases
        lines = [
            _counted(name, counted)
            for name, counted in (("ended", cases.ended), ("harm", cases.harms), ("files", cases.files))
        ]
        lines.append(
            f"{cases.count} damaged files, {len(cases.failed)} violations; seeds from {self.first}, "
            f"{cases.entries_right} entries read correctly, {seconds:.1f} s, "
            f"{cases.count / max(seconds, 1e-9):.0f}/s, {jobs} jobs"
        )
        return "\n".join(lines)

    def failures(self) -> Iterator[str]:
        for outcome in sorted(self.failed, key=lambda outcome: outcome.seed):
            yield f"seed {outcome.seed}: VIOLATED {outcome}\n" + replay_command("damage", f"--case {outcome.seed}")


def run_crash(seed: int, *, every: bool) -> crash.Outcome:
    """Run one seed. `every`: cut the power before each operation, not before a random sample."""
    return crash.play(seed, wanted=(lambda operation: True) if every else None)


def run_damage(first: int, *, end: int | None) -> damage.Tally:
    """Run the cases of one template from seed `first` on, below `end`."""
    count = damage.CASES_PER_TEMPLATE
    return damage.run_cases(first, count if end is None else min(count, end - first))


def replay_point(seed: int, operation: int, note: Callable[[str], None]) -> bool:
    """Run one crash point with a trace. Return whether every promise held. Operation -1: only the workload."""
    outcome = crash.play(seed, wanted=lambda found: found == operation, note=note)
    for broken in outcome.problems:
        note(f"seed {seed} operation {broken.operation}: VIOLATED {broken}")
    if not outcome.problems:
        note(f"seed {seed} operation {operation} of {outcome.operations}: every promise held, {outcome.points} points")
    return not outcome.problems


def replay_case(seed: int, note: Callable[[str], None]) -> bool:
    """Run one damage case and describe the result. Return whether every promise held."""
    outcome = damage.replay(seed)
    note(f"seed {seed}: {outcome.harm.kind}: {outcome.harm.text}\nended: {outcome.ended} {outcome.text}")
    note(f"answers without a result: {outcome.refusals}")
    for problem in outcome.problems:
        note(f"VIOLATED {problem}")
    return not outcome.problems


def replay_command(what: str, options: str) -> str:
    return f"replay: python -m bindery_simulation storage {what} {options}"


def _counted(what: str, counted: Counter[str]) -> str:
    return f"{what}: " + (", ".join(f"{name} {number}" for name, number in sorted(counted.items())) or "nothing")
