"""A topic's ledgers and cursors in the format of Pulsar's `internalStats`."""

from collections.abc import Mapping
from typing import Any

from bindery_broker.managed_ledger.cursors.cursor import ManagedCursor
from bindery_broker.managed_ledger.ledger_list import LedgerList
from bindery_broker.managed_ledger.writing.writer import TopicWriter


def internal_stats(
    *,
    writer: TopicWriter | None,
    ledgers: LedgerList,
    cursors: Mapping[str, ManagedCursor],
    properties: Mapping[str, str],
) -> dict[str, Any]:
    """Return what Pulsar's admin API returns, but with the current number of entries and size of the open ledger."""
    return {
        "entriesAddedCounter": writer.entries_added if writer is not None else 0,
        "numberOfEntries": ledgers.entries_count,
        "totalSize": ledgers.size,
        "currentLedgerEntries": ledgers.current.entries,
        "currentLedgerSize": ledgers.current.size,
        "pendingAddEntriesCount": writer.pending_adds if writer is not None else 0,
        "lastConfirmedEntry": str(ledgers.last_confirmed),
        "state": writer.state if writer is not None else "Terminated",
        "ledgers": [
            {
                "ledgerId": record.ledger_id,
                "entries": record.entries,
                "size": record.size,
                "offloaded": False,
                "timestamp": record.closed_ms,
            }
            for record in ledgers.stored
        ],
        "cursors": {name: _cursor_stats(cursor) for name, cursor in cursors.items()},
        "properties": dict(properties),
    }


def _cursor_stats(cursor: ManagedCursor) -> dict[str, Any]:
    return {
        "markDeletePosition": str(cursor.mark_delete),
        "individuallyDeletedMessages": cursor.individually_acked(),
        "totalNonContiguousDeletedMessagesRange": cursor.ranges_count,
        "numberOfEntriesSinceFirstNotAckedMessage": cursor.backlog_entries,
        "cursorLedger": cursor.store.ledger_id,
        "cursorLedgerLastEntry": cursor.store.last_record,
        "state": "Open" if cursor.store.ledger_id >= 0 else "NoLedger",
        "properties": dict(cursor.position_properties),
    }
