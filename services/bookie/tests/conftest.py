"""A bookie's server over an in-memory store, and a raw client. Tests can import the modules in this folder."""

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop
from bindery_bookie.access.security import OPEN, Security
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.server import BookieServer
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import AddDone, LacState, ReadDone, ReplayProgress
from bindery_core.entry import peek_ids, peek_lac
from bindery_core.errors import BadRequest, NoSuchLedger, Unauthorized
from bindery_core.wire import v2, v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, Request, Response, Status
from bindery_kit.http.listening import bind_tcp
from bindery_metadata.layout.layout import LedgersLayout
from bindery_simulation.instant import InstantLoop

sys.path.insert(0, str(Path(__file__).parent))

ON_BOTH_LOOPS = (
    "test_connection.py",
    "test_operations.py",
    "test_protocol_v2.py",
    "test_tls.py",
    "test_authentication.py",
    "test_sessions.py",
)
"""Files whose tests run on uvloop, as a bookie does, and on asyncio, as a simulation does: the transports of the two
pause, buffer and close differently."""
WITHOUT_SOCKETS = (
    "test_advertised.py",
    "test_back_pressure.py",
    "test_limits_together.py",
    "test_clear_frames.py",
    "test_deleted_ledgers.py",
    "engine/test_open_storage.py",
    "engine/test_adds.py",
    "flushing/test_flush_loop.py",
    "test_limbo_listing.py",
    "test_over_replicated.py",
    "test_presence.py",
    "server/test_server.py",
    "test_single_operations.py",
)
"""Files whose tests run on a simulated clock, because they use nothing outside of the process."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loops on which an asynchronous test runs."""
    if item.path.name in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.path.name in WITHOUT_SOCKETS or "/".join(item.path.parts[-2:]) in WITHOUT_SOCKETS:
        return {"instant": InstantLoop}
    return {"asyncio": asyncio.new_event_loop}


class MemoryLedger:
    def __init__(self, master_key: bytes) -> None:
        self.master_key = master_key
        self.entries: dict[int, bytes] = {}
        self.fenced = False
        self.explicit_packet: bytes | None = None
        self.lac = -1
        self.lac_updated_at_ms = 0
        self.watchers: list[Callable[[], None]] = []


class MemoryEntryStore:
    """An EntryStore without disks. After `hold()`, nothing becomes durable until `release()`."""

    def __init__(self) -> None:
        self.ledgers: dict[int, MemoryLedger] = {}
        self.groups: list[int] = []
        """Sizes of the groups of adds, in order."""
        self.read_groups: list[int] = []
        self.forces = 0
        self.usage = (1000, 400)
        self._held: list[Callable[[], None]] | None = None
        self._fence_gate = asyncio.Event()
        self._fence_gate.set()

    def hold(self) -> None:
        self._held = []
        self._fence_gate.clear()

    def hold_forces(self) -> None:
        self._fence_gate.clear()

    def release(self) -> None:
        held, self._held = self._held or [], None
        self._fence_gate.set()
        for work in held:
            work()

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        return None

    async def close(self) -> None:
        return None

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        self.groups.append(len(adds))
        statuses = [self._add(add) for add in adds]
        if self._held is None:
            done(statuses)
        else:
            self._held.append(lambda: done(statuses))

    def _add(self, add: AddRequest) -> int:
        try:
            ledger_id, entry_id = peek_ids(add.body)
        except BadRequest:
            return Status.BAD_REQUEST
        ledger = self.ledgers.setdefault(ledger_id, MemoryLedger(add.master_key))
        if ledger.master_key != add.master_key:
            return Status.UNAUTHORIZED
        if ledger.fenced and not add.recovery:
            return Status.FENCED
        ledger.entries[entry_id] = add.body
        self._advance(ledger, peek_lac(add.body))
        return Status.OK

    def _advance(self, ledger: MemoryLedger, lac: int) -> None:
        if lac > ledger.lac:
            ledger.lac = lac
            ledger.lac_updated_at_ms = 1_700_000_000_000 + lac
            self._wake(ledger)

    def _wake(self, ledger: MemoryLedger) -> None:
        watchers, ledger.watchers = ledger.watchers, []
        for watcher in watchers:
            watcher()

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        self.read_groups.append(len(keys))
        results: list[bytes | int] = []
        for ledger_id, entry_id in keys:
            ledger = self.ledgers.get(ledger_id)
            if ledger is None:
                results.append(Status.NO_LEDGER)
                continue
            if entry_id == -1 and ledger.entries:
                entry_id = max(ledger.entries)
            results.append(ledger.entries.get(entry_id, Status.NO_ENTRY))
        done(results)

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        ledger = self.ledgers.setdefault(ledger_id, MemoryLedger(master_key))
        if ledger.master_key != master_key:
            raise Unauthorized("another master key", ledger_id=ledger_id)
        ledger.fenced = True
        await self._fence_gate.wait()
        self._wake(ledger)

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        ledger = self.ledgers.setdefault(ledger_id, MemoryLedger(master_key))
        if ledger.master_key != master_key:
            raise Unauthorized("another master key", ledger_id=ledger_id)
        ledger.explicit_packet = packet
        await self._fence_gate.wait()
        self._advance(ledger, lac)

    def _ledger(self, ledger_id: int) -> MemoryLedger:
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(ledger_id=ledger_id)
        return self.ledgers[ledger_id]

    async def read_lac(self, ledger_id: int) -> LacState:
        ledger = self._ledger(ledger_id)
        last = ledger.entries[max(ledger.entries)] if ledger.entries else None
        return LacState(ledger.explicit_packet, last)

    def last_add_confirmed(self, ledger_id: int) -> int:
        return self._ledger(ledger_id).lac

    def watch_lac(self, ledger_id: int, wake: Callable[[], None]) -> Callable[[], None]:
        watchers = self._ledger(ledger_id).watchers
        watchers.append(wake)

        def cancel() -> None:
            if wake in self.ledgers[ledger_id].watchers:
                self.ledgers[ledger_id].watchers.remove(wake)

        return cancel

    def lac_updated_at_ms(self, ledger_id: int) -> int:
        return self._ledger(ledger_id).lac_updated_at_ms

    async def force(self, ledger_id: int) -> None:
        self.forces += 1
        await self._fence_gate.wait()

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for entry_id in sorted(self._ledger(ledger_id).entries):
            if runs and sum(runs[-1]) == entry_id:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((entry_id, 1))
        return runs

    async def list_ledger_ids(self) -> Sequence[int]:
        return list(self.ledgers)

    async def delete_ledger(self, ledger_id: int) -> None:
        self._wake(self.ledgers.pop(ledger_id))

    def disk_usage(self) -> tuple[int, int]:
        return self.usage


class RawClient:
    """A connection to a bookie that sends and receives frames in hex, or requests, without any logic."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._decoder = FrameDecoder()
        self._messages: list[bytes] = []

    def send(self, *requests: Request) -> None:
        self.writer.write(v3.encode_requests(requests))

    def send_v2(self, *requests: Request) -> None:
        self.writer.write(v2.encode_requests(requests))

    async def receive_v2(self) -> Response:
        return v2.decode_response(await self.receive_bytes())

    async def ask_v2(self, request: Request) -> Response:
        self.send_v2(request)
        return await self.receive_v2()

    def send_hex(self, text: str) -> None:
        """Send one message, preceded by its length."""
        message = bytes.fromhex(text)
        self.writer.write(len(message).to_bytes(4, "big") + message)

    async def receive_bytes(self) -> bytes:
        """Return the next message. Raises EOFError if the bookie closed the connection."""
        async with asyncio.timeout(30):
            while not self._messages:
                data = await self.reader.read(65536)
                if not data:
                    raise EOFError
                self._messages += self._decoder.feed(data)
        return self._messages.pop(0)

    async def receive(self) -> Response:
        return v3.decode_response(await self.receive_bytes())

    async def receive_all(self, count: int) -> dict[int, Response]:
        """Return `count` responses by transaction id."""
        responses = [await self.receive() for _ in range(count)]
        assert len({response.txn_id for response in responses}) == count
        return {response.txn_id: response for response in responses}

    async def ask(self, request: Request) -> Response:
        self.send(request)
        return await self.receive()

    async def is_closed(self) -> bool:
        """Return whether the bookie closes the connection without another byte."""
        async with asyncio.timeout(30):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):  # the TLS handshake may have failed
            await self.writer.wait_closed()


async def open_raw(port: int, *, receive_buffer_size: int | None = None, address: str = "127.0.0.1") -> RawClient:
    sock = socket.socket()
    sock.bind((address, 0))
    if receive_buffer_size:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_size)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return RawClient(*await asyncio.open_connection(sock=sock, limit=2**20))


class BookieUnderTest:
    def __init__(self, settings: ServerSettings | None = None, security: Security = OPEN) -> None:
        loop = asyncio.get_running_loop()
        self.store = MemoryEntryStore()
        self.state = BookieState()
        self.metrics = BookieMetrics(clock=loop.time)
        self.server = BookieServer(
            self.store, state=self.state, metrics=self.metrics, settings=settings, security=security, clock=loop.time
        )
        self.port = 0
        self._clients: list[RawClient] = []

    async def start(self) -> None:
        sock: socket.socket = bind_tcp("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        await self.server.start(sock)

    async def connect(self, *, receive_buffer_size: int | None = None, address: str = "127.0.0.1") -> RawClient:
        client = await open_raw(self.port, receive_buffer_size=receive_buffer_size, address=address)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.close()


@pytest.fixture
async def start_bookie() -> AsyncIterator[Callable[..., object]]:
    """Start bookies with given ServerSettings fields, and Security; they end with the test."""
    started: list[BookieUnderTest] = []

    async def start(*, security: Security = OPEN, **settings: object) -> BookieUnderTest:
        bookie = BookieUnderTest(ServerSettings(**settings), security)  # type: ignore[arg-type]
        await bookie.start()
        started.append(bookie)
        return bookie

    yield start
    for bookie in started:
        await bookie.close()


@pytest.fixture
async def bookie(start_bookie: Callable[..., object]) -> BookieUnderTest:
    return await start_bookie()  # type: ignore[no-any-return, misc]


@pytest.fixture
async def client(bookie: BookieUnderTest) -> RawClient:
    return await bookie.connect()


@pytest.fixture
async def connect_raw() -> AsyncIterator[Callable[..., object]]:
    """Connect to a port of this machine; the connections end with the test."""
    clients: list[RawClient] = []

    async def connect(port: int) -> RawClient:
        clients.append(await open_raw(port))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


@pytest.fixture
def memory_store() -> MemoryEntryStore:
    return MemoryEntryStore()


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One ZooKeeper server for each module; each test has a ledgers root of its own."""
    from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
    from bookie_process import free_port

    server = EmbeddedZooKeeper(ServerSpec(tmp_path_factory.mktemp("zookeeper"), free_port()))
    asyncio.run(server.start())
    yield server.hosts
    asyncio.run(server.stop())


@pytest.fixture
async def metadata(zookeeper: str) -> AsyncIterator[Any]:
    from bindery_metadata.stores.zookeeper import ZooKeeperStore

    store = await ZooKeeperStore.connect(zookeeper)
    yield store
    await store.close()


@pytest.fixture
async def real_bookie(tmp_path: Path, zookeeper: str, metadata: Any) -> AsyncIterator[Any]:
    """A bookie process in a cluster of its own, not started yet; it is killed at the end of the test."""
    from bindery_metadata.cluster import initialize_cluster
    from bookie_process import Bookie

    root = f"/{tmp_path.name}"
    await initialize_cluster(metadata, LedgersLayout(root), randomness=random.Random(tmp_path.name))
    bookie = Bookie(tmp_path, zookeeper, root)
    yield bookie
    bookie.kill()
