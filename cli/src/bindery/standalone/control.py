"""The supervisor's control socket: one JSON object per line over a Unix socket, one request per connection.

| request                               | response                                                          |
|---------------------------------------|-------------------------------------------------------------------|
| {"verb": "status"}                    | the status, see Supervisor.status                                 |
| {"verb": "stop"}                      | {"ok": true} at once; the supervisor then stops all and exits     |
| {"verb": "stop", "name": "bookie-2"}  | {"ok": true} when the process is down                             |
| {"verb": "start", "name": "bookie-2"} | {"ok": true} when the process is ready                            |

The response to a refused request is {"error": "reason"}. Only the user who runs the supervisor can open the socket.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import BinderyError

REQUEST_SIZE_MAX: Final = 4096
"""Maximum size of a request in bytes."""
READ_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds until a request is complete."""

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlServer:
    """Pass each request on the control socket to `handler`, whose BinderyErrors become error responses."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Removes an existing socket file, which is stale because the caller holds the directory's lock."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path=str(self._path), limit=REQUEST_SIZE_MAX)
        finally:
            os.umask(before)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            request = json.loads(line)
            answer = await self._handler(request if isinstance(request, dict) else {})
        except BinderyError as error:
            answer = {"error": str(error)}
        except (ValueError, TimeoutError):
            answer = {"error": "not a valid request: expected a line of JSON"}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            writer.close()


def ask(path: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any] | None:
    """Send one request and return the response; None if no supervisor listens. Raises TimeoutError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            sock.sendall(json.dumps(request).encode() + b"\n")
            received = b""
            while not received.endswith(b"\n"):
                chunk = sock.recv(65536)
                if not chunk:
                    break
                received += chunk
        except TimeoutError:
            raise
        except OSError:
            return None
    answer = json.loads(received) if received else None
    return answer if isinstance(answer, dict) else None
