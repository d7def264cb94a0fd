"""The recovery of the last ledger of a topic that is opened."""

import asyncio
from typing import Any

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_broker.managed_ledger.opening import RecoveredLedgers, recover_ledgers
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import BookieUnavailable, LedgerFenced, TryAgain
from bindery_core.ids import LedgerId
from bindery_pulsar.managed_ledger_codec import TopicInfo
from bindery_pulsar.message_id import Position

NOW_MS = 1_700_000_000_000
FORMER = LedgerRecord(ledger_id=-5, entries=3, size=30, closed_ms=1)


async def recovered(
    ledgers: MemoryLedgers, *records: LedgerRecord, terminated: Position | None = None
) -> RecoveredLedgers:
    return await recover_ledgers(
        "t",
        TopicInfo(ledgers=records, terminated=terminated),
        client=MemoryLedgerClient(ledgers),
        timeout_s=5,
        clock=lambda: NOW_MS,
    )


async def test_a_topic_without_ledgers_needs_no_recovery(ledgers: MemoryLedgers) -> None:
    assert await recovered(ledgers) == RecoveredLedgers([], None)


async def test_the_last_ledger_is_fenced_and_closed_with_its_entries(ledgers: MemoryLedgers) -> None:
    writer = await MemoryLedgerClient(ledgers).create()
    await writer.add_many([b"abc", b"de"])
    found = await recovered(ledgers, FORMER, LedgerRecord(ledger_id=0, extension=b"kept"))
    assert found.records == [
        FORMER,
        LedgerRecord(ledger_id=0, entries=2, size=5, closed_ms=NOW_MS, extension=b"kept"),
    ]
    assert found.handle is not None
    assert (found.handle.ledger_id, found.is_last_missing) == (0, False)
    with pytest.raises(LedgerFenced):
        await writer.add(b"late")


async def test_a_ledger_whose_record_is_closed_is_not_opened(ledgers: MemoryLedgers) -> None:
    closed = LedgerRecord(ledger_id=0, entries=1, size=3, closed_ms=77)  # it does not even exist
    assert await recovered(ledgers, closed) == RecoveredLedgers([closed], None)


async def test_an_empty_ledger_is_fenced_and_kept(ledgers: MemoryLedgers) -> None:
    """Cursors may be at its begin: the list must not end before them."""
    writer = await MemoryLedgerClient(ledgers).create()
    found = await recovered(ledgers, FORMER, LedgerRecord(ledger_id=0))
    assert found.records == [FORMER, LedgerRecord(ledger_id=0, closed_ms=NOW_MS)]
    with pytest.raises(LedgerFenced):
        await writer.add(b"late")


async def test_an_empty_ledger_of_a_terminated_topic_is_kept(ledgers: MemoryLedgers) -> None:
    await MemoryLedgerClient(ledgers).create()
    found = await recovered(ledgers, FORMER, LedgerRecord(ledger_id=0), terminated=Position(-5, 2))
    assert found.records == [FORMER, LedgerRecord(ledger_id=0, closed_ms=NOW_MS)]
    assert found.handle is not None


@pytest.mark.parametrize("terminated", [None, Position(-5, 2)])
async def test_a_missing_ledger_is_dropped(ledgers: MemoryLedgers, terminated: Position | None) -> None:
    found = await recovered(ledgers, FORMER, LedgerRecord(ledger_id=7), terminated=terminated)
    assert found == RecoveredLedgers([FORMER], None, is_last_missing=True)


async def test_a_ledger_that_cannot_be_recovered_now_is_an_error(ledgers: MemoryLedgers) -> None:
    await MemoryLedgerClient(ledgers).create()
    ledgers.fail_next("open", BookieUnavailable("made up"))
    with pytest.raises(BookieUnavailable):
        await recovered(ledgers, LedgerRecord(ledger_id=0))


async def test_a_recovery_without_an_answer_fails_at_the_time_limit() -> None:
    class Unreachable:
        async def open(self, ledger_id: LedgerId, *, recover: bool) -> Any:
            await asyncio.get_running_loop().create_future()

    client: Any = Unreachable()
    info = TopicInfo(ledgers=(LedgerRecord(ledger_id=0),))
    began = asyncio.get_running_loop().time()
    with pytest.raises(TryAgain, match="could not recover the topic's last ledger in time"):
        await recover_ledgers("t", info, client=client, timeout_s=5, clock=lambda: NOW_MS)
    assert asyncio.get_running_loop().time() == began + 5
