"""Topics as series of ledgers, and the cursors that store what each subscription has acknowledged."""

from bindery_broker.managed_ledger.caching.entry_cache import EntryCache
from bindery_broker.managed_ledger.cursors.ack_state import BatchAck, Redelivered
from bindery_broker.managed_ledger.cursors.cursor import ManagedCursor, UnackedEntry, UnackedRead
from bindery_broker.managed_ledger.cursors.transient_cursor import TransientCursor
from bindery_broker.managed_ledger.ledger import ManagedLedger, WallClock
from bindery_broker.managed_ledger.retention import COMPACTION_CURSOR, SYSTEM_CURSORS, LedgerVerdict, RetentionRule
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings

__all__ = [
    "COMPACTION_CURSOR",
    "SYSTEM_CURSORS",
    "BatchAck",
    "EntryCache",
    "LedgerVerdict",
    "ManagedCursor",
    "ManagedLedger",
    "ManagedLedgerSettings",
    "Redelivered",
    "RetentionRule",
    "TransientCursor",
    "UnackedEntry",
    "UnackedRead",
    "WallClock",
]
