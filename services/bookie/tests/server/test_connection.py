"""Hostile and slow clients: each affects only itself, and memory stays within its budgets."""

import asyncio
import random
import socket

import pytest
from bindery_bookie.server import connection as connection_module
from bindery_bookie.server.operations import PENDING_READS_FREE_COUNT, READ_ANSWER_SIZE_MAX
from bindery_bookie.server.read_turns import READ_TURN_COUNT_MAX, READ_UNIT_SIZE
from bindery_bookie.server.server import LISTENERS
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v3

KEY = master_key(b"")
CRC32C = Digester(DigestType.CRC32C)


def add(txn_id: int, ledger_id: int, entry_id: int, size: int = 10) -> m.AddRequest:
    body = pack(CRC32C, ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=2**40, payload=bytes(size))
    return m.AddRequest(txn_id, ledger_id, entry_id, KEY, body)


async def eventually(condition, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


# --- bytes that are no requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        b"\x00\x50\x00\x01",
        b"GET / HTTP/1.1\r\nHost: bookie\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x18\x02\x04\x00\x00" + bytes(20),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    ],
    ids=["empty frame", "negative", "2 GiB", "one over 5 MiB", "HTTP", "no protobuf", "v2 read LAC", "TLS hello"],
)
async def test_malformed_bytes_end_only_their_connection(bookie, client, data) -> None:
    neighbour = await bookie.connect()
    client.writer.write(data)
    assert await client.is_closed()
    assert (await neighbour.ask(add(1, 1, 0))).status == 0
    assert bookie.metrics.bad_frames == 1


async def test_random_bytes_do_not_harm_the_process(bookie, caplog) -> None:
    """Two hundred connections send random bytes, some after a plausible length."""
    noise = random.Random(7)
    for _ in range(200):
        client = await bookie.connect()
        data = noise.randbytes(noise.randrange(1, 400))
        if noise.random() < 0.7:
            data = len(data).to_bytes(4, "big") + data
        client.writer.write(data)
        client.writer.write_eof()
        assert await client.is_closed()
    await eventually(lambda: bookie.server.connection_count == 0)
    survivor = await bookie.connect()
    assert (await survivor.ask(add(1, 1, 0))).status == 0


async def test_flipped_bits_in_real_frames_do_not_harm_the_process(bookie) -> None:
    noise = random.Random(11)
    frames = [
        v3.encode_request(request)
        for request in (
            add(1, 1, 0),
            m.ReadRequest(2, 1, 0),
            m.ReadRequest(3, 1, -1, flag=1, master_key=KEY),
            m.ReadRequest(4, 1, -1, flag=2, previous_lac=5, timeout_ms=10),
            m.WriteLacRequest(5, 1, 3, KEY, b"packet"),
            m.ForceLedgerRequest(6, 1),
            m.AuthRequest(7, "plugin", b"x"),
        )
    ]
    for _ in range(150):
        client = await bookie.connect()
        frame = bytearray(noise.choice(frames))
        for _ in range(noise.randrange(1, 4)):
            frame[noise.randrange(4, len(frame))] ^= 1 << noise.randrange(8)
        client.writer.write(bytes(frame))
        client.writer.write_eof()
        async with asyncio.timeout(30):
            await client.reader.read()
    survivor = await bookie.connect()
    assert (await survivor.ask(add(1, 77, 0))).status == 0
    assert bookie.server.operations.adds_budget.used == 0
    assert bookie.server.operations.reads_budget.used == 0
    assert bookie.server.operations.long_polls == 0


async def test_a_request_that_arrives_byte_by_byte_is_served(client) -> None:
    for byte in v3.encode_request(add(1, 1, 0)):
        client.writer.write(bytes((byte,)))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert (await client.receive()).status == 0


async def test_a_partial_frame_waits_and_its_client_may_disconnect(bookie, client) -> None:
    client.writer.write(v3.encode_request(add(1, 1, 0))[:30])
    await asyncio.sleep(0.01)
    assert bookie.store.groups == []
    await client.close()
    await eventually(lambda: bookie.server.connection_count == 0)


async def test_the_largest_frame_passes_and_the_next_larger_does_not(start_bookie) -> None:
    bookie = await start_bookie(frame_size_max=8192)
    client = await bookie.connect()
    overhead = len(v3.encode_request(add(1, 1, 0, size=8000))) - 8000
    assert (await client.ask(add(1, 1, 0, size=8192 - overhead))).status == 0
    client.send(add(2, 1, 1, size=8192 - overhead + 1))
    assert await client.is_closed()


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_above_the_limit_the_connection_that_has_been_idle_longest_is_closed(start_bookie) -> None:
    bookie = await start_bookie(connections_max=2, connections_per_address_max=2)
    first, second = await bookie.connect(), await bookie.connect()
    assert (await first.ask(add(1, 1, 0))).status == (await second.ask(add(2, 1, 1))).status == 0
    await asyncio.sleep(0.01)
    assert (await first.ask(add(3, 1, 2))).status == 0
    assert (await (await bookie.connect()).ask(add(4, 1, 3))).status == 0
    assert await second.is_closed()
    assert (await first.ask(add(5, 1, 4))).status == 0
    assert bookie.server.limits.ends == {"for_others": 1}


async def test_a_connection_above_the_limit_is_closed_if_all_others_have_adds_in_progress(start_bookie) -> None:
    bookie = await start_bookie(connections_max=2, connections_per_address_max=2)
    first, second = await bookie.connect(), await bookie.connect()
    bookie.store.hold()
    first.send(add(1, 1, 0))
    second.send(add(2, 1, 1))
    await eventually(lambda: len(bookie.store.groups) == 2)
    assert await (await bookie.connect()).is_closed()
    bookie.store.release()
    assert (await first.receive()).status == (await second.receive()).status == 0
    assert bookie.server.limits.ends == {"connections": 1}


async def test_several_connections_are_accepted_in_a_turn_of_the_loop(start_bookie) -> None:
    """uvloop accepts one per listener, so that under load a new connection would wait for hundreds of turns."""
    bookie = await start_bookie()
    socks = [socket.socket() for _ in range(64)]
    for sock in socks:
        sock.connect(("127.0.0.1", bookie.port))
    most, before = 0, 0
    async with asyncio.timeout(30):
        while before < len(socks):
            await asyncio.sleep(0)
            most, before = max(most, bookie.server.connection_count - before), bookie.server.connection_count
    for sock in socks:
        sock.close()
    assert most >= LISTENERS // 2


async def test_adds_over_the_budget_pause_reading_until_some_are_answered(start_bookie) -> None:
    """The journal blocks while a client sends adds: memory stays near the budget, and no add is lost or refused."""
    bookie = await start_bookie(adds_size_max=256 * 1024)
    client = await bookie.connect()
    bookie.store.hold()
    total = 600
    client.send(*[add(n, 1, n, size=10_000) for n in range(total)])
    budget = bookie.server.operations.adds_budget
    await eventually(lambda: budget.is_over)
    await asyncio.sleep(0.05)
    assert budget.used < 256 * 1024 + 1024 * 1024, "one socket read over the budget, not six megabytes"
    taken = sum(bookie.store.groups)
    assert taken < total
    await asyncio.sleep(0.05)
    assert sum(bookie.store.groups) == taken
    bookie.store.release()
    answers = await client.receive_all(total)
    assert {answer.status for answer in answers.values()} == {0}
    assert budget.used == 0


async def test_a_client_that_does_not_read_delays_only_its_own_responses(start_bookie, monkeypatch) -> None:
    """The client does not read the responses of large entries: the bookie holds a few of them, not all."""
    monkeypatch.setattr(connection_module, "READ_BATCH_SIZE", 256 * 1024)
    bookie = await start_bookie(unsent_size_max=64 * 1024, reads_size_max=64 * 1024 * 1024)
    slow, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    for entry_id in range(4):
        assert (await quick.ask(add(entry_id, 1, entry_id, size=200_000))).status == 0
    total = 400
    slow.reader._limit = 1024  # type: ignore[attr-defined]
    slow.send(*[m.ReadRequest(n, 1, n % 4) for n in range(total)])
    operations = bookie.server.operations
    await eventually(lambda: operations.reads_budget.used > 64 * 1024)
    await asyncio.sleep(0.1)
    issued = sum(bookie.store.read_groups)
    assert issued < total // 4, "80 MB of answers must not be made for a client that does not read"
    assert (await quick.ask(m.ReadRequest(9, 1, 0))).status == 0
    slow.reader._limit = 2**20  # type: ignore[attr-defined]
    slow.reader._maybe_resume_transport()  # type: ignore[attr-defined]
    answers = await slow.receive_all(total)
    assert {answer.status for answer in answers.values()} == {0}
    await eventually(lambda: operations.reads_budget.used == 0)


async def test_waiting_reads_are_answered_in_thirds(start_bookie) -> None:
    """The client reads the first responses while the bookie prepares the others."""
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(0, 1, 0))).status == 0
    for txn_id in range(40):  # until the estimated entry size is small
        assert (await client.ask(m.ReadRequest(txn_id, 1, 0))).status == 0
    bookie.store.read_groups.clear()
    client.send(*[m.ReadRequest(100 + n, 1, 0) for n in range(200)])
    answers = await client.receive_all(200)
    assert {answer.status for answer in answers.values()} == {0}
    assert bookie.store.read_groups == [66, 44, 32, 32, 26]


async def test_reads_from_the_cache_yield_to_other_connections(start_bookie, monkeypatch) -> None:
    """The limit holds for any number of segments in one turn, from any connections."""
    bookie = await start_bookie()
    clients = [await bookie.connect() for _ in range(4)]
    assert (await clients[0].ask(add(0, 1, 0))).status == 0
    turn = 0
    reads_in: dict[int, int] = {}
    read_many = bookie.store.read_many

    def counted(keys, done) -> None:  # type: ignore[no-untyped-def]
        reads_in[turn] = reads_in.get(turn, 0) + len(keys)
        read_many(keys, done)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    monkeypatch.setattr(bookie.store, "read_many", counted)
    for client in clients:
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(3000)])
    for client in clients:
        answers = await client.receive_all(3000)
        assert {answer.status for answer in answers.values()} == {0}
    counting.cancel()
    assert sum(reads_in.values()) == 12_000
    # A turn that is counted here may span two turns of the event loop.
    assert max(reads_in.values()) <= 2 * READ_TURN_COUNT_MAX
    assert bookie.server.operations.reads_budget.used == 0


async def test_closing_answers_reads_that_wait_for_a_turn(start_bookie) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(0, 1, 0))).status == 0
    client.send(*[m.ReadRequest(n, 1, 0) for n in range(4000)])
    await eventually(lambda: bookie.server.operations.pending_reads > 0)
    closing = asyncio.ensure_future(bookie.server.close())
    answers = await client.receive_all(4000)
    assert {answer.status for answer in answers.values()} == {0}
    await closing


async def test_an_error_of_the_store_leaves_no_read_unanswered(start_bookie, monkeypatch) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(0, 1, 0))).status == 0

    def broken(keys, done) -> None:  # type: ignore[no-untyped-def]
        raise KeyError(keys[0])

    def torn(keys, done) -> None:  # type: ignore[no-untyped-def]
        done([0])
        raise KeyError(keys[0])

    for wrong in (broken, torn):
        monkeypatch.setattr(bookie.store, "read_many", wrong)
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(3)])
        answers = await client.receive_all(3)
        assert {answer.status for answer in answers.values()} == {m.Status.IO_ERROR}
    assert bookie.server.operations.reads_budget.used == 0
    assert bookie.metrics.reads_in_progress == 0


async def test_an_error_of_the_store_leaves_no_add_unanswered(start_bookie, monkeypatch) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()

    def broken(adds, done) -> None:  # type: ignore[no-untyped-def]
        raise KeyError(adds[0].ledger_id)

    def torn(adds, done) -> None:  # type: ignore[no-untyped-def]
        done([0])
        raise KeyError(adds[0].ledger_id)

    def twice(adds, done) -> None:  # type: ignore[no-untyped-def]
        asyncio.get_running_loop().call_soon(done, [0] * len(adds))
        raise KeyError(adds[0].ledger_id)

    for wrong in (broken, torn, twice):
        with monkeypatch.context() as patched:
            patched.setattr(bookie.store, "add_many", wrong)
            client.send(*[add(n, 1, n) for n in range(3)])
            answers = await client.receive_all(3)
        assert {answer.status for answer in answers.values()} == {m.Status.IO_ERROR}
    assert (await client.ask(add(9, 1, 0))).status == 0  # no second answer came before
    assert bookie.server.operations.adds_budget.used == 0
    assert bookie.metrics.adds_in_progress == 0


async def test_a_slow_reader_that_disconnects_releases_its_budget(start_bookie) -> None:
    bookie = await start_bookie(unsent_size_max=64 * 1024)
    slow, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    assert (await quick.ask(add(0, 1, 0, size=1_000_000))).status == 0
    slow.reader._limit = 1024  # type: ignore[attr-defined]
    slow.send(*[m.ReadRequest(n, 1, 0) for n in range(200)])
    budget = bookie.server.operations.reads_budget
    await eventually(lambda: budget.used > 0)
    slow.writer.transport.abort()
    await eventually(lambda: budget.used == 0)
    assert (await quick.ask(m.ReadRequest(1, 1, 0))).status == 0


async def test_the_budget_of_reads_is_shared_by_all_connections(start_bookie) -> None:
    bookie = await start_bookie(reads_size_max=1024 * 1024, unsent_size_max=64 * 1024)
    writer = await bookie.connect()
    assert (await writer.ask(add(0, 1, 0, size=100_000))).status == 0
    clients = [await bookie.connect() for _ in range(8)]
    for client in clients:
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(40)])
    # At the same time: clients that do not read may hold so much that another one waits until they are disconnected.
    for answers in await asyncio.gather(*(client.receive_all(40) for client in clients)):
        assert {answer.status for answer in answers.values()} == {0}
    await eventually(lambda: bookie.server.operations.reads_budget.used == 0)


async def stuck_readers(bookie, count: int) -> list:
    """Return clients that request much more than they read, with responses of 200 kB."""
    slow = [await bookie.connect(receive_buffer_size=4096) for _ in range(count)]
    for client in slow:
        client.reader._limit = 1024
        client.send(*[m.ReadRequest(n, 1, 0) for n in range(100)])
    return slow


async def test_clients_that_do_not_read_do_not_starve_others(start_bookie) -> None:
    bookie = await start_bookie(reads_size_max=1024 * 1024, unsent_size_max=64 * 1024, unsent_time_max_s=0.1)
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 1, 0, size=200_000))).status == 0
    slow = await stuck_readers(bookie, 8)
    budget = bookie.server.operations.reads_budget
    await eventually(lambda: budget.is_over)
    async with asyncio.timeout(30):
        assert (await quick.ask(m.ReadRequest(9, 1, 0))).status == 0
    assert bookie.metrics.bad_frames == 0
    for client in slow:
        client.writer.transport.abort()
    await eventually(lambda: (budget.used, budget.waiting) == (0, 0))


async def test_a_client_that_does_not_read_is_kept_while_no_other_waits(start_bookie) -> None:
    bookie = await start_bookie(reads_size_max=512 * 1024, unsent_size_max=64 * 1024, unsent_time_max_s=0.02)
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 1, 0, size=200_000))).status == 0
    (slow,) = await stuck_readers(bookie, 1)
    budget = bookie.server.operations.reads_budget
    await eventually(lambda: budget.is_over)
    await asyncio.sleep(0.2)
    assert bookie.server.connection_count == 2, "it may wait for room itself"
    slow.reader._limit = 2**20
    slow.reader._maybe_resume_transport()
    assert len(await slow.receive_all(100)) == 100


class Wire(asyncio.Transport):
    """A transport to a client that reads `step` bytes between two checks of the unsent bytes."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.connection: connection_module.BookieConnection
        self.step = step
        self.unsent = self.looks = 0
        self.is_checked = False
        """Whether the connection checks now how much is unsent."""
        self.aborted = False

    def write(self, data) -> None:
        self.unsent += len(data)
        self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        if self.is_checked:
            self.looks += 1
            self.unsent -= self.step
        return self.unsent

    def set_write_buffer_limits(self, high=None, low=None) -> None:
        assert (high, low) == (4096, 1024)

    def pause_reading(self) -> None:
        assert not self.aborted

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True
        self.connection.connection_lost(None)


@pytest.mark.parametrize(("step", "is_cut"), [(0, True), (200, True), (2048, False), (-100, True)])
async def test_a_slow_reader_that_still_reads_is_kept_while_others_wait(start_bookie, step, is_cut) -> None:
    """Responses in progress that are still added do not count as read."""
    bookie = await start_bookie(reads_size_max=512 * 1024, unsent_size_max=4096, unsent_time_max_s=0.08)
    quick = await bookie.connect()
    assert (await quick.ask(add(0, 1, 0, size=200_000))).status == 0
    operations, budget = bookie.server.operations, bookie.server.operations.reads_budget
    wire = Wire(step)

    class Checked(connection_module.BookieConnection):
        def _check_unsent(self) -> None:
            wire.is_checked = True
            super()._check_unsent()
            wire.is_checked = False

    wire.connection = Checked(bookie.server)
    wire.connection.connection_made(wire)
    operations.handle(wire.connection, [m.ReadRequest(n, 1, 0) for n in range(8)])
    await eventually(lambda: wire.unsent > 0 and budget.is_over)
    quick.send(m.ReadRequest(9, 1, 0))
    await eventually(lambda: wire.looks >= 20 or wire.aborted)
    assert wire.aborted == is_cut
    if not is_cut:
        assert budget.waiting == 1
        wire.abort()
    assert set(await quick.receive_all(1)) == {9}
    await eventually(lambda: budget.used == 0)
    assert 2 <= wire.looks < 20 if is_cut else wire.looks >= 20


async def test_large_entries_from_the_cache_yield_to_other_connections(start_bookie) -> None:
    """Clients that read as fast as the bookie sends would otherwise have a turn of 256 large entries each."""
    bookie = await start_bookie()
    writer = await bookie.connect()
    assert (await writer.ask(add(0, 1, 0, size=500_000))).status == 0
    turn = 0
    sent_in: dict[int, int] = {}

    class Quick(Wire):
        def write(self, data) -> None:
            sent_in[turn] = sent_in.get(turn, 0) + len(data)

        def set_write_buffer_limits(self, high=None, low=None) -> None: ...

    wires = [Quick(0) for _ in range(4)]
    for wire in wires:
        wire.connection = connection_module.BookieConnection(bookie.server)
        wire.connection.connection_made(wire)
        bookie.server.operations.handle(wire.connection, [m.ReadRequest(n, 1, 0) for n in range(200)])
    while sum(sent_in.values()) < 4 * 200 * 500_000:
        turn += 1
        await asyncio.sleep(0)
        assert turn < 1000
    # A turn that is counted here may span two turns of the event loop; each may be exceeded by one answer.
    assert max(sent_in.values()) <= 2 * (READ_TURN_COUNT_MAX * READ_UNIT_SIZE + READ_ANSWER_SIZE_MAX)
    for wire in wires:
        wire.abort()
    assert bookie.server.operations.reads_budget.used == 0


async def test_reads_of_larger_entries_than_expected_are_answered_in_parts(start_bookie, monkeypatch) -> None:
    """Otherwise a thousand reads of one large entry, after reads of small ones, would be answered with gigabytes."""
    sizes: list[int] = []
    send = connection_module.BookieConnection.send

    def counted(self, data) -> None:
        sizes.append(len(data))
        send(self, data)

    monkeypatch.setattr(connection_module.BookieConnection, "send", counted)
    bookie = await start_bookie()
    client = await bookie.connect()
    assert (await client.ask(add(0, 1, 0))).status == 0
    assert (await client.ask(add(0, 1, 1, size=1_000_000))).status == 0
    for txn_id in range(40):  # until the estimated entry size is small
        assert (await client.ask(m.ReadRequest(txn_id, 1, 0))).status == 0
    client.send(*[m.ReadRequest(n, 1, 1) for n in range(50)])
    answers = await client.receive_all(50)
    assert {(answer.status, len(answer.body)) for answer in answers.values()} == {(0, len(answers[0].body))}
    assert max(sizes) < READ_ANSWER_SIZE_MAX + 1_100_000
    assert bookie.metrics.reads_in_progress == bookie.server.operations.pending_reads == 0
    await eventually(lambda: bookie.server.operations.reads_budget.used == 0)


async def test_reads_that_are_to_be_issued_again_end_with_their_connection(start_bookie, monkeypatch) -> None:
    bookie = await start_bookie()
    client = await bookie.connect()
    for entry_id in range(3):
        assert (await client.ask(add(0, 1, entry_id, size=1_500_000))).status == 0
    waiting: list = []
    read_many = bookie.store.read_many
    monkeypatch.setattr(bookie.store, "read_many", lambda keys, done: waiting.append((keys, done)))
    client.send(*[m.ReadRequest(n, 1, n) for n in range(3)])
    await eventually(lambda: waiting)
    client.writer.transport.abort()
    await eventually(lambda: bookie.server.connection_count == 0)
    for keys, done in waiting:
        read_many(keys, done)
    operations = bookie.server.operations
    assert (operations.pending_reads, operations.reads_budget.used) == (0, 0)


async def test_a_connection_does_not_pass_those_that_wait_for_room(start_bookie) -> None:
    """Otherwise clients that connect over and over would take all room that becomes free."""
    bookie = await start_bookie(reads_size_max=1024 * 1024)
    first, second = await bookie.connect(), await bookie.connect()
    assert (await first.ask(add(0, 1, 0))).status == 0
    budget = bookie.server.operations.reads_budget
    budget.take(1024 * 1024, group="127.0.0.1")
    first.send(m.ReadRequest(1, 1, 0))
    await eventually(lambda: budget.waiting == 1)
    budget.give(256 * 1024, group="127.0.0.1")
    second.send(m.ReadRequest(2, 1, 0))
    await eventually(lambda: budget.waiting == 2)
    budget.give(768 * 1024, group="127.0.0.1")
    assert (await first.receive()).status == (await second.receive()).status == 0
    assert (budget.waiting, budget.used) == (0, 0)


async def test_a_few_reads_of_each_connection_may_wait_whatever_others_have(start_bookie) -> None:
    bookie = await start_bookie(reads_size_max=64 * 1024, pending_reads_max=50)
    greedy, modest = await bookie.connect(), await bookie.connect()
    assert (await modest.ask(add(0, 1, 0))).status == 0
    bookie.server.operations.reads_budget.take(64 * 1024, group="127.0.0.1")
    greedy.send(*[m.ReadRequest(n, 1, 0) for n in range(60)])
    assert {(await greedy.receive()).status for _ in range(10)} == {m.Status.TOO_MANY_REQUESTS}
    modest.send(*[m.ReadRequest(n, 1, 0) for n in range(PENDING_READS_FREE_COUNT + 1)])
    assert (await modest.receive()).status == m.Status.TOO_MANY_REQUESTS
    bookie.server.operations.reads_budget.give(64 * 1024, group="127.0.0.1")
    assert {(await modest.receive()).status for _ in range(PENDING_READS_FREE_COUNT)} == {0}
    assert {(await greedy.receive()).status for _ in range(50)} == {0}


async def test_many_operations_pause_their_connection(start_bookie) -> None:
    bookie = await start_bookie(operations_max=10)
    client = await bookie.connect()
    bookie.store.hold()
    client.send(*[m.ForceLedgerRequest(n, 1) for n in range(10)])
    await eventually(lambda: bookie.store.forces == 10)
    client.send(add(50, 1, 0))
    await asyncio.sleep(0.05)
    assert bookie.store.groups == []
    bookie.store.release()
    assert set(await client.receive_all(11)) == {*range(10), 50}


async def test_pending_reads_are_bounded(start_bookie, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "PENDING_READS_MAX", 100)
    bookie = await start_bookie()
    client = await bookie.connect()
    await client.ask(add(0, 1, 0))
    client.send(*[m.ReadRequest(n, 1, 0) for n in range(5000)])
    assert set(await client.receive_all(5000)) == set(range(5000))


# --- the end --------------------------------------------------------------------------------------------------------


async def test_closing_answers_requests_in_progress(bookie, client) -> None:
    bookie.store.hold()
    client.send(add(1, 1, 0), m.ForceLedgerRequest(2, 1))
    await eventually(lambda: bookie.store.groups == [1])
    closing = asyncio.create_task(bookie.server.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    bookie.store.release()
    assert set(await client.receive_all(2)) == {1, 2}
    assert await client.is_closed()
    await closing


async def test_closing_aborts_requests_that_take_too_long(start_bookie) -> None:
    bookie = await start_bookie(drain_timeout_s=0.05)
    client = await bookie.connect()
    bookie.store.hold()
    client.send(add(1, 1, 0))
    await eventually(lambda: bookie.store.groups == [1])
    async with asyncio.timeout(30):
        await bookie.server.close()
    assert await client.is_closed()
    bookie.store.release()


async def test_closing_ends_long_polls_and_idle_connections_at_once(bookie, client) -> None:
    await client.ask(add(1, 1, 0))
    client.send(m.ReadRequest(2, 1, -1, flag=2, previous_lac=5, timeout_ms=60_000))
    await eventually(lambda: bookie.server.operations.long_polls == 1)
    async with asyncio.timeout(30):
        await bookie.server.close()
    assert await client.is_closed()


async def test_a_closed_bookie_accepts_no_connection(bookie) -> None:
    await bookie.server.close()
    with pytest.raises(ConnectionRefusedError):
        await bookie.connect()
