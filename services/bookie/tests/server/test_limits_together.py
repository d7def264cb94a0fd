"""Random clients, by seed: everything that they held is given back, and no client that reads waits for ever.

Each client has a transport in memory, and one of a few addresses. It sends requests of all kinds, whole and in parts,
reads its responses sometimes, and may disconnect at any time, also while the store does not answer. The limits are so
small that most of them are exceeded. At the end, all clients that are left read and complete their frames.
"""

import asyncio
import random
from typing import Any

import pytest
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.connection import BookieConnection
from bindery_bookie.server.server import BookieServer
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder

KEY = master_key(b"")
CRC32C = Digester(DigestType.CRC32C)
KIB = 1024
STEPS = 1500
SEEDS = 12
LONGEST_S = 600.0
"""Simulated seconds after which every request must be answered."""
SETTINGS: dict[str, Any] = {
    "frame_size_max": 128 * KIB,
    "connections_max": 24,
    "connections_per_address_max": 12,
    "unfinished_size_max": 256 * KIB,
    "unread_size_max": 512 * KIB,
    "adds_size_max": 64 * KIB,
    "reads_size_max": 128 * KIB,
    "pending_reads_max": 200,
    "unsent_size_max": 16 * KIB,
    "operations_max": 8,
    "operations_total_max": 20,
    "long_polls_max": 10,
    "long_poll_timeout_max_s": 5.0,
    "batch_read_size_max": 64 * KIB,
}


class Client(asyncio.Transport):
    """A client and its transport. What it was sent is unsent until it reads."""

    def __init__(self, server: BookieServer, randomness: random.Random) -> None:
        super().__init__()
        self._randomness = randomness
        self._name = (f"10.0.0.{randomness.randrange(4)}", randomness.randrange(1, 65536))
        self._is_reading = True
        self._is_paused = False
        self._high = self._low = 0
        self._unsent = bytearray()
        self._to_send = bytearray()
        self._decoder = FrameDecoder(frame_size_max=2**24)
        self._open: set[int] = set()
        """Transaction ids of requests that were not answered yet."""
        self._next_id = 0
        self.is_gone = self._is_closing = False
        self._connection = BookieConnection(server)
        self._connection.connection_made(self)

    # --- the client

    def ask(self, ledgers: int) -> None:
        for _ in range(self._randomness.choice([1, 1, 3, 20])):
            self._next_id += 1
            request = self._request(self._next_id, self._randomness.randrange(ledgers))
            self._open.add(self._next_id)
            self._to_send += v3.encode_request(request)
        self.pump(self._randomness.random())

    def _request(self, txn_id: int, ledger_id: int) -> m.Request:
        entry_id = self._randomness.randrange(8)
        kind = self._randomness.randrange(9)
        if kind < 3:
            size = self._randomness.choice([10, 1000, 30_000])
            body = pack(CRC32C, ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=size, payload=bytes(size))
            return m.AddRequest(txn_id, ledger_id, entry_id, KEY, body)
        if kind < 6:
            return m.ReadRequest(txn_id, ledger_id, entry_id)
        if kind == 6:
            return m.ReadLacRequest(txn_id, ledger_id)
        if kind == 7:
            return m.ForceLedgerRequest(txn_id, ledger_id)
        return m.ReadRequest(txn_id, ledger_id, -1, flag=2, previous_lac=2**40, timeout_ms=60_000)

    def pump(self, part: float = 1.0) -> None:
        """Send this part of what the client has to send, while the bookie reads."""
        left = int(len(self._to_send) * part)
        while left > 0 and self._is_reading and not self._is_closing:
            data = bytes(self._to_send[: min(left, 64 * KIB)])
            del self._to_send[: len(data)]
            left -= len(data)
            self._connection.data_received(data)

    def read(self, part: float = 1.0) -> None:
        size = int(len(self._unsent) * part + 1)
        for message in self._decoder.feed(bytes(self._unsent[:size])):
            self._open.remove(v3.decode_response(message).txn_id)
        del self._unsent[:size]
        if self._is_paused and len(self._unsent) <= self._low:
            self._is_paused = False
            self._connection.resume_writing()

    @property
    def is_done(self) -> bool:
        """Whether everything was sent and answered, or the bookie has ended the connection."""
        return self.is_gone or not (self._open or self._to_send or self._unsent)

    # --- asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._name if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is not None
        self._high, self._low = high, low

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: Any) -> None:
        assert not self._is_closing
        self._unsent += data
        if len(self._unsent) > self._high and not self._is_paused:
            self._is_paused = True
            self._connection.pause_writing()

    def pause_reading(self) -> None:
        assert self._is_reading
        self._is_reading = False

    def resume_reading(self) -> None:
        assert not self._is_reading
        self._is_reading = True

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._unsent.clear()
            asyncio.get_running_loop().call_soon(self._lose)

    def close(self) -> None:
        self.abort()

    def _lose(self) -> None:
        self.is_gone = True
        self._connection.connection_lost(None)


def held(server: BookieServer) -> dict[str, int]:
    """Return everything that is not 0 without clients."""
    operations, limits = server.operations, server.limits
    figures = {
        "adds": operations.adds_budget.used,
        "reads": operations.reads_budget.used,
        "operations": operations.operations_budget.used,
        "waiting adds": operations.adds_budget.waiting,
        "waiting reads": operations.reads_budget.waiting,
        "waiting operations": operations.operations_budget.waiting,
        "pending reads": operations.pending_reads,
        "long polls": operations.long_polls,
        "turns": operations._single._turns.count,
        "needed": limits.needed_size,
        "unfinished": len(limits.unfinished),
        "paused": len(limits.paused),
        "unread": len(limits.unread),
        "unknown": len(limits.room._unknown),
        "connections": server.connection_count,
        "tasks": len(server._tasks),
    }
    return {name: figure for name, figure in figures.items() if figure}


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_everything_returns_to_zero_and_nobody_waits_for_ever(memory_store: Any, seed: int) -> None:
    randomness = random.Random(seed)
    loop = asyncio.get_running_loop()
    metrics = BookieMetrics(clock=loop.time)
    server = BookieServer(
        memory_store, state=BookieState(), metrics=metrics, settings=ServerSettings(**SETTINGS), clock=loop.time
    )
    clients: list[Client] = []
    is_held = False
    for _ in range(STEPS):
        clients = [one for one in clients if not one.is_gone]
        what = randomness.random()
        if what < 0.1 or not clients:
            clients.append(Client(server, randomness))
        elif what < 0.5:
            randomness.choice(clients).ask(ledgers=3)
        elif what < 0.6:
            randomness.choice(clients).pump()
        elif what < 0.85:
            randomness.choice(clients).read(randomness.choice([0.1, 0.5, 1.0]))
        elif what < 0.88:
            randomness.choice(clients).abort()
        elif what < 0.92:
            memory_store.release() if is_held else memory_store.hold()
            is_held = not is_held
        await asyncio.sleep(randomness.choice([0, 0, 0.01, 1.0]))
    memory_store.release()
    until_s = loop.time() + LONGEST_S
    while not all(client.is_done for client in clients):
        assert loop.time() < until_s, f"clients wait for ever: {held(server)}"
        for client in clients:
            client.pump()
            client.read()
        await asyncio.sleep(0.1)
    answered = sum(not client.is_gone for client in clients)
    for client in clients:
        client.abort()
    await asyncio.sleep(1)
    assert held(server) == {}
    assert answered
    assert len(server.limits.ends) >= 3, "the limits are not exceeded"
    assert metrics.reads_in_progress == metrics.adds_in_progress == 0
