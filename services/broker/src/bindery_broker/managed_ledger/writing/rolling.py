"""Decide when a topic continues in a new ledger. Pure.

A ledger is rolled if it holds anything and is older than `age_s_max`, or if it is full and older than `age_s_min`.
"""

from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings

CHECK_PAUSE_S_MIN = 0.01
"""Minimum seconds between two checks of the age."""


def roll_due(record: LedgerRecord, settings: ManagedLedgerSettings, *, age_s: float) -> bool:
    """Return whether the ledger is due to be rolled. `age_s`: seconds since it was opened."""
    if not record.entries:
        return False
    is_full = record.entries >= settings.entries_max or record.size >= settings.size_max
    return (is_full and age_s >= settings.age_s_min) or age_s >= settings.age_s_max


def next_check_s(settings: ManagedLedgerSettings, *, age_s: float) -> float:
    """Return the seconds until the age reaches the next limit; `age_s_max` if it has passed the last limit."""
    rest = [limit - age_s for limit in (settings.age_s_min, settings.age_s_max) if limit > age_s]
    return max(min(rest, default=settings.age_s_max), CHECK_PAUSE_S_MIN)
