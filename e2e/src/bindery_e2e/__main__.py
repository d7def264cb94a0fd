"""`python -m bindery_e2e`: run random faults, run each fault once, load one subscription, or judge a recorded history.

Exit codes: 0 GOOD, 1 BAD or the run could not begin, 2 wrong usage, 3 INCOMPLETE, 130 stopped by a signal. A stopped
run writes its report, too.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bindery.standalone.directory import StandaloneError

from bindery_e2e.cluster.cluster import ClusterError
from bindery_e2e.cluster.commands import CommandFailed
from bindery_e2e.cluster.images import NEXT_VERSION, VERSION, Images
from bindery_e2e.cluster.world import World
from bindery_e2e.judging.space import ChurnLimits
from bindery_e2e.reporting.report import Report, report_of, write_report
from bindery_e2e.runs.chaos import random_steps
from bindery_e2e.runs.churn import run_churn
from bindery_e2e.runs.delayed import run_delayed
from bindery_e2e.runs.kills import run_kills
from bindery_e2e.runs.ordering import run_ordering
from bindery_e2e.runs.repeats import run_repeats
from bindery_e2e.runs.retries import run_retries
from bindery_e2e.runs.runner import RunSettings, Step
from bindery_e2e.runs.session import CHAOS_VALUES, REQUIRED, facts_of, installed, play, world_of
from bindery_e2e.runs.suite import quick_steps
from bindery_e2e.traffic.churn import MIB, ChurnSettings
from bindery_e2e.traffic.delayed import DelayedSettings
from bindery_e2e.traffic.kills import KillsSettings
from bindery_e2e.traffic.ordering import ORDERS, OrderingSettings
from bindery_e2e.traffic.repeats import RepeatsSettings
from bindery_e2e.traffic.retries import RetriesSettings
from bindery_e2e.traffic.traffic import TrafficError, TrafficSettings

EXIT_CODES: Final = {"GOOD": 0, "BAD": 1, "INCOMPLETE": 3}
EXIT_STOPPED: Final = 130
NAMESPACE: Final = "bindery-e2e-chaos"


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(prog="python -m bindery_e2e", description=(__doc__ or "").splitlines()[0])
    verbs = commands.add_subparsers(dest="verb", required=True)
    chaos = verbs.add_parser("chaos", help="inject random faults under traffic for some minutes")
    chaos.add_argument(
        "--minutes", type=float, default=60, metavar="N", help="minutes after which no fault begins (60)"
    )
    quick = verbs.add_parser("quick", help="inject each fault once")
    quick.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only faults whose name contains TEXT; repeatable"
    )
    for verb in (chaos, quick):
        verb.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the sequence (default: random)")
        verb.add_argument(
            "--report", type=Path, metavar="DIR", help="report directory (e2e-reports/<verb>-<seed>-<time>)"
        )
        verb.add_argument("--namespace", default=NAMESPACE, help=f"created, and removed at the end ({NAMESPACE})")
        verb.add_argument("--rate", type=float, default=100.0, metavar="N", help="messages per second (100)")
        verb.add_argument(
            "--data", type=Path, action="append", metavar="PATH", help="file or folder with payload data; repeatable"
        )
        verb.add_argument("--keep", action="store_true", help="do not remove the namespace at the end")
    plan = verbs.add_parser("plan", help="print the faults of a seed without injecting them")
    plan.add_argument("--seed", type=int, required=True, metavar="N")
    plan.add_argument("--steps", type=int, default=20, metavar="N", help="number of steps (20)")
    verbs.add_parser("images", help="build and load all images that the Kubernetes tests use")
    ordering = verbs.add_parser("ordering", help="load a subscription whose consumers join, leave and are killed")
    ordering.add_argument("--seconds", type=float, default=60, metavar="N", help="duration without the drain (60)")
    ordering.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the load (default: random)")
    ordering.add_argument(
        "--kind", choices=sorted(ORDERS), default="key_shared", help="type of the subscription (key_shared)"
    )
    ordering.add_argument(
        "--order", choices=("key", "topic", "none"), default="", help="order to judge (default: that of the type)"
    )
    ordering.add_argument("--keys", type=int, default=200, metavar="N", help="number of keys (200)")
    ordering.add_argument("--consumers", type=int, default=5, metavar="N", help="consumers at a time (5)")
    ordering.add_argument("--rate", type=float, default=500.0, metavar="N", help="messages per second (500)")
    ordering.add_argument("--url", help="broker that runs already (default: a temporary cluster on this machine)")
    ordering.add_argument("--topic", default="public/default/ordering", help="empty topic (public/default/ordering)")
    ordering.add_argument(
        "--report", type=Path, metavar="DIR", help="report directory (e2e-reports/ordering-<seed>-<time>)"
    )
    kills = verbs.add_parser("kills", help="load three subscriptions while their broker is killed and started again")
    kills.add_argument("--kills", type=int, default=50, metavar="N", help="number of kills, at least 2 (50)")
    kills.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the load (default: random)")
    kills.add_argument("--rate", type=float, default=300.0, metavar="N", help="messages per second (300)")
    kills.add_argument("--report", type=Path, metavar="DIR", help="report directory (e2e-reports/kills-<seed>-<time>)")
    retries = verbs.add_parser("retries", help="retry and return messages while broker and bookies are killed")
    retries.add_argument("--kills", type=int, default=20, metavar="N", help="number of kills, at least 2 (20)")
    retries.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the load (default: random)")
    retries.add_argument("--rate", type=float, default=60.0, metavar="N", help="messages per second (60)")
    retries.add_argument("--brokers", type=int, default=1, metavar="N", help="brokers, all of which are killed (1)")
    retries.add_argument(
        "--report", type=Path, metavar="DIR", help="report directory (e2e-reports/retries-<seed>-<time>)"
    )
    repeats = verbs.add_parser(
        "repeats", help="producers repeat their requests while connections are cut and brokers are killed"
    )
    repeats.add_argument("--seconds", type=float, default=60.0, metavar="N", help="seconds of load (60)")
    repeats.add_argument("--kills", type=int, default=4, metavar="N", help="number of kills (4)")
    repeats.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the load (default: random)")
    repeats.add_argument(
        "--partitions", type=int, default=0, metavar="N", help="partitions of the topic, with consumers (0: none)"
    )
    repeats.add_argument("--brokers", type=int, default=2, metavar="N", help="brokers, all of which are killed (2)")
    repeats.add_argument(
        "--report", type=Path, metavar="DIR", help="report directory (e2e-reports/repeats-<seed>-<time>)"
    )
    delayed = verbs.add_parser(
        "delayed", help="store delayed messages, kill the broker, receive them when they are due"
    )
    delayed.add_argument("--messages", type=int, default=1_000_000, metavar="N", help="delayed messages (1000000)")
    delayed.add_argument(
        "--rate", type=float, default=20_000, metavar="N", help="messages due in a second, at most (20000)"
    )
    delayed.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the times (default: random)")
    delayed.add_argument("--random", action="store_true", help="due at random times, not in the order of the topic")
    delayed.add_argument("--strict", action="store_true", help="a time or size that is missed is an error")
    delayed.add_argument(
        "--report", type=Path, metavar="DIR", help="report directory (e2e-reports/delayed-<seed>-<time>)"
    )
    churn = verbs.add_parser(
        "churn", help="write ledgers or topics, delete nine of ten soon, judge disk space and latency of bookies"
    )
    churn.add_argument("--seconds", type=float, default=1200, metavar="N", help="duration (1200)")
    churn.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the load (default: random)")
    churn.add_argument("--rate", type=float, default=8.0, metavar="N", help="MiB of payload written per second (8)")
    churn.add_argument("--topics", action="store_true", help="write topics over HTTP instead of ledgers")
    churn.add_argument(
        "--allowance",
        type=float,
        default=2048,
        metavar="N",
        help="MiB of disk besides three times the live bytes (2048)",
    )
    churn.add_argument(
        "--latency-ratio", type=float, default=1.5, metavar="N", help="p50 and p99 while collecting, at most (1.5)"
    )
    churn.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="environment variable of bookies; repeatable"
    )
    churn.add_argument("--json", action="store_true", help="print the figures as JSON at the end, progress to stderr")
    churn.add_argument("--report", type=Path, metavar="DIR", help="report directory (e2e-reports/churn-<seed>-<time>)")
    judge = verbs.add_parser("judge", help="judge a recorded history")
    judge.add_argument("history", type=Path, metavar="HISTORY.jsonl")
    judge.add_argument("--report", type=Path, metavar="DIR", help="write report.html and summaries to DIR")
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    match args.verb:
        case "plan":
            for number, step in enumerate(itertools.islice(random_steps(args.seed), args.steps), 1):
                print(f"{number:4}  {' + '.join(f'{fault.name} [{fault.draw:.3f}]' for fault in step)}")
            return 0
        case "images":
            return _images()
        case "ordering":
            return _ordering(args)
        case "kills":
            return _kills(args)
        case "retries":
            return _retries(args)
        case "repeats":
            return _repeats(args)
        case "delayed":
            return _delayed(args)
        case "churn":
            return _churn(args)
        case "judge":
            return _judge(args)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    steps = random_steps(seed) if args.verb == "chaos" else quick_steps(seed, only=args.only)
    try:
        return EXIT_CODES[_run(args, seed, steps).judgement.verdict]
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_STOPPED
    except (ClusterError, CommandFailed) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]


def _images() -> int:
    try:
        Images(say=say).all()
    except CommandFailed as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    return 0


def _judge(args: argparse.Namespace) -> int:
    try:
        report = report_of(args.history, required=REQUIRED)
    except FileNotFoundError:
        print(f"bindery_e2e: there is no {args.history}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    if args.report:
        print(f"report: {write_report(report, args.report).html}")
    print(f"verdict: {report.judgement.verdict}")
    return EXIT_CODES[report.judgement.verdict]


def _ordering(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    settings = OrderingSettings(
        seed=seed,
        seconds=args.seconds,
        kind=args.kind,
        order=args.order,
        topic=args.topic,
        keys=args.keys,
        consumers=args.consumers,
        messages_per_s=args.rate,
    )
    command = (
        f"python -m bindery_e2e ordering --seed {seed} --seconds {args.seconds:g} --kind {args.kind} "
        f"--keys {args.keys} --consumers {args.consumers} --rate {args.rate:g}"
    )
    folder = args.report or Path("e2e-reports") / f"ordering-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    say(command)
    try:
        report = run_ordering(settings, folder, facts=facts_of(command), url=args.url, say=say)
    except (TrafficError, StandaloneError, FileExistsError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    return EXIT_CODES[report.judgement.verdict]


def _kills(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    command = f"python -m bindery_e2e kills --kills {args.kills} --seed {seed} --rate {args.rate:g}"
    folder = args.report or Path("e2e-reports") / f"kills-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = KillsSettings(seed=seed, kills=args.kills, messages_per_s=args.rate)
    say(command)
    try:
        report = run_kills(settings, folder, facts=facts_of(command), say=say)
    except (TrafficError, StandaloneError, FileExistsError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    return EXIT_CODES[report.judgement.verdict]


def _retries(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    command = f"python -m bindery_e2e retries --kills {args.kills} --seed {seed} --rate {args.rate:g}"
    command += f" --brokers {args.brokers}"
    folder = args.report or Path("e2e-reports") / f"retries-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = RetriesSettings(seed=seed, kills=args.kills, messages_per_s=args.rate)
    say(command)
    try:
        found = run_retries(settings, folder, facts=facts_of(command), brokers=args.brokers, say=say)
    except (TrafficError, StandaloneError, FileExistsError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    return EXIT_CODES[found.verdict]


def _repeats(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    command = f"python -m bindery_e2e repeats --seconds {args.seconds:g} --kills {args.kills} --seed {seed}"
    command += f" --brokers {args.brokers} --partitions {args.partitions}"
    folder = args.report or Path("e2e-reports") / f"repeats-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = RepeatsSettings(seed=seed, seconds=args.seconds, kills=args.kills, partitions=args.partitions)
    say(command)
    try:
        found = run_repeats(settings, folder, facts=facts_of(command), brokers=args.brokers, say=say)
    except (TrafficError, StandaloneError, FileExistsError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    return EXIT_CODES[found.verdict]


def _delayed(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    command = f"python -m bindery_e2e delayed --messages {args.messages} --rate {args.rate:g} --seed {seed}"
    command += " --random" if args.random else ""
    folder = args.report or Path("e2e-reports") / f"delayed-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = DelayedSettings(seed=seed, messages=args.messages, rate=args.rate, is_random=args.random)
    say(command)
    try:
        verdict, _ = run_delayed(settings, folder, facts=facts_of(command), strict=args.strict, say=say)
    except (TrafficError, StandaloneError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    return EXIT_CODES[verdict]


def _churn(args: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    command = f"python -m bindery_e2e churn --seconds {args.seconds:g} --seed {seed} --rate {args.rate:g}"
    command += f" --allowance {args.allowance:g} --latency-ratio {args.latency_ratio:g}"
    command += " --topics" * args.topics + "".join(f" --set {one}" for one in args.set)
    folder = args.report or Path("e2e-reports") / f"churn-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = ChurnSettings(seed=seed, seconds=args.seconds, rate=int(args.rate * MIB))
    limits = ChurnLimits(allowance=int(args.allowance * MIB), latency_ratio_max=args.latency_ratio)
    environment = dict(one.split("=", 1) for one in args.set)

    def tell(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    tell(command)
    try:
        facts = facts_of(command)
        summary = run_churn(
            settings, limits, folder, facts=facts, are_topics=args.topics, environment=environment, say=tell
        )
    except (TrafficError, StandaloneError) as error:
        print(f"bindery_e2e: {error}", file=sys.stderr)
        return EXIT_CODES["BAD"]
    except KeyboardInterrupt:
        return EXIT_STOPPED
    if args.json:
        say(json.dumps(summary, indent=2))
    return EXIT_CODES[summary["verdict"]]


def _run(args: argparse.Namespace, seed: int, steps: Iterable[Step]) -> Report:
    began = time.strftime("%Y%m%d-%H%M%S")
    folder = args.report or Path("e2e-reports") / f"{args.verb}-{seed}-{began}"
    minutes = getattr(args, "minutes", None)
    command = f"python -m bindery_e2e {args.verb} --seed {seed} --rate {args.rate:g}"
    command += f" --minutes {minutes:g}" if minutes is not None else ""
    say(command)
    images = Images(say=say)
    images.version(VERSION)
    images.version(NEXT_VERSION)
    settings = RunSettings(
        folder=folder,
        seed=seed,
        facts=facts_of(command),
        seconds=None if minutes is None else minutes * 60,
        traffic=TrafficSettings(seed=seed, messages_per_s=args.rate),
        data=args.data or (),
    )
    with installed(args.namespace, values=[CHAOS_VALUES], keep=args.keep, folder=folder, say=say) as release:
        return asyncio.run(_stoppable(world_of(release, settings, say=say), settings, steps))


async def _stoppable(world: World, settings: RunSettings, steps: Iterable[Step]) -> Report:
    """Play, and handle SIGTERM like Ctrl-C: undo the faults and write the report."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await play(world, settings, steps, say=say)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
