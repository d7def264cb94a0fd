"""Kill the driver of spark-jobs/examples/enrich.py at random times, and check that its output is exactly once.

    python bench/spark_kills.py --kills 10 --seed 11

Exit code 0: each order is in the output once.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from bindery.standalone.throwaway import ThrowawayCluster

JOB = Path(__file__).parents[1] / "spark-jobs" / "examples" / "enrich.py"
CUSTOMERS = 20
PER_ROUND = 3_000
MAX_ENTRIES = 400
"""Maximum entries of a micro-batch, and so the size of the work that a kill interrupts."""
RUN_S_MAX = 300

POLL_S = 0.3
HTTP = httpx.Client(timeout=60, trust_env=False)

TOO_SLOW = "failed to connect back"
"""What Spark says if a Python process does not start within its ten seconds, as on a machine that is very busy."""


class Pipeline:
    """The job as a process group of its own: its driver, and the Python workers."""

    def __init__(self, cluster: ThrowawayCluster, folder: Path, *, until_now: bool) -> None:
        self._command = [
            *(sys.executable, str(JOB), "--zookeeper", cluster.zookeeper),
            *("--url", cluster.url, "--from", "orders", "--to", "enriched"),
            *("--every", "200 milliseconds"),
            *("--checkpoint", str(folder / "checkpoint"), "--max-entries", str(MAX_ENTRIES)),
            *(["--until-now"] if until_now else []),
        ]
        self._log = folder / "pipeline.log"
        self._start()

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, start_new_session=True, stdout=log, stderr=log)

    def is_running(self) -> bool:
        """Whether the job has not ended. One that ended because the machine is too slow is started again."""
        code = self._process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        text = self._log.read_text(errors="replace")
        assert TOO_SLOW in text, text[-3_000:]
        print("started again: a Python process was too slow", flush=True)
        self.kill()
        self._start()
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def topic(cluster: ThrowawayCluster, name: str) -> str:
    return f"{cluster.url}/v1/topics/public/default/{name}"


def produce(cluster: ThrowawayCluster, first: int) -> None:
    for start in range(first, first + PER_ROUND, 1_000):
        lines = [
            {"payload_json": {"customer": f"c{n % CUSTOMERS}", "amount": n}, "key": str(n)}
            for n in range(start, start + 1_000)
        ]
        HTTP.post(topic(cluster, "orders") + "/messages?batch=false", json=lines).raise_for_status()


def read(cluster: ThrowawayCluster, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    place = "earliest"
    while True:
        answer = HTTP.get(topic(cluster, name) + "/messages", params={"start": place, "max": 1000})
        if answer.status_code == 404:
            return []
        content = answer.raise_for_status().json()
        if not content["messages"]:
            return found
        found += (json.loads(message["payload"]) for message in content["messages"])
        place = content["next"]


def count(cluster: ThrowawayCluster, name: str) -> int:
    answer = HTTP.get(topic(cluster, name))
    return int(answer.json()["entries"]) if answer.status_code == 200 else 0


def run(cluster: ThrowawayCluster, folder: Path, *, kills: int, seed: int) -> bool:
    """Return whether the output is exactly once."""
    chance = random.Random(seed)
    print(f"seed {seed}, {kills} kills", flush=True)
    expected = 0
    for kill in range(kills):
        produce(cluster, expected)
        expected += PER_ROUND
        pipeline = Pipeline(cluster, folder, until_now=False)
        try:
            before, deadline = count(cluster, "enriched"), time.monotonic() + RUN_S_MAX
            while count(cluster, "enriched") == before and time.monotonic() < deadline:
                assert pipeline.is_running()
                time.sleep(POLL_S)
            delay_s = chance.uniform(0, 4)
            time.sleep(delay_s)
        finally:
            pipeline.kill()
        print(f"kill {kill}: after {before} entries, {delay_s:.2f} s later at {count(cluster, 'enriched')}", flush=True)
    pipeline = Pipeline(cluster, folder, until_now=True)
    try:
        deadline = time.monotonic() + RUN_S_MAX
        while pipeline.is_running():
            assert time.monotonic() < deadline, "the pipeline does not end"
            time.sleep(POLL_S)
    finally:
        pipeline.kill()
    found = read(cluster, "enriched")
    amounts = Counter(int(order["amount"]) for order in found)
    missing = [n for n in range(expected) if not amounts[n]]
    twice = [n for n, times in amounts.items() if times > 1]
    print(f"{expected} orders, {len(found)} enriched, {len(missing)} missing, {len(twice)} twice", flush=True)
    assert all(order["large"] == (order["amount"] >= 100) for order in found)
    return not missing and not twice and len({order["message_id"] for order in found}) == len(found) == expected


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the driver of enrich.py, and check its output.")
    parser.add_argument("--kills", type=int, default=2, help="number of kills (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills (0)")
    args = parser.parse_args()
    with ThrowawayCluster(bookies=3, auditors=0) as cluster, tempfile.TemporaryDirectory() as folder:
        is_good = run(cluster, Path(folder), kills=args.kills, seed=args.seed)
    print("GOOD: each order is in the output once" if is_good else "BAD")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
