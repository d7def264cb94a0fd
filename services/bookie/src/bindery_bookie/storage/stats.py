"""StorageStats: counters and gauges of one shard, as plain numbers from which /metrics is built.

Counters never decrease; gauges are the current state. The hooks are called in the event loop, once per group, flush,
read job or collection; an exporter sets them to the `observe` of its histograms. Fields are written in the event loop
only.
"""

from collections.abc import Callable
from dataclasses import dataclass


def _ignore(_: float) -> None:
    return None


def _ignore_reason(_: str) -> None:
    return None


def _ignore_count(_: float, count: int) -> None:
    return None


@dataclass(slots=True)
class StorageStats:
    """Counts since the start. `*_bytes` and `*_size` are bytes, `*_s` seconds."""

    # Counters: adds
    adds_ok: int = 0
    adds_fenced: int = 0
    adds_unauthorized: int = 0
    adds_bad: int = 0
    adds_rejected: int = 0
    """Adds answered with TOO_MANY_REQUESTS."""
    adds_waited: int = 0
    """Adds that had to wait because both write caches were full."""
    add_bytes: int = 0

    # Counters: journal
    journal_groups: int = 0
    journal_bytes: int = 0
    """Bytes written to the journal, including headers and padding."""
    journal_files_created: int = 0
    journal_files_dropped: int = 0
    journal_sync_s: float = 0.0
    """Time spent in write and fdatasync."""
    journal_adds: int = 0
    """Records made durable."""
    journal_add_s: float = 0.0
    """Sum of the times from the first record of a group to its durability, over all records."""

    # Counters: reads, by the cache or disk that answered
    reads_active_cache: int = 0
    reads_flushing_cache: int = 0
    reads_read_cache: int = 0
    reads_disk: int = 0
    reads_absent: int = 0
    """Reads answered with NO_ENTRY, NO_LEDGER or UNKNOWN_LEDGER_STATE."""
    reads_failed: int = 0
    """Reads answered with IO_ERROR."""
    read_jobs: int = 0
    read_ahead_entries: int = 0
    damage_found: int = 0
    """Regions of the disk whose bytes contradict their checksum or format, or are missing."""

    # Counters: flush
    flushes: int = 0
    flush_entries: int = 0
    flush_bytes: int = 0
    flush_s: float = 0.0
    index_rows_written: int = 0

    # Counters: garbage collection, compaction
    gc_runs: int = 0
    gc_s: float = 0.0
    ledgers_deleted: int = 0
    """Ledgers deleted here because their metadata was deleted."""
    logs_removed: int = 0
    """Entry logs removed because they had no live entries."""
    compactions_minor: int = 0
    """Entry logs rewritten by minor compaction."""
    compactions_major: int = 0
    compactions_for_space: int = 0
    """Entry logs that minor or major compaction rewrote before its interval was over, because of dead bytes."""
    index_compactions: int = 0
    compacted_bytes: int = 0
    """Live bytes copied by compaction."""
    reclaimed_deletion_bytes: int = 0
    """Bytes of logs removed because they had no live entries."""
    reclaimed_compaction_bytes: int = 0
    """Bytes freed by rewriting logs: the size of the old logs minus that of the new ones."""
    log_removals_failed: int = 0

    # Gauges
    entry_logs: int = 0
    """Number of entry logs at the last run of garbage collection."""
    entry_log_bytes: int = 0
    live_bytes: int = 0
    """Part of `entry_log_bytes` that belongs to existing ledgers."""
    dead_bytes: int = 0
    """The rest of `entry_log_bytes`, which compaction can free."""
    dead_bytes_allowed: int = 0
    """Dead bytes above which compaction begins before its interval is over; 0: it does not."""
    compaction_speed: float = 0.0
    """Current speed of compaction, as a multiple of `compaction_rate`; 0: no log is being rewritten."""
    active_ledgers: int = 0
    """Number of ledgers in the index at the last run of garbage collection."""
    journal_failed: bool = False
    """Whether the journal could not be written. If so, no more adds are accepted until a restart."""
    journal_full: bool = False
    """Whether there is no space for a journal file. Adds are refused until there is."""
    flush_failed: bool = False
    """Whether the last flush failed. It is retried, and adds wait once both write caches are full."""
    journal_queue_size: int = 0
    """Bytes accepted whose write has not begun."""
    journal_queue_groups: int = 0
    """Batches of adds that wait for their group or for its fdatasync."""
    journal_at_disk: int = 0
    """Groups being written and synced: 0 or 1."""
    waiting_size: int = 0
    waiting_adds: int = 0
    """Adds that wait because both write caches are full."""
    active_cache_size: int = 0
    flushing_cache_size: int = 0
    read_cache_size: int = 0
    read_queue_entries: int = 0
    ledgers_in_memory: int = 0
    replay_entries: int = 0
    replay_s: float = 0.0

    # Hooks
    no_space: Callable[[str], None] = _ignore_reason
    """Called with the error text when a disk has no space. The disk monitor then checks the disks at once."""
    observe_sync_s: Callable[[float], None] = _ignore
    """Seconds of one group's write and fdatasync."""
    observe_group_size: Callable[[float], None] = _ignore
    """Bytes of one group."""
    observe_flush_s: Callable[[float], None] = _ignore
    """Seconds of one flush."""
    observe_journal_add: Callable[[float, int], None] = _ignore_count
    """Seconds from a group's first record to its durability, and the group's records."""
    observe_journal_queue: Callable[[float, int], None] = _ignore_count
    """Seconds from a group's first record to the start of its write, and the group's records."""
    observe_read_ahead: Callable[[float], None] = _ignore
    """Entries that one read job read in addition to the requested ones."""
    observe_gc_s: Callable[[float], None] = _ignore
    """Seconds of one run of garbage collection."""
