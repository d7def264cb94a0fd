"""Decide which ledgers of a topic are no longer needed. Pure.

A ledger may be deleted if it is closed, every durable cursor has acknowledged all of it, and its retention time is
over. Ledgers are deleted from the oldest on; the first one that is needed keeps all later ones.
"""

from collections.abc import Iterable

from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.ledger_list import LedgerList


def trimmable(
    ledgers: LedgerList,
    mark_deletes: Iterable[Position],
    *,
    now_ms: int,
    retention_acked_s: float,
    retention_unsubscribed_s: float,
) -> int:
    """Return how many of the oldest ledgers may be deleted; never the last one.

    `mark_deletes`: the durable positions of all cursors. A ledger is kept for `retention_unsubscribed_s` after its
    close if there are no cursors, else for `retention_acked_s`.
    """
    slowest = min(mark_deletes, default=None)
    retention_s = retention_unsubscribed_s if slowest is None else retention_acked_s
    count = 0
    for record in list(ledgers)[:-1]:
        if slowest is not None and slowest < Position(record.ledger_id, record.entries - 1):
            break
        if now_ms - record.closed_ms < retention_s * 1000:
            break
        count += 1
    return count
