"""`python -m bindery_simulation storage crash|damage|mutants`: search by seed, count, and replay one with its trace."""

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from bindery_simulation.storage import crash, damage, mutants
from bindery_simulation.storage.runner import quietly, run_pieces

_clock = time.monotonic
PROGRESS_S: Final = 10.0
FAILURES_MAX: Final = 5
"""So many failures are shown; then the search ends."""


@dataclass(slots=True)
class CrashTally:
    """Sums over seeds."""

    points: int = 0
    seeds: int = 0
    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, crash.Broken]] = field(default_factory=list)
    """(seed, what is wrong)."""

    def add(self, outcome: crash.Outcome) -> None:
        self.points += outcome.points
        self.seeds += 1
        self.operations += outcome.operations
        self.kinds.update(outcome.kinds)
        self.reached.update(outcome.reached)
        self.failed += [(outcome.seed, broken) for broken in outcome.problems]


def main(argv: Sequence[str]) -> int:
    """0: every promise held; 1: one did not (for `mutants`: one was not caught)."""
    arguments = _parse(argv)
    handler: Callable[[argparse.Namespace], int] = arguments.handler
    return handler(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Progress:
    """A line now and then, on standard error, so that a long search is seen to live."""

    def __init__(self, unit: str) -> None:
        self.began = self._told = _clock()
        self._unit = unit

    def tell(self, number: int, failed: int) -> None:
        now = _clock()
        if now - self._told >= PROGRESS_S:
            self._told = now
            sys.stderr.write(f"... {number} {self._unit}, {failed} violations, {now - self.began:.0f} s\n")


def _crash(arguments: argparse.Namespace) -> int:
    if arguments.point is not None:
        return quietly(lambda seed: _replay_point(seed, arguments.point[1]), arguments.point[0])
    tally, progress = CrashTally(), _Progress("crash points")
    until = progress.began + (arguments.seconds if arguments.seconds is not None else float("inf"))

    def goes_on() -> bool:
        return tally.points < arguments.points and len(tally.failed) < FAILURES_MAX and _clock() < until

    work = functools.partial(_play_all, every=arguments.every)
    for _, outcome in run_pieces(work, count(arguments.first), jobs=arguments.jobs, goes_on=goes_on):
        tally.add(outcome)
        progress.tell(tally.points, len(tally.failed))
    took = _clock() - progress.began
    _say(_counted("cut before, of", tally.kinds))
    _say(_counted("points that saw", tally.reached))
    for seed, broken in tally.failed:
        _say(f"seed {seed} operation {broken.operation}: VIOLATED {broken}")
        _say(f"replay: {_command('crash', f'--point {seed}:{broken.operation}')}")
    _say(
        f"{tally.points} crash points, {len(tally.failed)} violations; seeds from {arguments.first}: {tally.seeds} of "
        f"{tally.operations} operations, {took:.1f} s, {tally.points / max(took, 1e-9):.0f}/s, {arguments.jobs} jobs"
    )
    return int(bool(tally.failed))


def _play_all(seed: int, *, every: bool) -> crash.Outcome:
    return crash.play(seed, wanted=(lambda operation: True) if every else None)


def _replay_point(seed: int, operation: int) -> int:
    """Operation -1: what is seen while the power is on."""
    outcome = crash.play(seed, wanted=lambda found: found == operation, note=_say)
    for broken in outcome.problems:
        _say(f"seed {seed} operation {broken.operation}: VIOLATED {broken}")
    if not outcome.problems:
        _say(f"seed {seed} operation {operation} of {outcome.operations}: every promise held, {outcome.points} points")
    return int(bool(outcome.problems))


def _damage(arguments: argparse.Namespace) -> int:
    if arguments.case is not None:
        return quietly(_replay_case, arguments.case)
    tally, progress = damage.Tally(), _Progress("damaged files")
    until = progress.began + (arguments.seconds if arguments.seconds is not None else float("inf"))
    last = arguments.first + arguments.cases

    def goes_on() -> bool:
        return len(tally.failed) < FAILURES_MAX and _clock() < until

    work = functools.partial(_run_cases, last=last)
    pieces = range(arguments.first, last, damage.CASES_PER_TEMPLATE)
    for _, part in run_pieces(work, pieces, jobs=arguments.jobs, goes_on=goes_on):
        tally.add(part)
        progress.tell(tally.cases, len(tally.failed))
    took = _clock() - progress.began
    for name, counted in (("ended", tally.ended), ("harm", tally.harms), ("files", tally.files)):
        _say(_counted(name, counted))
    for seed, outcome in sorted(tally.failed, key=lambda item: item[0]):
        _say(f"seed {seed}: VIOLATED {outcome}\nreplay: {_command('damage', f'--case {seed}')}")
    _say(
        f"{tally.cases} damaged files, {len(tally.failed)} violations; seeds from {arguments.first}, "
        f"{tally.entries_right} entries read back right, {took:.1f} s, {tally.cases / max(took, 1e-9):.0f}/s, "
        f"{arguments.jobs} jobs"
    )
    return int(bool(tally.failed))


def _run_cases(first: int, *, last: int) -> damage.Tally:
    return damage.run_cases(first, min(damage.CASES_PER_TEMPLATE, last - first))


def _replay_case(seed: int) -> int:
    outcome = damage.replay(seed)
    _say(f"seed {seed}: {outcome.harm.kind}: {outcome.harm.told}\nended: {outcome.ended} {outcome.told}")
    _say(f"answers that could not tell: {outcome.refusals}")
    for problem in outcome.problems:
        _say(f"VIOLATED {problem}")
    return int(bool(outcome.problems))


def _mutants(arguments: argparse.Namespace) -> int:
    missed = 0
    for name in mutants.MUTANTS:
        caught = quietly(lambda points, name=name: mutants.hunt(name, points_max=points), arguments.points)  # type: ignore[misc]
        missed += caught is None
        if caught is None:
            _say(f"{name}: NOT CAUGHT within {arguments.points} points")
        else:
            _say(f"{name}: {caught.points} points, seed {caught.seed}: {caught.broken}")
    for name in mutants.DAMAGE_MUTANTS:
        found = quietly(lambda cases, name=name: mutants.hunt_damage(name, cases_max=cases), arguments.points)  # type: ignore[misc]
        missed += found is None
        _say(f"{name}: " + ("NOT CAUGHT" if found is None else f"{found[0]} damaged files, {found[1]}"))
    _say(f"{len(mutants.MUTANTS) + len(mutants.DAMAGE_MUTANTS)} mutants, {missed} not caught")
    return int(bool(missed))


def _counted(what: str, counted: Counter[str]) -> str:
    return f"{what}: " + (", ".join(f"{name} {number}" for name, number in sorted(counted.items())) or "nothing")


def _command(what: str, options: str) -> str:
    return f"python -m bindery_simulation storage {what} {options}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bindery_simulation storage", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="crash|damage|mutants")
    crashes = verbs.add_parser("crash", help="cut the power before every write")
    crashes.add_argument("--points", type=int, default=sys.maxsize, help="stop after so many (no end)")
    crashes.add_argument(
        "--every", action="store_true", help="cut before each operation of a seed, not before some by lot"
    )
    crashes.add_argument("--point", type=_point, metavar="SEED:OPERATION", help="replay this one with its trace")
    crashes.set_defaults(handler=_crash)
    damages = verbs.add_parser("damage", help="harm the files of real directories")
    damages.add_argument("--cases", type=int, default=10**9, help="run so many (no end)")
    damages.add_argument("--case", type=int, metavar="SEED", help="replay this one")
    damages.set_defaults(handler=_damage)
    for verb in (crashes, damages):
        verb.add_argument("--first", type=int, default=0, metavar="SEED", help="run SEED, SEED + 1, ... (0)")
        verb.add_argument("--seconds", type=float, help="stop after so long")
        verb.add_argument("--jobs", type=int, default=1, help="processes (1)")
    broken = verbs.add_parser("mutants", help="break the product's promises one by one; each must be noticed")
    broken.add_argument("--points", type=int, default=5_000, help="look at so many crash points for each (5000)")
    broken.set_defaults(handler=_mutants)
    return parser.parse_args(argv)


def _point(text: str) -> tuple[int, int]:
    seed, separator, operation = text.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError("a point is SEED:OPERATION")
    return int(seed), int(operation)
