"""BookieServer: the ledger port. Accepts connections, owns what runs for them, ends them in order.

Invariants: never more than `connections_max` connections; every task started for a request is held here until it ends.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Final

from bindery_core.errors import BadRequest, BinderyError, TooManyRequests, Unauthorized
from bindery_kit.observability.last_words import bind_fix
from bindery_kit.observability.logs import error_fields

from bindery_bookie.access.security import OPEN, Security
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.connection import BookieConnection
from bindery_bookie.server.operations import Operations
from bindery_bookie.server.quiet_log import QuietLog
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import EntryStore

BACKLOG: Final = 512


def bind(host: str, port: int, *, insecure: bool) -> socket.socket:
    """A bound socket that does not listen yet, so that the port is known, and ours, before storage is open.

    Raises BadRequest for an address that other machines can reach, unless `insecure`, and for one that cannot be bound.
    """
    if not insecure and not _is_loopback(host):
        raise BadRequest(
            f"refusing to listen on {host}, where other machines can connect without authentication; use 127.0.0.1, "
            "or say --insecure (BOOKIE_INSECURE=true) if the network itself is trusted"
        )
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise BadRequest(f"cannot listen on {host}:{port}: {error.strerror or error}; {bind_fix(error)}") from error
    sock.setblocking(False)
    return sock


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
        self._state = state
        self._metrics = metrics
        self._log = QuietLog(__name__, clock=clock)
        self._connections: dict[BookieConnection, None] = {}
        """In the order in which they came, so that they end in an order that can be replayed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._all_closed: asyncio.Event | None = None
        metrics.gauge("bindery_bookie_connections", "Connections of clients.", lambda: len(self._connections))
        metrics.gauge("bindery_bookie_long_polls", "Parked long-poll reads.", lambda: self.operations.long_polls)
        metrics.gauge("bindery_bookie_adds_size", "Bytes of adds under way.", lambda: self.operations.adds_budget.used)
        metrics.gauge("bindery_bookie_reads_size", "Bytes of read answers.", lambda: self.operations.reads_budget.used)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def start(self, sock: socket.socket) -> None:
        """Listen on `sock` (see `bind`) and serve from now on."""
        assert self._server is None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: BookieConnection(self), sock=sock, backlog=BACKLOG)
        self._state.running = True

    async def close(self) -> None:
        """Accept no more, answer what is under way within `drain_timeout_s`, end all connections. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._state.running = False
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
        await asyncio.sleep(0)  # lets aborted transports tell their protocols

    # --- connection.ConnectionOwner -------------------------------------------------------------------------------

    def opened(self, connection: BookieConnection) -> bool:
        if len(self._connections) >= self.settings.connections_max:
            self._log.warning(
                "connection_refused", peer=connection.peer_name, connections_max=self.settings.connections_max
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
            self._log.warning("connection_closed_for_unread_answers", peer=connection.peer_name, **error_fields(error))
        else:
            self._metrics.bad_frames += 1
            self._log.warning("connection_closed_for_bad_bytes", peer=connection.peer_name, **error_fields(error))

    def keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
