"""StorageSettings: the storage settings of an operator. Components (disk, index store, clock) are passed in instead.

Maximum memory of one engine in bytes: 2 x write_cache_size_max + read_cache_size_max + waiting_size_max +
index_block_cache_size + 2 x index_write_buffer_size, plus the journal's queue (limited by the same adds, whose bodies
are shared with the write cache) and `ledgers_max` x about 1 KiB. A bookie derives these from one number (`memory`).
"""

from enum import StrEnum
from typing import Annotated, Final

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class LedgerStorageKind(StrEnum):
    """Values of `ledger_storage`."""

    SORTED = "sorted"
    INTERLEAVED = "interleaved"


class LostStorage(StrEnum):
    """Values of `on_lost_storage`."""

    REPAIR = "repair"
    REFUSE = "refuse"


class StorageSettings(Settings):
    """Directories, memory, disk space and background work of a bookie's storage."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_STORAGE_")

    journal_directory: str = "data/bookie/journal"
    """Contains `current/<hex id>.txn`. Preferably a separate disk: every acknowledgement waits for its fdatasync."""

    ledger_directory: str = "data/bookie/ledgers"
    """Contains `current/`: entry logs, the index and LastLogMark."""

    journal_file_size_max: Annotated[int, Ge(64 * KIB), Le(2 * GIB)] = 64 * MIB
    """Bytes allocated per journal file. Small files are deleted sooner after a flush."""

    reserve_size: Annotated[int, Ge(0), Le(64 * GIB)] = 64 * MIB
    """Bytes reserved in the journal directory and in the ledger directory, and released when the disk is full; at most
    an eighth of the file system. Default in a bookie: both write caches and 16 MiB, so that all accepted entries can be
    flushed. 0: no reserve."""

    journal_retry_s: Annotated[float, Gt(0), Le(600)] = 0.5
    """Pause in seconds before the journal is retried after there was no space for a file."""

    journal_group_size_max: Annotated[int, Ge(64 * KIB), Le(64 * MIB)] = 4 * MIB
    """Maximum number of bytes per fdatasync, unless a single entry is larger. Limits the latency of a group."""

    journal_inline_size_max: Annotated[int, Ge(0), Le(4 * MIB)] = 256 * KIB
    """Maximum size in bytes of a group that the event loop writes and syncs itself while syncs take less than a
    millisecond. Passing a group to a thread takes longer than such a disk. 0: the thread writes all groups."""

    journal_pace_s: Annotated[float, Ge(0), Le(0.001)] = 0.0003
    """Minimum time in seconds between groups that the event loop writes itself, if each has several records: small
    groups cost bookie and clients more processor time than they save. A single add never waits. 0: no minimum."""

    journal_past_cache: bool = True
    """Write the journal with direct I/O (O_DIRECT), if the file system and its disk support it. False: write it through
    the page cache."""

    write_cache_size_max: Annotated[int, Ge(16 * KIB), Le(8 * GIB)] = 64 * MIB
    """Bytes in each of the two write caches. A full cache is swapped with the other and flushed; while both are full,
    adds wait. Also limits the size of the journal that is replayed after a crash."""

    flush_interval_s: Annotated[float, Gt(0), Le(3600)] = 10.0
    """Maximum time in seconds that an entry is only in journal and write cache. Source: BookKeeper's flushInterval."""

    flush_retry_s: Annotated[float, Gt(0), Le(600)] = 1.0
    """Pause in seconds after a failed flush."""

    flush_slice_s: Annotated[float, Gt(0), Le(0.1)] = 0.001
    """Maximum time in seconds that a flush blocks the event loop. One millisecond has no noticeable effect on adds."""

    flush_chunk_size: Annotated[int, Ge(4 * KIB), Le(64 * MIB)] = 1 * MIB
    """Bytes of entry log per write of the background thread."""

    flush_sync_size: Annotated[int, Ge(4 * KIB), Le(1 * GIB)] = 1 * MIB
    """Bytes of entry log after which a flush syncs. A single sync of a whole cache would delay syncs of the journal."""

    waiting_size_max: Annotated[int, Ge(0), Le(8 * GIB)] = 32 * MIB
    """Maximum bytes of adds that wait while both write caches are full. Further adds get TOO_MANY_REQUESTS."""

    waiting_time_max_s: Annotated[float, Gt(0), Le(600)] = 10.0
    """Maximum time in seconds that an add waits; then it gets TOO_MANY_REQUESTS. Source: BookKeeper's
    dbStorage_maxThrottleTimeMs."""

    entry_log_size_max: Annotated[int, Ge(64 * KIB), Le(2 * GIB)] = 1 * GIB
    """Size in bytes above which an entry log is closed. At most 2 GiB, so that an offset fits into 32 bits."""

    read_cache_size_max: Annotated[int, Ge(0), Le(64 * GIB)] = 64 * MIB
    """Maximum bytes of entries kept in memory after reads and read-ahead."""

    read_ahead_entries_max: Annotated[int, Ge(0), Le(10_000)] = 256
    """Maximum number of entries read ahead after a requested entry of a ledger. BookKeeper's default is 100."""

    read_ahead_size_max: Annotated[int, Ge(0), Le(64 * MIB)] = 512 * KIB
    """Maximum bytes read ahead after a requested entry."""

    read_job_size_max: Annotated[int, Ge(64 * KIB), Le(64 * GIB)] = 32 * MIB
    """Maximum bytes that the reads of one disk job load into memory. Read-ahead stops at half of it; further reads get
    TOO_MANY_REQUESTS. Reached only if entries are much larger than the ones before."""

    read_queue_entries_max: Annotated[int, Ge(1), Le(10_000_000)] = 100_000
    """Maximum number of reads that wait for the disk. Further reads get TOO_MANY_REQUESTS."""

    ledgers_max: Annotated[int, Ge(16), Le(10_000_000)] = 50_000
    """Maximum number of idle ledgers whose state (key, fence, LAC) stays in memory. Others are read from the index."""

    tombstones_max: Annotated[int, Ge(0), Le(10_000_000)] = 100_000
    """Maximum number of deleted ledgers recorded, so that a late writer cannot create them again. The oldest are
    dropped first."""

    open_logs_max: Annotated[int, Ge(1), Le(100_000)] = 256
    """Maximum number of entry logs kept open for reading."""

    ledger_storage: LedgerStorageKind = LedgerStorageKind.SORTED
    """Order in which a flush writes entries: `sorted` by ledger and entry, or `interleaved` in order of arrival. May be
    changed at any restart, because files and index are the same. See `ledger_storage`."""

    scrub_interval_s: Annotated[float, Ge(0), Le(365 * 86400)] = 3 * 86400.0
    """Seconds from the end of one scrub, which verifies everything stored here, to the next. 0: only on request. Bit
    rot must be detected while other replicas are good; BookKeeper's localScrubInterval is off by default."""

    scrub_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 8 * MIB
    """Maximum bytes per second that a scrub reads: 1 TiB in a day and a half."""

    on_lost_storage: LostStorage = LostStorage.REPAIR
    """Behaviour of a start if a directory is empty, or if files are missing that only other bookies can restore.
    `repair`: serve in limbo (missing entries are answered "unknown") and refill from other bookies; `refuse`: do not
    start."""

    repair_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 16 * MIB
    """Maximum bytes per second that the repair of lost or damaged entries fetches from other bookies."""

    drills: bool = False
    """Allow fault injection: operators can make this bookie's disk slow or faulty over its HTTP API."""

    index_block_cache_size: Annotated[int, Ge(64 * KIB), Le(64 * GIB)] = 16 * MIB
    """Bytes of index blocks that LevelDB caches in memory."""

    index_write_buffer_size: Annotated[int, Ge(64 * KIB), Le(1 * GIB)] = 8 * MIB
    """Bytes of the index that LevelDB collects before it writes a table; twice as much while it writes one."""

    gc_wait_time_s: Annotated[float, Gt(0), Le(7 * 86400)] = 600.0
    """Maximum seconds between two runs of garbage collection. Source: BookKeeper's gcWaitTime."""

    gc_wait_time_min_s: Annotated[float, Gt(0), Le(7 * 86400)] = 15.0
    """Seconds until the next run of garbage collection if the last one found deleted ledgers, and before the first run;
    otherwise the time doubles up to gc_wait_time_s. A bookie whose runs would take more than a thirtieth of the time
    waits longer. From gc_wait_time_s on: all runs are gc_wait_time_s apart."""

    gc_metadata_op_rate: Annotated[float, Gt(0), Le(1_000_000)] = 1000.0
    """Maximum metadata reads per second of such a run. Source: BookKeeper's gcMetadataOpRateLimit."""

    gc_over_replicated_wait_time_s: Annotated[float, Ge(0), Le(365 * 86400)] = 86400.0
    """Seconds between two searches for closed ledgers that moved to other bookies, so that their metadata does not name
    this bookie any more. They are deleted here some time after a search found them. 0: they are kept. Source:
    BookKeeper's gcOverreplicatedLedgerWaitTime."""

    minor_compaction_threshold: Annotated[float, Le(1)] = 0.2
    """Minor compaction rewrites entry logs whose live ratio is below this value. 0 or less: disabled. Source:
    BookKeeper's minorCompactionThreshold."""

    minor_compaction_interval_s: Annotated[float, Le(365 * 86400)] = 3600.0
    """Seconds between two minor compactions. 0 or less: disabled. Source: BookKeeper's minorCompactionInterval."""

    major_compaction_threshold: Annotated[float, Le(1)] = 0.8
    """Live ratio for major compaction. Must be above minor_compaction_threshold; 0 or less: disabled. Source:
    BookKeeper's majorCompactionThreshold."""

    major_compaction_interval_s: Annotated[float, Le(365 * 86400)] = 86400.0
    """Seconds between two major compactions. Must be above minor_compaction_interval_s; 0 or less: disabled. Source:
    BookKeeper's majorCompactionInterval."""

    dead_ratio_max: Annotated[float, Ge(0), Le(1000)] = 1.0
    """Dead bytes, as a multiple of the live bytes, above which compaction begins before its interval is over: with 1,
    entry logs take about twice their live bytes. A lower value copies more: with 1, a log is about half live or less
    when it is rewritten. Only logs below the thresholds of minor and major compaction are rewritten. 0: compaction runs
    by interval only."""

    dead_size_min: Annotated[int, Ge(0), Le(1024 * GIB)] = 512 * MIB
    """Dead bytes of a bookie up to which compaction does not begin before its interval, whatever the ratio. Lower
    values leave many small logs."""

    compaction_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 4 * MIB
    """Maximum bytes per second that compaction reads and writes. A full log of 1 GiB takes eight minutes if all of it
    is live. While dead bytes exceed what dead_ratio_max and dead_size_min allow, up to eight times as much, as long as
    adds are not slower than before. With small entries, each of which is verified, compaction uses about a twentieth of
    one processor. BookKeeper's default (compactionRateByEntries) is 1000 entries per second."""

    @property
    def has_minor_compaction(self) -> bool:
        return self.minor_compaction_threshold > 0 and self.minor_compaction_interval_s > 0

    @property
    def has_major_compaction(self) -> bool:
        return self.major_compaction_threshold > 0 and self.major_compaction_interval_s > 0

    @check
    def _check_compaction(self) -> None:
        """Refuse combinations that BookKeeper refuses at its start too."""
        for kind, is_on in (("minor", self.has_minor_compaction), ("major", self.has_major_compaction)):
            interval = getattr(self, f"{kind}_compaction_interval_s")
            if is_on and interval < self.gc_wait_time_s:
                raise ValueError(
                    f"{kind}_compaction_interval_s ({interval:g}) is shorter than gc_wait_time_s "
                    f"({self.gc_wait_time_s:g}), the interval of garbage collection runs; increase it"
                )
        if self.has_minor_compaction and self.has_major_compaction:
            for name in ("threshold", "interval_s"):
                minor, major = getattr(self, f"minor_compaction_{name}"), getattr(self, f"major_compaction_{name}")
                if minor >= major:
                    raise ValueError(
                        f"minor_compaction_{name} ({minor:g}) must be below major_compaction_{name} ({major:g})"
                    )
