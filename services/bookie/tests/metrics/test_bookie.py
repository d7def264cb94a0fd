"""The metrics page: BookKeeper's names, and values that Prometheus parses."""

import asyncio
import math
import re
from pathlib import Path

from bindery_bookie.metrics import OPERATIONS, BookieMetrics, DirectoryUsage
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire.messages import AddRequest
from prometheus_client.parser import text_string_to_metric_families


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def page_of(metrics: BookieMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of the page by name and labels. Prometheus' own parser must accept the page."""
    text = metrics.render().decode()
    assert list(text_string_to_metric_families(text))
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            at, _, value = line.rpartition(" ")
            name, _, labels = at.partition("{")
            pairs = re.findall(r'(\w+)="([^"]*)"', labels)
            assert (name, tuple(sorted(pairs))) not in samples, f"twice: {at}"
            samples[name, tuple(sorted(pairs))] = float(value)
    return samples


def test_the_page_has_bookkeepers_names_and_parses() -> None:
    stats = StorageStats()
    metrics = BookieMetrics(clock=Clock(), storage=stats)
    metrics.gauge("bookie_SERVER_STATUS", "1 writable.", lambda: 1)
    metrics.operations["ADD_ENTRY"].observe(0.004, ok=True, count=10)
    metrics.write_bytes = 1234
    stats.observe_sync_s(0.002)
    samples = page_of(metrics)
    for operation in OPERATIONS:
        assert (f"bookkeeper_server_{operation}_REQUEST_count", (("success", "true"),)) in samples
    for name in ("bookkeeper_server_ADD_ENTRY_REQUEST", "bookkeeper_server_ADD_ENTRY", "bookie_BOOKIE_ADD_ENTRY"):
        assert samples[f"{name}_count", (("success", "true"),)] == 10
        assert math.isclose(samples[f"{name}_sum", (("success", "true"),)], 40.0)
        assert 4.0 <= samples[name, (("quantile", "0.99"), ("success", "true"))] <= 4.4
    assert samples["bookie_WRITE_BYTES", ()] == 1234, "a dashboard asks for the name without _total"
    assert samples["bookie_SERVER_STATUS", ()] == 1
    assert samples["bookie_journal_JOURNAL_SYNC_count", (("journalIndex", "0"), ("success", "true"))] == 1
    assert samples["bindery_bookie_storage_adds_ok", (("shard", "0"),)] == 0


async def test_a_running_engine_sets_the_metrics_of_journals_and_caches(tmp_path: Path) -> None:
    settings = StorageSettings(journal_directory=str(tmp_path / "journal"), ledger_directory=str(tmp_path / "ledgers"))
    stats = StorageStats()
    clock = asyncio.get_running_loop().time
    metrics = BookieMetrics(clock=clock, storage=stats)
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1, stats=stats)
    await engine.open()
    digester = Digester(DigestType.DUMMY, b"")
    bodies = pack_many(digester, [b"x" * 50] * 100, ledger_id=3, first_entry_id=0, lac=-1, length=0)
    added: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    engine.add_many(
        [AddRequest(1, 3, at, digester.master_key, body) for at, body in enumerate(bodies)], added.set_result
    )
    assert page_of(metrics)["bookie_journal_JOURNAL_QUEUE_SIZE", (("journalIndex", "0"),)] == 1
    await added
    await engine.flush()
    await read(engine, [(3, 0), (3, 1)])
    samples = page_of(metrics)
    ok = (("journalIndex", "0"), ("success", "true"))
    adds = samples["bookie_journal_JOURNAL_ADD_ENTRY_count", ok]
    assert adds == samples["bookie_journal_JOURNAL_QUEUE_LATENCY_count", ok] == 101, "100 entries and the master key"
    queued, added_ms = (samples[f"bookie_journal_JOURNAL_{name}_sum", ok] for name in ("QUEUE_LATENCY", "ADD_ENTRY"))
    assert 0 <= queued <= added_ms < 101 * 10_000
    assert samples["bookie_journal_JOURNAL_ADD_ENTRY", (*ok[:1], ("quantile", "0.99"), *ok[1:])] > 0
    assert samples["bookie_journal_JOURNAL_FORCE_WRITE_QUEUE_SIZE", (("journalIndex", "0"),)] == 0
    assert samples["bookie_readahead_batch_count_count", (("shard", "0"), ("success", "true"))] == 1
    assert samples["bookie_readahead_batch_count_sum", (("shard", "0"), ("success", "true"))] > 0
    assert samples["bookie_read_cache_misses", ()] == 2
    await read(engine, [(3, 1)])
    assert page_of(metrics)["bookie_read_cache_hits", ()] == 1
    await engine.close()


async def read(engine: StorageEngine, keys: list[tuple[int, int]]) -> None:
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    engine.read_many(keys, done.set_result)
    await done


def test_shards_have_labels_or_are_summed_as_dashboards_expect() -> None:
    shards = [StorageStats(), StorageStats()]
    metrics = BookieMetrics(clock=Clock(), storage=shards)
    for at, stats in enumerate(shards, 1):
        stats.read_cache_size = 100 * at
        stats.observe_sync_s(0.001 * at)
        stats.waiting_adds = at
    samples = page_of(metrics)
    assert samples["bookie_read_cache_size", ()] == 300
    assert samples["bookkeeper_server_ADD_ENTRY_BLOCKED", ()] == 3
    assert samples["bindery_bookie_storage_read_cache_size", (("shard", "1"),)] == 200
    for at in (0, 1):
        assert samples["bookie_journal_JOURNAL_SYNC_count", (("journalIndex", str(at)), ("success", "true"))] == 1


def test_a_figure_that_cannot_be_read_is_left_out_and_counted() -> None:
    metrics = BookieMetrics(clock=Clock())
    metrics.gauge("bindery_bookie_broken", "Never.", lambda: 1 / 0)
    metrics.gauge("bindery_bookie_good", "Always.", lambda: 4)
    samples = page_of(metrics)
    assert ("bindery_bookie_broken", ()) not in samples
    assert samples["bindery_bookie_good", ()] == 4
    assert samples["bindery_bookie_metrics_broken", ()] == 1


def test_directories_are_shown_by_path_as_bookkeeper_does() -> None:
    metrics = BookieMetrics(clock=Clock())
    metrics.directories = lambda: [
        DirectoryUsage("/pulsar/data/bookkeeper/ledgers-0", "ledger", 0.25, False),
        DirectoryUsage("/data/l2", "ledger", 0.99, True),
        DirectoryUsage("/data/l2", "journal", 0.99, True),
    ]
    samples = page_of(metrics)
    assert samples["bookie_ledger_dir__pulsar_data_bookkeeper_ledgers_0_usage", ()] == 25
    assert samples["bookie_ledger_num_dirs", ()] == 2
    assert samples["bookie_ledger_writable_dirs", ()] == 1
    assert samples["bookie_JOURNAL_DIRS", ()] == 1


def test_labels_are_escaped_and_large_numbers_are_exact() -> None:
    metrics = BookieMetrics(clock=Clock())
    odd = 'a"b\\c\nd'
    metrics.figure("bindery_bookie_odd", "gauge", "Odd.", lambda: [({"path": odd}, 0.5), ({"path": "x"}, 2.0**70)])
    (family,) = [one for one in text_string_to_metric_families(metrics.render().decode()) if one.name.endswith("_odd")]
    assert [(s.labels["path"], s.value) for s in family.samples] == [(odd, 0.5), ("x", 2.0**70)]
