"""HttpServer: run an HTTP server as a task of an event loop that already runs.

uvicorn's own entry point controls the process (signals, event loop). Here the owner of the server starts and stops it.
The constructor binds the socket, so the port is reserved and known before `start`. Addresses other than loopback
require `insecure=True`, because requests are not authenticated by default.
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bindery_kit.http.http_limits import with_limits
from bindery_kit.http.listening import BindRefused, bind_tcp, cannot_listen
from bindery_kit.observability.health import AsgiApp
from bindery_kit.observability.logs import get_logger

BACKLOG: Final = 1024
"""Maximum number of connections that the kernel queues before they are accepted."""
CONNECTIONS_MAX: Final = 5000
"""Default maximum number of open connections; each uses about 30 KiB while its request waits."""
KEEP_ALIVE_S: Final = 75
"""Time in seconds after which an idle connection is closed."""
START_TIMEOUT_S: Final = 10.0
"""Maximum time in seconds that the start may take."""
STOP_TIMEOUT_S: Final = 5.0
"""Default maximum time in seconds that a stop waits for requests in progress."""

log = get_logger(__name__)


def default_connections_max() -> int:
    """Return CONNECTIONS_MAX, or half of this process's limit of open files if that is less."""
    open_files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if open_files_max < 0 else max(1, min(CONNECTIONS_MAX, open_files_max // 2))


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
        connections_max: int | None = None,
        **uvicorn_options: Any,
    ) -> None:
        """`sock`: a bound socket, which the server closes; None binds `host` and `port`, where 0 is any free port.
        `http`: the protocol of each connection, to which the limits of `http_limits` are added.
        `connections_max`: None for `default_connections_max`."""
        self.host = host
        self._sock = sock or bind_tcp(host, port, insecure=insecure)
        self.port: int = self._sock.getsockname()[1]
        self._stop_timeout_s = stop_timeout_s
        options: dict[str, Any] = {
            "http": with_limits(http, connections_max=connections_max or default_connections_max()),
            "ws": "none",
            "lifespan": "auto",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": max(1, int(stop_timeout_s)),
            "backlog": BACKLOG,
            **uvicorn_options,
        }
        self._server = _Server(uvicorn.Config(app, **options))
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

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

    async def wait(self) -> None:
        """Return when the server ends; before `stop`, that is an error."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop accepting, wait for requests in progress up to the timeout, and close. Idempotent."""
        if self._task is None:
            self._sock.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=self._stop_timeout_s + 1)
        if not done:
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)
        self._sock.close()

    async def __aenter__(self) -> "HttpServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
