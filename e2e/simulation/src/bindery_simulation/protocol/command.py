"""`python -m bindery_simulation protocol`: play histories by seed, count them, and replay one as a sequence chart."""

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice

from bindery_simulation.protocol.history import Outcome, play
from bindery_simulation.protocol.mutants import MUTANTS, applied
from bindery_simulation.protocol.profiles import PROFILES

_clock = time.monotonic
CHUNK = 1_000
"""Histories between two looks at the clock."""
FAILURES_MAX = 5
"""So many failures are shown; then the run ends."""


@dataclass
class Tally:
    """Sums over histories. `reach`: in how many of them something was reached."""

    histories: int = 0
    first: int | None = None
    last: int = -1
    reach: Counter[str] = field(default_factory=Counter)
    profiles: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.histories += other.histories
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
            self.last = max(self.last, other.last)
        self.reach.update(other.reach)
        self.profiles.update(other.profiles)
        self.failed += other.failed


def play_all(seeds: Iterable[int], profile: str | None = None) -> Tally:
    """Play these seeds; only what failed is kept of them."""
    tally = Tally()
    for seed in seeds:
        outcome = play(seed, profile=profile)
        tally.histories += 1
        tally.first = seed if tally.first is None else tally.first
        tally.last = seed
        tally.profiles[outcome.profile] += 1
        for what in outcome.reach:
            tally.reach[what] += 1
        if outcome.violation is not None:
            tally.failed.append(seed)
            if len(tally.failed) >= FAILURES_MAX:
                break
    return tally


def replay_command(seed: int, profile: str | None = None) -> str:
    """One line that plays the history again, with its trace."""
    narrowed = f' --profile "{profile}"' if profile is not None else ""
    return f"PYTHONHASHSEED=0 .venv/bin/python -m bindery_simulation protocol --seed {seed}{narrowed} --trace"


def report(outcome: Outcome, profile: str | None = None, *, trace: bool) -> str:
    """A history in words: how it ended, how to play it again, and with `trace` the sequence chart."""
    lines = [f"seed {outcome.seed} ({outcome.title})"]
    if trace and outcome.chart is not None:
        lines += outcome.chart.lines
        lines.append(f"trace: {len(outcome.chart.lines)} lines, sha256 {outcome.chart.digest()}")
    if outcome.violation is None:
        lines.append("every invariant holds")
    else:
        lines += [f"VIOLATED {outcome.violation}", f"replay: {replay_command(outcome.seed, profile)}"]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """0: every invariant held; 1: one did not."""
    arguments = _parse(argv)
    if arguments.mutant is None:
        return _run_all(arguments)
    with applied(MUTANTS[arguments.mutant]):
        return _run_all(arguments)


def _run_all(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None:
        outcome = play(arguments.seed, profile=arguments.profile, trace=True)
        print(report(outcome, arguments.profile, trace=arguments.trace or outcome.violation is not None))
        return int(outcome.violation is not None)
    began = _clock()
    seeds: Iterator[int] = iter(range(*arguments.seeds)) if arguments.seeds is not None else count(arguments.first)
    until = began + arguments.seconds if arguments.seconds is not None else None
    tally = _run(seeds, arguments.profile, arguments.jobs, until)
    took = _clock() - began
    print(_summary(tally, took, arguments.jobs))
    for seed in tally.failed[:FAILURES_MAX]:
        print(report(play(seed, profile=arguments.profile, trace=True), arguments.profile, trace=True))
    return int(bool(tally.failed))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bindery_simulation protocol", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="play this one")
    which.add_argument("--seeds", type=_range, metavar="A..B", help="play A, A+1, ..., B-1")
    which.add_argument("--seconds", type=float, help="play --first, --first + 1, ... for so long")
    parser.add_argument("--first", type=int, default=0, help="with --seconds (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="only histories of this kind")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="put this defect in (one process only)")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every message")
    return parser.parse_args(argv)


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition("..")
    return int(first), int(end)


def _run(seeds: Iterator[int], profile: str | None, jobs: int, until: float | None) -> Tally:
    """In chunks, on `jobs` processes, until the seeds or the time are used up, or enough has failed."""
    tally = Tally()

    def goes_on() -> bool:
        return len(tally.failed) < FAILURES_MAX and (until is None or _clock() < until)

    size = CHUNK if until is None else CHUNK // 5
    if jobs == 1:
        while goes_on() and (chunk := list(islice(seeds, size))):
            tally.add(play_all(chunk, profile))
        return tally
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[Tally]] = set()
        while True:
            while goes_on() and len(running) < jobs + 1 and (chunk := list(islice(seeds, size))):
                running.add(pool.submit(play_all, chunk, profile))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for part in done:
                tally.add(part.result())
    tally.failed.sort()
    return tally


def _summary(tally: Tally, took: float, jobs: int) -> str:
    share = {what: number / max(1, tally.histories) for what, number in tally.reach.items()}
    reached = ", ".join(f"{what} {part:.1%}" for what, part in sorted(share.items(), key=lambda item: -item[1]))
    rate = tally.histories / max(took, 1e-9)
    return (
        f"{tally.histories} protocol histories in {took:.1f} s ({rate:.0f}/s, {jobs} jobs), "
        f""
        f"seeds {tally.first}..{tally.last}, {len(tally.failed)} violations\nhistories that reached: {reached}"
    )
