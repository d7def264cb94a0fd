"""Metrics of a shard's storage: what each of BookKeeper's names shows."""

from dataclasses import fields

import pytest
from bindery_bookie.metrics.storage_metrics import ShardMetrics, add_storage
from bindery_bookie.storage.stats import StorageStats
from bindery_kit.observability.metrics_page import Page


class World:
    """Two shards, and the page of their metrics."""

    def __init__(self) -> None:
        self.stats = [StorageStats(), StorageStats()]
        self.shards = [ShardMetrics(at, stats, lambda: 0.0) for at, stats in enumerate(self.stats)]

    def set(self, **values: int) -> None:
        """Set fields of the first shard, and twice the values in the second."""
        for name, value in values.items():
            setattr(self.stats[0], name, value)
            setattr(self.stats[1], name, 2 * value)

    def lines(self) -> list[str]:
        page = Page()
        add_storage(page, self.shards)
        return page.render().decode().splitlines()

    def __getitem__(self, name: str) -> float:
        (value,) = [line.rpartition(" ")[2] for line in self.lines() if line.rpartition(" ")[0] == name]
        return float(value)

    def kind(self, name: str) -> str:
        (kind,) = [line.split()[-1] for line in self.lines() if line.startswith(f"# TYPE {name} ")]
        return kind


@pytest.fixture
def world() -> World:
    return World()


def test_reads_are_hits_of_the_cache_that_answered_and_misses_of_those_before_it(world: World) -> None:
    world.set(
        reads_active_cache=1,
        reads_flushing_cache=10,
        reads_read_cache=100,
        reads_disk=1_000,
        reads_absent=10_000,
        reads_failed=100_000,
    )
    assert world["bookie_write_cache_hits"] == 3 * 11
    assert world["bookie_write_cache_misses"] == 3 * 111_100
    assert world["bookie_read_cache_hits"] == 3 * 100
    assert world["bookie_read_cache_misses"] == 3 * 111_000


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("bookie_throttled_write_requests", "adds_waited"),
        ("bookie_rejected_write_requests", "adds_rejected"),
        ("bookie_DELETED_LEDGER_TOTAL", "ledgers_deleted"),
        ("bookie_DELETED_LEDGER_COUNT", "ledgers_deleted"),
        ("bookie_MAJOR_COMPACTION_TOTAL", "compactions_major"),
        ("bookie_MINOR_COMPACTION_TOTAL", "compactions_minor"),
        ("bookie_MINOR_COMPACTION_COUNT", "compactions_minor"),
        ("bookie_ENTRY_LOCATION_COMPACTION_TOTAL", "index_compactions"),
        ("bookie_RECLAIMED_COMPACTION_SPACE_BYTES", "reclaimed_compaction_bytes"),
        ("bookie_RECLAIMED_DELETION_SPACE_BYTES", "reclaimed_deletion_bytes"),
        ("bookie_RECLAIM_FAILED_TO_DELETE", "log_removals_failed"),
    ],
)
def test_a_counter_is_the_sum_over_all_shards(world: World, name: str, field: str) -> None:
    world.set(**{field: 7})
    assert world[name] == 21
    assert world.kind(name) == "counter"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("bookie_read_cache_size", "read_cache_size"),
        ("bookie_ACTIVE_ENTRY_LOG_TOTAL", "entry_logs"),
        ("bookie_ACTIVE_ENTRY_LOG_SPACE_BYTES", "entry_log_bytes"),
        ("bookie_ACTIVE_LEDGER_TOTAL", "active_ledgers"),
    ],
)
def test_a_gauge_is_the_sum_over_all_shards(world: World, name: str, field: str) -> None:
    world.set(**{field: 7})
    assert world[name] == 21
    assert world.kind(name) == "gauge"


def test_the_size_of_the_write_cache_has_both_caches(world: World) -> None:
    world.set(active_cache_size=5, flushing_cache_size=100)
    assert world["bookie_write_cache_size"] == 315


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("JOURNAL_WRITE_BYTES", "counter", "journal_bytes"),
        ("JOURNAL_QUEUE_SIZE", "gauge", "journal_queue_groups"),
        ("JOURNAL_FORCE_WRITE_QUEUE_SIZE", "gauge", "journal_at_disk"),
        ("JOURNAL_MEMORY_USED", "gauge", "journal_queue_size"),
    ],
)
def test_numbers_of_a_journal_are_shown_by_shard(world: World, name: str, kind: str, field: str) -> None:
    world.set(**{field: 7})
    assert world[f'bookie_journal_{name}{{journalIndex="0"}}'] == 7
    assert world[f'bookie_journal_{name}{{journalIndex="1"}}'] == 14
    assert world.kind(f"bookie_journal_{name}") == kind


def observed(world: World, name: str, labels: str) -> tuple[float, float]:
    """Return count and sum of a summary."""
    return world[f"{name}_count{{{labels}}}"], world[f"{name}_sum{{{labels}}}"]


def test_times_of_a_journal_are_in_milliseconds(world: World) -> None:
    first = world.stats[0]
    first.observe_journal_add(0.25, 3)
    first.observe_journal_queue(0.5, 2)
    first.observe_sync_s(0.125)
    first.observe_group_size(512)
    labels = 'journalIndex="0",success="true"'
    assert observed(world, "bookie_journal_JOURNAL_ADD_ENTRY", labels) == (3, 750)
    assert observed(world, "bookie_journal_JOURNAL_QUEUE_LATENCY", labels) == (2, 1000)
    assert observed(world, "bookie_journal_JOURNAL_SYNC", labels) == (1, 125)
    assert observed(world, "bookie_journal_JOURNAL_FLUSH_LATENCY", labels) == (1, 125)
    assert observed(world, "bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES", labels) == (1, 512)
    other = 'journalIndex="1",success="true"'
    assert observed(world, "bookie_journal_JOURNAL_ADD_ENTRY", other) == (0, 0)


def test_work_in_the_background_is_observed_by_shard(world: World) -> None:
    second = world.stats[1]
    second.observe_flush_s(0.25)
    second.observe_read_ahead(40)
    second.observe_gc_s(2.0)
    labels = 'shard="1",success="true"'
    assert observed(world, "bookie_flush", labels) == (1, 250)
    assert observed(world, "bookie_readahead_batch_count", labels) == (1, 40)
    assert observed(world, "bookie_THREAD_RUNTIME", labels) == (1, 2000)
    assert observed(world, "bookie_flush", 'shard="0",success="true"') == (0, 0)


def test_every_number_of_the_storage_is_shown_by_shard(world: World) -> None:
    numbers = [one.name for one in fields(StorageStats) if isinstance(one.default, int | float)]
    assert "adds_ok" in numbers
    assert "journal_failed" in numbers
    for at, name in enumerate(numbers):
        setattr(world.stats[1], name, at)
    shown = [line for line in world.lines() if line.startswith("bindery_bookie_storage_")]
    assert [line for line in shown if 'shard="1"' in line] == [
        f'bindery_bookie_storage_{name}{{shard="1"}} {at}' for at, name in enumerate(numbers)
    ]
    assert len(shown) == 2 * len(numbers)
    assert world.kind("bindery_bookie_storage_adds_ok") == "gauge"
