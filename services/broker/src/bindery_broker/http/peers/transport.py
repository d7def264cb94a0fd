"""PeerTransport: send requests to other brokers over few connections (`bindery_kit.multiplex`), or over HTTP/1.1.

Brokers of earlier versions and brokers of Pulsar refuse the upgrade; requests to them take a connection of HTTP/1.1
each. The errors are those of httpx, so that `proxy` treats both alike:

| what happened                                                    | error               | what the request did |
|------------------------------------------------------------------|---------------------|----------------------|
| there is no connection, or the other broker did not begin it     | ConnectError        | nothing              |
| too many requests to this broker, or at it                       | PoolTimeout         | nothing              |
| the connection broke, or the other broker gave the answer up     | RemoteProtocolError | unknown              |
| no byte arrived in time                                          | ReadTimeout         | unknown              |
| the request has bytes that HTTP does not allow                   | LocalProtocolError  | nothing              |
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Final

import httpx
from bindery_kit.multiplex.frames import ProtocolViolation
from bindery_kit.multiplex.heads import HOP_HEADERS, Headers, encode_request
from bindery_kit.multiplex.link import LinkError, NotBegun, NotMultiplexed, PeerRequest, TooBusy
from bindery_kit.multiplex.peers import PeerLinks
from bindery_kit.multiplex.streams import StreamOver

PEERS_PATH: Final = "/v1/peer-requests"
"""Path of the request with which a connection between brokers begins."""
_NO_BODY: Final = (b"", b"0")


class PeerTransport(httpx.AsyncBaseTransport):
    """`http1`: the transport to brokers that refuse the upgrade. `headers`: returns the headers that authenticate this
    broker. `links_max`: maximum number of connections to one broker; `unread_size_max`: see `PeerLinks`."""

    def __init__(
        self,
        http1: httpx.AsyncBaseTransport,
        *,
        headers: Callable[[], Headers],
        tls: ssl.SSLContext | None,
        links_max: int,
        unread_size_max: int,
    ) -> None:
        self._http1 = http1
        self.links = PeerLinks(
            path=PEERS_PATH,
            headers=headers,
            tls=tls,
            links_max=links_max,
            unread_size_max=unread_size_max,
            now=lambda: asyncio.get_running_loop().time(),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        named = [(name.lower(), value) for name, value in request.headers.raw]
        headers = [header for header in named if header[0] not in HOP_HEADERS]
        length = next((value for name, value in named if name == b"content-length"), b"")
        has_body = length not in _NO_BODY or any(name == b"transfer-encoding" for name, _ in named)
        timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
        try:
            head = encode_request(request.method, request.url.raw_path.decode("latin-1"), headers)
            url = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
            sent = await self.links.begin(url, head, has_body=has_body)
        except NotMultiplexed:
            return await self._http1.handle_async_request(request)
        except ProtocolViolation as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error
        except LinkError as error:
            raise _of(error, request) from error
        try:
            if has_body:
                await _send_body(sent, request, timeout_s)
            async with asyncio.timeout(timeout_s):
                status, answered = await sent.response()
        except BaseException as error:
            sent.cancel()
            if isinstance(error, LinkError):
                raise _of(error, request) from error
            if isinstance(error, TimeoutError):
                raise httpx.ReadTimeout("the other broker does not answer", request=request) from error
            raise
        return httpx.Response(status, headers=answered, stream=_Body(sent, request, timeout_s))

    def waiting(self, http1: httpx.AsyncBaseTransport) -> "PeerTransport":
        """Return a transport over the same connections, with another one to brokers that refuse the upgrade."""
        other = copy(self)
        other._http1 = http1
        return other

    async def aclose(self) -> None:
        await self.links.close()
        await self._http1.aclose()


async def _send_body(sent: PeerRequest, request: httpx.Request, timeout_s: float | None) -> None:
    """Send the body, unless the other broker answers before its end. Raises TimeoutError."""
    stream = request.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    try:
        async for chunk in stream:
            if chunk:
                await sent.send_body(chunk, is_end=False, credit_timeout_s=timeout_s)
        await sent.send_body(b"", is_end=True, credit_timeout_s=timeout_s)
    except StreamOver:
        return


class _Body(httpx.AsyncByteStream):
    """The body of an answer. `aclose` cancels the request unless it is complete."""

    def __init__(self, sent: PeerRequest, request: httpx.Request, timeout_s: float | None) -> None:
        self._sent = sent
        self._request = request
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while True:
                if not (chunk := self._sent.take()):
                    async with asyncio.timeout(self._timeout_s):
                        chunk = await self._sent.read()
                if not chunk:
                    return
                yield chunk
        except TimeoutError as error:
            raise httpx.ReadTimeout("the other broker sends nothing", request=self._request) from error
        except LinkError as error:
            raise _of(error, self._request) from error

    async def aclose(self) -> None:
        self._sent.cancel()


def _of(error: LinkError, request: httpx.Request) -> httpx.TransportError:
    if isinstance(error, TooBusy):
        return httpx.PoolTimeout(str(error), request=request)
    if isinstance(error, NotBegun):
        reasons = [str(error)]
        cause = error.__cause__
        while cause is not None:
            reasons.append(str(cause))
            cause = cause.__cause__
        return httpx.ConnectError(": ".join(reasons), request=request)
    return httpx.RemoteProtocolError(str(error), request=request)
