"""Metrics: BookKeeper's names, quantiles that are near the truth, and a window that forgets."""

import math
import random

from bindery_bookie.metrics import OPERATIONS, WINDOW_S, BookieMetrics, OpStat
from bindery_bookie.storage.stats import StorageStats
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_are_within_ten_per_cent() -> None:
    stat = OpStat(Clock())
    numbers = [random.Random(3).lognormvariate(1, 2) for _ in range(5000)]
    for number in numbers:
        stat.observe(number)
    numbers.sort()
    for part in (0.5, 0.95, 0.99):
        truth = numbers[math.ceil(part * len(numbers)) - 1]
        assert truth <= stat.quantile(part) <= truth * 1.1
    assert stat.count == 5000
    assert math.isclose(stat.sum, sum(numbers))


def test_a_group_counts_as_its_members() -> None:
    stat = OpStat(Clock())
    stat.observe(1.0, 99)
    stat.observe(1000.0)
    assert stat.count == 100
    assert stat.quantile(0.99) < 1.2
    assert stat.quantile(1.0) >= 1000


def test_extremes_stay_inside() -> None:
    stat = OpStat(Clock())
    for number in (0.0, 1e-9, 1e300):
        stat.observe(number)
    assert stat.quantile(0.1) <= 0.001
    assert stat.quantile(1.0) > 1e8


def test_quantiles_forget_after_two_windows_and_counts_do_not() -> None:
    clock = Clock()
    stat = OpStat(clock)
    assert math.isnan(stat.quantile(0.5))
    stat.observe(500.0)
    clock.now = WINDOW_S + 1
    assert stat.quantile(0.5) >= 500
    clock.now = 2 * WINDOW_S + 2
    assert math.isnan(stat.quantile(0.5))
    stat.observe(1.0)
    assert stat.quantile(1.0) < 1.2
    assert stat.count == 2


def test_the_page_has_bookkeepers_names_and_parses() -> None:
    stats = StorageStats()
    metrics = BookieMetrics(clock=Clock(), storage=stats)
    metrics.gauge("bookie_SERVER_STATUS", "1 writable.", lambda: 1)
    metrics.operations["ADD_ENTRY"].observe(0.004, ok=True, count=10)
    metrics.write_bytes = 1234
    stats.observe_sync_s(0.002)
    registry = CollectorRegistry()
    registry.register(metrics)
    page = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for operation in OPERATIONS:
        assert f"bookkeeper_server_{operation}_REQUEST" in families
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value for family in families.values() for s in family.samples
    }
    assert samples["bookkeeper_server_ADD_ENTRY_REQUEST_count", (("success", "true"),)] == 10
    assert math.isclose(samples["bookkeeper_server_ADD_ENTRY_REQUEST_sum", (("success", "true"),)], 40.0)
    p99 = samples["bookkeeper_server_ADD_ENTRY_REQUEST", (("quantile", "0.99"), ("success", "true"))]
    assert 4.0 <= p99 <= 4.4
    assert samples["bookie_WRITE_BYTES_total", ()] == 1234
    assert samples["bookie_SERVER_STATUS", ()] == 1
    assert samples["bookie_journal_JOURNAL_SYNC_count", (("success", "true"),)] == 1
    assert samples["bindery_bookie_storage_adds_ok", ()] == 0
