"""Kill the driver of spark-jobs/examples/enrich.py at random times, and check that its outputs are exactly once.

    python bench/spark_kills.py --kills 10 --seed 11
    python bench/spark_kills.py --kills 10 --seed 12 --partitions 3    # input and outputs are partitioned topics
    python bench/spark_kills.py --kills 1 --without-totals             # with half the processor time

Each round adds orders, starts the job, waits until it writes, and ends its process group with SIGKILL at a random time
within the next seconds. The last start runs to the end. Then must hold:

- each order is in `enriched` once, and those of a customer are in the order in which they were sent;
- the messages of `totals` count and sum the first orders of their customer, more from message to message, and the last
  one all of them. So no total is stored twice or lost, and none contains an order twice.

Exit code 0: all of that holds.
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from bindery.standalone.throwaway import ThrowawayCluster

JOB = Path(__file__).parents[1] / "spark-jobs" / "examples" / "enrich.py"
INPUT, ENRICHED, TOTALS = "orders", "enriched", "totals"
CUSTOMERS = 20
MAX_ENTRIES = 400
"""Maximum entries of a micro-batch, and so the size of the work that a kill interrupts."""
DELAY_S_MAX = 4.0
"""Maximum time in seconds from the first new message of a round to the kill."""
RUN_S_MAX = 600
REQUEST_MESSAGES = 1_000

POLL_S = 0.3
HTTP = httpx.Client(timeout=60, trust_env=False)

SPARK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings with which Spark needs less processor time for small micro-batches."""
TOO_SLOW = "failed to connect back"
"""What Spark says if a Python process does not start within its ten seconds, as on a machine that is very busy."""

Rows = list[dict[str, Any]]


class Pipeline:
    """The job as a process group of its own: its driver, and the Python workers."""

    def __init__(self, cluster: ThrowawayCluster, folder: Path, *, totals: bool, until_now: bool) -> None:
        self._command = [
            *(sys.executable, str(JOB), "--zookeeper", cluster.zookeeper, "--url", cluster.url),
            *("--from", INPUT, "--to", ENRICHED, "--every", "200 milliseconds"),
            *(("--totals", TOTALS) if totals else ()),
            *("--checkpoint", str(folder / "checkpoint"), "--max-entries", str(MAX_ENTRIES)),
            *(["--until-now"] if until_now else []),
        ]
        self._environment = {"BINDERY_SPARK_CONF": json.dumps(SPARK), **os.environ}
        self._log = folder / "pipeline.log"
        self._start()

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True, stdout=log, stderr=log
            )

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


class Topics:
    """The topics of the run, through a broker."""

    def __init__(self, url: str, partitions: int) -> None:
        self._url = f"{url}/v1/topics/public/default/"
        self._partitions = partitions
        for name in (INPUT, ENRICHED, TOTALS) if partitions else ():
            HTTP.put(f"{self._url}{name}/partitions", json={"partitions": partitions}).raise_for_status()

    def produce(self, numbers: range) -> None:
        """The orders of a customer have the customer as key, so that their order is kept."""
        for start in range(numbers.start, numbers.stop, REQUEST_MESSAGES):
            lines = [
                {"payload_json": {"customer": f"c{n % CUSTOMERS}", "amount": n}, "key": f"c{n % CUSTOMERS}"}
                for n in range(start, min(start + REQUEST_MESSAGES, numbers.stop))
            ]
            HTTP.post(f"{self._url}{INPUT}/messages?batch=false", json=lines).raise_for_status()

    def read(self, name: str) -> Rows:
        """The payloads, partition after partition."""
        found: Rows = []
        for one in self._parts(name):
            place: str | None = "earliest"
            while place:
                answer = HTTP.get(f"{self._url}{one}/messages", params={"start": place, "max": REQUEST_MESSAGES})
                content = answer.raise_for_status().json()
                found += (json.loads(message["payload"]) for message in content["messages"])
                place = content["next"] if content["messages"] else None
        return found

    def count(self, name: str) -> int:
        """Number of entries."""
        answers = [HTTP.get(self._url + one) for one in self._parts(name)]
        return sum(int(answer.json()["entries"]) for answer in answers if answer.status_code == 200)

    def _parts(self, name: str) -> list[str]:
        return [f"{name}-partition-{index}" for index in range(self._partitions)] or [name]


def judge_orders(orders: Sequence[dict[str, Any]], expected: int) -> list[str]:
    """Return what is wrong with the enriched orders 0 to `expected`."""
    times = Counter(int(order["amount"]) for order in orders)
    by_customer: defaultdict[str, list[int]] = defaultdict(list)
    for order in orders:
        by_customer[order["customer"]].append(int(order["amount"]))
    wrong = [f"order {n} is missing" for n in range(expected) if n not in times]
    wrong += [f"order {n} is there {count} times" for n, count in times.items() if count > 1]
    wrong += [f"order {n} was not sent" for n in times if not 0 <= n < expected]
    wrong += [
        f"the orders of {name} are not in their order" for name, all_ in by_customer.items() if all_ != sorted(all_)
    ]
    wrong += [f"not enriched: {order}" for order in orders if order["large"] != (order["amount"] >= 100)]
    if len({order["message_id"] for order in orders}) != len(orders):
        wrong.append("a message id is there twice")
    return wrong


def judge_totals(totals: Sequence[dict[str, Any]], expected: int) -> list[str]:
    """Return what is wrong with the totals of the orders 0 to `expected`."""
    wrong: list[str] = []
    before: Counter[str] = Counter()
    sums = {f"c{customer}": [0] for customer in range(min(CUSTOMERS, expected))}
    for n in range(expected):
        of_customer = sums[f"c{n % CUSTOMERS}"]
        of_customer.append(of_customer[-1] + n)
    for row in totals:
        customer, orders = row["customer"], row["orders"]
        if orders <= before[customer]:
            wrong.append(f"{row} comes after a total of {before[customer]} orders")
        before[customer] = orders
        if not 0 < orders < len(sums.get(customer, ())):
            wrong.append(f"{row}: there are not so many orders")
        elif row["total"] != sums[customer][orders]:
            wrong.append(f"{row}: the first {orders} orders make {sums[customer][orders]}")
    wrong += [
        f"the last total of {customer} has {before[customer]} of {len(of_customer) - 1} orders"
        for customer, of_customer in sums.items()
        if before[customer] != len(of_customer) - 1
    ]
    return wrong


def run(
    cluster: ThrowawayCluster, folder: Path, *, kills: int, seed: int, partitions: int, per_round: int, totals: bool
) -> list[str]:
    """Return what is wrong with the outputs."""
    chance = random.Random(seed)
    topics = Topics(cluster.url, partitions)
    print(f"seed {seed}, {kills} kills, {partitions or 'no'} partitions", flush=True)
    expected = 0
    for kill in range(kills):
        topics.produce(range(expected, expected + per_round))
        expected += per_round
        # Alternately after the first new message of one output and of the other, because either may be ahead.
        watched = (ENRICHED, TOTALS)[kill % 2] if totals else ENRICHED
        before, deadline = topics.count(watched), time.monotonic() + RUN_S_MAX
        pipeline = Pipeline(cluster, folder, totals=totals, until_now=False)
        try:
            while topics.count(watched) == before:
                assert pipeline.is_running()
                assert time.monotonic() < deadline, f"nothing new in {watched} for {RUN_S_MAX} s"
                time.sleep(POLL_S)
            delay_s = chance.uniform(0, DELAY_S_MAX)
            time.sleep(delay_s)
        finally:
            pipeline.kill()
        at = ", ".join(f"{topics.count(name)} {name}" for name in (ENRICHED, TOTALS))
        print(f"kill {kill + 1}, {delay_s:.2f} s after the first of {watched}: {at} of {expected} orders", flush=True)
    pipeline = Pipeline(cluster, folder, totals=totals, until_now=True)
    try:
        deadline = time.monotonic() + RUN_S_MAX
        while pipeline.is_running():
            assert time.monotonic() < deadline, "the pipeline does not end"
            time.sleep(POLL_S)
    finally:
        pipeline.kill()
    orders = topics.read(ENRICHED)
    print(f"{expected} orders, {len(orders)} enriched", flush=True)
    wrong = judge_orders(orders, expected)
    if totals:
        sums = topics.read(TOTALS)
        print(f"{len(sums)} totals", flush=True)
        wrong += judge_totals(sums, expected)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the driver of enrich.py, and check its outputs.")
    parser.add_argument("--kills", type=int, default=2, help="number of kills (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills (0)")
    parser.add_argument("--partitions", type=int, default=0, help="partitions of all topics (0: not partitioned)")
    parser.add_argument("--per-round", type=int, default=3_000, help="orders that each round adds (3000)")
    parser.add_argument("--without-totals", action="store_true", help="only the orders, without their sums")
    args = parser.parse_args()
    with ThrowawayCluster(bookies=3, auditors=0) as cluster, tempfile.TemporaryDirectory() as folder:
        wrong = run(
            cluster,
            Path(folder),
            kills=args.kills,
            seed=args.seed,
            partitions=args.partitions,
            per_round=args.per_round,
            totals=not args.without_totals,
        )
    print(
        "\n".join([f"BAD: {len(wrong)} findings", *wrong[:20]])
        if wrong
        else f"GOOD: all is stored exactly once after {args.kills} kills"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
