"""BookieMetrics: what the server counts, under BookKeeper's names, so that its dashboards show our bookies too.

| metric                                                   | shape   | meaning                                         |
|----------------------------------------------------------|---------|-------------------------------------------------|
| bookkeeper_server_<OP>_REQUEST                           | summary | a request from its arrival to its answer, ms    |
| bookkeeper_server_ADD_ENTRY_IN_PROGRESS, READ_...        | gauge   | requests without an answer yet                  |
| bookkeeper_server_ADD_ENTRY_REJECTED, READ_...           | counter | answered TOO_MANY_REQUESTS                      |
| bookie_WRITE_BYTES, bookie_READ_BYTES                    | counter | entry bytes taken, entry bytes given            |
| bookie_SERVER_STATUS                                     | gauge   | 1 writable, 0 read-only, -1 not registered      |
| bookie_journal_JOURNAL_SYNC                              | summary | write and fdatasync of one group, ms            |
| bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES           | summary | bytes of one group                              |
| bookie_journal_JOURNAL_WRITE_BYTES                       | counter | bytes written to the journal                    |
| bookie_journal_JOURNAL_QUEUE_SIZE                        | gauge   | bytes accepted, not yet handed to the disk      |
| bookie_flush                                             | summary | one flush of a write cache, ms                  |
| bookie_write_cache_size, bookie_read_cache_size          | gauge   | bytes                                           |
| bookie_ledger_dir_usage                                  | gauge   | per cent of the ledger disk in use              |
| bindery_bookie_storage_<name>                            | gauge   | each number of StorageStats by its own name     |
| bindery_bookie_connections, _long_polls, ..._size        | gauge   | now                                             |
| bindery_bookie_bad_frames                                | counter | connections ended for bytes that are no request |
| bindery_bookie_auth_failures                             | counter | connections whose client is not who it must be  |

OP: ADD_ENTRY, READ_ENTRY, READ_ENTRY_FENCE, READ_ENTRY_LONG_POLL, WRITE_LAC, READ_LAC, FORCE_LEDGER, GET_BOOKIE_INFO,
GET_LIST_OF_ENTRIES_OF_LEDGER. Summaries carry `success` and quantiles over the last one to two minutes, to 10 %.
Counting is plain arithmetic, once a group; Prometheus' own objects are made only when somebody asks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from bindery_bookie.storage.stats import StorageStats

QUANTILES: Final = (0.5, 0.75, 0.95, 0.99, 0.999, 0.9999, 1.0)
WINDOW_S: Final = 60.0
_SUB_BUCKETS = 8
"""Buckets per doubling: each is 9 % wide."""
_SMALLEST = 2.0**-10
_BUCKETS = 40 * _SUB_BUCKETS
_LOG_SMALLEST = math.log2(_SMALLEST)


class OpStat:
    """Distribution of one number (ms or bytes), cumulative count and sum, quantiles over a sliding window."""

    __slots__ = ("_clock", "_counts", "_older", "_turn_at", "count", "sum")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts = [0] * _BUCKETS
        self._older = [0] * _BUCKETS
        self._turn_at = clock() + WINDOW_S
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times `value`: one call for a whole group."""
        self._turn()
        self.count += count
        self.sum += value * count
        if value <= _SMALLEST:
            self._counts[0] += count
        else:
            at = int((math.log2(value) - _LOG_SMALLEST) * _SUB_BUCKETS) + 1
            self._counts[min(at, _BUCKETS - 1)] += count

    def quantile(self, part: float) -> float:
        """Upper edge of the bucket in which `part` of the window's observations end; nan without any."""
        self._turn()
        total = sum(self._counts) + sum(self._older)
        if not total:
            return math.nan
        wanted = math.ceil(part * total)
        seen = 0
        for at, (new, old) in enumerate(zip(self._counts, self._older, strict=True)):
            seen += new + old
            if seen >= wanted:
                return float(2.0 ** (_LOG_SMALLEST + at / _SUB_BUCKETS))
        raise AssertionError("counts changed under our hands")

    def _turn(self) -> None:
        now = self._clock()
        if now < self._turn_at:
            return
        idle = now >= self._turn_at + WINDOW_S
        self._older = [0] * _BUCKETS if idle else self._counts
        self._counts = [0] * _BUCKETS
        self._turn_at = now + WINDOW_S


class Operation:
    """One kind of request: latency by outcome."""

    __slots__ = ("failure", "success")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.success = OpStat(clock)
        self.failure = OpStat(clock)

    def observe(self, latency_s: float, *, ok: bool, count: int = 1) -> None:
        (self.success if ok else self.failure).observe(latency_s * 1000, count)


OPERATIONS: Final = (
    "ADD_ENTRY",
    "READ_ENTRY",
    "READ_ENTRY_FENCE",
    "READ_ENTRY_LONG_POLL",
    "WRITE_LAC",
    "READ_LAC",
    "FORCE_LEDGER",
    "GET_BOOKIE_INFO",
    "GET_LIST_OF_ENTRIES_OF_LEDGER",
)


class BookieMetrics(Collector):
    """`clock`: monotonic seconds. Gauges that others own are set through `gauges`: name -> how to read it."""

    def __init__(self, *, clock: Callable[[], float], storage: StorageStats | None = None) -> None:
        self.operations = {name: Operation(clock) for name in OPERATIONS}
        self.adds_in_progress = 0
        self.reads_in_progress = 0
        self.adds_rejected = 0
        self.reads_rejected = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.bad_frames = 0
        self.auth_failures = 0
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.storage = storage or StorageStats()
        self._sync_ms = OpStat(clock)
        self._group_bytes = OpStat(clock)
        self._flush_ms = OpStat(clock)
        self.storage.observe_sync_s = lambda seconds: self._sync_ms.observe(seconds * 1000)
        self.storage.observe_group_size = self._group_bytes.observe
        self.storage.observe_flush_s = lambda seconds: self._flush_ms.observe(seconds * 1000)

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Show `read()` under `name` whenever metrics are asked for."""
        self.gauges[name] = (help, read)

    def collect(self) -> Iterator[Metric]:
        for name, operation in self.operations.items():
            yield from _summary(
                f"bookkeeper_server_{name}_REQUEST",
                "A request from its arrival to its answer, milliseconds.",
                ((True, operation.success), (False, operation.failure)),
            )
        for metric, help, stat in (
            ("bookie_journal_JOURNAL_SYNC", "Write and fdatasync of one group, milliseconds.", self._sync_ms),
            ("bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES", "Bytes of one group.", self._group_bytes),
            ("bookie_flush", "One flush of a write cache, milliseconds.", self._flush_ms),
        ):
            yield from _summary(metric, help, ((True, stat),))
        storage = self.storage
        for metric, help, value in (
            ("bookkeeper_server_ADD_ENTRY_REJECTED", "Adds answered TOO_MANY_REQUESTS.", self.adds_rejected),
            ("bookkeeper_server_READ_ENTRY_REJECTED", "Reads answered TOO_MANY_REQUESTS.", self.reads_rejected),
            ("bookie_WRITE_BYTES", "Entry bytes taken.", self.write_bytes),
            ("bookie_READ_BYTES", "Entry bytes given.", self.read_bytes),
            ("bookie_journal_JOURNAL_WRITE_BYTES", "Bytes written to the journal.", storage.journal_bytes),
            ("bindery_bookie_auth_failures", "Clients that did not show who they are.", self.auth_failures),
            ("bindery_bookie_bad_frames", "Connections ended for bytes that are no request.", self.bad_frames),
        ):
            yield CounterMetricFamily(metric, help, value)
        for metric, help, value in (
            ("bookkeeper_server_ADD_ENTRY_IN_PROGRESS", "Adds without an answer yet.", self.adds_in_progress),
            ("bookkeeper_server_READ_ENTRY_IN_PROGRESS", "Reads without an answer yet.", self.reads_in_progress),
            ("bookie_journal_JOURNAL_QUEUE_SIZE", "Bytes not yet handed to the disk.", storage.journal_queue_size),
            (
                "bookie_write_cache_size",
                "Bytes in both write caches.",
                storage.active_cache_size + storage.flushing_cache_size,
            ),
            ("bookie_read_cache_size", "Bytes in the read cache.", storage.read_cache_size),
        ):
            yield GaugeMetricFamily(metric, help, value)
        for metric, (help, read) in self.gauges.items():
            yield GaugeMetricFamily(metric, help, read())
        for field in fields(storage):
            number = getattr(storage, field.name)
            if isinstance(number, int | float):
                yield GaugeMetricFamily(f"bindery_bookie_storage_{field.name}", "As in StorageStats.", float(number))


def _summary(name: str, help: str, stats: tuple[tuple[bool, OpStat], ...]) -> Iterator[Metric]:
    family = SummaryMetricFamily(name, help, labels=("success",))
    for ok, stat in stats:
        success = {"success": "true" if ok else "false"}
        for part in QUANTILES:
            family.add_sample(name, {**success, "quantile": str(part)}, stat.quantile(part))
        family.add_metric([success["success"]], stat.count, stat.sum)
    yield family
