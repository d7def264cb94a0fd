"""Simulate the two ends of a connection as transports of asyncio. `network` describes the faults."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol

from bindery_simulation.loop import Process, SimLoop
from bindery_simulation.trace import Trace

WINDOW_SIZE: Final = 64 * 1024
"""Number of bytes that the two kernels buffer if the receiver does not read."""
RETRANSMIT_S_MAX: Final = 1.0
"""Maximum time in seconds from the end of a partition until waiting bytes are sent."""


class Links(Protocol):
    """The part of `network.Network` that transports use."""

    loop: SimLoop
    rng: Random
    trace: Trace
    reset_chance: float
    connections: "list[SimConnection]"

    def is_blocked(self, source: str, target: str) -> bool: ...
    def is_off(self, host: str) -> bool: ...
    def delay_s(self, source: str, target: str) -> float: ...
    def at(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None: ...
    def at_time(self, when: float, callback: Callable[..., None], *args: Any) -> None: ...


class SimConnection:
    """The two ends of a connection."""

    def __init__(self, network: Links, number: int, client: Process, server: Process) -> None:
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
    """One end of a connection.

    Invariants: the protocol is not called after connection_lost; the received bytes are a prefix of the bytes that the
    peer wrote.
    """

    def __init__(self, connection: SimConnection, process: Process, *, port: int) -> None:
        super().__init__()
        self.process = process
        self.peer: SimTransport = self
        self._connection = connection
        self._network = connection.network
        self._port = port
        self._protocol: Any = None
        self.is_gone = False
        """Whether connection_lost was called or the process has ended."""
        self._is_closing = False
        self._is_failing = False
        self._sent: deque[bytes | None] = deque()
        """Writes in flight to the peer. None: the end of the stream."""
        self._held: deque[bytes | None] = deque()
        """Writes that wait for the end of a partition."""
        self._last_arrival = 0.0
        self._inbox: list[bytes] = []
        self._has_ended = False
        """Whether the end of the stream has arrived, after the bytes in the inbox."""
        self._is_delivering = False
        self._is_reading = True
        self._unread = 0
        """Number of written bytes that the protocol of the peer has not received yet."""
        self._is_paused = False
        self._high = WINDOW_SIZE
        self._low = WINDOW_SIZE // 4
        self._timeout_number = 0

    # --- beginning and end ------------------------------------------------------------------------------------------

    def start(self, factory: Callable[[], Any], established: "asyncio.Future[SimTransport] | None" = None) -> None:
        """Create the protocol and call connection_made in its process."""
        self.process.call_soon(self._start, factory, established)

    def _start(self, factory: Callable[[], Any], established: "asyncio.Future[SimTransport] | None") -> None:
        if self.is_gone:
            return
        if established is not None and established.done():  # the caller has timed out
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
        """End without a call to the protocol, because its process or host has ended."""
        self.is_gone = self._is_closing = True
        self._inbox.clear()
        self._held.clear()

    def fail_later(self, error: Exception) -> None:
        """Fail with `error` after a delay, like a kernel that receives a reset or times out."""
        if not self.is_gone and not self._is_failing:
            self._is_failing = True
            delay_s = self._network.delay_s(self._peer_name, self.process.host)
            self._network.at(delay_s, self.process.call_soon, self._lose, error)

    def reset_peer(self) -> None:
        """Reset the peer. During a partition, the peer times out instead."""
        network = self._network
        if network.is_blocked(self.process.host, self._peer_name):
            network.at(network.rng.uniform(5, 60), self.peer.fail_later, TimeoutError(110, "Connection timed out"))
        else:
            self.peer.fail_later(ConnectionResetError(104, "Connection reset by peer"))

    def lose_tail(self) -> None:
        """Lose the bytes in flight from a random point on."""
        keep = self._network.rng.randint(0, len(self._sent))
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
                network.at(network.rng.uniform(5, 60), self._give_up, self._timeout_number)
            self._held.append(data)
            return
        arrival = network.loop.time() + network.delay_s(self.process.host, self._peer_name)
        self._last_arrival = arrival = max(arrival, self._last_arrival)
        self._sent.append(data)
        network.at_time(arrival, self._arrive)
        if network.reset_chance and network.rng.random() < network.reset_chance:
            self._connection.reset()

    def retransmit(self) -> None:
        """Send waiting bytes after the end of a partition."""
        if self._held and not self.is_gone:
            delay_s = self._network.rng.uniform(0.05, RETRANSMIT_S_MAX)
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
        """Deliver the next write to the kernel of the peer."""
        if not self._sent:
            return  # a reset removed the write
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
        """Account for `size` more bytes that the protocol of the peer received."""
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
        """Pass received bytes to the protocol: usually all of them, sometimes only the first part."""
        self._is_delivering = False
        if self.is_gone or not self._is_reading or self._is_closing:
            return
        if self._inbox:
            data = b"".join(self._inbox) if len(self._inbox) > 1 else self._inbox[0]
            self._inbox.clear()
            rng = self._network.rng
            if rng.random() < 0.1:
                cut = rng.randint(1, len(data))
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
            self._protocol.eof_received()  # its result is ignored: half-closed connections are not simulated
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
