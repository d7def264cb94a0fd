"""BookieServer: the ledger port. It accepts connections, holds the tasks of their requests, and closes them in order.

Invariants: never more than `connections_max` connections, beyond those that are just being closed; every task started
for a request is held here until it ends.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from bindery_core.errors import BinderyError, TooManyRequests, Unauthorized
from bindery_kit.observability.logs import error_fields
from bindery_kit.observability.quiet_log import QuietLog

from bindery_bookie.access.security import OPEN, Security
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.connection import BookieConnection
from bindery_bookie.server.operations import Operations
from bindery_bookie.server.port_limits import KERNEL_UNREAD_SIZE, PortLimits
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import EntryStore

BACKLOG: Final = 4096
"""Maximum number of connections that wait in the kernel until they are accepted. Beyond it, the kernel drops their
packets, and clients repeat them only after seconds."""
LISTENERS: Final = 32
"""Number of listeners on the socket. uvloop accepts one connection per listener in a turn of the event loop, and turns
are long under load: with one listener, a new connection would wait for seconds behind hundreds of others."""
KEEP_ALIVE_IDLE_S: Final = 60
"""Seconds of silence after which the kernel checks whether a client still exists."""
KEEP_ALIVE_INTERVAL_S: Final = 20
"""Seconds between two such checks."""
KEEP_ALIVE_COUNT: Final = 3
"""Number of checks without an answer after which a connection is lost."""


class BookieServer:
    """Serves `store` on a bound socket. `clock`: monotonic seconds."""

    def __init__(
        self,
        store: EntryStore,
        *,
        state: BookieState,
        metrics: BookieMetrics,
        settings: ServerSettings | None = None,
        security: Security = OPEN,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings or ServerSettings()
        self.security = security
        self.operations = Operations(store, state, metrics, self.settings, clock=clock)
        self.limits = PortLimits(self.settings, metrics, clock=clock)
        self._state = state
        self._metrics = metrics
        self._log = QuietLog(__name__, clock=clock)
        self._connections: dict[BookieConnection, None] = {}
        """In the order of their arrival, so that a simulation closes them in a reproducible order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._all_closed: asyncio.Event | None = None
        operations = self.operations
        metrics.gauge("bindery_bookie_connections", "Connections of clients.", lambda: len(self._connections))
        metrics.gauge("bindery_bookie_long_polls", "Long-poll reads in progress.", lambda: operations.long_polls)
        metrics.gauge("bindery_bookie_adds_size", "Bytes of adds in progress.", lambda: operations.adds_budget.used)
        metrics.gauge(
            "bindery_bookie_reads_size",
            "Bytes of read responses in progress.",
            lambda: self.operations.reads_budget.used,
        )

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def start(self, sock: socket.socket) -> None:
        """Listen on `sock` (see `bind_tcp`) and serve."""
        assert not self._servers
        _set_options(sock)
        loop = asyncio.get_running_loop()
        for one in _listeners(sock):
            self._servers.append(await loop.create_server(lambda: BookieConnection(self), sock=one, backlog=BACKLOG))
        self._state.running = True

    async def close(self) -> None:
        """Stop accepting, answer requests in progress within `drain_timeout_s`, close all connections. Idempotent."""
        if not self._servers:
            return
        servers, self._servers = self._servers, []
        self._state.running = False
        for server in servers:
            server.close()
        for connection in tuple(self._connections):
            connection.stop_reading()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.operations.adds_budget.wait_empty()
                await self.operations.reads_budget.wait_empty()
                if self._tasks:
                    await asyncio.wait(tuple(self._tasks))
                for connection in tuple(self._connections):
                    connection.close()
                if self._connections:
                    self._all_closed = asyncio.Event()
                    await self._all_closed.wait()
        except TimeoutError:
            self._log.warning(
                "connections_cut", connections=len(self._connections), adds_in_progress=self._metrics.adds_in_progress
            )
        for connection in tuple(self._connections):
            connection.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports call their protocols in the next turn

    # --- connection.ConnectionOwner -------------------------------------------------------------------------------

    def opened(self, connection: BookieConnection) -> bool:
        room = self.limits.room
        if not room.open(connection):
            self.limits.ended(
                "connections",
                peer=connection.peer_name,
                connections_max=room.connections_max,
                connections_per_address_max=room.per_address_max,
            )
            return False
        self._connections[connection] = None
        return True

    def closed(self, connection: BookieConnection, error: Exception | None) -> None:
        self._connections.pop(connection, None)
        if self._all_closed is not None and not self._connections:
            self._all_closed.set()

    def refused(self, connection: BookieConnection, error: BinderyError) -> None:
        if isinstance(error, Unauthorized):
            self._metrics.auth_failures += 1
            self._log.warning("authentication_failed", peer=connection.peer_name, **error_fields(error))
        elif isinstance(error, TooManyRequests):
            self.limits.ended("blocks_others", peer=connection.peer_name, **error_fields(error))
        else:
            self._metrics.bad_frames += 1
            self._log.warning("connection_closed_for_bad_bytes", peer=connection.peer_name, **error_fields(error))

    def keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listeners(sock: socket.socket) -> list[socket.socket]:
    """Return `sock` and copies of it, which share its queue of connections."""
    if not hasattr(sock, "dup"):  # a simulation has one
        return [sock]
    return [sock, *(sock.dup() for _ in range(LISTENERS - 1))]


def _set_options(sock: socket.socket) -> None:
    """Set the options that accepted connections inherit: find dead clients, and keep little unsent in the kernel."""
    if not hasattr(sock, "setsockopt"):  # a simulation has none
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_ALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNREAD_SIZE)
