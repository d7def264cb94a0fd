"""The ledgers that may be trimmed."""

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.retention import trimmable
from bindery_pulsar.message_id import Position

LEDGERS = LedgerList(
    [
        LedgerRecord(ledger_id=1, entries=10, closed_ms=1_000),
        LedgerRecord(ledger_id=2, entries=5, closed_ms=2_000),
        LedgerRecord(ledger_id=3, entries=7, closed_ms=3_000),
        LedgerRecord(ledger_id=4, entries=2),
    ]
)


@pytest.mark.parametrize(
    ("mark_deletes", "now_ms", "acked_s", "unsubscribed_s", "count"),
    [
        ([(1, 8)], 9_000, 0, 0, 0),
        ([(1, 9)], 9_000, 0, 0, 1),
        ([(2, 3)], 9_000, 0, 0, 1),
        ([(2, 4)], 9_000, 0, 0, 2),
        ([(4, 1)], 9_000, 0, 0, 3),  # never the current one
        ([(4, 1), (1, 9)], 9_000, 0, 0, 1),  # the slowest counts
        ([(4, 1)], 9_000, 7, 0, 2),  # two were closed at least 7 s ago
        ([(4, 1)], 9_000, 8.5, 0, 0),
        ([], 9_000, 0, 7, 2),
        ([], 9_000, 0, 1e9, 0),
        ([], 9_000, 1e9, 0, 3),  # no subscription: the other time counts
    ],
)
def test_only_unneeded_ledgers_are_trimmable(
    mark_deletes: list[tuple[int, int]], now_ms: int, acked_s: float, unsubscribed_s: float, count: int
) -> None:
    assert count == trimmable(
        LEDGERS,
        [Position(*mark_delete) for mark_delete in mark_deletes],
        now_ms=now_ms,
        retention_acked_s=acked_s,
        retention_unsubscribed_s=unsubscribed_s,
    )
