"""One ASGI request made of literal messages, and what an application sends in answer: no sockets, no HTTP library."""

import asyncio
import json
from collections import deque
from collections.abc import MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
GONE: Message = {"type": "http.disconnect"}
"""What an application receives when the client has closed the connection."""


def http_scope(
    method: str = "GET",
    path: str = "/",
    *,
    raw_path: bytes | None = None,
    query: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> dict[str, Any]:
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers or []}
    return scope if raw_path is None else {**scope, "raw_path": raw_path}


def piece(body: bytes, *, more: bool = False) -> Message:
    """Return a piece of a request's body; the last one unless there is `more`."""
    return {"type": "http.request", "body": body, "more_body": more}


class Line:
    """A connection. The application may receive no more than `messages`, or then waits forever (`stays_open`)."""

    def __init__(self, *messages: Message, stays_open: bool = False) -> None:
        self.unread = deque(messages)
        self.sent: list[Message] = []
        self._stays_open = stays_open

    async def receive(self) -> Message:
        if self._stays_open and not self.unread:
            await asyncio.Event().wait()
        assert self.unread, "the application receives after the end of the request"
        return self.unread.popleft()

    async def send(self, message: Message) -> None:
        self.sent.append(dict(message))

    @property
    def status(self) -> int:
        """Status of the only answer."""
        (start,) = [message for message in self.sent if message["type"] == "http.response.start"]
        return int(start["status"])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return list(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def problem(self) -> dict[str, Any]:
        """Check that the answer is a problem. Returns its body."""
        assert (b"content-type", b"application/problem+json") in self.headers
        problem: dict[str, Any] = json.loads(self.body)
        assert problem["status"] == self.status
        return problem
