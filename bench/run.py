"""Run all benchmarks one after the other, as `make bench` does.

    make bench                              # every part
    make bench ARGS="--seconds 1"           # shorter lines
    make bench ARGS="--parts bookie http"   # some of the parts

| part    | what it measures                                                                                      |
|---------|-------------------------------------------------------------------------------------------------------|
| storage | the storage engine in one process, without a network: adds with fsync on, reads that catch up          |
| bookie  | one real bookie over its port: adds with fsync on, reads; latency, CPU and memory of the bookie        |
| client  | the ledger client's own CPU per entry against bookies that only acknowledge; then through real bookies |
| topic   | the broker's storage part over ledgers in memory: its CPU per message                                  |
| cursor  | commits and loading of a subscription with a million entries of backlog, over ledgers in memory        |
| http    | produce and receive over the broker's HTTP API, single messages and batches                            |

Each part is a program of its own with more options: see its `--help`. Results with the machine they were measured on
are in docs/benchmarks.md.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bindery.standalone.throwaway import ThrowawayCluster

BENCH = Path(__file__).resolve().parent
URL = "{url}"
"""Placeholder for the address of a cluster that exists only for this benchmark."""
PARTS: dict[str, list[list[str]]] = {
    "storage": [["storage.py"]],
    "bookie": [["bookie.py"]],
    "client": [["client.py"], ["client.py", "--real"]],
    "topic": [["topic.py"]],
    "cursor": [["cursor.py"]],
    "http": [["broker.py", URL]],
}


def measure(words: list[str]) -> int:
    return subprocess.run([sys.executable, *words], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, help="seconds per table row; default: that of each benchmark")
    args = parser.parse_args()
    for part in args.parts:
        for command in PARTS[part]:
            extra = [] if args.seconds is None or part in ("topic", "cursor") else ["--seconds", str(args.seconds)]
            print(f"\n## {' '.join([*command, *extra])}\n", flush=True)
            words = [str(BENCH / command[0]), *command[1:], *extra]
            if URL in command:
                with ThrowawayCluster() as cluster:
                    code = measure([word.replace(URL, cluster.url) for word in words])
            else:
                code = measure(words)
            if code:
                print(f"{command[0]} failed with exit code {code}", file=sys.stderr)
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
