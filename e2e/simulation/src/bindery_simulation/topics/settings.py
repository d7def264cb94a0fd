"""Settings of the brokers in a simulated cluster. They are so small that a run of seconds reaches every limit."""

import random
from typing import Final

from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.settings import BrokerSettings

NEVER: Final = 100_000
"""Value of limits that a run does not reach."""


def broker_settings(rng: random.Random, *, bookies: int, inactive_s_max: float) -> BrokerSettings:
    """Return random settings: short ledgers, small limits, timeouts of seconds."""
    ensemble_size = min(3, bookies)
    return BrokerSettings(
        ledger=ManagedLedgerSettings(
            ensemble_size=ensemble_size,
            write_quorum=ensemble_size,
            ack_quorum=min(2, ensemble_size),
            entries_max=rng.choice((5, 20, NEVER)),
            age_s_min=rng.choice((0.0, 0.5)),
            age_s_max=rng.choice((2.0, 5.0, 60.0)),
            add_timeout_s=rng.choice((2.0, 6.0)),
            operation_timeout_s=rng.choice((3.0, 8.0)),
            retry_pause_s=0.05,
            retry_pause_s_max=1.0,
            cache_size_max=rng.choice((0, 1024, 2**20)),
            read_handles_max=rng.choice((1, 16)),
            retention_unsubscribed_s=1_000.0,
            cursor_entries_max=rng.choice((3, 10, NEVER)),
            cursor_age_s_max=rng.choice((2.0, 60.0)),
            cursor_inline_size_max=rng.choice((256, 32_768)),
            inactive_s_max=inactive_s_max,
        ),
        topic_idle_s=rng.choice((0.5, 60.0)),
        unacked_max=rng.choice((8, 200)),
        unacked_per_consumer_max=rng.choice((4, 8)),
        read_ahead_bytes_max=rng.choice((0, 2**24)),
        maintenance_interval_s=rng.choice((0.5, 2.0)),
    )
