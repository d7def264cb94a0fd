"""Create storage engines on simulated or real disks, with small files and caches that fill quickly."""

import random
from collections.abc import Callable
from typing import Any, Final

from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.settings import KIB, LedgerStorageKind, StorageSettings

from bindery_simulation.disk import CrashableKV
from bindery_simulation.storage.turns import TurnWorker

SMALL: Final[dict[str, Any]] = {
    "journal_file_size_max": 64 * KIB,
    "journal_group_size_max": 64 * KIB,
    "write_cache_size_max": 16 * KIB,
    "flush_chunk_size": 4 * KIB,
    "entry_log_size_max": 64 * KIB,
    "read_cache_size_max": 16 * KIB,
    "flush_interval_s": 3600,
    "flush_retry_s": 0.01,
    "waiting_time_max_s": 0.05,
}
"""Settings with which a workload of a few hundred entries reaches every function of an engine."""

DEAD_BYTES: Final[dict[str, Any]] = {"dead_ratio_max": 0.1, "dead_size_min": 1 * KIB}
"""Settings with which a few deleted ledgers begin a compaction before its interval is over."""

_KINDS: Final = tuple(LedgerStorageKind)
"""Kinds of ledger storage. A bookie may use another kind at each start, so each engine uses a random one."""


def small_settings(
    directory: str, kind: LedgerStorageKind = LedgerStorageKind.SORTED, *, limits_dead_bytes: bool = False
) -> StorageSettings:
    return StorageSettings(
        journal_directory=f"{directory}/journal",
        ledger_directory=f"{directory}/ledgers",
        ledger_storage=kind,
        **SMALL,
        **(DEAD_BYTES if limits_dead_bytes else {}),
    )


def crashable_engine(
    disk: Any,
    kv: CrashableKV,
    rng: random.Random,
    *,
    worker: type[TurnWorker] = TurnWorker,
    limits_dead_bytes: bool = False,
) -> StorageEngine:
    """Return an engine on a disk that can lose power, with its index on the same disk. `limits_dead_bytes`: compaction
    begins by DEAD_BYTES."""
    return _engine("", disk, lambda path: kv, lambda path: kv.clear(), rng, worker, limits_dead_bytes=limits_dead_bytes)


def real_engine(directory: str, rng: random.Random, *, write_buffer_size: int = 8 * 1024 * KIB) -> StorageEngine:
    """Return an engine on real files and LevelDB. A small `write_buffer_size` makes LevelDB write and merge tables."""

    def open_kv(path: str) -> LevelDbKV:
        return LevelDbKV(path, write_buffer_size=write_buffer_size)

    return _engine(directory, RealDisk(), open_kv, LevelDbKV.destroy, rng, TurnWorker)


def _engine(
    directory: str,
    disk: Any,
    open_kv: Callable[[str], Any],
    destroy_kv: Callable[[str], None],
    rng: random.Random,
    worker: type[TurnWorker],
    *,
    limits_dead_bytes: bool = False,
) -> StorageEngine:
    return StorageEngine(
        small_settings(directory, rng.choice(_KINDS), limits_dead_bytes=limits_dead_bytes),
        disk=disk,
        open_kv=open_kv,
        destroy_kv=destroy_kv,
        start_worker=lambda name: worker(rng),
        wall_clock_ms=lambda: 1_000,
    )
