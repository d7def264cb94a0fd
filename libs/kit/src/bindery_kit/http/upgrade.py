"""Continue a connection of an HTTP port with another protocol (`Upgrade`), after the application has allowed it.

The request is an ordinary one for the application: it passes the checks of the port and the authentication. Its scope
has a function as `scope["extensions"][UPGRADE]`. The application calls it to accept; then it must return without a
response. If it answers instead, the connection goes on with HTTP/1.1.

Source: RFC 9110 section 7.8. A server may answer a request as if it did not ask for another protocol.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from uvicorn.server import ServerState

UPGRADE: Final = "bindery.upgrade"
"""Key of the scope's extension. Its value is an Accept."""

Accept = Callable[[], bool]
"""Continue with the other protocol. Return False, with nothing done, if the connection is being closed, or if the
client has sent more than the request: then the application must answer."""


class Upgraded(Protocol):
    """The other protocol of one connection. The limits of the port for connections and unread bytes stay in force."""

    def data_received(self, data: bytes) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self) -> None: ...

    def shutdown(self) -> None:
        """The server stops: finish what is in progress, and close."""


class HttpConnection(Protocol):
    """What the other protocol uses of the connection."""

    app: Any
    app_state: dict[str, Any]
    asgi_version: Any
    client: Any
    group: str
    logger: Any
    loop: asyncio.AbstractEventLoop
    scheme: Any
    server: Any
    server_state: ServerState
    tasks: set[asyncio.Task[None]]
    transport: asyncio.Transport

    @property
    def shared(self) -> Any:
        """The `ServerLimits` of the port."""
        ...

    def be_idle(self, is_idle: bool) -> None:
        """Whether the port may close the connection if others need its place."""


class Upgrade(Protocol):
    """Another protocol that a port serves."""

    token: bytes
    """Its name in the `Upgrade` header."""

    def connect(self, connection: HttpConnection) -> Upgraded: ...


def asks_for(headers: list[tuple[bytes, bytes]], token: bytes) -> bool:
    """Return whether a request with these headers, whose names are lower case, asks for the protocol only."""
    values = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    return values == [token]
