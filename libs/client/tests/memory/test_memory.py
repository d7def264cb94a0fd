"""The in-memory client: the contract, and the faults that tests can inject."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_client.ledger.api import LedgerClient
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import AddTimeout, BookieUnavailable, LedgerClosed, LedgerFenced, MetadataUnavailable
from bindery_core.ids import BookieId, EntryId
from ledger_client_contract import LedgerClientContract, MakeClient


class TestMemoryLedgerClient(LedgerClientContract):
    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        ledgers = MemoryLedgers()
        clients: list[MemoryLedgerClient] = []

        async def make() -> LedgerClient:
            clients.append(MemoryLedgerClient(ledgers))
            return clients[-1]

        yield make
        for client in clients:
            await client.close()


async def test_an_add_that_fails_breaks_the_handle() -> None:
    client = MemoryLedgerClient()
    writer = await client.create()
    await writer.add(b"a")
    client.ledgers.fail_next("add", BookieUnavailable("down"))
    results = await asyncio.gather(writer.add(b"b"), writer.add(b"c"), return_exceptions=True)
    assert [type(result) for result in results] == [BookieUnavailable, BookieUnavailable]
    with pytest.raises(BookieUnavailable):
        await writer.add(b"d")
    assert (await writer.close()).last_entry_id == 0


async def test_an_add_of_unknown_outcome_is_found_by_recovery_if_it_was_stored() -> None:
    client = MemoryLedgerClient()
    writer = await client.create()
    client.ledgers.fail_next("add", AddTimeout("late"), stored=True)
    with pytest.raises(AddTimeout):
        await writer.add(b"maybe")
    reader = await client.open(writer.ledger_id)
    assert reader.last_add_confirmed == 0


async def test_held_adds_stay_in_flight_until_they_are_released_or_fenced() -> None:
    ledgers = MemoryLedgers()
    mine, other = MemoryLedgerClient(ledgers), MemoryLedgerClient(ledgers)
    writer = await mine.create()
    ledgers.hold_adds()
    adds = [asyncio.ensure_future(writer.add(b"%d" % i)) for i in range(3)]
    await asyncio.sleep(0.01)
    assert not any(add.done() for add in adds)
    assert (writer.last_add_confirmed, writer.last_add_pushed) == (-1, 2)
    ledgers.release_adds()
    assert await asyncio.gather(*adds) == [0, 1, 2]
    ledgers.hold_adds()
    late = asyncio.ensure_future(writer.add(b"late"))
    await asyncio.sleep(0)
    assert (await other.open(writer.ledger_id)).last_add_confirmed == 2
    with pytest.raises(LedgerFenced):
        await late
    ledgers.release_adds()


async def test_a_closed_client_leaves_its_ledgers_open_as_a_crash_would() -> None:
    ledgers = MemoryLedgers()
    crashed, other = MemoryLedgerClient(ledgers), MemoryLedgerClient(ledgers)
    writer = await crashed.create()
    await writer.add(b"a")
    await crashed.close()
    with pytest.raises(LedgerClosed):
        await writer.add(b"b")
    assert (await other.metadata(writer.ledger_id)).state.name == "OPEN"
    assert (await (await other.open(writer.ledger_id)).read(EntryId(0), EntryId(0)))[0].payload == b"a"


async def test_an_injected_fault_makes_the_given_number_of_calls_fail() -> None:
    client = MemoryLedgerClient()
    client.ledgers.fail_next("create", MetadataUnavailable("down"), count=2)
    for _ in range(2):
        with pytest.raises(MetadataUnavailable):
            await client.create()
    await client.create()


async def test_read_only_bookies_are_listed_and_not_chosen() -> None:
    client = MemoryLedgerClient()
    read_only = BookieId("bookie-1:3182")
    client.ledgers.bookies[read_only] = False
    writer = await client.create()
    assert read_only not in writer.metadata.last_segment.ensemble
    assert (await client.list_bookies())[read_only] is False


async def test_an_injected_fault_makes_a_force_fail() -> None:
    ledgers = MemoryLedgers()
    writer = await MemoryLedgerClient(ledgers).create(deferred_sync=True)
    await writer.add(b"0")
    ledgers.fail_next("force", BookieUnavailable("no answer"))
    with pytest.raises(BookieUnavailable):
        await writer.force()
    assert writer.last_add_confirmed == -1
    assert await writer.force() == 0
