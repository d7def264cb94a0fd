"""Runner: many seeds, in as many processes as asked, until a time is over or one fails."""

import gc
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult
from typing import Final

from bindery_simulation.service.healing.plan import HealingKind
from bindery_simulation.service.world import run_seed

_clock = time.monotonic

COLLECT_EVERY: Final = 10
"""Runs between two garbage collections."""
CHUNK: Final = 8
"""Seeds that a process takes at a time."""

Healing = HealingKind | bool | None
Result = tuple[int, list[str], str | None, tuple[str, int, int] | None]
"""Seed, faults injected, what was violated; with auditors: the kind of world, marks removed, copies made."""


@dataclass(slots=True)
class Summary:
    seeds: int = 0
    first: int | None = None
    """The least seed that was run."""
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was violated)."""
    healing: Counter[str] = field(default_factory=Counter)
    """Worlds with auditors, by kind."""
    marks_removed: int = 0
    copies: int = 0

    def add(self, results: Iterable[Result]) -> None:
        for seed, faults, failure, healed in results:
            self.seeds += 1
            self.first = seed if self.first is None else min(self.first, seed)
            self.faults.update(faults)
            if healed is not None:
                kind, marks, copies = healed
                self.healing[kind] += 1
                self.marks_removed += marks
                self.copies += copies
            if failure is not None:
                self.failures.append((seed, failure))

    def text(self) -> str:
        injected = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.healing.items()))
        per_minute = 60 * self.seeds / self.seconds if self.seconds else 0.0
        return (
            f"{self.seeds} service seeds from {self.first} in {self.seconds:.1f} s ({per_minute:.0f} a minute), "
            f"{sum(self.faults.values())} faults injected, {len(self.failures)} violations\n"
            f"faults: {injected or 'none'}\n"
            f"with auditors: {sum(self.healing.values())} ({kinds or 'none'}), {self.marks_removed} marks removed, "
            f"{self.copies} copies made"
        )


def run_seeds(
    seeds: Iterable[int],
    *,
    seconds: float | None = None,
    jobs: int = 1,
    failures_max: int = 1,
    healing: Healing = None,
) -> Summary:
    """Run until the seeds or the seconds are over, or so many failed. Within COLLECT_EVERY runs memory may grow."""
    summary = Summary()
    started = _clock()
    deadline = None if seconds is None else started + seconds
    for results in _run_chunks(_chunks(seeds), jobs, deadline, healing):
        summary.add(results)
        if len(summary.failures) >= failures_max or (deadline is not None and _clock() >= deadline):
            break
    summary.seconds = _clock() - started
    return summary


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    remaining = iter(seeds)
    while chunk := list(itertools.islice(remaining, CHUNK)):
        yield chunk


def _run_chunks(
    chunks: Iterator[list[int]], jobs: int, deadline: float | None, healing: Healing
) -> Iterator[list[Result]]:
    if jobs == 1:
        for chunk in chunks:
            yield _run_chunk(chunk, deadline, healing)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:

        def submit(count: int) -> list[AsyncResult[list[Result]]]:
            some = itertools.islice(chunks, count)
            return [pool.apply_async(_run_chunk, (chunk, deadline, healing)) for chunk in some]

        waiting = submit(2 * jobs)  # never all at once: there may be no end of them
        while waiting:
            yield waiting.pop(0).get()
            waiting += submit(1)


def _run_chunk(seeds: list[int], deadline: float | None, healing: Healing) -> list[Result]:
    results: list[Result] = []
    for seed in seeds:
        outcome = run_seed(seed, healing=healing)
        failure = None if outcome.violation is None else str(outcome.violation)
        plan = outcome.healing
        healed = None if plan is None else (plan.kind.value, outcome.marks_removed, outcome.entries_healed)
        results.append((seed, outcome.faults, failure, healed))
        _collect()
        if deadline is not None and _clock() >= deadline:
            break
    return results


_runs = itertools.count(1)


def _collect() -> None:
    number = next(_runs)
    if number == 1:
        gc.collect()
        gc.freeze()  # what was imported stays, and need not be looked at again
    elif number % COLLECT_EVERY == 0:
        gc.collect()
