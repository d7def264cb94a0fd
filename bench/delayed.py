"""Measure the index of delayed messages: memory, adding, storing, loading, and delivery at 20,000 messages a second.

    .venv/bin/python bench/delayed.py                 # a million messages; takes about a minute
    .venv/bin/python bench/delayed.py --count 3000000 --json

No network or disk. `random`: delivery times at random in ten days; `in order`: 20,000 a second, in the order of the
topic. Times are CPU times of the process. Memory is that of Python's allocations (tracemalloc), measured apart from the
times.
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice

from bindery_broker.dispatch.delays import DelayIndex
from bindery_broker.dispatch.delays.bucket_codec import decode_bucket
from bindery_pulsar.message_id import Position

RATE = 20_000
"""Messages that become due in a second if they are in order."""
TEN_DAYS_MS = 10 * 86_400_000
ENTRIES_PER_LEDGER = 50_000
START_MS = 1_700_000_000_000
ADDS_TIMED = 100
"""Number of calls of `add` that are timed together: a single one takes less than reading the clock."""
MIB = 2**20


def messages(order: str, count: int) -> Iterator[tuple[Position, int]]:
    chance = random.Random(1)
    for n in range(count):
        delay_ms = chance.randrange(TEN_DAYS_MS) if order == "random" else n * 1_000 // RATE
        yield Position(n // ENTRIES_PER_LEDGER, n % ENTRIES_PER_LEDGER), START_MS + delay_ms


def not_acked(position: Position) -> bool:
    return False


def none_acked(ledger_id: int, first: int, last: int) -> bool:
    return False


def timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def add_all(order: str, count: int) -> tuple[DelayIndex, float, float]:
    """Return the index, the seconds of adding, and the longest of ADDS_TIMED calls together."""
    delays = DelayIndex()
    rows = messages(order, count)
    total = longest = 0.0
    while part := list(islice(rows, ADDS_TIMED)):
        started = time.process_time()
        for position, at_ms in part:
            known = delays.add(position, at_ms)
        seconds = time.process_time() - started
        assert known, "the index is full: use a lower --count"
        total += seconds
        longest = max(longest, seconds)
    return delays, total, longest


def memory(order: str, count: int) -> tuple[int, int]:
    """Return the bytes of an index, and the most at any time while it was built."""
    tracemalloc.start()
    delays = DelayIndex()
    for position, at_ms in messages(order, count):
        delays.add(position, at_ms)
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(delays) == count
    return used, peak


def deliver(delays: DelayIndex, order: str) -> tuple[float, float, float]:
    """Take everything: tick by tick if in order, else all overdue, 1,000 at a time; and acknowledge it.

    Returns the seconds of taking, the longest call of it, and the seconds of forgetting what is acknowledged.
    """
    total = longest = forgetting = 0.0
    now_ms = START_MS if order == "in order" else START_MS + 2 * TEN_DAYS_MS
    while len(delays):
        started = time.process_time()
        found = delays.due(now_ms, 10_000 if order == "in order" else 1_000)
        seconds = time.process_time() - started
        forgetting += timed(lambda found=found: delays.forget(found))
        total += seconds
        longest = max(longest, seconds)
        now_ms += delays.tick_ms
    return total, longest, forgetting


def measure(order: str, count: int) -> dict[str, float]:
    used, peak = memory(order, count)
    delays, adding_s, add_longest_s = add_all(order, count)
    delays.seal()
    blobs: dict[str, bytes] = {}
    encoding_s = timed(lambda: blobs.update(delays.changes(()).put))
    decoding_s = timed(lambda: [decode_bucket(blob) for blob in blobs.values()])
    again = DelayIndex()
    parts = [
        timed(lambda name=name, blob=blob: again.restore({name: blob}, not_acked, none_acked))
        for name, blob in blobs.items()
    ]
    assert len(again) == count
    delivering_s, deliver_longest_s, forgetting_s = deliver(again, order)
    return {
        "memory_mib": used / MIB,
        "memory_peak_mib": peak / MIB,
        "add_per_s": count / adding_s,
        "add_longest_ms": add_longest_s * 1e3,
        "blobs": len(blobs),
        "blobs_mib": sum(map(len, blobs.values())) / MIB,
        "encode_ms": encoding_s * 1e3,
        "decode_ms": decoding_s * 1e3,
        "restore_ms": sum(parts) * 1e3,
        "restore_longest_ms": max(parts) * 1e3,
        "due_per_s": count / delivering_s,
        "due_longest_ms": deliver_longest_s * 1e3,
        "acked_per_s": count / forgetting_s,
        "core_share_at_20000_per_s": (delivering_s + forgetting_s) / count * RATE,
    }


TEXTS = {
    "memory_mib": "memory, MiB",
    "memory_peak_mib": "most while it is built, MiB",
    "add_per_s": "add, messages/s",
    "add_longest_ms": "longest 100 adds, ms",
    "blobs": "blobs",
    "blobs_mib": "stored, MiB",
    "encode_ms": "encode all, ms",
    "decode_ms": "decode all, ms",
    "restore_ms": "load all, ms",
    "restore_longest_ms": "load the largest blob, ms",
    "due_per_s": "due, messages/s",
    "due_longest_ms": "longest due, ms",
    "acked_per_s": "acknowledged once delivered, messages/s",
    "core_share_at_20000_per_s": "share of a core at 20,000 due a second",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the index of delayed messages.")
    parser.add_argument("--count", type=int, default=1_000_000, help="number of messages")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = {order: measure(order, arguments.count) for order in ("random", "in order")}
    if arguments.json:
        print(json.dumps({"count": arguments.count, "results": results}))
        return
    print(f"| {arguments.count:,} messages | {' | '.join(results)} |\n|---|{'---:|' * len(results)}")
    for name, text in TEXTS.items():
        values = [result[name] for result in results.values()]
        print(f"| {text} | {' | '.join(f'{v:,.0f}' if v >= 1_000 or v == int(v) else f'{v:.3g}' for v in values)} |")


if __name__ == "__main__":
    main()
