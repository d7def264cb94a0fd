"""Network: hosts by name, and connections between them that behave as TCP does on a bad day.

What a connection promises: the bytes of a direction arrive in order, each once, or the connection breaks. What it does
not promise, and the lots decide: how long they take, and in how many pieces they are received.

| what happens                     | what the two ends see |
|----------------------------------|-----------------------|
| a host is partitioned (one way)  | silence; bytes wait and arrive after the heal, or one end gives up (ETIMEDOUT) |
| a process is killed              | the peer gets a reset, after a delay; bytes under way may be lost |
| a host loses power               | silence; when the host is back, the next bytes for an old connection are reset |
| a connection is reset by lot     | both ends get ConnectionResetError; of each direction an end piece is lost |
| a connect to no listener         | ConnectionRefusedError |
| a connect to a host that is off  | nothing, until the caller's own limit; the same behind a partition |
| the receiver does not read       | beyond a window the sender's protocol is told to pause writing |

The kernel's part (arriving, acknowledging) belongs to no process; what a protocol sees runs in its process.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final

from bindery_simulation.loop import Process, SimLoop, current_process
from bindery_simulation.trace import Trace

WINDOW_SIZE: Final = 64 * 1024
"""Bytes that the two kernels hold between a writer and a reader that does not read."""
JITTERS_S: Final = (0.001, 0.001, 0.02, 0.1)
"""One of these for a whole run."""
SYN_RETRY_S: Final = 1.0
RETRANSMIT_S_MAX: Final = 1.0
"""After a partition healed, waiting bytes move within this time."""


@dataclass(slots=True)
class LinkQuality:
    """How bytes travel from one host to another. Seconds."""

    delay_s: float = 0.0005
    jitter_s: float = 0.001
    """Up to this much more, by lot."""
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """What a server on a simulated host listens on."""

    host: str
    port: int

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def close(self) -> None:
        return None


class SimServer:
    """What create_server gives: a listener until it is closed or its process is dead."""

    def __init__(self, network: "Network", sock: ListeningSocket, factory: Callable[[], Any], process: Process) -> None:
        self._network = network
        self.sock = sock
        self.factory = factory
        self.process = process

    def close(self) -> None:
        self._network.stop_listening(self)

    def is_serving(self) -> bool:
        return self._network.is_listening(self)

    async def wait_closed(self) -> None:
        return None


class Network:
    """Made once for a run. `lots`: all its chance."""

    def __init__(self, loop: SimLoop, lots: random.Random, trace: Trace) -> None:
        self.loop = loop
        self.lots = lots
        self.trace = trace
        self.quality = LinkQuality(jitter_s=lots.choice(JITTERS_S))
        self.reset_chance = 0.0
        """Of each write: its connection breaks then and there."""
        self._links: dict[tuple[str, str], LinkQuality] = {}
        self._servers: dict[tuple[str, int], SimServer] = {}
        self._off: set[str] = set()
        self.connections: list[SimConnection] = []
        self._connection_count = 0
        self._context = Context()
        """Nobody's."""

    # --- hosts and links --------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> LinkQuality:
        """The way from `source` to `target`, to be changed by faults."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = LinkQuality(self.quality.delay_s, self.quality.jitter_s)
        return found

    def block(self, source: str, target: str) -> None:
        self.link(source, target).is_blocked = True

    def unblock(self, source: str, target: str) -> None:
        self.link(source, target).is_blocked = False
        for connection in list(self.connections):
            connection.link_healed(source, target)

    def heal(self) -> None:
        """All links as they were at the beginning."""
        self.calm()
        blocked = [hosts for hosts, quality in self._links.items() if quality.is_blocked]
        for quality in self._links.values():
            quality.delay_s, quality.jitter_s = self.quality.delay_s, self.quality.jitter_s
        for source, target in blocked:
            self.unblock(source, target)

    def calm(self) -> None:
        self.reset_chance = 0.0

    def is_blocked(self, source: str, target: str) -> bool:
        found = self._links.get((source, target))
        return found is not None and found.is_blocked

    def delay_s(self, source: str, target: str) -> float:
        quality = self._links.get((source, target)) or self.quality
        return quality.delay_s + quality.jitter_s * self.lots.random()

    def power_off(self, host: str) -> None:
        """The host's kernel is gone: nothing answers, old connections are forgotten."""
        self._off.add(host)
        for connection in list(self.connections):
            connection.host_lost(host)

    def power_on(self, host: str) -> None:
        self._off.discard(host)
        for connection in list(self.connections):
            connection.host_back(host)

    def is_off(self, host: str) -> bool:
        return host in self._off

    def process_killed(self, process: Process) -> None:
        """Its kernel closes what it left open."""
        for key in [key for key, server in self._servers.items() if server.process is process]:
            del self._servers[key]
        for connection in list(self.connections):
            connection.process_killed(process)

    def reset_some(self, chance: float) -> int:
        """Break established connections by lot. How many."""
        broken = [connection for connection in list(self.connections) if self.lots.random() < chance]
        for connection in broken:
            connection.reset()
        return len(broken)

    # --- what the loop asks for -------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], Any], sock: Any) -> SimServer:
        process = current_process()
        assert process is not None
        assert isinstance(sock, ListeningSocket), "a simulated server listens on a ListeningSocket"
        key = sock.host, sock.port
        if key in self._servers:
            raise OSError(98, "Address already in use")
        server = self._servers[key] = SimServer(self, sock, factory, process)
        return server

    def stop_listening(self, server: SimServer) -> None:
        if self.is_listening(server):
            del self._servers[server.sock.host, server.sock.port]

    def is_listening(self, server: SimServer) -> bool:
        return self._servers.get((server.sock.host, server.sock.port)) is server

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple["SimTransport", Any]:
        process = current_process()
        assert process is not None
        established: asyncio.Future[SimTransport] = self.loop.create_future()
        self.at(self.delay_s(process.host, host), self._syn, process, factory, host, port, established)
        transport = await established
        return transport, transport.get_protocol()

    def _syn(
        self,
        process: Process,
        factory: Callable[[], Any],
        host: str,
        port: int,
        established: "asyncio.Future[SimTransport]",
    ) -> None:
        """A connect request arrives, or would if it could."""
        if established.done() or not process.is_alive:
            return
        source = process.host
        if self.is_off(host) or self.is_blocked(source, host) or self.is_blocked(host, source):
            self.at(SYN_RETRY_S, self._syn, process, factory, host, port, established)
            return
        server = self._servers.get((host, port))
        back_s = self.delay_s(host, source)
        if server is None:
            self.at(back_s, _refuse, established, host, port)
            return
        self._connection_count += 1
        connection = SimConnection(self, self._connection_count, process, server.process)
        self.connections.append(connection)
        connection.server.start(server.factory)
        self.at(back_s, connection.client.start, factory, established)

    def at(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Run by nobody's process."""
        self.loop.call_at(self.loop.time() + delay_s, callback, *args, context=self._context)

    def at_time(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_at(when, callback, *args, context=self._context)


class SimConnection:
    """The two ends of a connection."""

    def __init__(self, network: Network, number: int, client: Process, server: Process) -> None:
        self.network = network
        self.name = f"c{number}"
        self.client = SimTransport(self, client, port=40000 + number)
        self.server = SimTransport(self, server, port=0)
        self.client.peer, self.server.peer = self.server, self.client

    @property
    def ends(self) -> tuple["SimTransport", "SimTransport"]:
        return self.client, self.server

    def link_healed(self, source: str, target: str) -> None:
        for end in self.ends:
            if end.process.host == source and end.peer.process.host == target:
                end.retransmit()

    def host_lost(self, host: str) -> None:
        for end in self.ends:
            if end.process.host == host:
                end.vanish()
        self.forget_if_over()

    def host_back(self, host: str) -> None:
        for end in self.ends:
            if end.process.host == host and end.is_gone and not end.peer.is_gone and end.peer.has_unacknowledged:
                end.peer.fail_later(ConnectionResetError(104, "Connection reset by peer"))

    def process_killed(self, process: Process) -> None:
        for end in self.ends:
            if end.process is process and not end.is_gone:
                end.vanish()
                end.reset_peer()
        self.forget_if_over()

    def reset(self) -> None:
        for end in self.ends:
            end.lose_tail()
            end.fail_later(ConnectionResetError(104, "Connection reset by peer"))

    def forget_if_over(self) -> None:
        if all(end.is_gone for end in self.ends) and self in self.network.connections:
            self.network.connections.remove(self)


class SimTransport(asyncio.Transport):
    """One end. Invariants: nothing reaches the protocol after connection_lost; what arrives is a beginning of what the
    peer wrote."""

    def __init__(self, connection: SimConnection, process: Process, *, port: int) -> None:
        super().__init__()
        self.process = process
        self.peer: SimTransport = self
        self._connection = connection
        self._network = connection.network
        self._port = port
        self._protocol: Any = None
        self.is_gone = False
        """connection_lost was told, or there is nobody to tell."""
        self._is_closing = False
        self._is_failing = False
        self._sent: deque[bytes | None] = deque()
        """Under way to the peer. None: the end."""
        self._held: deque[bytes | None] = deque()
        """Waits for the link to heal."""
        self._last_arrival = 0.0
        self._inbox: list[bytes] = []
        self._has_ended = False
        """The peer's end has arrived, behind the inbox."""
        self._is_delivering = False
        self._is_reading = True
        self._unread = 0
        """Bytes written that the peer's protocol did not get yet."""
        self._is_paused = False
        self._high = WINDOW_SIZE
        self._low = WINDOW_SIZE // 4
        self._timeout_number = 0

    # --- beginning and end ------------------------------------------------------------------------------------------

    def start(self, factory: Callable[[], Any], established: "asyncio.Future[SimTransport] | None" = None) -> None:
        """Make the protocol and tell it, in its own process."""
        self.process.call_soon(self._start, factory, established)

    def _start(self, factory: Callable[[], Any], established: "asyncio.Future[SimTransport] | None") -> None:
        if self.is_gone:
            return
        if established is not None and established.done():  # its caller gave up
            self._protocol = asyncio.Protocol()
            self.abort()
            return
        self._network.trace.add(self.process.host, "connected", connection=self._connection.name, peer=self._peer_name)
        self._protocol = factory()
        self._protocol.connection_made(self)
        if established is not None:
            established.set_result(self)
        if self._inbox or self._has_ended:
            self._deliver_soon()

    @property
    def _peer_name(self) -> str:
        return self.peer.process.host

    def vanish(self) -> None:
        """Without a word: process or host is gone."""
        self.is_gone = self._is_closing = True
        self._inbox.clear()
        self._held.clear()

    def fail_later(self, error: Exception) -> None:
        """The kernel hears of a reset, or gives up, after a delay."""
        if not self.is_gone and not self._is_failing:
            self._is_failing = True
            delay_s = self._network.delay_s(self._peer_name, self.process.host)
            self._network.at(delay_s, self.process.call_soon, self._lose, error)

    def reset_peer(self) -> None:
        """Our kernel answers the peer with a reset, or, while it cannot be heard, leaves it to find out by itself."""
        network = self._network
        if network.is_blocked(self.process.host, self._peer_name):
            network.at(network.lots.uniform(5, 60), self.peer.fail_later, TimeoutError(110, "Connection timed out"))
        else:
            self.peer.fail_later(ConnectionResetError(104, "Connection reset by peer"))

    def lose_tail(self) -> None:
        """Some of what is under way never arrives, from a point on."""
        keep = self._network.lots.randint(0, len(self._sent))
        while len(self._sent) > keep:
            self._sent.pop()

    def _lose(self, error: Exception | None) -> None:
        if self.is_gone:
            return
        self.vanish()
        self._network.trace.add(
            self.process.host, "disconnected", connection=self._connection.name, peer=self._peer_name, error=error
        )
        if self._protocol is not None:
            self._protocol.connection_lost(error)
        self._connection.forget_if_over()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._send(None)
        if not self._unread:
            self.process.call_soon(self._lose, None)

    def abort(self) -> None:
        if self.is_gone:
            return
        self._is_closing = True
        self.process.call_soon(self._lose, None)
        self.reset_peer()

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        self._unread += len(data)
        self._send(bytes(data))
        if not self._is_paused and self.get_write_buffer_size() > self._high:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    @property
    def has_unacknowledged(self) -> bool:
        return bool(self._unread)

    def _send(self, data: bytes | None) -> None:
        network = self._network
        if self._held or network.is_blocked(self.process.host, self._peer_name):
            if not self._held:
                self._timeout_number += 1
                network.at(network.lots.uniform(5, 60), self._give_up, self._timeout_number)
            self._held.append(data)
            return
        arrival = network.loop.time() + network.delay_s(self.process.host, self._peer_name)
        self._last_arrival = arrival = max(arrival, self._last_arrival)
        self._sent.append(data)
        network.at_time(arrival, self._arrive)
        if network.reset_chance and network.lots.random() < network.reset_chance:
            self._connection.reset()

    def retransmit(self) -> None:
        """The link is whole again."""
        if self._held and not self.is_gone:
            delay_s = self._network.lots.uniform(0.05, RETRANSMIT_S_MAX)
            self._network.at(delay_s, self._send_held, self._timeout_number)

    def _send_held(self, number: int) -> None:
        if number != self._timeout_number or self._network.is_blocked(self.process.host, self._peer_name):
            return
        self._timeout_number += 1
        held, self._held = self._held, deque()
        for data in held:
            self._send(data)

    def _give_up(self, number: int) -> None:
        if number == self._timeout_number and self._held:
            self.fail_later(TimeoutError(110, "Connection timed out"))

    def _arrive(self) -> None:
        """At the peer's kernel."""
        if not self._sent:
            return  # cut off by a reset
        data = self._sent.popleft()
        peer = self.peer
        if peer.is_gone:
            if not self._network.is_off(self._peer_name):
                peer.reset_peer()
            return
        if data is None:
            peer._has_ended = True
        else:
            peer._inbox.append(data)
        peer._deliver_soon()

    def get_write_buffer_size(self) -> int:
        return max(0, self._unread - WINDOW_SIZE)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = WINDOW_SIZE if high is None else high
        self._low = self._high // 4 if low is None else low

    def _acknowledged(self, size: int) -> None:
        """The peer's protocol got `size` more bytes."""
        self._unread -= size
        if self.is_gone:
            return
        if self._is_paused and self.get_write_buffer_size() <= self._low:
            self.process.call_soon(self._resume_writing)
        if self._is_closing and not self._unread:
            self.process.call_soon(self._lose, None)

    def _resume_writing(self) -> None:
        if self._is_paused and not self._is_closing:
            self._is_paused = False
            self._protocol.resume_writing()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _deliver_soon(self) -> None:
        if not self._is_delivering and self._is_reading and self._protocol is not None and not self.is_gone:
            self._is_delivering = True
            self.process.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Hand over what arrived: mostly all of it at once, sometimes a piece that ends anywhere."""
        self._is_delivering = False
        if self.is_gone or not self._is_reading or self._is_closing:
            return
        if self._inbox:
            data = b"".join(self._inbox) if len(self._inbox) > 1 else self._inbox[0]
            self._inbox.clear()
            lots = self._network.lots
            if lots.random() < 0.1:
                cut = lots.randint(1, len(data))
                if cut < len(data):
                    self._inbox.append(data[cut:])
                    data = data[:cut]
            network = self._network
            if not network.is_blocked(self.process.host, self._peer_name):
                network.at(network.delay_s(self.process.host, self._peer_name), self.peer._acknowledged, len(data))
            else:
                self.peer._acknowledged(len(data))
            self._protocol.data_received(data)
            if self._inbox or self._has_ended:
                self._deliver_soon()
        elif self._has_ended:
            self._has_ended = False
            self._protocol.eof_received()  # what it answers does not matter: half-closed connections are not simulated
            self._is_closing = True
            self._lose(None)

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._inbox or self._has_ended:
            self._deliver_soon()

    def is_reading(self) -> bool:
        return self._is_reading

    # --- the rest of asyncio.Transport ------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self._peer_name, self.peer._port
        if name == "sockname":
            return self.process.host, self._port
        return default


def _refuse(established: "asyncio.Future[SimTransport]", host: str, port: int) -> None:
    if not established.done():
        established.set_exception(ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})"))
