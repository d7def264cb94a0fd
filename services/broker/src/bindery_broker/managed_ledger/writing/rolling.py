"""Decide when a topic continues in a new ledger, or rests without one. Pure.

A ledger is rolled if it holds anything and is older than `age_s_max`, or if it is full and older than `age_s_min`. It
is closed without a successor if nothing was added for `inactive_s_max`, also if it is empty: the next add starts one.
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


def rest_due(settings: ManagedLedgerSettings, *, idle_s: float) -> bool:
    """Return whether the ledger is due to be closed without a successor. `idle_s`: seconds since the last add."""
    return idle_s >= settings.inactive_s_max


def next_check_s(settings: ManagedLedgerSettings, *, age_s: float, idle_s: float) -> float:
    """Return the seconds until the age, or the time without an add, reaches the next limit; at most `age_s_max`."""
    rest = [limit - age_s for limit in (settings.age_s_min, settings.age_s_max) if limit > age_s]
    if idle_s < settings.inactive_s_max:
        rest.append(settings.inactive_s_max - idle_s)
    return max(min([*rest, settings.age_s_max]), CHECK_PAUSE_S_MIN)
