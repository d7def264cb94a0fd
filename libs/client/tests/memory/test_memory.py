"""The in-memory client: the contract, and the faults that tests can inject."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from bindery_client.ledger.api import LedgerClient
from bindery_client.memory import memory
from bindery_client.memory.memory import (
    MemoryLedgerClient,
    MemoryLedgers,
    MemoryReadHandle,
    MemoryWriteHandle,
    Operation,
)
from bindery_core.errors import (
    AddTimeout,
    BookieUnavailable,
    LedgerClosed,
    LedgerFenced,
    MetadataUnavailable,
    NoSuchLedger,
)
from bindery_core.formats.ledger_metadata import LedgerState
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


# --- operations -------------------------------------------------------------------------------------------------------

Call = Callable[[MemoryLedgerClient, MemoryWriteHandle, MemoryReadHandle], Awaitable[object]]
ZERO = EntryId(0)

OPERATIONS: dict[str, Call] = {
    "create": lambda client, writer, reader: client.create(),
    "open": lambda client, writer, reader: client.open(writer.ledger_id),
    "delete": lambda client, writer, reader: client.delete(writer.ledger_id),
    "metadata": lambda client, writer, reader: client.metadata(writer.ledger_id),
    "update_metadata": lambda client, writer, reader: client.update_metadata(writer.ledger_id, lambda _: None),
    "list_bookies": lambda client, writer, reader: client.list_bookies(),
    "entries_on": lambda client, writer, reader: client.entries_on(writer.ledger_id, members(writer)[0]),
    "read_replicas": lambda client, writer, reader: client.read_replicas(
        writer.ledger_id, writer.metadata, members(writer)[0], [ZERO], lambda replica: replica
    ),
    "store_replicas": lambda client, writer, reader: client.store_replicas(
        writer.ledger_id, writer.metadata, members(writer)[0], []
    ),
    "choose_replacements": lambda client, writer, reader: client.choose_replacements(
        members(writer), {0: members(writer)[0]}, write_quorum=3
    ),
    "force": lambda client, writer, reader: writer.force(),
    "close": lambda client, writer, reader: writer.close(),
    "read of the writer": lambda client, writer, reader: writer.read(ZERO, ZERO),
    "read of a reader": lambda client, writer, reader: reader.read(ZERO, ZERO),
    "read_last_confirmed": lambda client, writer, reader: reader.read_last_confirmed(),
}


def members(writer: MemoryWriteHandle) -> tuple[BookieId, ...]:
    return writer.metadata.last_segment.ensemble


async def with_one_entry() -> tuple[MemoryLedgerClient, MemoryWriteHandle, MemoryReadHandle]:
    client = MemoryLedgerClient()
    writer = await client.create()
    await writer.add(b"0")
    return client, writer, await client.open(writer.ledger_id, recover=False)


@pytest.mark.parametrize("call", OPERATIONS.values(), ids=OPERATIONS.keys())
async def test_an_operation_lets_other_tasks_run_and_takes_no_time(call: Call) -> None:
    """Code under test meets the interleavings that requests to bookies would allow."""
    client, writer, reader = await with_one_entry()
    loop = asyncio.get_running_loop()
    began, turns = loop.time(), []
    loop.call_soon(turns.append, "another task")
    await call(client, writer, reader)
    assert turns == ["another task"]
    assert loop.time() == began


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("create", "create"),
        ("open", "open"),
        ("delete", "delete"),
        ("metadata", "metadata"),
        ("metadata", "update_metadata"),
        ("force", "force"),
        ("close", "close"),
        ("read", "read of the writer"),
        ("read", "read of a reader"),
    ],
)
async def test_an_injected_fault_makes_the_operation_fail_once(operation: Operation, name: str) -> None:
    client, writer, reader = await with_one_entry()
    client.ledgers.fail_next(operation, MetadataUnavailable("down"))
    with pytest.raises(MetadataUnavailable):
        await OPERATIONS[name](client, writer, reader)
    await OPERATIONS[name](client, writer, reader)


async def test_injected_faults_are_raised_in_their_order() -> None:
    client = MemoryLedgerClient()
    client.ledgers.fail_next("create", MetadataUnavailable("first"))
    client.ledgers.fail_next("create", BookieUnavailable("second"))
    for error in (MetadataUnavailable, BookieUnavailable):
        with pytest.raises(error):
            await client.create()


async def test_ensembles_rotate_over_the_writable_bookies() -> None:
    client = MemoryLedgerClient(MemoryLedgers(bookies=["a", "b", "c", "d"]))
    client.ledgers.bookies[BookieId("c")] = False
    ensembles = [members(await client.create(ensemble_size=2, write_quorum=2)) for _ in range(4)]
    assert ensembles == [("a", "b"), ("b", "d"), ("d", "a"), ("a", "b")]


# --- readers ----------------------------------------------------------------------------------------------------------


async def test_a_reader_learns_of_new_entries_when_it_asks_or_when_the_ledger_is_closed() -> None:
    client, writer, reader = await with_one_entry()
    await writer.add_many([b"1", b"2", b"3"])
    assert reader.last_add_confirmed == 0
    assert await reader.read_last_confirmed() == reader.last_add_confirmed == 3
    assert [entry.payload for entry in await reader.read(EntryId(1), EntryId(2))] == [b"1", b"2"]
    await writer.add(b"4")
    assert (await client.open(writer.ledger_id, recover=False)).last_add_confirmed == 4
    assert reader.last_add_confirmed == 3
    await writer.close()
    assert reader.last_add_confirmed == 4


async def test_a_wait_takes_no_longer_than_necessary() -> None:
    client, writer, reader = await with_one_entry()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await reader.wait_for_entry(ZERO, timeout_s=60), "it is confirmed already"
    for end, expected in (
        (lambda: writer.add(b"1"), True),
        (lambda: client.update_metadata(writer.ledger_id, as_closed), False),
    ):
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(1 if expected else 2), timeout_s=60))
        await asyncio.sleep(0)
        await end()
        assert await waiting is expected
    assert loop.time() == began
    assert not await (await with_one_entry())[2].wait_for_entry(EntryId(1), timeout_s=60)
    assert loop.time() == pytest.approx(began + 60)


def as_closed(metadata):  # type: ignore[no-untyped-def]
    return metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(1), length=2)


async def test_a_deletion_ends_waits_and_reads() -> None:
    client, writer, reader = await with_one_entry()
    began = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(1), timeout_s=60))
    tail = reader.tail(EntryId(1))
    following = asyncio.ensure_future(anext(tail, None))
    await asyncio.sleep(0)
    await client.delete(writer.ledger_id)
    assert await waiting is False
    assert await following is None
    assert asyncio.get_running_loop().time() == began
    with pytest.raises(NoSuchLedger):
        await reader.read(ZERO, ZERO)


async def test_a_wait_that_timed_out_leaves_nothing_behind() -> None:
    client, writer, reader = await with_one_entry()
    assert not await reader.wait_for_entry(EntryId(1), timeout_s=1)
    assert not client.ledgers.find(writer.ledger_id)._waiters


async def test_a_tail_yields_batches_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TAIL_BATCH_ENTRIES_MAX", 2)
    _, writer, reader = await with_one_entry()
    await writer.add_many([b"1", b"2", b"3", b"4"])
    await writer.close()
    assert [[entry.entry_id for entry in batch] async for batch in reader.tail(ZERO)] == [[0, 1], [2, 3], [4]]


# --- writers that break, and closing ----------------------------------------------------------------------------------


async def test_an_add_that_failed_is_not_found_by_recovery_unless_it_was_stored() -> None:
    client = MemoryLedgerClient()
    writer = await client.create()
    client.ledgers.fail_next("add", AddTimeout("late"))
    with pytest.raises(AddTimeout):
        await writer.add(b"lost")
    assert (await client.open(writer.ledger_id)).last_add_confirmed == -1


async def test_a_broken_writer_closes_its_ledger_without_the_entries_that_were_not_confirmed() -> None:
    client, writer, reader = await with_one_entry()
    client.ledgers.fail_next("add", AddTimeout("late"), stored=True)
    with pytest.raises(AddTimeout):
        await writer.add_many([b"1", b"2"])
    with pytest.raises(AddTimeout):
        await writer.force()
    first = members(writer)[0]
    assert await client.entries_on(writer.ledger_id, first) == [(0, 3)]
    sealed = await writer.close()
    assert (sealed.last_entry_id, sealed.length) == (0, 1)
    assert await client.entries_on(writer.ledger_id, first) == [(0, 1)]
    assert reader.last_add_confirmed == 0
    assert client.ledgers.find(writer.ledger_id).entries == [(0, b"0", 1)]


async def test_a_broken_writer_with_deferred_sync_closes_its_ledger_at_the_last_forced_entry() -> None:
    client = MemoryLedgerClient()
    writer = await client.create(deferred_sync=True)
    await writer.add(b"a")
    await writer.force()
    await writer.add(b"b")
    client.ledgers.fail_next("add", BookieUnavailable("down"))
    with pytest.raises(BookieUnavailable):
        await writer.add(b"c")
    assert (await writer.close()).last_entry_id == 0


async def test_close_waits_for_adds_in_flight() -> None:
    client = MemoryLedgerClient(MemoryLedgers(add_delay_s=5.0))
    loop = asyncio.get_running_loop()
    writer = await client.create()
    began = loop.time()
    adds = [asyncio.ensure_future(writer.add(b"%d" % n)) for n in range(3)]
    await asyncio.sleep(0)
    assert (await writer.close()).last_entry_id == 2
    assert loop.time() == pytest.approx(began + 5)
    assert await asyncio.gather(*adds) == [0, 1, 2]


async def test_a_close_that_waits_fails_if_the_ledger_is_fenced_meanwhile() -> None:
    client, writer, _ = await with_one_entry()
    client.ledgers.hold_adds()
    add = asyncio.ensure_future(writer.add(b"1"))
    closing = asyncio.ensure_future(writer.close())
    await asyncio.sleep(0.01)
    await client.open(writer.ledger_id)
    with pytest.raises(LedgerFenced):
        await closing
    with pytest.raises(LedgerFenced):
        await add
    client.ledgers.release_adds()


async def test_closing_a_deleted_ledger_fails() -> None:
    client, writer, _ = await with_one_entry()
    await client.delete(writer.ledger_id)
    with pytest.raises(LedgerFenced):
        await writer.close()
    client, writer, _ = await with_one_entry()
    client.ledgers.fail_next("add", AddTimeout("late"))
    with pytest.raises(AddTimeout):
        await writer.add(b"1")
    await client.delete(writer.ledger_id)
    with pytest.raises(NoSuchLedger):
        await writer.close()


async def test_closing_a_client_ends_each_of_its_writers() -> None:
    client = MemoryLedgerClient()
    writers = [await client.create() for _ in range(3)]
    await writers[0].close()
    await client.close()
    for writer in writers:
        with pytest.raises(LedgerClosed):
            await writer.add(b"late")
    states = [(await client.metadata(writer.ledger_id)).state for writer in writers]
    assert states == [LedgerState.CLOSED, LedgerState.OPEN, LedgerState.OPEN]


async def test_a_bookie_that_is_not_registered_lists_no_entries() -> None:
    client, writer, _ = await with_one_entry()
    first = members(writer)[0]
    del client.ledgers.bookies[first]
    with pytest.raises(BookieUnavailable):
        await client.entries_on(writer.ledger_id, first)
