"""BookieServer over transports in memory: it accepts connections up to its limit, and closes them in order."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.connection import BookieConnection
from bindery_bookie.server.server import BACKLOG, BookieServer
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_core.errors import BadRequest, TooManyRequests, Unauthorized
from bindery_core.wire import messages as m
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder

KEY = b"k" * 20


class MemoryTransport(asyncio.Transport):
    """A connection whose client reads everything. Like a real one, it reports its end in the next turn."""

    def __init__(self, connection: BookieConnection, *, is_stuck: bool = False) -> None:
        super().__init__({"peername": ("client", 5)})
        self.connection = connection
        self.sent: list[bytes] = []
        self.aborted = False
        self.is_reading_paused = False
        self._closing = False
        self._is_stuck = is_stuck
        """Whether `close` waits for a client that does not read."""
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        self.sent += FrameDecoder().feed(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._is_stuck:
                asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self._closing = True
        asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def is_reading(self) -> bool:
        return not self.is_reading_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def ask(self, *requests: m.Request) -> None:
        self.connection.data_received(v3.encode_requests(requests))

    def responses(self) -> list[m.Response]:
        return [v3.decode_response(one) for one in self.sent]


class Listener:
    """What an event loop returns for a listening socket."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class World:
    def __init__(self, store: Any, **settings: Any) -> None:
        self.store = store
        self.state = BookieState()
        clock = asyncio.get_running_loop().time
        self.metrics = BookieMetrics(clock=clock)
        self.server = BookieServer(
            store, state=self.state, metrics=self.metrics, settings=ServerSettings(**settings), clock=clock
        )
        self.listener = Listener()
        self.listened: dict[str, Any] = {}
        self.accept: Callable[[], BookieConnection] = lambda: BookieConnection(self.server)

    async def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def create_server(factory: Callable[[], BookieConnection], **options: Any) -> Listener:
            self.accept, self.listened = factory, options
            return self.listener

        monkeypatch.setattr(asyncio.get_running_loop(), "create_server", create_server)
        await self.server.start(SOCKET)

    def connect(self, *, is_stuck: bool = False) -> MemoryTransport:
        return MemoryTransport(self.accept(), is_stuck=is_stuck)

    def figures(self) -> dict[str, float]:
        lines = [line.split(" ") for line in self.metrics.render().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in (line for line in lines if len(line) == 2)}


SOCKET: Any = object()


@pytest.fixture
async def world(memory_store: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(memory_store, connections_max=2, connections_per_address_max=2, drain_timeout_s=4.0)
    await world.start(monkeypatch)
    return world


def add(txn_id: int) -> m.AddRequest:
    body = b"".join(number.to_bytes(8, "big", signed=True) for number in (1, txn_id, -1, 0))
    return m.AddRequest(txn_id, 1, txn_id, KEY, body)


async def test_it_serves_on_the_given_socket_once_started(world: World) -> None:
    assert world.state.running
    assert world.listened == {"sock": SOCKET, "backlog": BACKLOG}
    client = world.connect()
    client.ask(add(1), m.ReadRequest(2, 1, 1))
    await asyncio.sleep(0.01)
    assert [response.status for response in client.responses()] == [0, 0]


async def test_more_connections_than_the_limit_are_cut(world: World) -> None:
    first, second, third = (world.connect() for _ in range(3))
    assert (first.aborted, second.aborted, third.aborted) == (True, False, False)
    await asyncio.sleep(0.01)
    assert world.server.connection_count == 2
    second.close()
    await asyncio.sleep(0.01)
    assert world.server.connection_count == 1
    assert not world.connect().aborted


async def test_refused_clients_are_counted_by_the_cause(world: World) -> None:
    connection = world.connect().connection
    world.server.refused(connection, Unauthorized("no"))
    assert (world.metrics.auth_failures, world.metrics.bad_frames) == (1, 0)
    world.server.refused(connection, TooManyRequests("too many"))
    assert world.server.limits.ends == {"blocks_others": 1}
    assert (world.metrics.auth_failures, world.metrics.bad_frames) == (1, 0)
    world.server.refused(connection, BadRequest("bad"))
    assert (world.metrics.auth_failures, world.metrics.bad_frames) == (1, 1)


async def test_the_gauges_show_connections_and_work_in_progress(world: World) -> None:
    client = world.connect()
    client.ask(add(1))
    await asyncio.sleep(0.01)
    world.store.hold()
    client.ask(add(2), m.ReadRequest(3, 1, -1, flag=2, previous_lac=5, timeout_ms=60_000))
    await asyncio.sleep(0.01)
    figures = world.figures()
    assert figures["bindery_bookie_connections"] == 1
    assert figures["bindery_bookie_long_polls"] == 1
    assert figures["bindery_bookie_adds_size"] == 544
    assert figures["bindery_bookie_reads_size"] == 0
    world.server.operations.reads_budget.take(77)
    assert world.figures()["bindery_bookie_reads_size"] == 77


async def test_closing_answers_what_is_in_progress_and_accepts_nothing_more(world: World) -> None:
    client, idle = world.connect(), world.connect()
    world.store.hold()
    client.ask(add(1), m.ForceLedgerRequest(2, 1))
    closing = asyncio.create_task(world.server.close())
    await asyncio.sleep(2)
    assert world.listener.is_closed
    assert not world.state.running
    assert client.is_reading_paused
    assert idle.is_reading_paused
    assert not closing.done()
    world.store.release()
    began = asyncio.get_running_loop().time()
    await closing
    assert asyncio.get_running_loop().time() == began, "it does not wait longer than needed"
    assert {response.txn_id: response.status for response in client.responses()} == {1: 0, 2: 0}
    assert not client.aborted
    assert world.server.connection_count == 0


async def test_reads_in_progress_are_awaited(world: World) -> None:
    world.server.operations.reads_budget.take(5)
    closing = asyncio.create_task(world.server.close())
    await asyncio.sleep(2)
    assert not closing.done()
    world.server.operations.reads_budget.give(5)
    await asyncio.sleep(0.01)
    assert closing.done()


async def test_what_is_not_done_in_time_is_cut_and_cancelled(world: World) -> None:
    client = world.connect()
    world.store.hold()
    client.ask(m.ForceLedgerRequest(2, 1))
    await asyncio.sleep(0.01)
    began = asyncio.get_running_loop().time()
    await world.server.close()
    assert asyncio.get_running_loop().time() - began == pytest.approx(4.0)
    assert client.aborted
    assert client.responses() == []
    assert world.server.connection_count == 0


async def test_a_client_that_does_not_read_its_last_responses_is_cut_in_time(world: World) -> None:
    client = world.connect(is_stuck=True)
    began = asyncio.get_running_loop().time()
    await world.server.close()
    assert asyncio.get_running_loop().time() - began == pytest.approx(4.0)
    assert client.aborted
    assert world.server.connection_count == 0


async def test_closing_twice_or_before_the_start_does_nothing(world: World, memory_store: Any) -> None:
    await world.server.close()
    world.listener.is_closed = False
    await world.server.close()
    assert not world.listener.is_closed
    await World(memory_store).server.close()


async def test_without_settings_it_has_the_defaults(memory_store: Any) -> None:
    clock = asyncio.get_running_loop().time
    server = BookieServer(memory_store, state=BookieState(), metrics=BookieMetrics(clock=clock), clock=clock)
    assert server.settings == ServerSettings()
    assert server.connection_count == 0


async def test_a_task_is_held_until_it_ends(world: World) -> None:
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    task = asyncio.create_task(wait())
    world.server.keep(task)
    closing = asyncio.create_task(world.server.close())
    await asyncio.sleep(1)
    assert not closing.done()
    gate.set()
    await closing
    assert not task.cancelled()
