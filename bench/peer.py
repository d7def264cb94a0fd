"""Compare Bindery with Apache BookKeeper: the same load by Apache's unmodified Java client, alternating in one run.

    make bench-peer                                         # the quick form: about 4 minutes
    make bench-peer ARGS="--full --write-docs"              # all rows, about 18 minutes; updates docs/benchmarks.md
    make bench-peer ARGS="--quorum 1/1/1 --wire 2 --size 1024 --in-flight 100 --parts write"

Requires the programs that run Apache's systems (`--peers DIR`, or PEERS in the environment): a folder with
`bookkeeper/run`, which downloads Apache BookKeeper and contains the load program. Bookies, ZooKeeper and load share the
machine's cores. All systems answer an add after fdatasync. Apache's bookies use DbLedgerStorage and their default
memory.

| system       | configuration                                                                                         |
|--------------|-------------------------------------------------------------------------------------------------------|
| bindery      | Bindery's bookies, default settings                                                                   |
| apache       | Apache's bookies, default settings: an add waits up to 2 ms for further adds                          |
| apache-eager | as apache, with journalFlushWhenQueueEmpty=true: an add does not wait                                 |
| apache-small | as apache, with -Xmx256m                                                                              |

For each kind of cluster (one bookie; three bookies with Qw=3 Qa=2), all systems are started and receive the same
warm-up load. Each row is then measured on one system after the other, each time in another order. CPU is the user and
system time of the bookies per entry and bookie that stores it.
"""

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from peer_clusters import OURS, SYSTEMS, Cluster, Peers, System, zookeeper
from peer_report import render, write_docs

PARTS: Final = ("start", "write", "read", "tail")
BENCH: Final = Path(__file__).resolve().parent
DEFAULT_PEERS: Final = BENCH.parent.parent / "shared" / "peers"
READ_ENTRIES: Final = 50_000
TAIL_RATE: Final = 1_000
TAIL_SIZE: Final = 1024
TAIL_IN_FLIGHT: Final = 1000
LOAD_ATTEMPTS: Final = 2

Row = dict[str, Any]


class Run:
    """One run of the whole comparison."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._peers = Peers(args.peers)
        self._systems: list[System] = [SYSTEMS[name] for name in args.systems]
        self._lots = random.Random(args.seed)
        self._zookeeper = zookeeper(folder)
        self._initialized: set[str] = set()
        self.result: dict[str, Any] = {"rows": [], "starts": {}, "rss_idle": {}, "rss_after": {}}

    def run(self) -> dict[str, Any]:
        args = self._args
        self._zookeeper.start()
        try:
            if "start" in args.parts:
                self._measure_starts()
            for quorum in args.quorum:
                if {"write", "read", "tail"} & set(args.parts):
                    self._measure_cluster(quorum)
        finally:
            self._zookeeper.stop()
        return self.result

    def _cluster(self, system: System) -> Cluster:
        cluster = Cluster(
            system, f"127.0.0.1:{self._zookeeper.port}", self._folder, self._peers, our_options=self._args.our_option
        )
        if system.name not in self._initialized:
            cluster.initialize()
            self._initialized.add(system.name)
        return cluster

    def _measure_starts(self) -> None:
        """Measure the time from exec to an open port on empty directories, alternating between the systems."""
        took: dict[str, list[float]] = {system.name: [] for system in self._systems}
        for _ in range(self._args.starts):
            for system in self._in_turn():
                cluster = self._cluster(system)
                try:
                    took[system.name] += cluster.start(1)
                finally:
                    cluster.stop()
        self.result["starts"] = {name: [round(seconds, 3) for seconds in each] for name, each in took.items()}
        say("start to open port, s: " + json.dumps(self.result["starts"]))

    def _measure_cluster(self, quorum: str) -> None:
        args = self._args
        e = int(quorum.split("/")[0])
        clusters = {system.name: self._cluster(system) for system in self._systems}
        try:
            for cluster in clusters.values():
                cluster.start(e)
            time.sleep(1.0)
            for name, cluster in clusters.items():
                self.result["rss_idle"].setdefault(name, {})[quorum] = round(cluster.rss_mib())
            for name in [system.name for system in self._in_turn()]:
                if args.warm_up > 0:
                    self._warm_up(clusters[name], quorum)
            tail = [(wire, TAIL_SIZE, TAIL_IN_FLIGHT) for wire in args.wire] if quorum == args.quorum[-1] else []
            for part, lines in (("write", self._write_lines()), ("read", self._read_lines()), ("tail", tail)):
                if part not in args.parts:
                    continue
                for wire, size, in_flight in lines:
                    runs = [
                        self._measure_line(clusters, part, quorum, wire=wire, size=size, in_flight=in_flight)
                        for _ in range(args.runs)
                    ]
                    self._keep(part, quorum, wire, size, in_flight, runs)
                for name, cluster in clusters.items():
                    self.result["rss_after"].setdefault(name, {}).setdefault(quorum, {})[part] = round(
                        cluster.rss_mib()
                    )
        finally:
            for cluster in clusters.values():
                cluster.stop()

    def _write_lines(self) -> list[tuple[int, int, int]]:
        return list(itertools.product(self._args.wire, self._args.size, self._args.in_flight))

    def _read_lines(self) -> list[tuple[int, int, int]]:
        return list(itertools.product(self._args.wire, self._args.read_size, self._args.read_in_flight))

    def _warm_up(self, cluster: Cluster, quorum: str) -> None:
        """Run the warm-up load, half of it in each protocol version."""
        for wire in (2, 3):
            words = load_words(
                "write", quorum, wire=wire, size=1024, in_flight=100, warm_up=0, seconds=self._args.warm_up / 2
            )
            self._load(cluster, [*words, "--verify", "0"])

    def _measure_line(
        self, clusters: dict[str, Cluster], part: str, quorum: str, *, wire: int, size: int, in_flight: int
    ) -> dict[str, Row]:
        args = self._args
        words = load_words(
            part, quorum, wire=wire, size=size, in_flight=in_flight, warm_up=args.client_warm_up, seconds=args.seconds
        )
        if part == "write":
            words += ["--verify", "1" if args.verify else "0"]
        elif part == "read":
            words += ["--entries", str(READ_ENTRIES)]
        else:
            words += ["--rate", str(TAIL_RATE)]
        measured: dict[str, Row] = {}
        for system in self._in_turn():
            got = self._load(clusters[system.name], words)
            if got["errors"] or got["wrong_payloads"]:
                raise SystemExit(
                    f"{system.title}: {got['errors']} errors {got['error_kinds']}, "
                    f"{got['wrong_payloads']} wrong payloads: {' '.join(words)}"
                )
            copies = int(quorum.split("/")[1]) if part == "write" else 1
            cpu = sum(bookie["cpu_s"] for bookie in got["bookies"])
            measured[system.name] = {
                "per_s": got["entries_per_s"],
                "p50_ms": got["latency_ms"]["p50"],
                "p99_ms": got["latency_ms"]["p99"],
                "p999_ms": got["latency_ms"]["p99.9"],
                "max_ms": got["latency_ms"]["max"],
                "cpu_us": round(1e6 * cpu / max(1, got["entries"]) / copies, 2),
                "cores": round(cpu / got["seconds"], 2),
                "client_cores": round(got["client_cpu_s"] / got["seconds"], 2),
                "rss_mib": max(bookie["rss_mib"] for bookie in got["bookies"]),
            }
        return measured

    def _keep(self, part: str, quorum: str, wire: int, size: int, in_flight: int, runs: list[dict[str, Row]]) -> None:
        """Record the row with the median of each measurement over `runs`."""
        line: Row = {"part": part, "quorum": quorum, "wire": wire, "size": size, "in_flight": in_flight, "systems": {}}
        for name in runs[0]:
            line["systems"][name] = {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
        self.result["rows"].append(line)
        words = [
            f"{name} {row['per_s']:,.0f}/s p99 {row['p99_ms']:.2f} ms {row['cpu_us']:.1f} us"
            for name, row in line["systems"].items()
        ]
        say(f"{part} {quorum} v{wire} {size} B x{in_flight}: " + "; ".join(words))

    def _in_turn(self) -> list[System]:
        return self._lots.sample(self._systems, len(self._systems))

    def _load(self, cluster: Cluster, words: list[str]) -> Row:
        command = self._peers.load_command(cluster, *words)
        for attempt in range(LOAD_ATTEMPTS):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                row: Row = json.loads(done.stdout)
                return row
            if attempt == LOAD_ATTEMPTS - 1 or not all(b.child and b.child.poll() is None for b in cluster.bookies):
                break
        raise SystemExit(f"the load program failed on {cluster.system.title}: {' '.join(words)}\n{done.stderr[-3000:]}")


def load_words(
    mode: str, quorum: str, *, wire: int, size: int, in_flight: int, warm_up: float, seconds: float
) -> list[str]:
    e, qw, qa = quorum.split("/")
    return [
        mode, "--e", e, "--qw", qw, "--qa", qa, "--wire", str(wire), "--size", str(size), "--inflight", str(in_flight),
        "--warmup", str(warm_up), "--seconds", str(seconds), "--digest", "CRC32C",
    ]  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
    return {
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "arch": platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all rows: both kinds of cluster, all sizes and windows")
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("PEERS") or DEFAULT_PEERS), metavar="DIR")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["apache", "apache-eager", OURS.name])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quorum", nargs="+", default=["1/1/1", "3/3/2"], metavar="E/QW/QA")
    parser.add_argument("--wire", type=int, nargs="+", choices=(2, 3), default=[2, 3], help="protocol versions")
    parser.add_argument("--size", type=int, nargs="+", metavar="BYTES", help="payload sizes of the writes")
    parser.add_argument("--in-flight", type=int, nargs="+", metavar="N", help="windows of the writes")
    parser.add_argument("--read-size", type=int, nargs="+", metavar="BYTES", default=[1024])
    parser.add_argument("--read-in-flight", type=int, nargs="+", metavar="N")
    parser.add_argument("--seconds", type=float, help="seconds measured per row and system")
    parser.add_argument("--client-warm-up", type=float, help="seconds of load before each measurement")
    parser.add_argument("--warm-up", type=float, help="seconds of load on each new cluster")
    parser.add_argument("--runs", type=int, default=1, help="measurements per row; the median counts")
    parser.add_argument("--starts", type=int, help="starts of each system")
    parser.add_argument("--verify", action="store_true", help="read all entries back and compare them")
    parser.add_argument(
        "--our-option", action="append", default=[], metavar="WORD", help="option of Bindery's bookies; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the systems")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--write-docs", action="store_true", help="update the tables in docs/benchmarks.md")
    args = parser.parse_args()
    defaults = {
        "size": ([1024], [128, 1024]),
        "in_flight": ([1, 100], [1, 100, 1000]),
        "read_in_flight": ([100], [1, 100]),
        "seconds": (2.0, 2.5),
        "client_warm_up": (2.0, 4.0),
        "warm_up": (8.0, 12.0),
        "starts": (2, 5),
    }
    for name, (quick, full) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, full if args.full else quick)
    return args


def main() -> int:
    args = options()
    began = time.time()
    folder = Path(tempfile.mkdtemp(prefix="bench-peer-"))
    try:
        result = Run(args, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["machine"] = machine()
    result["date"] = time.strftime("%-d %B %Y", time.localtime(began))
    result["took_s"] = round(time.time() - began)
    result["command"] = " ".join(["bench/peer.py", *(word for word in sys.argv[1:] if word != "--write-docs")])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    text = render(result)
    print(text)
    if args.write_docs:
        write_docs("bench-peer", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
