"""Which event of the history states whether a drain has ended."""

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.records.drain_end import drain_finished, drain_goes_on, is_drain_end_recorded

B1, B2 = BookieId("b1"), BookieId("b2")
STARTED = HistoryEvent(1, "drain_started", "", {"bookie_id": B1})


@pytest.mark.parametrize(
    ("events", "is_recorded"),
    [
        ([], False),
        ([STARTED], False),
        ([STARTED, drain_finished(B1, 2)], True),
        ([STARTED, drain_finished(B1, 2), drain_goes_on(B1, 3, ledgers=1)], False),
        ([drain_finished(B1, 2), STARTED], False),
        ([STARTED, drain_finished(B2, 2)], False),
        ([drain_finished(B1, 2), HistoryEvent(3, "drain_started", "", {"bookie_id": B2})], True),
        ([drain_finished(B1, 2), HistoryEvent(3, "bookie_retired", "", {"bookie_id": B1})], True),
        ([drain_finished(B1, 2), HistoryEvent(3, "paused", "", {})], True),
    ],
)
async def test_the_newest_drain_event_of_the_bookie_decides(events: list[HistoryEvent], is_recorded: bool) -> None:
    records = RecoveryRecords(MemoryTree().connect())
    for event in events:
        await records.append_history(event)
    assert await is_drain_end_recorded(records, B1) is is_recorded


def test_events_carry_the_bookie_and_the_given_facts() -> None:
    finished = drain_finished(B1, 5, by="anna")
    assert (finished.at_ms, finished.kind, finished.fields) == (5, "drain_finished", {"bookie_id": B1, "by": "anna"})
    assert drain_goes_on(B1, 5, ledgers=3).fields == {"bookie_id": B1, "ledgers": 3}
