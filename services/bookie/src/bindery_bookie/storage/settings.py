"""StorageSettings: the numbers an operator may turn. Components (disk, index store, clock) are handed in instead.

Memory the engine may use, in bytes: 2 x write_cache_size_max + read_cache_size_max + waiting_size_max, the journal's
queue (bounded by the same adds: their bodies are shared with the write cache) and `ledgers_max` x about 1 KiB.
"""

from typing import Annotated, Final

from annotated_types import Ge, Gt, Le
from bindery_kit.settings import Settings
from pydantic_settings import SettingsConfigDict

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class StorageSettings(Settings):
    """Where a bookie keeps its entries, and how much memory and disk it may use for that."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_STORAGE_")

    journal_directory: str = "data/bookie/journal"
    """Holds `current/<hex id>.txn`. Best on a disk of its own: every acknowledgement waits for its fdatasync."""

    ledger_directory: str = "data/bookie/ledgers"
    """Holds `current/`: entry logs, the index and LastLogMark."""

    journal_file_size_max: Annotated[int, Ge(64 * KIB), Le(2 * GIB)] = 64 * MIB
    """Bytes allocated for one journal file; a full one is followed by the next. Small files are dropped sooner."""

    journal_group_size_max: Annotated[int, Ge(64 * KIB), Le(64 * MIB)] = 4 * MIB
    """Most bytes one fdatasync answers for, unless a single entry is larger. Bounds the latency of a group."""

    write_cache_size_max: Annotated[int, Ge(16 * KIB), Le(8 * GIB)] = 64 * MIB
    """Bytes in each of the two write caches. A full one is swapped with the other and flushed; while both are full adds
    wait. It also bounds the journal that a start after a crash replays."""

    flush_interval_s: Annotated[float, Gt(0), Le(3600)] = 10.0
    """Longest an entry stays only in journal and write cache. Seconds. Source: BookKeeper's flushInterval."""

    flush_retry_s: Annotated[float, Gt(0), Le(600)] = 1.0
    """Pause after a flush failed. Seconds."""

    flush_slice_s: Annotated[float, Gt(0), Le(0.1)] = 0.001
    """Longest turn of the event loop that a flush takes at once. Seconds; adds do not feel one millisecond."""

    flush_chunk_size: Annotated[int, Ge(4 * KIB), Le(64 * MIB)] = 1 * MIB
    """Bytes of entry log written in one go by the background thread."""

    flush_sync_size: Annotated[int, Ge(4 * KIB), Le(1 * GIB)] = 4 * MIB
    """Bytes of entry log after which a flush syncs them. One sync of a whole cache would make the journal's wait."""

    waiting_size_max: Annotated[int, Ge(0), Le(8 * GIB)] = 32 * MIB
    """Bytes of adds that may wait while both write caches are full. Beyond: TOO_MANY_REQUESTS."""

    waiting_time_max_s: Annotated[float, Gt(0), Le(600)] = 10.0
    """Longest such a wait, then TOO_MANY_REQUESTS. Seconds. Source: BookKeeper's dbStorage_maxThrottleTimeMs."""

    entry_log_size_max: Annotated[int, Ge(64 * KIB), Le(2 * GIB)] = 1 * GIB
    """An entry log is closed once it is larger. At most 2 GiB, so that an offset fits the low half of a location."""

    read_cache_size_max: Annotated[int, Ge(0), Le(64 * GIB)] = 64 * MIB
    """Bytes of entries kept after reads and read-ahead."""

    read_ahead_entries_max: Annotated[int, Ge(0), Le(10_000)] = 256
    """Entries read after the one that was asked for, of the same ledger. BookKeeper takes 100."""

    read_ahead_size_max: Annotated[int, Ge(0), Le(64 * MIB)] = 512 * KIB
    """Bytes of such read-ahead."""

    read_queue_entries_max: Annotated[int, Ge(1), Le(10_000_000)] = 100_000
    """Reads that may wait for the disk. Beyond: TOO_MANY_REQUESTS."""

    ledgers_max: Annotated[int, Ge(16), Le(10_000_000)] = 50_000
    """Ledgers whose state (key, fence, LAC) stays in memory while idle. Others are read back from the index."""

    tombstones_max: Annotated[int, Ge(0), Le(10_000_000)] = 100_000
    """Deleted ledgers that are remembered, so that a late writer does not bring one back. The oldest go first."""

    open_logs_max: Annotated[int, Ge(1), Le(100_000)] = 256
    """Entry logs held open for reading."""
