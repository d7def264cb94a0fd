"""The writer of a subscription log: when a snapshot or a new ledger is due, and what a failed add leaves."""

import asyncio
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.managed_ledger.cursors.log_writer import LEDGER_FACTOR, RECORD_OVERHEAD, SNAPSHOT_FACTOR, LogWriter
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import AddTimeout, TryAgain
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import Position
from bindery_pulsar.subscription_log import CursorChange, LogReplay

STATE = CursorState(mark_delete=Position(0, 1), blobs={"a": bytes(1000)})
CHANGE = CursorChange(mark_delete=Position(0, 1), properties={"n": 1})


async def writer_of(ledgers: MemoryLedgers, **settings: Any) -> LogWriter:
    client = MemoryLedgerClient(ledgers)
    handle = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    return LogWriter(handle, ManagedLedgerSettings(**settings))


async def test_records_continue_the_last_snapshot() -> None:
    ledgers = MemoryLedgers()
    writer = await writer_of(ledgers)
    replay = LogReplay()
    for step in ("snapshot", "change", "change", "snapshot", "change"):
        await (writer.add_snapshot(STATE) if step == "snapshot" else writer.add_change(CHANGE))
        assert writer.ends_with_snapshot == (step == "snapshot")
    entries = ledgers.ledgers[writer.handle.ledger_id].entries
    assert writer.records == len(entries) == 5
    assert writer.size == entries[-1].length
    for entry in entries:
        replay.feed(entry.entry_id, entry.payload)
    assert replay.state().blobs == STATE.blobs


async def test_a_snapshot_is_due_after_changes_of_its_size_twice() -> None:
    writer = await writer_of(MemoryLedgers(), cursor_changes_size_max=1)
    await writer.add_snapshot(STATE)
    snapshot, changes = writer.size, 0
    while not writer.is_snapshot_due:
        before = writer.size
        await writer.add_change(CHANGE)
        changes += writer.size - before + RECORD_OVERHEAD
    assert SNAPSHOT_FACTOR * snapshot <= changes < SNAPSHOT_FACTOR * snapshot + 200
    await writer.add_snapshot(STATE)
    assert not writer.is_snapshot_due


async def test_a_snapshot_waits_for_the_configured_bytes() -> None:
    writer = await writer_of(MemoryLedgers(), cursor_changes_size_max=10_000)
    await writer.add_snapshot(STATE)
    await writer.add_change(CursorChange(mark_delete=Position(0, 1), blobs={"a": bytes(9000)}))
    assert not writer.is_snapshot_due
    await writer.add_change(CursorChange(mark_delete=Position(0, 1), blobs={"a": bytes(900)}))
    assert writer.is_snapshot_due


@pytest.mark.parametrize("cause", ["records", "age", "size"])
async def test_a_new_ledger_is_due_by_records_age_and_size(cause: str) -> None:
    limits = {"records": {"cursor_entries_max": 3}, "age": {"cursor_age_s_max": 5}, "size": {"cursor_size_max": 1}}
    writer = await writer_of(MemoryLedgers(), **limits[cause])
    await writer.add_snapshot(STATE)
    snapshot = writer.size
    await writer.add_change(CHANGE)
    assert not writer.is_roll_due
    if cause == "records":
        await writer.add_change(CHANGE)
    elif cause == "age":
        await asyncio.sleep(5)
        assert writer.is_too_old
    else:
        while not writer.is_roll_due:
            await writer.add_change(CHANGE)
        assert LEDGER_FACTOR * snapshot <= writer.size < LEDGER_FACTOR * snapshot + 100
    assert writer.is_roll_due


@pytest.mark.parametrize("fault", ["error", "timeout"])
async def test_a_failed_add_is_reported_and_counts_as_not_written(fault: str) -> None:
    ledgers = MemoryLedgers()
    writer = await writer_of(ledgers, operation_timeout_s=1)
    await writer.add_snapshot(STATE)
    if fault == "error":
        ledgers.fail_next("add", AddTimeout("made up"))
    else:
        ledgers.hold_adds()
    with pytest.raises(AddTimeout if fault == "error" else TryAgain):
        await writer.add_change(CHANGE)
    assert writer.records == 1
    assert writer.ends_with_snapshot, "it is not known whether there is another record, so the writer is not used again"
