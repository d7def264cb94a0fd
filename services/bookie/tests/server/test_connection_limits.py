"""Limits on what clients of the ledger port occupy: who exceeds one is disconnected, and nobody else."""

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import pytest
from bindery_bookie.access.security import AuthSettings, Security, TlsSettings, load_security
from bindery_bookie.server.connection import BookieConnection
from bindery_bookie.server.entry_turns import ENTRY_TURNS_MAX
from bindery_bookie.server.room import BUSY, IDLE, POLLING, UNKNOWN_GRACE_S, WAITING
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v3
from bindery_identity.tokens import Bearer
from bindery_simulation.certificates import CA, certificate, key

KEY = master_key(b"")
CRC32C = Digester(DigestType.CRC32C)
FRAME: dict[str, Any] = {"frame_size_max": 64 * 1024, "unfinished_size_max": 64 * 1024}
START_TLS = "0a06080310091801d20600"


class Anyone:
    plugin = "any"

    def by_token(self, token: bytes) -> Bearer:
        return Bearer("someone")

    def by_certificate(self, names: Any) -> None:
        return None


def add(txn_id: int, entry_id: int = 0, size: int = 10) -> m.AddRequest:
    body = pack(CRC32C, ledger_id=1, entry_id=entry_id, lac=-1, length=2**40, payload=bytes(size))
    return m.AddRequest(txn_id, 1, entry_id, KEY, body)


async def eventually(condition: Any, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def send_part(bookie: Any, client: Any, size: int) -> bytes:
    """Send `size` bytes of a frame, wait until the bookie holds them, and return the rest."""
    used = bookie.server.limits.unfinished.used
    data = v3.encode_request(add(9, 9, 50_000))
    client.writer.write(data[:size])
    await eventually(lambda: bookie.server.limits.unfinished.used != used)
    return data[size:]


# --- incomplete frames


async def test_incomplete_frames_are_bounded_over_all_connections(start_bookie: Any) -> None:
    bookie = await start_bookie(**FRAME)
    oldest, younger, neighbour = [await bookie.connect() for _ in range(3)]
    await send_part(bookie, oldest, 40_000)
    (ended,) = [one for one in bookie.server.limits.room.connections if one._unfinished_size]
    rest = await send_part(bookie, younger, 30_000)
    assert await oldest.is_closed()
    assert (await neighbour.ask(add(1))).status == 0
    younger.writer.write(rest)
    assert (await younger.receive()).status == 0
    assert ended._decoder.buffered_size == 0, "its bytes are free although the object is kept"
    limits = bookie.server.limits
    assert limits.ends == {"unfinished": 1}
    assert limits.unfinished.used == 0


async def test_a_client_that_completes_its_frames_has_not_held_the_next_one_long(start_bookie: Any) -> None:
    bookie = await start_bookie(**FRAME)
    busy, stuck, last = [await bookie.connect() for _ in range(3)]
    rest = await send_part(bookie, busy, 20_000)
    await send_part(bookie, stuck, 20_000)
    data = v3.encode_request(add(10, 10, 50_000))
    busy.writer.write(rest + data[:25_000])
    assert (await busy.receive()).txn_id == 9
    await eventually(lambda: bookie.server.limits.unfinished.used == 45_000)
    await send_part(bookie, last, 30_000)
    assert await stuck.is_closed()
    busy.writer.write(data[25_000:])
    assert (await busy.receive()).status == 0


async def test_the_bytes_of_a_client_that_disconnects_do_not_count(start_bookie: Any) -> None:
    bookie = await start_bookie(**FRAME)
    client = await bookie.connect()
    await send_part(bookie, client, 40_000)
    await client.close()
    await eventually(lambda: bookie.server.limits.unfinished.used == 0)


async def test_a_frame_must_arrive_at_the_minimum_rate(start_bookie: Any) -> None:
    bookie = await start_bookie(transfer_grace_s=0.1, transfer_rate_min=1_000_000.0)
    slow, neighbour = await bookie.connect(), await bookie.connect()
    await send_part(bookie, slow, 1000)
    assert await slow.is_closed()
    assert (await neighbour.ask(add(1))).status == 0
    assert bookie.server.limits.ends == {"frame_timeout": 1}


async def test_bytes_that_trickle_in_do_not_extend_the_time(start_bookie: Any) -> None:
    bookie = await start_bookie(transfer_grace_s=0.1, transfer_rate_min=1_000_000.0)
    slow = await bookie.connect()
    data = v3.encode_request(add(9, 9, 50_000))
    for byte in data[:2000]:
        if bookie.server.limits.ends:
            break
        slow.writer.write(bytes((byte,)))
        await asyncio.sleep(0.002)
    assert bookie.server.limits.ends == {"frame_timeout": 1}


async def test_a_frame_that_arrives_fast_enough_may_take_longer_than_the_grace(start_bookie: Any) -> None:
    bookie = await start_bookie(transfer_grace_s=0.05, transfer_rate_min=1000.0)
    client = await bookie.connect()
    rest = await send_part(bookie, client, 10_000)
    await asyncio.sleep(0.3)
    client.writer.write(rest)
    assert (await client.receive()).status == 0


async def test_a_frame_is_not_late_while_the_bookie_does_not_read(start_bookie: Any) -> None:
    bookie = await start_bookie(adds_size_max=64 * 1024, transfer_grace_s=0.1, transfer_rate_min=1_000_000.0)
    client = await bookie.connect()
    bookie.store.hold()
    client.send(add(1, 0, 60_000), add(2, 1, 60_000))
    data = v3.encode_request(add(9, 9, 50_000))
    client.writer.write(data[:1000])
    await eventually(lambda: bookie.server.operations.adds_budget.is_over)
    await asyncio.sleep(0.4)
    bookie.store.release()
    client.writer.write(data[1000:])
    answers = await client.receive_all(3)
    assert {answer.status for answer in answers.values()} == {0}


def adds_and_part(data: bytes) -> bytes:
    """Return adds that take more than 64 KiB with their overhead, and a part of a frame: few enough bytes to arrive
    together."""
    return v3.encode_requests([add(number, number, 400) for number in range(80)]) + data[:20_000]


async def test_frames_whose_rest_the_bookie_does_not_read_are_not_outlasted(start_bookie: Any) -> None:
    """A client that waits for others is not ended because of those that send incomplete frames."""
    bookie = await start_bookie(**FRAME, operations_total_max=3)
    limits = bookie.server.limits
    paused, slow, newer = [await bookie.connect() for _ in range(3)]
    bookie.store.hold()
    data = v3.encode_request(add(90, 90, 50_000))
    paused.writer.write(v3.encode_requests([m.ForceLedgerRequest(n, 1) for n in range(3)]) + data[:20_000])
    await eventually(lambda: limits.paused.used)
    assert limits.unfinished.used == 0
    await send_part(bookie, slow, 40_000)
    await send_part(bookie, newer, 41_000)
    assert await slow.is_closed()
    assert limits.paused.used
    bookie.store.release()
    await eventually(lambda: limits.paused.used == 0)
    paused.writer.write(data[20_000:])
    assert {answer.status for answer in (await paused.receive_all(4)).values()} == {0}
    assert limits.ends == {"unfinished": 1}


async def test_frames_of_paused_clients_are_bounded_too(start_bookie: Any) -> None:
    bookie = await start_bookie(**FRAME, adds_size_max=64 * 1024)
    limits = bookie.server.limits
    bookie.store.hold()
    for _ in range(8):
        client = await bookie.connect()
        client.writer.write(adds_and_part(v3.encode_request(add(90, 90, 50_000))))
        await asyncio.sleep(0.02)
    await eventually(lambda: limits.ends["paused"])
    assert 0 < limits.paused.used <= limits.paused.limit
    bookie.store.release()
    await eventually(lambda: limits.paused.used == 0)


async def test_many_writers_of_large_entries_go_on_in_turns(start_bookie: Any) -> None:
    """Each always has an incomplete frame, and none is ended except one that does not complete its frame."""
    bookie = await start_bookie(frame_size_max=2**20, unfinished_size_max=2**20)
    limits = bookie.server.limits
    stuck = await bookie.connect()
    stuck.writer.write(v3.encode_request(add(9, 9, 600_000))[:-1])
    await eventually(lambda: limits.unfinished.used > 590_000)
    clients = [await bookie.connect() for _ in range(8)]
    data = v3.encode_request(add(9, 9, 500_000))
    for client in clients:
        client.writer.write(data[:200_000])
    await eventually(lambda: limits.paused.used > 500_000)
    for client in clients:
        client.writer.write(data[200_000:])
    async with asyncio.timeout(10):
        assert {(await client.receive()).status for client in clients} == {0}
    assert limits.ends == {"unfinished": 1}
    assert await stuck.is_closed()
    assert (limits.paused.used, len(limits.unfinished)) == (0, 0)


async def test_the_rest_of_an_add_waits_for_the_journal(start_bookie: Any) -> None:
    """Otherwise the adds of many clients would exceed twice the budget, and be refused."""
    bookie = await start_bookie(adds_size_max=64 * 1024)
    first, other = await bookie.connect(), await bookie.connect()
    bookie.store.hold()
    first.send(add(1, 0, 70_000))
    await eventually(lambda: bookie.server.operations.adds_budget.is_over)
    data = v3.encode_request(add(9, 9, 50_000))
    other.writer.write(data[:20_000])
    await eventually(lambda: bookie.server.limits.paused.used)
    other.writer.write(data[20_000:])
    await asyncio.sleep(0.05)
    assert len(bookie.store.groups) == 1
    bookie.store.release()
    assert (await other.receive()).status == 0


@pytest.mark.parametrize("what", ["operations", "adds"])
async def test_a_frame_of_a_client_that_is_gone_does_not_count_again(start_bookie: Any, what: str) -> None:
    """The bookie goes on reading when its operations end, as if the client were still there."""
    bookie = await start_bookie(**FRAME, adds_size_max=64 * 1024, operations_max=2)
    limits, budget = bookie.server.limits, bookie.server.operations.adds_budget
    client = await bookie.connect()
    bookie.store.hold()
    data = v3.encode_request(add(90, 90, 50_000))
    if what == "adds":
        client.writer.write(adds_and_part(data))
    else:
        client.writer.write(v3.encode_requests([m.ForceLedgerRequest(n, 1) for n in range(3)]) + data[:20_000])
    await eventually(lambda: limits.paused.used + limits.unfinished.used)
    assert budget.waiting == (what == "adds")
    (connection,) = limits.room.connections
    connection.abort()
    await eventually(lambda: bookie.server.connection_count == 0)
    assert budget.waiting == 0, "while the journal is slow, clients may connect again and again"
    bookie.store.release()
    await eventually(lambda: not bookie.server._tasks and not budget.used)
    assert (limits.paused.used, limits.unfinished.used) == (0, 0)


# --- room for others


def rank_of(bookie: Any) -> int | None:
    (connection,) = bookie.server.limits.room.connections
    return connection.rank


async def test_the_rank_of_a_connection_is_what_the_bookie_does_for_it(start_bookie: Any) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(1))).status == 0
    assert rank_of(bookie) == IDLE
    bookie.store.hold()
    client.send(add(2, 1))
    await eventually(lambda: len(bookie.store.groups) == 2)
    assert rank_of(bookie) is None
    bookie.store.release()
    assert (await client.receive()).status == 0
    bookie.store.hold()
    client.send(m.ForceLedgerRequest(2, 1))
    await eventually(lambda: bookie.store.forces)
    assert rank_of(bookie) == BUSY
    bookie.store.release()
    assert (await client.receive()).status == 0
    client.send(m.ReadRequest(3, 1, -1, flag=2, previous_lac=2**40, timeout_ms=60_000))
    await eventually(lambda: bookie.server.operations.long_polls == 1)
    assert rank_of(bookie) == POLLING
    rest = await send_part(bookie, client, 1000)
    assert rank_of(bookie) == WAITING
    client.writer.write(rest)
    assert (await client.receive()).status == 0
    assert rank_of(bookie) == POLLING


async def test_a_client_that_does_not_read_is_waited_for(start_bookie: Any) -> None:
    bookie = await start_bookie()
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 0, 100_000))).status == 0
    await quick.close()
    await eventually(lambda: bookie.server.connection_count == 0)
    await stuck_readers(bookie, 1)
    await eventually(lambda: rank_of(bookie) == WAITING)


async def test_a_reading_client_is_known_by_the_bytes_that_it_reads(start_bookie: Any) -> None:
    bookie = await start_bookie()
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 0, 100_000))).status == 0
    await quick.close()
    await eventually(lambda: bookie.server.connection_count == 0)
    (slow,) = await stuck_readers(bookie, 1)
    (connection,) = bookie.server.limits.room.connections
    await eventually(lambda: connection._is_unread)
    await asyncio.sleep(0.1)
    connection.has_read()
    assert not connection.has_read()
    before = connection._transport.get_write_buffer_size()
    slow.reader._limit = 2**20
    slow.reader._maybe_resume_transport()
    await eventually(lambda: not connection._is_unread or connection._transport.get_write_buffer_size() < before)
    if connection._is_unread:
        assert connection.has_read()


async def test_above_the_limit_one_in_the_handshake_makes_room_before_idle_ones(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered(), connections_max=2, connections_per_address_max=2)
    known, shaking = await bookie.connect(), await bookie.connect()
    assert (await known.ask(add(1))).status == 0
    shaking.send_hex(START_TLS)
    await shaking.receive_bytes()
    await asyncio.sleep(UNKNOWN_GRACE_S)
    new = await bookie.connect()
    assert (await new.ask(add(2, 1))).status == 0
    assert await shaking.is_closed()
    assert (await known.ask(add(3, 2))).status == 0
    assert bookie.server.limits.ends == {"for_others": 1}
    assert bookie.metrics.auth_failures == 0, "it is counted once"


# --- the first request


async def test_a_client_that_sends_no_request_is_disconnected_and_an_idle_one_is_kept(start_bookie: Any) -> None:
    bookie = await start_bookie(first_request_timeout_s=0.2)
    silent, partial, idle = [await bookie.connect() for _ in range(3)]
    assert (await idle.ask(add(1))).status == 0
    await send_part(bookie, partial, 100)
    assert await silent.is_closed()
    assert await partial.is_closed()
    await asyncio.sleep(0.2)
    assert (await idle.ask(add(2, 1))).status == 0
    assert bookie.server.limits.ends == {"first_request_timeout": 2}


# --- unread responses


async def stuck_readers(bookie: Any, count: int) -> list[Any]:
    """Return clients that request much more than they read."""
    slow = [await bookie.connect(receive_buffer_size=4096) for _ in range(count)]
    for client in slow:
        client.reader._limit = 1024
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(30)])
        await asyncio.sleep(0.01)
    return slow


async def test_unread_responses_are_bounded_over_all_connections(start_bookie: Any) -> None:
    bookie = await start_bookie(unread_size_max=512 * 1024)
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 0, 100_000))).status == 0
    await stuck_readers(bookie, 12)
    limits = bookie.server.limits
    await eventually(lambda: limits.ends["unread"] >= 3)
    assert limits.unread.used <= 512 * 1024
    assert (await quick.ask(m.ReadRequest(9, 1, 0))).status == 0


async def test_responses_must_be_read_at_the_minimum_rate(start_bookie: Any) -> None:
    bookie = await start_bookie(transfer_grace_s=0.2, transfer_rate_min=1e9)
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 0, 100_000))).status == 0
    await stuck_readers(bookie, 2)
    limits = bookie.server.limits
    await eventually(lambda: limits.ends["unread_timeout"] == 2)
    await eventually(lambda: (limits.unread.used, bookie.server.operations.reads_budget.used) == (0, 0))
    assert (await quick.ask(m.ReadRequest(9, 1, 0))).status == 0


async def test_responses_that_are_read_hold_nothing(start_bookie: Any) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(0, 0, 100_000))).status == 0
    client.send(*[m.ReadRequest(n, 1, 0) for n in range(100)])
    assert len(await client.receive_all(100)) == 100
    await eventually(lambda: bookie.server.limits.unread.used == 0)
    assert not bookie.server.limits.ends


# --- operations


async def test_refusals_of_operations_are_sent_together(start_bookie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of writes would take many times their size if the client does not read."""
    sent: list[bytes] = []
    monkeypatch.setattr(BookieConnection, "send", lambda self, data: sent.append(data))
    bookie = await start_bookie(operations_total_max=5)
    client = await bookie.connect()
    bookie.store.hold()
    client.send(*[m.ForceLedgerRequest(n, 1) for n in range(500)])
    await eventually(lambda: sent)
    refusal = v3.encode_response(m.ForceLedgerResponse(0, m.Status.TOO_MANY_REQUESTS, 1))
    assert len(sent) == 1
    assert len(sent[0]) >= 490 * len(refusal)
    bookie.store.release()


async def test_operations_of_all_connections_are_bounded(start_bookie: Any) -> None:
    bookie = await start_bookie(operations_total_max=5)
    first, second = await bookie.connect(), await bookie.connect()
    bookie.store.hold()
    first.send(*[m.ForceLedgerRequest(n, 1) for n in range(5)])
    await eventually(lambda: bookie.store.forces == 5)
    second.send(*[m.ForceLedgerRequest(n, 1) for n in range(20)])
    refused = [await second.receive() for _ in range(15)]
    assert {answer.status for answer in refused} == {m.Status.TOO_MANY_REQUESTS}
    second.send(add(50))
    await asyncio.sleep(0.05)
    assert bookie.store.groups == [], "it is not read while the operations are over the limit"
    bookie.store.release()
    assert len(await first.receive_all(5)) == 5
    assert {(await second.receive()).status for _ in range(6)} == {0}
    assert bookie.server.operations.operations_budget.used == 0


async def test_a_connection_may_have_two_operations_whatever_others_have(start_bookie: Any) -> None:
    """Otherwise one client could keep the others from fencing a ledger, which recovery begins with."""
    bookie = await start_bookie(operations_total_max=5)
    greedy, other = await bookie.connect(), await bookie.connect()
    bookie.store.hold()
    greedy.send(*[m.ForceLedgerRequest(n, 1) for n in range(20)])
    assert {answer.status for answer in (await greedy.receive_all(10)).values()} == {m.Status.TOO_MANY_REQUESTS}
    other.send(*[m.ForceLedgerRequest(n, 1) for n in range(3)])
    assert (await other.receive()).status == m.Status.TOO_MANY_REQUESTS
    bookie.store.release()
    assert {answer.status for answer in (await other.receive_all(2)).values()} == {0}


async def test_a_connection_with_two_operations_is_read_whatever_others_have(start_bookie: Any) -> None:
    """Otherwise the adds of a broker would wait behind its single LAC while others have thousands of operations."""
    bookie = await start_bookie(operations_total_max=5)
    greedy, other = await bookie.connect(), await bookie.connect()
    assert (await other.ask(add(0, 0))).status == 0
    bookie.store.hold_forces()
    greedy.send(*[m.ForceLedgerRequest(n, 1) for n in range(10)])
    await eventually(lambda: bookie.server.operations.operations_budget.is_over)
    other.send(*[m.ForceLedgerRequest(n, 1) for n in range(2)])
    other.send(add(3, 1))
    assert (await other.receive()).txn_id == 3
    bookie.store.release()
    assert len(await other.receive_all(2)) == 2


async def test_long_polls_of_a_connection_count_as_its_operations(start_bookie: Any) -> None:
    bookie = await start_bookie(operations_max=4)
    waiting, other = await bookie.connect(), await bookie.connect()
    assert (await other.ask(add(0, 0))).status == 0
    polls = [
        m.ReadRequest(n, 1, -1, flag=m.ReadFlag.ENTRY_PIGGYBACK, previous_lac=-1, timeout_ms=60_000) for n in range(4)
    ]
    waiting.send(*polls)
    await eventually(lambda: bookie.server.operations.long_polls == 4)
    waiting.send(add(5, 1))
    await asyncio.sleep(0.05)
    assert bookie.store.groups == [1], "it is not read while it has as many as it may have"
    await bookie.store.fence(1, KEY)
    assert {answer.status for answer in (await waiting.receive_all(4)).values()} == {0}
    assert (await waiting.receive()).txn_id == 5


async def test_a_connection_is_read_again_once_it_has_two_operations(start_bookie: Any) -> None:
    bookie = await start_bookie(operations_total_max=7)
    greedy, other = await bookie.connect(), await bookie.connect()
    assert (await other.ask(add(0, 0))).status == 0
    bookie.store.hold_forces()
    greedy.send(*[m.ForceLedgerRequest(n, 1) for n in range(8)])
    await eventually(lambda: bookie.server.operations.operations_budget.is_over)
    other.send(*[m.ReadLacRequest(n, 1) for n in range(3)])
    assert {answer.status for answer in (await other.receive_all(3)).values()} == {0}
    assert (await other.ask(add(1, 1))).status == 0
    assert bookie.server.operations.operations_budget.waiting <= 1, "only the other one waits"
    bookie.store.release()
    assert len(await greedy.receive_all(8)) == 8
    await eventually(lambda: bookie.server.operations.operations_budget.used == 0)


async def test_addresses_that_hold_nothing_go_on_together_while_others_hold_more_than_the_limit(
    start_bookie: Any,
) -> None:
    """Each waits for its turn to issue reads meanwhile, which counts as a byte."""
    bookie = await start_bookie()
    writer = await bookie.connect()
    assert (await writer.ask(add(0, 0))).status == 0
    budget = bookie.server.operations.reads_budget
    held = budget.limit + budget.limit // 5
    budget.take(held, group="others")
    clients = [await bookie.connect(address=address) for address in ("127.0.0.2", "127.0.0.3")]
    for client in clients:
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(900)])
    for answers in await asyncio.gather(*(client.receive_all(900) for client in clients)):
        assert {answer.status for answer in answers.values()} == {0}
    budget.give(held, group="others")
    assert budget.used == 0


async def test_lookups_end_with_their_connection(start_bookie: Any) -> None:
    """Entries are not read and encoded for clients that have gone."""
    bookie = await start_bookie()
    client, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    assert (await quick.ask(add(0, 0, 1_000_000))).status == 0
    client.reader._limit = 1024
    client.send(
        *[m.ReadLacRequest(n, 1) for n in range(500)], m.ListEntriesRequest(500, 1), m.ForceLedgerRequest(501, 1)
    )
    budget = bookie.server.operations.operations_budget
    await eventually(lambda: budget.used >= 400)
    client.writer.transport.abort()
    await eventually(lambda: budget.used == 0)
    counts = bookie.metrics.operations
    assert counts["READ_LAC"].success.count < 100
    assert counts["GET_LIST_OF_ENTRIES_OF_LEDGER"].success.count == 0
    assert counts["FORCE_LEDGER"].success.count == 1


async def test_small_requests_for_large_entries_are_answered_as_the_client_reads(start_bookie: Any) -> None:
    """A thousand reads of the LAC of one large entry would otherwise be answered with a gigabyte at once."""
    bookie = await start_bookie()
    client, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    assert (await quick.ask(add(0, 0, 1_000_000))).status == 0
    client.reader._limit = 1024
    client.send(*[m.ReadLacRequest(n, 1) for n in range(100)])
    (connection, _) = bookie.server.limits.room.connections
    await eventually(lambda: connection.is_unsent)
    await asyncio.sleep(0.1)
    assert connection._transport.get_write_buffer_size() < (ENTRY_TURNS_MAX + 1) * 1_100_000
    assert (await quick.ask(m.ReadLacRequest(1, 1))).status == 0
    client.reader._limit = 2**20
    client.reader._maybe_resume_transport()
    assert {answer.status for answer in (await client.receive_all(100)).values()} == {0}


async def test_a_client_that_does_not_read_does_not_keep_the_operations_of_others(start_bookie: Any) -> None:
    bookie = await start_bookie(operations_total_max=10, unsent_time_max_s=0.05)
    stuck, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    assert (await quick.ask(add(0, 0, 1_000_000))).status == 0
    stuck.reader._limit = 1024
    stuck.send(*[m.ReadLacRequest(n, 1) for n in range(16)])
    await eventually(lambda: bookie.server.operations.operations_budget.is_over)
    quick.send(*[m.ReadLacRequest(n, 1) for n in range(3)])
    assert {answer.status for answer in (await quick.receive_all(3)).values()} == {0}
    assert (await quick.ask(add(3, 1))).status == 0
    assert bookie.server.limits.ends == {}
    bookie.store.hold_forces()
    quick.send(*[m.ForceLedgerRequest(n, 1) for n in range(3)])
    await eventually(lambda: bookie.server.limits.ends == {"blocks_others": 1})
    bookie.store.release()
    assert {answer.status for answer in (await quick.receive_all(3)).values()} == {0}


# --- TLS


def offered() -> Security:
    settings = TlsSettings(certificate_file=str(certificate("bookie")), key_file=str(key("bookie")))
    return Security(tls=load_security(AuthSettings(), settings, now_s=lambda: 0.0).tls)


async def test_handshakes_in_progress_are_bounded(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered(), handshakes_max=1)
    stuck, quick = await bookie.connect(), await bookie.connect()
    for client in (stuck, quick):
        client.send_hex(START_TLS)
        await client.receive_bytes()
    assert await stuck.is_closed()
    await quick.writer.start_tls(ssl.create_default_context(cafile=str(CA)), server_hostname="localhost")
    assert (await quick.ask(add(1))).status == 0
    assert bookie.server.limits.ends == {"handshakes": 1}
    assert bookie.server.limits.handshakes.count == 0


async def test_connections_with_tls_are_bounded(start_bookie: Any) -> None:
    """Each can take more memory than a hundred others. One without TLS is not affected."""
    bookie = await start_bookie(security=offered(), secured_connections_max=2, connections_per_address_max=2000)
    clear, idle, quick, new = [await bookie.connect() for _ in range(4)]
    assert (await clear.ask(add(1))).status == 0
    for client in (idle, quick, new):
        client.send_hex(START_TLS)
        await client.receive_bytes()
        await client.writer.start_tls(ssl.create_default_context(cafile=str(CA)), server_hostname="localhost")
        assert (await client.ask(add(1))).status == 0
        if client is quick:
            await asyncio.sleep(0.01)
    assert await idle.is_closed()
    for client in (clear, quick, new):
        assert (await client.ask(add(2))).status == 0
    limits = bookie.server.limits
    assert (limits.ends, len(limits.secured)) == ({"secured": 1}, 2)
    for client in (clear, quick, new):
        await client.close()
    await eventually(lambda: not len(limits.secured) and not len(limits.room))


async def test_a_connection_with_tls_is_closed_if_the_bookie_works_for_all_others(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered(), secured_connections_max=1)
    first, second = await bookie.connect(), await bookie.connect()
    for client in (first, second):
        client.send_hex(START_TLS)
        await client.receive_bytes()
        tls = ssl.create_default_context(cafile=str(CA))
        if client is first:
            await client.writer.start_tls(tls, server_hostname="localhost")
            assert (await client.ask(add(1))).status == 0
            bookie.store.hold()
            first.send(add(2, 1))
            await eventually(lambda: len(bookie.store.groups) == 2)
        else:
            with contextlib.suppress(OSError):
                await client.writer.start_tls(tls, server_hostname="localhost")
            assert await second.is_closed()
    bookie.store.release()
    assert (await first.receive()).status == 0
    assert bookie.server.limits.ends == {"secured": 1}
    await eventually(lambda: bookie.server.connection_count == 1)


async def test_a_client_must_send_a_request_after_its_handshake(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered(), first_request_timeout_s=0.5)
    client = await bookie.connect()
    client.send_hex(START_TLS)
    await client.receive_bytes()
    await client.writer.start_tls(ssl.create_default_context(cafile=str(CA)), server_hostname="localhost")
    assert await client.is_closed()
    assert bookie.server.limits.ends == {"first_request_timeout": 1}


async def test_responses_during_a_handshake_count_as_unread(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered())
    client = await bookie.connect()
    bookie.store.hold()
    client.send(m.ForceLedgerRequest(1, 1))
    await eventually(lambda: bookie.store.forces == 1)
    client.send_hex(START_TLS)
    await client.receive_bytes()
    limits = bookie.server.limits
    assert (limits.unread.used, limits.handshakes.count) == (0, 1)
    bookie.store.release()
    await eventually(lambda: limits.unread.used > 0)
    await client.writer.start_tls(ssl.create_default_context(cafile=str(CA)), server_hostname="localhost")
    assert (await client.receive()).status == 0
    assert (limits.unread.used, limits.handshakes.count) == (0, 0)


async def test_responses_during_a_handshake_cannot_displace_those_of_others(start_bookie: Any) -> None:
    bookie = await start_bookie(security=offered(), unsent_size_max=64 * 1024, unread_size_max=1024 * 1024)
    client, quick = await bookie.connect(), await bookie.connect()
    assert (await quick.ask(add(0, 0, 20_000))).status == 0
    (slow,) = await stuck_readers(bookie, 1)
    limits = bookie.server.limits
    await eventually(lambda: limits.unread.used > 0)
    bookie.store.hold()
    client.send(*[m.ReadRequest(n, 1, 0, flag=1, master_key=KEY) for n in range(100)])
    await eventually(lambda: bookie.server.operations.operations_budget.used == 100)
    client.send_hex(START_TLS)
    await client.receive_bytes()
    bookie.store.release()
    assert await client.is_closed()
    assert limits.ends == {"unread": 1}
    await eventually(lambda: not bookie.server._tasks)
    assert not slow.reader.at_eof()


async def test_a_client_that_does_not_authenticate_in_time_is_counted_as_such(start_bookie: Any) -> None:
    security = Security(authenticator=Anyone(), auth_timeout_s=0.1)
    bookie = await start_bookie(security=security, first_request_timeout_s=0.3)
    silent, quick = await bookie.connect(), await bookie.connect()
    assert (await quick.ask(m.AuthRequest(0, "any", b""))).status == 0
    assert await silent.is_closed()
    assert bookie.metrics.auth_failures == 1
    await asyncio.sleep(0.4)
    assert (await quick.ask(add(1))).status == 0, "it is known, and may be idle"
    assert not bookie.server.limits.ends


@pytest.mark.parametrize("name", ["SO_KEEPALIVE", "TCP_NOTSENT_LOWAT"])
async def test_the_kernel_finds_dead_clients_and_keeps_little_unsent(start_bookie: Any, name: str) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(1))).status == 0
    (connection,) = bookie.server.limits.room.connections
    sock = connection._transport.get_extra_info("socket")
    level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
    assert sock.getsockopt(level, getattr(socket, name)) == {"SO_KEEPALIVE": 1, "TCP_NOTSENT_LOWAT": 65536}[name]


async def test_the_first_bytes_of_a_connection_wait_for_their_turn(start_bookie: Any) -> None:
    """They count meanwhile, and are dropped with the connection."""
    bookie = await start_bookie()
    limits = bookie.server.limits
    client, other = await bookie.connect(), await bookie.connect()
    await eventually(lambda: len(limits.room) == 2)
    first, second = limits.room.connections
    for connection in (first, second):
        connection.data_received(v3.encode_request(add(1)))
    assert limits.paused.used > 0
    assert bookie.store.groups == []
    second.connection_lost(None)
    assert len(limits.first_reads) == 1
    assert (await client.receive()).status == 0
    assert (limits.paused.used, bookie.store.groups) == (0, [1])
    assert (await client.ask(add(2, 1))).status == 0
    other.writer.transport.abort()
