"""`python -m bindery_simulation`: search by seed, replay one seed with its trace, and hunt mutants.

Exit codes: 0 no violation (every mutant was reported), 1 a violation (a mutant was not), 2 wrong usage.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

from bindery_simulation import runner
from bindery_simulation.mutant import Kind, MutantTable
from bindery_simulation.policies import mutants as policies_mutants
from bindery_simulation.policies import search as policies
from bindery_simulation.policies.world import FAULTS as POLICIES_FAULTS
from bindery_simulation.policies.world import run_seed as run_policies
from bindery_simulation.protocol import mutants as protocol_mutants
from bindery_simulation.protocol import search as protocol
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.profiles import PROFILES
from bindery_simulation.runner import Budget, quietly, without_logs
from bindery_simulation.service import mutants as service_mutants
from bindery_simulation.service import search as service
from bindery_simulation.service.faults import FAULTS, Fault
from bindery_simulation.service.healing.faults import HEALING_FAULTS
from bindery_simulation.service.healing.plan import HealingKind
from bindery_simulation.service.world import run_seed
from bindery_simulation.storage import mutants as storage_mutants
from bindery_simulation.storage import search as storage
from bindery_simulation.storage.damage import CASES_PER_TEMPLATE
from bindery_simulation.topics import mutants as topics_mutants
from bindery_simulation.topics import search as topics
from bindery_simulation.topics.faults import FAULTS as TOPICS_FAULTS
from bindery_simulation.topics.gateway import SUPPORTED
from bindery_simulation.topics.judging.history import Kind as SubscriptionKind
from bindery_simulation.topics.world import run_seed as run_topics

TABLES: Final[dict[Kind, MutantTable[Any]]] = {
    table.kind: table
    for table in (
        protocol_mutants.MUTANTS,
        service_mutants.MUTANTS,
        topics_mutants.MUTANTS,
        policies_mutants.MUTANTS,
        storage_mutants.MUTANTS,
        storage_mutants.DAMAGE_MUTANTS,
    )
}
"""The mutants of each search."""
COST_MAX: Final = {
    Kind.PROTOCOL: 8_000,
    Kind.SERVICE: 150,
    Kind.TOPICS: 150,
    Kind.POLICIES: 50,
    Kind.CRASH: 5_000,
    Kind.DAMAGE: 5_000,
}
"""Maximum cost of the hunt for a mutant by kind, in histories, seeds, crash points and damaged files."""


class _Tally(runner.Tally, Protocol):
    def text(self, seconds: float, jobs: int) -> str: ...
    def failures(self) -> Iterator[str]: ...


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    arguments = _parse(argv)
    handler: Callable[[argparse.Namespace], int] = arguments.handler
    return handler(arguments)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _search(work: Callable[[int], Any], pieces: Iterable[int], tally: _Tally, arguments: argparse.Namespace) -> int:
    budget = Budget(arguments.seconds, arguments.count_max, arguments.failures, arguments.jobs)
    seconds = runner.search(work, pieces, tally, budget)
    _print(tally.text(seconds, arguments.jobs))
    for failure in tally.failures():
        _print(failure)
    return int(bool(tally.failed))


def _pieces(arguments: argparse.Namespace, size: int = 1) -> Iterable[int]:
    """Return the first seed of each piece of work."""
    if arguments.seeds is None:
        return count(arguments.first, size)
    first, end = arguments.seeds
    return range(first, end, size)


def _applied(kind: Kind, name: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if name is None else TABLES[kind][name].applied()


def _protocol(arguments: argparse.Namespace) -> int:
    profile = arguments.profile
    with _applied(Kind.PROTOCOL, arguments.mutant):
        if arguments.seed is not None:
            outcome = play(arguments.seed, profile=profile, trace=True)
            _print(protocol.report(outcome, profile, trace=arguments.trace or outcome.violation is not None))
            return int(outcome.violation is not None)
        end = None if arguments.seeds is None else arguments.seeds[1]
        work = partial(protocol.run_chunk, end=end, profile=profile)
        return _search(work, _pieces(arguments, protocol.CHUNK_SIZE), protocol.Tally(profile), arguments)


def _service(arguments: argparse.Namespace) -> int:
    healing, faults = arguments.healing, arguments.faults
    if arguments.seed is None:
        return _search(partial(service.run_one, healing=healing), _pieces(arguments), service.Tally(healing), arguments)
    options = []
    if faults:
        options += ["--faults", ",".join(fault.__name__ for fault in faults)]
    if arguments.mutant:
        options += ["--mutant", arguments.mutant]
        conditions = service_mutants.MUTANTS[arguments.mutant].conditions
        faults = faults or conditions.faults
    options += service.healing_options(healing)
    if arguments.mutant and healing is None:
        healing = conditions.healing or False
    with _applied(Kind.SERVICE, arguments.mutant):
        outcome = run_seed(arguments.seed, is_traced=True, faults=faults, healing=healing)
    _print(service.report(outcome, *options, trace=arguments.trace))
    return int(outcome.violation is not None)


def _topics(arguments: argparse.Namespace) -> int:
    faults = arguments.faults
    if arguments.seed is None:
        return _search(topics.run_one, _pieces(arguments), topics.Tally(), arguments)
    options = []
    kinds: Sequence[SubscriptionKind] = SUPPORTED
    others: dict[str, Any] = {}
    if faults:
        options += ["--faults", ",".join(fault.__name__ for fault in faults)]
    if arguments.mutant:
        options += ["--mutant", arguments.mutant]
        conditions = topics_mutants.MUTANTS[arguments.mutant].conditions
        faults, kinds = faults or conditions.faults, conditions.kinds
        others = {name: getattr(conditions, name) for name in ("has_delays", "has_retries", "remote_share")}
    with _applied(Kind.TOPICS, arguments.mutant):
        outcome = run_topics(arguments.seed, is_traced=True, faults=faults, kinds=kinds, **others)
    _print(topics.report(outcome, *options, trace=arguments.trace))
    return int(outcome.violation is not None)


def _policies(arguments: argparse.Namespace) -> int:
    faults = arguments.faults
    if arguments.seed is None:
        return _search(policies.run_one, _pieces(arguments), policies.Tally(), arguments)
    options = []
    if faults:
        options += ["--faults", ",".join(fault.__name__ for fault in faults)]
    if arguments.mutant:
        options += ["--mutant", arguments.mutant]
        faults = faults or policies_mutants.MUTANTS[arguments.mutant].conditions.faults
    with _applied(Kind.POLICIES, arguments.mutant):
        result = run_policies(arguments.seed, is_traced=True, faults=POLICIES_FAULTS if faults is None else faults)
    _print(policies.report(result, *options, trace=arguments.trace))
    return int(result.violation is not None)


def _crash(arguments: argparse.Namespace) -> int:
    if arguments.point is not None:
        seed, operation = arguments.point
        return int(not quietly(lambda seed: storage.replay_point(seed, operation, _print), seed))
    work = partial(storage.run_crash, every=arguments.every)
    return _search(work, count(arguments.first), storage.CrashTally(arguments.first), arguments)


def _damage(arguments: argparse.Namespace) -> int:
    if arguments.case is not None:
        return int(not quietly(lambda seed: storage.replay_case(seed, _print), arguments.case))
    end = arguments.first + arguments.count_max
    pieces = range(arguments.first, end, CASES_PER_TEMPLATE)
    return _search(partial(storage.run_damage, end=end), pieces, storage.DamageTally(arguments.first), arguments)


def _mutants(arguments: argparse.Namespace) -> int:
    hunted = [(TABLES[kind], name) for kind in arguments.kinds or Kind for name in TABLES[kind]]
    if arguments.list:
        for table, name in hunted:
            mutant = table[name]
            _print(f"{table.kind} {name}: {mutant.breaks} Seed {mutant.seed}: {' or '.join(mutant.caught_by)}")
        return 0
    missed = 0
    for table, name in hunted:
        cost_max = arguments.points or COST_MAX[table.kind]
        with without_logs():
            found = table.hunt(name, cost_max=cost_max, seeds=count() if arguments.from_zero else None)
        if found is None or found.trial.invariant not in table[name].caught_by:
            missed += 1
            text = (
                f"within {cost_max} {table.unit}" if found is None else f"by its invariants but by {found.trial.text}"
            )
            _print(f"{table.kind} {name}: NOT CAUGHT {text}")
        else:
            _print(f"{table.kind} {name}: {found.cost} {table.unit}, seed {found.trial.seed}: {found.trial.text}")
    _print(f"{len(hunted)} mutants, {missed} not caught")
    return int(bool(missed))


# --- the command line -------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bindery_simulation", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="protocol|service|topics|policies|storage|mutants")

    histories = commands.add_parser("protocol", help="histories of the ledger protocol")
    _add_seeds(histories, Kind.PROTOCOL, failures=5)
    histories.add_argument("--profile", choices=sorted(PROFILES), help="play only histories of this kind")
    histories.set_defaults(handler=_protocol, parser=histories)

    clusters = commands.add_parser("service", help="clusters of bookies and clients")
    _add_seeds(clusters, Kind.SERVICE, failures=1)
    clusters.add_argument("--faults", type=_faults, metavar="A,B", help="with --seed: inject only these faults")
    kinds = ", ".join(HealingKind)
    clusters.add_argument(
        "--healing", type=_healing, metavar="KIND", help=f"clusters with auditors: none, any, {kinds} (by seed)"
    )
    clusters.set_defaults(handler=_service, parser=clusters)

    brokers = commands.add_parser("topics", help="clusters of bookies and brokers, producers and consumers")
    _add_seeds(brokers, Kind.TOPICS, failures=1)
    brokers.add_argument("--faults", type=_topics_faults, metavar="A,B", help="with --seed: inject only these faults")
    brokers.set_defaults(handler=_topics, parser=brokers)

    hours = commands.add_parser("policies", help="clusters with brokers whose topics have policies, over hours")
    _add_seeds(hours, Kind.POLICIES, failures=1)
    hours.add_argument("--faults", type=_policies_faults, metavar="A,B", help="with --seed: inject only these faults")
    hours.set_defaults(handler=_policies, parser=hours)

    searches = commands.add_parser("storage", help="storage of one bookie").add_subparsers(
        required=True, metavar="crash|damage|mutants"
    )
    crashes = searches.add_parser("crash", help="power cuts before disk operations")
    _add_budget(crashes, failures=5)
    crashes.add_argument(
        "--points", type=int, default=sys.maxsize, dest="count_max", help="maximum number of crash points (no limit)"
    )
    crashes.add_argument(
        "--every", action="store_true", help="cut the power before each operation of a seed, not before a sample"
    )
    crashes.add_argument("--point", type=_point, metavar="SEED:OPERATION", help="replay this point with its trace")
    crashes.set_defaults(handler=_crash)
    damages = searches.add_parser("damage", help="damaged files in real directories")
    _add_budget(damages, failures=5)
    damages.add_argument(
        "--cases", type=int, default=10**9, dest="count_max", help="maximum number of damaged files (no limit)"
    )
    damages.add_argument("--case", type=int, metavar="SEED", help="replay this case")
    damages.set_defaults(handler=_damage)
    broken = searches.add_parser("mutants", help="inject the defects of the storage; each must be reported")
    broken.add_argument("--points", type=int, default=5_000, help="crash points or damaged files per mutant (5000)")
    broken.set_defaults(handler=_mutants, kinds=[Kind.CRASH, Kind.DAMAGE], list=False, from_zero=True)

    hunts = commands.add_parser("mutants", help="inject all known defects; each must be reported")
    hunts.add_argument("kinds", nargs="*", type=Kind, metavar="KIND", help=f"only of these: {', '.join(Kind)}")
    hunts.add_argument("--list", action="store_true", help="list the mutants instead of hunting them")
    hunts.add_argument("--from-zero", action="store_true", help="begin with seed 0, not with the seed that is known")
    hunts.set_defaults(handler=_mutants, points=None)

    arguments = parser.parse_args(argv)
    if "seeds" in arguments:
        if arguments.seed is None and arguments.seeds is None and arguments.seconds is None:
            arguments.parser.error("one of --seed, --seeds and --seconds is required")
        has_options = arguments.handler in (_service, _topics, _policies) and (arguments.faults or arguments.mutant)
        if has_options and arguments.seed is None:
            arguments.parser.error("--faults and --mutant require --seed")
    return arguments


def _add_budget(parser: argparse.ArgumentParser, *, failures: int) -> None:
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed of a search (0)")
    parser.add_argument("--seconds", type=float, help="end the search after this time")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (1)")
    parser.add_argument(
        "--failures", type=int, default=failures, help=f"end the search after this number of violations ({failures})"
    )


def _add_seeds(parser: argparse.ArgumentParser, kind: Kind, *, failures: int) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="replay this seed")
    which.add_argument("--seeds", type=_range, metavar="A..B", help="search the seeds A, A+1, ..., B-1")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--mutant", choices=sorted(TABLES[kind]), metavar="NAME", help="inject this defect")
    _add_budget(parser, failures=failures)
    parser.set_defaults(count_max=sys.maxsize)


def _faults(text: str) -> tuple[Fault, ...]:
    return _named_faults(text, (*FAULTS, *HEALING_FAULTS))


def _topics_faults(text: str) -> tuple[Fault, ...]:
    return _named_faults(text, TOPICS_FAULTS)


def _policies_faults(text: str) -> tuple[Fault, ...]:
    return _named_faults(text, POLICIES_FAULTS)


def _named_faults(text: str, faults: Sequence[Fault]) -> tuple[Fault, ...]:
    known = {fault.__name__: fault for fault in faults}
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown fault: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return tuple(known[name] for name in names)


def _healing(text: str) -> HealingKind | bool:
    known: dict[str, HealingKind | bool] = {"none": False, "any": True, **{kind.value: kind for kind in HealingKind}}
    if text not in known:
        raise argparse.ArgumentTypeError(f"unknown kind of cluster: {text}; known are {', '.join(known)}")
    return known[text]


def _range(text: str) -> tuple[int, int]:
    first, separator, end = text.partition("..")
    if not separator:
        raise argparse.ArgumentTypeError("a range is A..B")
    return int(first), int(end)


def _point(text: str) -> tuple[int, int]:
    seed, separator, operation = text.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError("a point is SEED:OPERATION")
    return int(seed), int(operation)
