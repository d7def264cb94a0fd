"""Search histories of the protocol by seed, and count the events that they reached."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

from bindery_simulation.protocol.history import Outcome, play

CHUNK_SIZE: Final = 200
"""Number of histories per piece of work. A search checks its budget between pieces."""
FAILURES_MAX: Final = 5
"""Maximum number of failures in one piece of work; the remaining histories of the piece are not played."""


@dataclass(slots=True)
class Tally:
    """Sums over histories. `profile`: name of the profile that was searched; None: all profiles."""

    unit: ClassVar[str] = "protocol histories"

    profile: str | None = None
    count: int = 0
    first: int | None = None
    last: int = -1
    reach: Counter[str] = field(default_factory=Counter)
    """Number of histories in which each event occurred."""
    failed: list[int] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.count += other.count
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
            self.last = max(self.last, other.last)
        self.reach.update(other.reach)
        self.failed += other.failed

    def text(self, seconds: float, jobs: int) -> str:
        shares = {what: number / max(1, self.count) for what, number in self.reach.items()}
        reached = ", ".join(f"{what} {part:.1%}" for what, part in sorted(shares.items(), key=lambda item: -item[1]))
        return (
            f"{self.count} protocol histories in {seconds:.1f} s ({self.count / max(seconds, 1e-9):.0f}/s, "
            f"{jobs} jobs), seeds {self.first}..{self.last}, {len(self.failed)} violations\n"
            f"histories that reached: {reached}"
        )

    def failures(self) -> Iterator[str]:
        """Play each failed history again, with its trace."""
        for seed in sorted(self.failed):
            yield report(play(seed, profile=self.profile, trace=True), self.profile, trace=True)


def run_chunk(first: int, *, end: int | None, profile: str | None) -> Tally:
    """Play up to CHUNK_SIZE seeds from `first` on, below `end`."""
    tally = Tally(profile, first=first)
    for seed in range(first, first + CHUNK_SIZE if end is None else min(first + CHUNK_SIZE, end)):
        outcome = play(seed, profile=profile)
        tally.count += 1
        tally.last = seed
        tally.reach.update(outcome.reach.keys())
        if outcome.violation is not None:
            tally.failed.append(seed)
            if len(tally.failed) >= FAILURES_MAX:
                break
    return tally


def replay_command(seed: int, profile: str | None = None) -> str:
    """Return a command line that plays the history again, with its trace."""
    narrowed = f' --profile "{profile}"' if profile is not None else ""
    return f"PYTHONHASHSEED=0 .venv/bin/python -m bindery_simulation protocol --seed {seed}{narrowed} --trace"


def report(outcome: Outcome, profile: str | None = None, *, trace: bool) -> str:
    """Return a description of the result and the command to play the history again; with `trace` also its chart."""
    lines = [f"seed {outcome.seed} ({outcome.title})"]
    if trace and outcome.chart is not None:
        lines += outcome.chart.lines
        lines.append(f"trace: {len(outcome.chart.lines)} lines, sha256 {outcome.chart.digest()}")
    if outcome.violation is None:
        lines.append("every invariant holds")
    else:
        lines += [f"VIOLATED {outcome.violation}", f"replay: {replay_command(outcome.seed, profile)}"]
    return "\n".join(lines)
