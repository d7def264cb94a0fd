"""Calls to the ledger client: their options, their time limit, and the errors that are only logged."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.writing.ledger_operations import LedgerOperations
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers, MemoryWriteHandle
from bindery_core.errors import BookieUnavailable, LedgerClosed, LedgerFenced, MetadataUnavailable, TryAgain
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import LedgerId

SETTINGS = ManagedLedgerSettings(ensemble_size=4, write_quorum=3, ack_quorum=2, operation_timeout_s=2)


class SilentClient:
    """Never answers."""

    async def create(self, **options: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    async def open(self, ledger_id: LedgerId, *, recover: bool) -> Any:
        await asyncio.get_running_loop().create_future()

    async def delete(self, ledger_id: LedgerId) -> None:
        await asyncio.get_running_loop().create_future()


class SilentHandle:
    """Never answers, or fails every call with `error`."""

    ledger_id = LedgerId(0)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def close(self) -> Any:
        await self.abandon()

    async def abandon(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.get_running_loop().create_future()


def operations(client: Any) -> LedgerOperations:
    return LedgerOperations("t", client, SETTINGS, {"application": b"pulsar"})


async def made(ledgers: MemoryLedgers) -> tuple[LedgerOperations, MemoryWriteHandle]:
    """Return operations, and the writer of ledger 0 with two entries of 5 bytes."""
    client = MemoryLedgerClient(ledgers)
    handle = await client.create()
    await handle.add_many([b"abc", b"de"])
    return operations(client), handle


async def test_a_ledger_is_created_with_the_quorums_of_the_settings(ledgers: MemoryLedgers) -> None:
    await operations(MemoryLedgerClient(ledgers)).create()
    metadata = ledgers.ledgers[LedgerId(0)].metadata
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (4, 3, 2)
    assert dict(metadata.custom) == {"application": b"pulsar"}


async def test_later_changes_of_the_callers_mapping_do_not_reach_new_ledgers(ledgers: MemoryLedgers) -> None:
    custom = {"application": b"pulsar"}
    made_before = LedgerOperations("t", MemoryLedgerClient(ledgers), SETTINGS, custom)
    custom["application"] = b"other"
    await made_before.create()
    assert ledgers.ledgers[LedgerId(0)].metadata.custom["application"] == b"pulsar"


async def test_a_close_returns_the_entries_and_bytes(ledgers: MemoryLedgers) -> None:
    calls, handle = await made(ledgers)
    assert await calls.close(handle) == (2, 5)
    assert ledgers.ledgers[LedgerId(0)].metadata.state is LedgerState.CLOSED


async def test_an_empty_ledger_has_zero_entries_when_it_is_closed(ledgers: MemoryLedgers) -> None:
    calls = operations(MemoryLedgerClient(ledgers))
    assert await calls.close(await calls.create()) == (0, 0)


async def test_a_recovery_fences_and_closes_the_ledger(ledgers: MemoryLedgers) -> None:
    calls, handle = await made(ledgers)
    found = await calls.recover(0)
    assert (found.ledger_id, found.last_add_confirmed, found.is_closed) == (0, 1, True)
    with pytest.raises(LedgerFenced):
        await handle.add(b"late")


async def test_an_abandoned_ledger_stays_open(ledgers: MemoryLedgers) -> None:
    calls, handle = await made(ledgers)
    await calls.abandon(handle)
    assert ledgers.ledgers[LedgerId(0)].metadata.state is LedgerState.OPEN
    with pytest.raises(LedgerClosed):
        await handle.add(b"late")


async def test_an_error_of_an_abandon_is_not_raised() -> None:
    calls = operations(SilentClient())
    assert await calls.abandon(SilentHandle(BookieUnavailable("made up"))) is None  # type: ignore[arg-type,func-returns-value]


@pytest.mark.parametrize(("delete", "left"), [(True, []), (False, [0])])
async def test_a_discarded_ledger_is_abandoned_and_deleted_on_request(
    ledgers: MemoryLedgers, delete: bool, left: list[int]
) -> None:
    calls, handle = await made(ledgers)
    await calls.discard(handle, delete=delete)
    assert list(ledgers.ledgers) == left
    with pytest.raises(LedgerClosed):  # not LedgerFenced: it was abandoned before it was deleted
        await handle.add(b"late")


async def test_an_error_of_a_deletion_is_not_raised(ledgers: MemoryLedgers) -> None:
    calls, _ = await made(ledgers)
    ledgers.fail_next("delete", MetadataUnavailable("made up"))
    await calls.delete(0)
    assert list(ledgers.ledgers) == [0]
    await calls.delete(0)
    assert list(ledgers.ledgers) == []


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda calls: calls.create(), "create a ledger"),
        (lambda calls: calls.close(SilentHandle()), "close a ledger"),
        (lambda calls: calls.recover(0), "recover a ledger"),
    ],
)
async def test_a_call_without_an_answer_fails_at_the_time_limit(
    call: Callable[[LedgerOperations], Awaitable[Any]], what: str
) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(TryAgain, match=f"could not {what} in time"):
        await call(operations(SilentClient()))
    assert asyncio.get_running_loop().time() - began == pytest.approx(2)


async def test_a_deletion_without_an_answer_ends_at_the_time_limit_without_an_error() -> None:
    began = asyncio.get_running_loop().time()
    await operations(SilentClient()).delete(0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(2)
