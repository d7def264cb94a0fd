"""Measure seeks by publish time in a large topic, through a whole cluster of its own.

    .venv/bin/python bench/seek.py
    .venv/bin/python bench/seek.py --entries 100000 --seeks 50

Stores small entries, one message each, in ledgers of 50,000. Kills the broker, so that its cache is empty, and waits
until the next one serves the topic. Then it reads one message at random publish times, and moves a subscription to
such times. Each answer is compared with the publish times that the messages had when they were stored. Milliseconds.
"""

import argparse
import bisect
import http.client
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from bindery.standalone.throwaway import ThrowawayCluster

TOPIC = "/v1/topics/public/default/large"
PER_REQUEST = 1_000
LEDGER_ENTRIES = 50_000
READY_S_MAX = 90


class Broker:
    """One connection to the broker; a new one after an error."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=60)

    def call(self, method: str, path: str, body: str = "", media_type: str = "application/json") -> dict[str, Any]:
        try:
            self._connection.request(method, path, body or None, {"content-type": media_type})
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        if answer.status not in (http.client.OK, http.client.CREATED):
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return dict(json.loads(content))


def fill(broker: Broker, entries: int) -> tuple[list[int], list[str]]:
    """Store the entries. Returns the publish time and the id of the first message of each request."""
    times, ids = [], []
    for first in range(0, entries, PER_REQUEST):
        lines = "\n".join(json.dumps({"payload": f"message {first + i}"}) for i in range(PER_REQUEST))
        answer = broker.call("POST", f"{TOPIC}/messages?batch=false", lines, "application/x-ndjson")
        ids.append(answer["message_ids"][0])
        times.append(broker.call("GET", f"{TOPIC}/messages/{ids[-1]}")["message"]["publish_time"])
    return times, ids


def ready(broker: Broker) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while True:
        try:
            broker.call("GET", f"{TOPIC}/messages?start=latest")
        except (OSError, http.client.HTTPException, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def measure(what: str, seeks: int, seek: Callable[[], None]) -> None:
    taken = []
    for _ in range(seeks):
        began = time.perf_counter()
        seek()
        taken.append((time.perf_counter() - began) * 1_000)
    p99 = sorted(taken)[int(len(taken) * 0.99)]
    print(f"| {what:<34} | {statistics.median(taken):7.2f} | {p99:7.2f} | {max(taken):7.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the topic; default: 1,000,000")
    parser.add_argument("--seeks", type=int, default=200, help="seeks of each row; default: 200")
    args = parser.parse_args()
    os.environ |= {"BROKER_LEDGER_AGE_S_MIN": "0", "BROKER_LEDGER_ENTRIES_MAX": str(LEDGER_ENTRIES)}
    chance = random.Random(1)
    with ThrowawayCluster() as cluster:
        broker = Broker(cluster.url)
        times, ids = fill(broker, args.entries)
        cluster.kill("broker-0")
        time.sleep(1)
        ready(broker)
        for name in ("s", "keep"):  # without the second one, ledgers that a seek has passed are deleted
            broker.call("PUT", f"{TOPIC}/subscriptions/{name}", json.dumps({"initial": "earliest"}))
        ledgers = broker.call("GET", TOPIC)["ledgers"]
        print(f"{args.entries} entries in {ledgers} ledgers\n\n| {'what':<34} |  p50 ms |  p99 ms |  max ms |")
        print(f"|{'-' * 36}|--------:|--------:|--------:|")

        def expected(at_ms: int) -> str:
            return ids[bisect.bisect_left(times, at_ms)]

        def read() -> None:
            at_ms = chance.choice(times)
            answer = broker.call("GET", f"{TOPIC}/messages?start=@{at_ms}&max=1")
            assert answer["messages"][0]["message_id"] == expected(at_ms), at_ms

        def seek() -> None:
            at_ms = chance.choice(times)
            answer = broker.call("POST", f"{TOPIC}/subscriptions/s/seek", json.dumps({"timestamp": at_ms}))
            wanted = expected(at_ms).split(":")
            assert answer["next"].split(":")[:2] == wanted[:2], (answer, at_ms)

        measure("read one message at a random time", args.seeks, read)
        measure("move a subscription to such a time", args.seeks, seek)
    return 0


if __name__ == "__main__":
    sys.exit(main())
