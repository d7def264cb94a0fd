"""Settings of the programs in a simulated cluster. They are so small that a run of seconds reaches every limit."""

import random
from typing import Final

from bindery_bookie.settings import BookieSettings, ServerSettings
from bindery_bookie.storage.settings import KIB, StorageSettings
from bindery_client.settings import ClientSettings

SESSION_TIMEOUT_S: Final = 4.0
"""Session timeout of the metadata store in seconds."""

STORAGE_SETTINGS: Final = StorageSettings(
    journal_directory="/journal",
    ledger_directory="/ledgers",
    journal_file_size_max=64 * KIB,
    journal_group_size_max=64 * KIB,
    write_cache_size_max=16 * KIB,
    flush_chunk_size=8 * KIB,
    entry_log_size_max=64 * KIB,
    read_cache_size_max=8 * KIB,
    read_ahead_entries_max=8,
    read_ahead_size_max=8 * KIB,
    flush_interval_s=3.0,
    flush_retry_s=0.2,
    waiting_time_max_s=2.0,
    reserve_size=0,
)
"""Sizes so small that files roll, caches fill and flushes overlap within a second."""

SERVER_SETTINGS: Final = ServerSettings(drain_timeout_s=1.0, adds_size_max=64 * KIB, reads_size_max=64 * KIB)
"""Budgets so small that connections are sometimes paused."""
BOOKIE_SETTINGS: Final = BookieSettings(
    journal_dir="/journal", ledger_dir="/ledgers", disk_check_interval_s=2.0, high_priority_free_size_min=0
)


def client_settings(rng: random.Random) -> ClientSettings:
    """Return random settings with timeouts so short that a run needs seconds instead of minutes."""
    add_timeout_s = rng.choice((0.5, 2.0))
    return ClientSettings(
        connect_timeout_s=1.0,
        reconnect_pause_s=0.05,
        reconnect_pause_s_max=1.0,
        add_timeout_s=add_timeout_s,
        add_quorum_timeout_s=rng.choice((4.0, 10.0)),
        read_timeout_s=rng.choice((0.5, 2.0)),
        speculative_read_s=rng.choice((0.0, 0.2)),
        fence_timeout_s=0.5,
        recovery_timeout_s=10.0,
        replacement_retry_s=rng.choice((0.5, 2.0)),
        recovery_batch_entries=rng.choice((1, 4, 32)),
        metadata_timeout_s=rng.choice((2.0, 10.0)),
        in_flight_entries_max=rng.choice((8, 64, 64)),
        in_flight_bytes_max=16 * KIB,
        client_bytes_max=32 * KIB,
        connection_bytes_max=64 * KIB,
        read_batch_entries_max=rng.choice((5, 20, 100)),
        read_batch_bytes_max=16 * KIB,
        explicit_lac_idle_s=0.05,
        long_poll_s=2.0,
        lac_refresh_s=0.2,
        quarantine_s=rng.choice((1.0, 5.0)),
        revisit_timeout_s=0.5,
        timer_tick_s=0.1,
    )
