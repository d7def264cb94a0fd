"""Simulate hosts and TCP connections between them, with faults.

A connection guarantees that the bytes of a direction arrive in order and once, or that the connection breaks. The seed
determines their delay and the number of pieces in which they are received.

| event                            | effect on the two ends |
|----------------------------------|-----------------------|
| a host is partitioned (one way)  | no answers; bytes arrive after the partition, or one end times out (ETIMEDOUT) |
| a process is killed              | the peer gets a reset after a delay; bytes in flight may be lost |
| a host loses power               | no answers; after the host returns, it resets old connections at their next bytes |
| a connection is reset at random  | both ends get ConnectionResetError; the last bytes of each direction are lost |
| a connect to no listener         | ConnectionRefusedError |
| a connect to a host that is off  | no answer until the timeout of the caller; likewise during a partition |
| the receiver does not read       | when the buffers are full, the protocol of the sender must pause writing |

Callbacks that simulate a kernel (arrival, acknowledgement) belong to no process. Callbacks of a protocol run in its
process.
"""

import asyncio
import random
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final

from bindery_simulation.loop import Process, SimLoop, current_process
from bindery_simulation.trace import Trace
from bindery_simulation.transport import SimConnection, SimTransport

JITTERS_S: Final = (0.001, 0.001, 0.02, 0.1)
"""Values for the maximum jitter in seconds. Each run uses one of them at random."""
SYN_RETRY_S: Final = 1.0
"""Time in seconds after which a connect request that was lost is repeated."""


@dataclass(slots=True)
class LinkQuality:
    """The quality of a link from one host to another."""

    delay_s: float = 0.0005
    jitter_s: float = 0.001
    """Maximum random addition to the delay, in seconds."""
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """The socket of a server on a simulated host."""

    host: str
    port: int

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def close(self) -> None:
        return None


class SimServer:
    """The result of create_server: a listener until it is closed or its process is killed."""

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
    """The hosts, links and connections of one run. `rng`: the only source of randomness."""

    def __init__(self, loop: SimLoop, rng: random.Random, trace: Trace) -> None:
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self.quality = LinkQuality(jitter_s=rng.choice(JITTERS_S))
        self.reset_chance = 0.0
        """Probability that a write breaks its connection."""
        self._links: dict[tuple[str, str], LinkQuality] = {}
        self._servers: dict[tuple[str, int], SimServer] = {}
        self._off: set[str] = set()
        self.connections: list[SimConnection] = []
        self._connection_count = 0
        self._context = Context()
        """Context of callbacks that belong to no process."""

    # --- hosts and links --------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> LinkQuality:
        """Return the link from `source` to `target`. Faults change it."""
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
        """Restore the initial quality of all links."""
        self.calm()
        blocked = [hosts for hosts, quality in self._links.items() if quality.is_blocked]
        for quality in self._links.values():
            quality.delay_s, quality.jitter_s = self.quality.delay_s, self.quality.jitter_s
        for source, target in blocked:
            self.unblock(source, target)

    def calm(self) -> None:
        """Stop breaking connections at random."""
        self.reset_chance = 0.0

    def is_blocked(self, source: str, target: str) -> bool:
        found = self._links.get((source, target))
        return found is not None and found.is_blocked

    def delay_s(self, source: str, target: str) -> float:
        quality = self._links.get((source, target)) or self.quality
        return quality.delay_s + quality.jitter_s * self.rng.random()

    def power_off(self, host: str) -> None:
        """Turn off a host: it does not answer, and its ends of connections are lost."""
        self._off.add(host)
        for connection in list(self.connections):
            connection.host_lost(host)

    def power_on(self, host: str) -> None:
        """Turn on a host again. It resets old connections at their next bytes."""
        self._off.discard(host)
        for connection in list(self.connections):
            connection.host_back(host)

    def is_off(self, host: str) -> bool:
        return host in self._off

    def process_killed(self, process: Process) -> None:
        """Close the sockets of a killed process, as its kernel does."""
        for key in [key for key, server in self._servers.items() if server.process is process]:
            del self._servers[key]
        for connection in list(self.connections):
            connection.process_killed(process)

    def reset_some(self, chance: float) -> int:
        """Reset each connection with probability `chance`. Return the number of reset connections."""
        broken = [connection for connection in list(self.connections) if self.rng.random() < chance]
        for connection in broken:
            connection.reset()
        return len(broken)

    # --- interface of the loop --------------------------------------------------------------------------------------

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
        """Handle the arrival of a connect request, which is repeated while the host cannot be reached."""
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
        """Call `callback` after a delay, outside all processes."""
        self.loop.call_at(self.loop.time() + delay_s, callback, *args, context=self._context)

    def at_time(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_at(when, callback, *args, context=self._context)


def _refuse(established: "asyncio.Future[SimTransport]", host: str, port: int) -> None:
    if not established.done():
        established.set_exception(ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})"))
