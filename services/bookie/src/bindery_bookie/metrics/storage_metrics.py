"""Metrics of a shard's storage, under BookKeeper's names.

| metric                                            | shape   | meaning                                          |
|---------------------------------------------------|---------|--------------------------------------------------|
| bookie_journal_JOURNAL_ADD_ENTRY                  | summary | from a group's first record to its fdatasync, ms |
| bookie_journal_JOURNAL_QUEUE_LATENCY              | summary | from a group's first record to its write, ms     |
| bookie_journal_JOURNAL_SYNC, _FLUSH_LATENCY       | summary | write and fdatasync of one group, ms             |
| bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES    | summary | bytes of one group                               |
| bookie_journal_JOURNAL_WRITE_BYTES                | counter | bytes written to the journal                     |
| bookie_journal_JOURNAL_QUEUE_SIZE                 | gauge   | batches of records that wait for their fdatasync |
| bookie_journal_JOURNAL_FORCE_WRITE_QUEUE_SIZE     | gauge   | groups being written and synced                  |
| bookie_journal_JOURNAL_MEMORY_USED                | gauge   | bytes accepted and not yet passed to the disk    |
| bookie_flush                                      | summary | one flush of a write cache, ms                   |
| bookie_write_cache_size, bookie_read_cache_size   | gauge   | bytes                                            |
| bookie_write_cache_hits, _misses, read_cache_...  | counter | reads with and without their entry in that cache |
| bookie_readahead_batch_count                      | summary | entries that a read job read ahead               |
| bookie_throttled_write_requests                   | counter | adds that waited for a write cache               |
| bookie_rejected_write_requests                    | counter | adds refused because both caches stayed full     |
| bookie_ACTIVE_ENTRY_LOG_TOTAL, _LOG_SPACE_BYTES   | gauge   | entry logs and their bytes, at the last scan     |
| bookie_ACTIVE_LEDGER_TOTAL                        | gauge   | ledgers in the index, at the last scan           |
| bookie_DELETED_LEDGER_TOTAL                       | counter | ledgers deleted because their metadata is gone   |
| bookie_MAJOR_COMPACTION_TOTAL, _MINOR_...         | counter | entry logs rewritten                             |
| bookie_ENTRY_LOCATION_COMPACTION_TOTAL            | counter | compactions of the index                         |
| bookie_RECLAIMED_COMPACTION_SPACE_BYTES           | counter | bytes reclaimed by rewriting logs                |
| bookie_RECLAIMED_DELETION_SPACE_BYTES             | counter | bytes of dead logs removed                       |
| bookie_RECLAIM_FAILED_TO_DELETE                   | counter | logs that could not be removed                   |
| bookie_THREAD_RUNTIME                             | summary | one run of garbage collection, ms                |
| bindery_bookie_storage_<name>                     | gauge   | each number of StorageStats, label `shard`       |

Journal metrics have the label `journalIndex`, the shard. Summaries are observed once per group, flush or job.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

from bindery_kit.observability.metrics_page import Page
from bindery_kit.observability.op_stat import OpStat

from bindery_bookie.storage.stats import StorageStats

_COUNTERS: Final[tuple[tuple[str, str, Callable[[StorageStats], float]], ...]] = (
    ("bookie_write_cache_hits", "Reads answered by a write cache.", lambda s: _write_cache_hits(s)),
    ("bookie_write_cache_misses", "Reads that no write cache answered.", lambda s: _reads(s) - _write_cache_hits(s)),
    ("bookie_read_cache_hits", "Reads answered by the read cache.", lambda s: s.reads_read_cache),
    (
        "bookie_read_cache_misses",
        "Reads that no cache answered.",
        lambda s: _reads(s) - _write_cache_hits(s) - s.reads_read_cache,
    ),
    ("bookie_throttled_write_requests", "Adds that waited for a write cache.", lambda s: s.adds_waited),
    ("bookie_rejected_write_requests", "Adds refused while both write caches were full.", lambda s: s.adds_rejected),
    ("bookie_DELETED_LEDGER_TOTAL", "Ledgers deleted because their metadata is gone.", lambda s: s.ledgers_deleted),
    ("bookie_DELETED_LEDGER_COUNT", "As bookie_DELETED_LEDGER_TOTAL, its older name.", lambda s: s.ledgers_deleted),
    ("bookie_MAJOR_COMPACTION_TOTAL", "Entry logs rewritten by major compaction.", lambda s: s.compactions_major),
    ("bookie_MINOR_COMPACTION_TOTAL", "Entry logs rewritten by minor compaction.", lambda s: s.compactions_minor),
    (
        "bookie_MINOR_COMPACTION_COUNT",
        "As bookie_MINOR_COMPACTION_TOTAL, its older name.",
        lambda s: s.compactions_minor,
    ),
    ("bookie_ENTRY_LOCATION_COMPACTION_TOTAL", "Compactions of the index.", lambda s: s.index_compactions),
    (
        "bookie_RECLAIMED_COMPACTION_SPACE_BYTES",
        "Bytes reclaimed by rewriting logs.",
        lambda s: s.reclaimed_compaction_bytes,
    ),
    ("bookie_RECLAIMED_DELETION_SPACE_BYTES", "Bytes of dead logs removed.", lambda s: s.reclaimed_deletion_bytes),
    ("bookie_RECLAIM_FAILED_TO_DELETE", "Entry logs that could not be removed.", lambda s: s.log_removals_failed),
)
_GAUGES: Final[tuple[tuple[str, str, Callable[[StorageStats], float]], ...]] = (
    ("bookie_write_cache_size", "Bytes in both write caches.", lambda s: s.active_cache_size + s.flushing_cache_size),
    ("bookie_read_cache_size", "Bytes in the read cache.", lambda s: s.read_cache_size),
    ("bookie_ACTIVE_ENTRY_LOG_TOTAL", "Entry logs at the last scan.", lambda s: s.entry_logs),
    ("bookie_ACTIVE_ENTRY_LOG_SPACE_BYTES", "Bytes of entry logs at the last scan.", lambda s: s.entry_log_bytes),
    ("bookie_ACTIVE_LEDGER_TOTAL", "Ledgers in the index at the last scan.", lambda s: s.active_ledgers),
)


class ShardMetrics:
    """The distributions and numbers of one shard. It sets the hooks of `stats`."""

    def __init__(self, shard: int, stats: StorageStats, clock: Callable[[], float]) -> None:
        self.shard = shard
        self.stats = stats
        self.journal_add_ms = OpStat(clock)
        self.journal_queue_ms = OpStat(clock)
        self.sync_ms = OpStat(clock)
        self.group_bytes = OpStat(clock)
        self.flush_ms = OpStat(clock)
        self.read_ahead = OpStat(clock)
        self.gc_ms = OpStat(clock)
        stats.observe_journal_add = lambda seconds, count: self.journal_add_ms.observe(seconds * 1000, count)
        stats.observe_journal_queue = lambda seconds, count: self.journal_queue_ms.observe(seconds * 1000, count)
        stats.observe_sync_s = lambda seconds: self.sync_ms.observe(seconds * 1000)
        stats.observe_group_size = self.group_bytes.observe
        stats.observe_flush_s = lambda seconds: self.flush_ms.observe(seconds * 1000)
        stats.observe_read_ahead = self.read_ahead.observe
        stats.observe_gc_s = lambda seconds: self.gc_ms.observe(seconds * 1000)


def add_storage(page: Page, shards: Sequence[ShardMetrics]) -> None:
    """Add all metrics of the table above."""
    for names, help, stat in (
        (("JOURNAL_ADD_ENTRY",), "From a group's first record to its fdatasync, milliseconds.", "journal_add_ms"),
        (("JOURNAL_QUEUE_LATENCY",), "From a group's first record to its write, milliseconds.", "journal_queue_ms"),
        (("JOURNAL_SYNC", "JOURNAL_FLUSH_LATENCY"), "Write and fdatasync of one group, milliseconds.", "sync_ms"),
        (("JOURNAL_FORCE_WRITE_BATCH_BYTES",), "Bytes of one group.", "group_bytes"),
    ):
        page.summaries(
            [f"bookie_journal_{name}" for name in names],
            help,
            [(f'{_journal(shard)},success="true"', getattr(shard, stat)) for shard in shards],
        )
    for name, kind, help, field in (
        ("JOURNAL_WRITE_BYTES", "counter", "Bytes written to the journal.", "journal_bytes"),
        ("JOURNAL_QUEUE_SIZE", "gauge", "Batches that wait for their fdatasync.", "journal_queue_groups"),
        ("JOURNAL_FORCE_WRITE_QUEUE_SIZE", "gauge", "Groups being written and synced.", "journal_at_disk"),
        ("JOURNAL_MEMORY_USED", "gauge", "Bytes not yet passed to the disk.", "journal_queue_size"),
    ):
        page.add(
            f"bookie_journal_{name}", kind, help, [(_journal(shard), getattr(shard.stats, field)) for shard in shards]
        )
    for name, help, stat in (
        ("bookie_flush", "One flush of a write cache, milliseconds.", "flush_ms"),
        ("bookie_readahead_batch_count", "Entries that a read job read ahead.", "read_ahead"),
        ("bookie_THREAD_RUNTIME", "One run of garbage collection, milliseconds.", "gc_ms"),
    ):
        page.summary(name, help, [(f'shard="{shard.shard}",success="true"', getattr(shard, stat)) for shard in shards])
    for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, help, value in table:
            page.add(name, kind, help, [("", sum(value(shard.stats) for shard in shards))])
    for name in _numbers():
        page.add(
            f"bindery_bookie_storage_{name}",
            "gauge",
            "A counter or gauge of the shard's storage.",
            [(f'shard="{shard.shard}"', float(getattr(shard.stats, name))) for shard in shards],
        )


def _journal(shard: ShardMetrics) -> str:
    return f'journalIndex="{shard.shard}"'


def _write_cache_hits(stats: StorageStats) -> int:
    return stats.reads_active_cache + stats.reads_flushing_cache


def _reads(stats: StorageStats) -> int:
    found = stats.reads_active_cache + stats.reads_flushing_cache + stats.reads_read_cache + stats.reads_disk
    return found + stats.reads_absent + stats.reads_failed


def _numbers() -> list[str]:
    """Return the names of all fields that are numbers."""
    return [field.name for field in fields(StorageStats) if isinstance(field.default, int | float)]
