"""An HTTP server as one more task in a running loop.

uvicorn's own entry point takes the process over (signals, loop); here it is started and stopped by its owner, who also
holds the socket: the port is known, and known to be free, before the first request.

Only loopback is bound without `insecure=True`: nothing here asks for a password yet.
"""

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from bindery_core.errors import BinderyError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bindery_kit.http.http_limits import with_limits
from bindery_kit.observability.health import AsgiApp
from bindery_kit.observability.last_words import bind_fix
from bindery_kit.observability.logs import get_logger

BACKLOG: Final = 1024
CONNECTIONS_MAX: Final = 5000
"""Some 30 KiB each while a request waits."""
KEEP_ALIVE_S: Final = 75
START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0

log = get_logger(__name__)


class BindRefused(BinderyError):
    """The address may not or cannot be bound."""

    code = "bind_refused"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (an address or `localhost`)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, insecure: bool) -> None:
    """Raise BindRefused for an address that others can reach, unless `insecure`."""
    if not insecure and not is_loopback(host):
        raise BindRefused(
            f"refusing to listen on {host}, where other machines can connect without authentication; "
            "use 127.0.0.1, or say --insecure (..._INSECURE=true) if the network itself is trusted"
        )


def bind_tcp(host: str, port: int, *, insecure: bool = False) -> socket.socket:
    """A bound, not yet listening socket; port 0 takes a free one. Raises BindRefused with the reason."""
    check_bind(host, insecure=insecure)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise BindRefused(f"cannot listen on {host}:{port}: {error.strerror or error}; {bind_fix(error)}") from error
    sock.setblocking(False)
    return sock


def default_connections_max() -> int:
    """CONNECTIONS_MAX, or half of the files that this process may have open if that is less."""
    open_files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if open_files_max < 0 else max(1, min(CONNECTIONS_MAX, open_files_max // 2))


class _Server(uvicorn.Server):
    """uvicorn without its hands on the signals: the process's owner decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI app. `async with HttpServer(app, port=0) as server: server.port`.

    Invariants: between `start` and `stop` exactly one task runs it; `stop` returns with the socket closed, whatever the
    clients do.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        host: str = "127.0.0.1",
        port: int,
        insecure: bool = False,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        http: type[HttpToolsProtocol] = HttpToolsProtocol,
        connections_max: int | None = None,
        **uvicorn_options: Any,
    ) -> None:
        """`http`: the protocol of each connection; it gets the bounds of `http_limits`, whatever it is.
        `connections_max`: None for `default_connections_max`."""
        self.host = host
        self._sock = bind_tcp(host, port, insecure=insecure)
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
        """Serve from now on. Returns once requests are accepted; raises what the app's start-up raised."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name=f"http:{self.port}")
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise BindRefused("the HTTP server ended at its start; see the log", host=self.host, port=self.port)
                await asyncio.sleep(0.005)  # uvicorn has a flag where an event would be nicer

    async def wait(self) -> None:
        """Until the server ends, which before `stop` is a fault of its own."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Accept no more, let requests in flight finish within the limit, close. Idempotent."""
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
