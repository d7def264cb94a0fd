"""`python -m bindery_simulation service`: run clusters by seed, count them, and replay one with its trace."""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Sequence

from bindery_simulation.service.faults import FAULTS, Fault
from bindery_simulation.service.healing.faults import HEALING_FAULTS
from bindery_simulation.service.healing.plan import HealingKind
from bindery_simulation.service.mutants import MUTANTS, mutant
from bindery_simulation.service.runner import run_seeds
from bindery_simulation.service.world import Outcome, run_seed


def main(argv: Sequence[str]) -> int:
    """0: every invariant held; 1: one did not."""
    arguments = _parse(argv)
    if arguments.seed is not None:
        with mutant(arguments.mutant) if arguments.mutant else contextlib.nullcontext():
            return _replay(arguments, is_traced=arguments.trace)
    seeds: Iterable[int] = itertools.count(arguments.first) if arguments.seeds is None else range(*arguments.seeds)
    summary = run_seeds(
        seeds, seconds=arguments.seconds, jobs=arguments.jobs, failures_max=arguments.failures,
        healing=arguments.healing,
    )  # fmt: skip
    told = _told(arguments.healing)
    sys.stdout.write(summary.text() + "\n")
    for seed, failure in summary.failures:
        sys.stdout.write(f"seed {seed}: VIOLATED {failure}\nreplay: {replay_command(seed, *told)}\n")
    return int(bool(summary.failures))


def replay_command(seed: int, *options: str) -> str:
    """One line that runs it again, with its trace."""
    return f"make sim SEED={seed}" + (f' ARGS="{" ".join(options)}"' if options else "")


def _replay(arguments: argparse.Namespace, *, is_traced: bool) -> int:
    seed, options = arguments.seed, []
    if arguments.faults:
        options += ["--faults", ",".join(fault.__name__ for fault in arguments.faults)]
    if arguments.mutant:
        options += ["--mutant", arguments.mutant]
    options += _told(arguments.healing)
    faults, healing = arguments.faults, arguments.healing
    if arguments.mutant:
        broken = MUTANTS[arguments.mutant]
        faults = faults or broken.faults
        healing = broken.healing or False if healing is None else healing
    outcome = run_seed(seed, is_traced=True, faults=faults, healing=healing)
    if is_traced or outcome.violation is not None:
        sys.stdout.writelines(outcome.trace.lines())
    sys.stdout.write(
        f"seed {seed}: {outcome.ledgers} ledgers, {outcome.acknowledged} entries acknowledged, "
        f"{outcome.simulated_s:.1f} s simulated, faults: {', '.join(outcome.faults) or 'none'}\n"
        f"{_healed(outcome)}"
        f"trace: {len(outcome.trace.events)} events, sha256 {outcome.trace.digest()}\n"
    )
    if outcome.violation is None:
        sys.stdout.write("every invariant holds\n")
        return 0
    sys.stdout.write(f"VIOLATED {outcome.violation}\nreplay: {replay_command(seed, *options)}\n")
    return 1


def _healed(outcome: Outcome) -> str:
    plan = outcome.healing
    if plan is None:
        return ""
    return f"healing ({plan.kind}): {outcome.marks_removed} marks removed, {outcome.entries_healed} copies made\n"


def _told(healing: HealingKind | bool | None) -> list[str]:
    """The option that says so."""
    if healing is None:
        return []
    return ["--healing", "any" if healing is True else str(healing or "none")]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bindery_simulation service", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="run this one")
    which.add_argument("--seeds", type=_range, metavar="A..B", help="run A, A+1, ..., B-1")
    parser.add_argument("--seconds", type=float, help="run --first, --first + 1, ... for so long")
    parser.add_argument("--first", type=int, default=0, help="with --seconds (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many (1)")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every event")
    parser.add_argument("--faults", type=_faults, metavar="A,B", help="with --seed: draw from these alone")
    parser.add_argument(
        "--healing", type=_healing, metavar="KIND",
        help="worlds with auditors: none, any, " + ", ".join(HealingKind) + " (as the seed says)",
    )  # fmt: skip
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with --seed: break this promise, under its faults")
    arguments = parser.parse_args(argv)
    if arguments.seed is None and (arguments.faults or arguments.mutant):
        parser.error("--faults and --mutant go with --seed")
    if arguments.seed is None and arguments.seeds is None and arguments.seconds is None:
        parser.error("one of --seed, --seeds and --seconds is needed")
    return arguments


def _faults(text: str) -> tuple[Fault, ...]:
    known = {fault.__name__: fault for fault in (*FAULTS, *HEALING_FAULTS)}
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no such fault: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(known[name] for name in names)


def _healing(text: str) -> HealingKind | bool:
    known: dict[str, HealingKind | bool] = {"none": False, "any": True, **{kind.value: kind for kind in HealingKind}}
    if text not in known:
        raise argparse.ArgumentTypeError(f"no such kind of world: {text}; there are {', '.join(known)}")
    return known[text]


def _range(text: str) -> tuple[int, int]:
    first, separator, end = text.partition("..")
    if not separator:
        raise argparse.ArgumentTypeError("a range is A..B")
    return int(first), int(end)
