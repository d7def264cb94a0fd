"""A refill is an event of the recovery history, if ZooKeeper answers."""

import pytest
from bindery_bookie.maintenance.refill_history import KIND, Refill, refill_recorder
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.stores.memory import MemoryTree

REFILL = Refill(ledgers=3, entries=100, entries_copied=60, bytes_copied=9000)


async def test_a_refill_is_recorded_with_what_was_copied() -> None:
    store = MemoryTree().connect()
    record = refill_recorder(store, BookieId("b-1"), wall_clock_ms=lambda: 77)
    await record(REFILL)
    assert KIND == "refilled"
    assert list(await RecoveryRecords(store).history()) == [
        HistoryEvent(
            77,
            "refilled",
            "bookie b-1 refilled 100 entries of 3 ledgers after it had lost its storage; it copied 60 entries (9000 "
            "bytes) from other bookies",
            {"bookie": "b-1", "ledgers": 3, "entries": 100, "entries_copied": 60, "bytes_copied": 9000},
        )
    ]


async def test_without_zookeeper_the_refill_is_not_recorded_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = MemoryTree()
    store = tree.connect()

    async def unavailable(self: RecoveryRecords, event: HistoryEvent) -> None:
        raise MetadataUnavailable("no session")

    with monkeypatch.context() as patch:
        patch.setattr(RecoveryRecords, "append_history", unavailable)
        await refill_recorder(store, BookieId("b-1"), wall_clock_ms=lambda: 77)(REFILL)
    assert list(await RecoveryRecords(tree.connect()).history()) == []


async def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: RecoveryRecords, event: HistoryEvent) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RecoveryRecords, "append_history", broken)
    with pytest.raises(ZeroDivisionError):
        await refill_recorder(MemoryTree().connect(), BookieId("b-1"), wall_clock_ms=lambda: 77)(REFILL)
