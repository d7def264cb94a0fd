"""StorageSettings: the numbers an operator may turn. Components (disk, index store, clock) are handed in instead.

Memory one engine may use, in bytes: 2 x write_cache_size_max + read_cache_size_max + waiting_size_max +
index_block_cache_size + 2 x index_write_buffer_size, the journal's queue (bounded by the same adds: their bodies are
shared with the write cache) and `ledgers_max` x about 1 KiB. A bookie derives them from one number (`memory`).
"""

from enum import StrEnum
from typing import Annotated, Final

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class LedgerStorageKind(StrEnum):
    SORTED = "sorted"
    INTERLEAVED = "interleaved"


class LostStorage(StrEnum):
    REPAIR = "repair"
    REFUSE = "refuse"


class StorageSettings(Settings):
    """Where a bookie keeps its entries, and how much memory and disk it may use for that."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_STORAGE_")

    journal_directory: str = "data/bookie/journal"
    """Holds `current/<hex id>.txn`. Best on a disk of its own: every acknowledgement waits for its fdatasync."""

    ledger_directory: str = "data/bookie/ledgers"
    """Holds `current/`: entry logs, the index and LastLogMark."""

    journal_file_size_max: Annotated[int, Ge(64 * KIB), Le(2 * GIB)] = 64 * MIB
    """Bytes allocated for one journal file; a full one is followed by the next. Small files are dropped sooner."""

    reserve_size: Annotated[int, Ge(0), Le(64 * GIB)] = 64 * MIB
    """Bytes kept free for when the disk is full, in the journal's directory and in the ledgers' (`reserve`); at most an
    eighth of the file system. In a bookie, unless set: both write caches and 16 MiB, so that what was taken finds a
    place. 0: none."""

    journal_retry_s: Annotated[float, Gt(0), Le(600)] = 0.5
    """Pause after a journal file found no room. Seconds."""

    journal_group_size_max: Annotated[int, Ge(64 * KIB), Le(64 * MIB)] = 4 * MIB
    """Most bytes one fdatasync answers for, unless a single entry is larger. Bounds the latency of a group."""

    journal_inline_size_max: Annotated[int, Ge(0), Le(4 * MIB)] = 256 * KIB
    """Largest group, in bytes, that the event loop writes and syncs itself while syncs take under a millisecond: the
    way to a thread and back costs more than such a disk does, and what arrives meanwhile is read in one go. 0: none."""

    journal_pace_s: Annotated[float, Ge(0), Le(0.001)] = 0.0003
    """Shortest time between two groups that the event loop writes itself, while each has company: small groups cost
    bookie and clients more CPU than they save time. A lone add never waits. Seconds; 0: none."""

    journal_past_cache: bool = True
    """Write the journal past the page cache (O_DIRECT), where the file system and its disk take that. False: through
    it, as any other file."""

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

    flush_sync_size: Annotated[int, Ge(4 * KIB), Le(1 * GIB)] = 1 * MIB
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

    read_job_size_max: Annotated[int, Ge(64 * KIB), Le(64 * GIB)] = 32 * MIB
    """Bytes that the reads which go to the disk together may bring into memory. Half of it without read-ahead; what
    was asked for beyond: TOO_MANY_REQUESTS. Only reads of entries far larger than those before come so far."""

    read_queue_entries_max: Annotated[int, Ge(1), Le(10_000_000)] = 100_000
    """Reads that may wait for the disk. Beyond: TOO_MANY_REQUESTS."""

    ledgers_max: Annotated[int, Ge(16), Le(10_000_000)] = 50_000
    """Ledgers whose state (key, fence, LAC) stays in memory while idle. Others are read back from the index."""

    tombstones_max: Annotated[int, Ge(0), Le(10_000_000)] = 100_000
    """Deleted ledgers that are remembered, so that a late writer does not bring one back. The oldest go first."""

    open_logs_max: Annotated[int, Ge(1), Le(100_000)] = 256
    """Entry logs held open for reading."""

    ledger_storage: LedgerStorageKind = LedgerStorageKind.SORTED
    """In which order a flush writes entries: `sorted` by ledger and entry, or `interleaved`, as they arrived. It may be
    changed at any restart: files and index are the same. See `ledger_storage`."""

    scrub_interval_s: Annotated[float, Ge(0), Le(365 * 86400)] = 3 * 86400.0
    """Seconds from the end of one scrub, which verifies everything stored here, to the next. 0: only on request. Bit
    rot is to be found while other copies are still good; BookKeeper's localScrubInterval is off by default."""

    scrub_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 8 * MIB
    """Bytes a second that a scrub reads at most: 1 TiB in a day and a half."""

    on_lost_storage: LostStorage = LostStorage.REPAIR
    """What a start does when a directory was emptied, or files are gone that only other bookies can bring back.
    `repair`: serve in limbo (what is missing is not denied) and refill from the others; `refuse`: do not start."""

    repair_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 16 * MIB
    """Bytes a second that the repair of lost or damaged entries fetches from other bookies at most."""

    drills: bool = False
    """Allow fault injection: operators can make this bookie's disk slow or faulty over its HTTP API."""

    index_block_cache_size: Annotated[int, Ge(64 * KIB), Le(64 * GIB)] = 16 * MIB
    """Bytes of the index's blocks that LevelDB keeps in memory."""

    index_write_buffer_size: Annotated[int, Ge(64 * KIB), Le(1 * GIB)] = 8 * MIB
    """Bytes of the index that LevelDB collects before it writes a table; twice as many while it writes one."""

    gc_wait_time_s: Annotated[float, Gt(0), Le(7 * 86400)] = 600.0
    """Seconds between two runs of garbage collection, and before the first. Source: BookKeeper's gcWaitTime."""

    gc_metadata_op_rate: Annotated[float, Gt(0), Le(1_000_000)] = 1000.0
    """Reads of metadata a second that such a run makes at most. Source: BookKeeper's gcMetadataOpRateLimit."""

    gc_over_replicated_wait_time_s: Annotated[float, Ge(0), Le(365 * 86400)] = 86400.0
    """Seconds between two searches for closed ledgers that others were given and whose metadata name this bookie no
    longer; they are forgotten some time after one was found so. 0: they are kept. Source: BookKeeper's
    gcOverreplicatedLedgerWaitTime."""

    minor_compaction_threshold: Annotated[float, Le(1)] = 0.2
    """Minor compaction rewrites entry logs of which less than this part is alive. 0 or less: none. Source:
    BookKeeper's minorCompactionThreshold."""

    minor_compaction_interval_s: Annotated[float, Le(365 * 86400)] = 3600.0
    """Seconds between two minor compactions. 0 or less: none. Source: BookKeeper's minorCompactionInterval."""

    major_compaction_threshold: Annotated[float, Le(1)] = 0.8
    """As minor_compaction_threshold, and above it. Source: BookKeeper's majorCompactionThreshold."""

    major_compaction_interval_s: Annotated[float, Le(365 * 86400)] = 86400.0
    """As minor_compaction_interval_s, and above it. Source: BookKeeper's majorCompactionInterval."""

    compaction_rate: Annotated[int, Ge(4 * KIB), Le(100 * GIB)] = 4 * MIB
    """Bytes a second that compaction copies at most. A full log of 1 GiB takes four minutes, a day wins back up to
    330 GiB, and with small entries, each of which is checked, it is about a twentieth of one processor. BookKeeper's
    default (compactionRateByEntries) is 1000 entries a second."""

    @property
    def has_minor_compaction(self) -> bool:
        return self.minor_compaction_threshold > 0 and self.minor_compaction_interval_s > 0

    @property
    def has_major_compaction(self) -> bool:
        return self.major_compaction_threshold > 0 and self.major_compaction_interval_s > 0

    @check
    def _check_compaction(self) -> None:
        """What BookKeeper refuses at its start, too."""
        for kind, is_on in (("minor", self.has_minor_compaction), ("major", self.has_major_compaction)):
            interval = getattr(self, f"{kind}_compaction_interval_s")
            if is_on and interval < self.gc_wait_time_s:
                raise ValueError(
                    f"{kind}_compaction_interval_s ({interval:g}) is shorter than gc_wait_time_s "
                    f"({self.gc_wait_time_s:g}): runs are no closer than that"
                )
        if self.has_minor_compaction and self.has_major_compaction:
            for name in ("threshold", "interval_s"):
                minor, major = getattr(self, f"minor_compaction_{name}"), getattr(self, f"major_compaction_{name}")
                if minor >= major:
                    raise ValueError(
                        f"minor_compaction_{name} ({minor:g}) must be below major_compaction_{name} ({major:g})"
                    )
