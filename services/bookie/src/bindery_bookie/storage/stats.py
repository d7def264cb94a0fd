"""StorageStats: what the engine did, as plain numbers that /metrics copies.

Counters only grow; gauges are the state of now. The three hooks are called in the event loop, once per group, flush or
read job: an exporter sets them to the `observe` of its histograms.
"""

from collections.abc import Callable
from dataclasses import dataclass


def _ignore(_: float) -> None:
    return None


@dataclass(slots=True)
class StorageStats:
    """All counts since the start. `*_bytes` and `*_size` are bytes, `*_s` seconds."""

    # Counters: adds
    adds_ok: int = 0
    adds_fenced: int = 0
    adds_unauthorized: int = 0
    adds_bad: int = 0
    adds_rejected: int = 0
    """Answered TOO_MANY_REQUESTS."""
    adds_waited: int = 0
    """Adds that had to wait because both write caches were full."""
    add_bytes: int = 0

    # Counters: journal
    journal_groups: int = 0
    journal_bytes: int = 0
    """Written to the journal, headers and padding included."""
    journal_files_created: int = 0
    journal_files_dropped: int = 0
    journal_sync_s: float = 0.0
    """Time spent in write and fdatasync."""

    # Counters: reads, by the tier that answered
    reads_active_cache: int = 0
    reads_flushing_cache: int = 0
    reads_read_cache: int = 0
    reads_disk: int = 0
    reads_absent: int = 0
    """Answered NO_ENTRY or NO_LEDGER."""
    reads_failed: int = 0
    """Answered IO_ERROR."""
    read_jobs: int = 0
    read_ahead_entries: int = 0
    damage_found: int = 0
    """Places where bytes on disk contradict their checksum or format, or are missing."""

    # Counters: flush
    flushes: int = 0
    flush_entries: int = 0
    flush_bytes: int = 0
    flush_s: float = 0.0
    index_rows_written: int = 0

    # Gauges
    journal_failed: bool = False
    """The journal could not be written. Nothing more is accepted until a restart."""
    flush_failed: bool = False
    """The last flush failed; it is tried again and adds wait meanwhile."""
    journal_queue_size: int = 0
    """Bytes accepted and not yet handed to the disk."""
    journal_queue_groups: int = 0
    """Batches of adds that wait for their group or for its fdatasync."""
    waiting_size: int = 0
    active_cache_size: int = 0
    flushing_cache_size: int = 0
    read_cache_size: int = 0
    read_queue_entries: int = 0
    ledgers_in_memory: int = 0
    replay_entries: int = 0
    replay_s: float = 0.0

    # Hooks
    observe_sync_s: Callable[[float], None] = _ignore
    """Seconds of one group's write and fdatasync."""
    observe_group_size: Callable[[float], None] = _ignore
    """Bytes of one group."""
    observe_flush_s: Callable[[float], None] = _ignore
    """Seconds of one flush."""
