"""The way to a topic's owner: the request is passed on as it comes, the answer as it goes.

A redirect would break port-forwarding and Ingress, so passing on is the default and `?redirect=true` asks for a 307.
A request is passed on once: an owner that is none answers 503 rather than passing it back.
"""

from collections.abc import AsyncIterator
from typing import Final

import httpx
from bindery_core.errors import BadRequest, OutcomeUnknown

from bindery_broker.errors import NotOwner
from bindery_broker.http.exchange import Exchange, Reply

PROXIED_HEADER: Final = b"bindery-proxied"
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 75.0
"""Longer than the longest receive waits and the longest add takes."""
CONNECTIONS_MAX: Final = 500
_HOP_HEADERS: Final = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"expect",
    )
)  # fmt: skip


class Proxy:
    def __init__(self, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport`: how to reach other brokers; None: TCP."""
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
            follow_redirects=False,
            trust_env=False,
        )

    async def forward(self, exchange: Exchange, url: str, *, body_size_max: int) -> None:
        """Pass the request to the broker at `url` and its answer back.

        Raises BadRequest for a path that leads elsewhere, NotOwner when that broker could not be reached (nothing was
        done), OutcomeUnknown when it was lost on the way.
        """
        scope = exchange.scope
        target = url.rstrip("/") + exchange.raw_path.decode("ascii")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("ascii")
        headers = [(k, v) for k, v in scope["headers"] if k not in _HOP_HEADERS]
        headers.append((PROXIED_HEADER, b"1"))
        has_body = exchange.method not in ("GET", "HEAD", "DELETE")
        content: AsyncIterator[bytes] | None = exchange.stream_body(size_max=body_size_max) if has_body else None
        request = self._client.build_request(exchange.method, target, headers=headers, content=content)
        if request.url.raw_path.partition(b"?")[0].count(b"/") != target.partition("?")[0].count("/") - 2:
            raise BadRequest("the path cannot be passed on to the topic's owner as it is")  # it would be another one
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise NotOwner("the topic's owner cannot be reached; ask again", owner=url) from error
        except httpx.HTTPError as error:
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url) from error
        try:
            await self._answer(exchange, response)
        except httpx.HTTPError as error:
            if exchange.is_answered:  # half an answer is out: only closing the connection tells the client
                raise
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url) from error
        finally:
            await response.aclose()

    async def _answer(self, exchange: Exchange, response: httpx.Response) -> None:
        headers = [
            (k.lower(), v)
            for k, v in response.headers.raw
            if k.lower() not in _HOP_HEADERS and k.lower() != b"x-request-id"
        ]
        chunks = response.aiter_raw()
        first = await anext(chunks, b"")
        await exchange.start_stream(response.status_code, headers)
        if first:
            await exchange.send_chunk(first, more=True)
        async for chunk in chunks:
            await exchange.send_chunk(chunk, more=True)
        await exchange.send_chunk(b"", more=False)

    async def close(self) -> None:
        await self._client.aclose()


def redirect(exchange: Exchange, url: str) -> Reply:
    """307 to the same path at the owner."""
    location = url.rstrip("/").encode() + exchange.raw_path
    if exchange.scope["query_string"]:
        location += b"?" + exchange.scope["query_string"]
    return Reply(307, b"", b"text/plain", ((b"location", location),))
