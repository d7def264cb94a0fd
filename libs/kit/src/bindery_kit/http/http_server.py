"""HttpServer: run an HTTP server as a task of an event loop that already runs.

uvicorn's own entry point controls the process (signals, event loop). Here the owner of the server starts and stops it.
The constructor binds the socket, so the port is reserved and known before `start`. Addresses other than loopback
require `insecure=True`, because requests are not authenticated by default.

Every server has the limits of `http_limits` and, before its application, the checks of `origin`. Every response of
either has the header `page_headers.NOSNIFF`.
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import uvicorn
from bindery_identity.tls import TlsFiles
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_limits import KERNEL_UNREAD_SIZE, ServerLimits, with_limits
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.listening import BindRefused, bind_tcp, cannot_listen
from bindery_kit.http.origin import OriginGuard, origin_policy
from bindery_kit.http.page_headers import NOSNIFF
from bindery_kit.http.tls_transport import over_tls
from bindery_kit.http.upgrade import Upgrade
from bindery_kit.limits.memory_release import MemoryRelease
from bindery_kit.observability.health import AsgiApp
from bindery_kit.observability.logs import get_logger

BACKLOG: Final = 1024
"""Maximum number of connections that the kernel queues before they are accepted."""
KEEP_ALIVE_S: Final = 75
"""Time in seconds after which an idle connection is closed."""
START_TIMEOUT_S: Final = 10.0
"""Maximum time in seconds that the start may take."""
STOP_TIMEOUT_S: Final = 5.0
"""Default maximum time in seconds that a stop waits for requests in progress."""

log = get_logger(__name__)


LEFT_CHECK_S: Final = 0.05
"""Seconds between two looks at whether connections are open."""
MEMORY_CHECK_S: Final = 1.0
"""Time in seconds between two checks whether memory of clients that have gone can be returned to the system."""
KEEP_ALIVE_PROBE_S: Final = 60
"""Time in seconds after which the kernel asks whether the other end of a silent connection still exists."""


def allowed_connections(connections_max: int) -> int:
    """Return `connections_max`, or half of this process's limit of open files if that is less."""
    open_files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_max if open_files_max < 0 else max(1, min(connections_max, open_files_max // 2))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the owner of the process stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI app. `async with HttpServer(app, port=0) as server: server.port`.

    Invariants: between `start` and `stop` exactly one task runs it; `stop` returns with the socket closed, even if
    clients keep their connections.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sock: socket.socket | None = None,
        insecure: bool = False,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        http: type[HttpToolsProtocol] = HttpToolsProtocol,
        settings: HttpSettings | None = None,
        stats: HttpStats | None = None,
        tls: TlsFiles | None = None,
        own_names: Sequence[str] = (),
        pages: Sequence[str] = (),
        outermost: Callable[[AsgiApp], AsgiApp] | None = None,
        upgrade: Upgrade | None = None,
        **uvicorn_options: Any,
    ) -> None:
        """`sock`: a bound socket, which the server closes; None binds `host` and `port`, where 0 is any free port.
        `http`: the protocol of each connection, to which the limits are added. `settings`: of checks and limits.
        `stats`: counters for the service's metrics. `tls`: serve https with these files; the caller polls them; None:
        http. `own_names`: advertised names of this port, and `pages`: paths to which other sites may link (`origin`).
        `outermost`: puts an application in front of these checks, which sees every answer that has the form of ASGI.
        `upgrade`: another protocol with which connections may continue (`upgrade`).
        Raises BindRefused, and BadRequest for wrong settings."""
        self.host = host
        settings = settings or HttpSettings()
        stats = stats or HttpStats()
        policy = origin_policy(settings, bound=host, own_names=own_names, pages=pages)
        self._sock = sock or bind_tcp(host, port, insecure=insecure)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited by accepted connections
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_PROBE_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNREAD_SIZE)
        self.port: int = self._sock.getsockname()[1]
        shared = ServerLimits(
            settings, connections_max=allowed_connections(settings.connections_max), stats=stats, clock=_now_s
        )
        self._shared = shared
        shared.upgrade = upgrade
        self.bodies = shared.bodies
        """Bodies that the application has not taken completely. It may make room in it for those that it keeps."""
        self._stop_timeout_s = stop_timeout_s
        self._is_secure = tls is not None
        protocol: Any = with_limits(http, shared)
        if tls is not None:
            protocol = over_tls(tls, protocol, shared)
        options: dict[str, Any] = {
            "http": protocol,
            "ws": "none",
            "interface": "asgi3",
            "lifespan": "auto",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,  # a client would be what it claims to be, and could take many shares of a limit
            "headers": [NOSNIFF],
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": max(1, int(stop_timeout_s)),
            "backlog": BACKLOG,
            **uvicorn_options,
        }
        self._stats = stats
        self._watch: asyncio.Task[None] | None = None
        guarded: AsgiApp = OriginGuard(app, policy, stats)
        self._server = _Server(uvicorn.Config(guarded if outermost is None else outermost(guarded), **options))
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._is_secure else 'http'}://{host}:{self.port}"

    async def start(self) -> None:
        """Start serving. Returns when requests are accepted. Raises the error of the app's start-up."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name=f"http:{self.port}")
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    try:
                        self._task.result()
                    except OSError as error:
                        raise cannot_listen(self.host, self.port, error) from error
                    raise BindRefused(
                        "the HTTP server stopped during its start-up; see the previous log lines for the cause",
                        host=self.host,
                        port=self.port,
                    )
                await asyncio.sleep(0.005)  # uvicorn has a flag and no event
        self._watch = asyncio.create_task(self._release_memory(), name=f"http-memory:{self.port}")

    async def wait(self) -> None:
        """Return when the server ends; before `stop`, that is an error."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def end_connections(self) -> None:
        """From now on, each response ends its connection with `Connection: close`, before `stop`: clients then open
        their next one elsewhere, and lose no request that they send while a connection is closed. New connections are
        accepted as before."""
        self._shared.keeps_alive = False
        for connection in list(self._server.server_state.connections):
            connection.end_soon()  # type: ignore[union-attr]

    async def quiet(self) -> None:
        """Return once no request is in progress."""
        while self._server.server_state.tasks:
            await asyncio.wait(list(self._server.server_state.tasks), return_when=asyncio.FIRST_COMPLETED)

    async def left(self) -> None:
        """Return once no connection is open: after `end_connections`, once all clients have sent another request."""
        while self._server.server_state.connections:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(LEFT_CHECK_S)

    async def stop(self) -> None:
        """Stop accepting, wait for requests in progress up to the timeout, and close. Idempotent."""
        if self._task is None:
            self._sock.close()
            return
        if self._watch is not None:
            self._watch.cancel()
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=self._stop_timeout_s + 1)
        if not done:
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)
        self._sock.close()

    async def _release_memory(self) -> None:
        memory = MemoryRelease()
        while True:
            memory.check(self._stats.needed_size, peak_size=self._stats.take_peak_size(), now_s=_now_s())
            await asyncio.sleep(MEMORY_CHECK_S)

    async def __aenter__(self) -> "HttpServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
