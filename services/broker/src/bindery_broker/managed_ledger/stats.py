"""A topic's inside, in the words of Pulsar's `internalStats`."""

from typing import TYPE_CHECKING, Any

from bindery_broker.managed_ledger.ledger_list import LedgerList
from bindery_broker.managed_ledger.writer import TopicWriter

if TYPE_CHECKING:
    from bindery_broker.managed_ledger.cursor import ManagedCursor
    from bindery_broker.managed_ledger.ledger import ManagedLedger


def internal_stats(topic: "ManagedLedger", *, writer: TopicWriter | None, ledgers: LedgerList) -> dict[str, Any]:
    """As the admin API answers it, but with the open ledger's true entries and size."""
    return {
        "entriesAddedCounter": writer.entries_added if writer is not None else 0,
        "numberOfEntries": ledgers.entries_count,
        "totalSize": ledgers.size,
        "currentLedgerEntries": ledgers.current.entries,
        "currentLedgerSize": ledgers.current.size,
        "pendingAddEntriesCount": writer.pending_adds if writer is not None else 0,
        "lastConfirmedEntry": str(topic.last_confirmed),
        "state": writer.state if writer is not None else "Terminated",
        "ledgers": [
            {
                "ledgerId": record.ledger_id,
                "entries": record.entries,
                "size": record.size,
                "offloaded": False,
                "timestamp": record.closed_ms,
            }
            for record in ledgers
        ],
        "cursors": {name: _cursor_stats(cursor) for name, cursor in topic.cursors.items()},
        "properties": dict(topic.properties),
    }


def _cursor_stats(cursor: "ManagedCursor") -> dict[str, Any]:
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
