"""Forward a request to the broker that owns its topic, and stream the answer back.

Redirects would break port-forwarding and Ingress, so forwarding is the default; `?redirect=true` requests a 307. A
request is forwarded once: a broker that receives a forwarded request and does not own the topic answers 503.

If the client disconnects, the forwarded request is cancelled. Otherwise the owner would continue to lease messages to a
client that no longer exists, because sending to a closed connection does not fail.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Final

import httpx
from bindery_core.errors import BadRequest, OutcomeUnknown, TooManyRequests, Unauthorized
from bindery_identity.principal import Principal
from bindery_kit.access.own_token import CREDENTIALS, OwnToken
from bindery_kit.admin.content_types import JSON_TYPE, check_codings
from bindery_kit.multiplex.peers import PeerLinks

from bindery_broker.errors import NotOwner
from bindery_broker.http.charging.passed_on import PASSED_ON_HEADER
from bindery_broker.http.exchange import (
    NOT_OWNER_HEADER,
    PROXIED_HEADER,
    REQUEST_ID_HEADER,
    ROOM_HEADER,
    ROUTED_BY_HEADER,
    WAITED_HEADER,
    ClientGone,
    Exchange,
)
from bindery_broker.http.peers.streams import until_stop
from bindery_broker.http.peers.transport import PeerTransport

CONNECT_TIMEOUT_S: Final = 5.0
"""Time limit in seconds for a connection to the broker that owns the topic."""
ANSWER_TIMEOUT_S: Final = 75.0
"""Maximum seconds to wait for data from the owner. Longer than the longest wait of a receive and the longest add."""
KEPT_BODY_SIZE_MAX: Final = 4 * 2**20
"""Maximum bytes of a request body that is kept while it is passed on, so that it can be sent to the next owner if the
topic moves. It counts in the bytes of request bodies; larger ones are passed on as they arrive."""
CONNECTIONS_MAX: Final = 500
"""Maximum number of connections to brokers that serve HTTP/1.1 only, for calls that wait and for all others each."""
LINKS_MAX: Final = 2
"""Maximum number of connections to any other broker."""
UNREAD_SIZE_MAX: Final = 96 * 2**20
"""Maximum bytes of answers of other brokers that have arrived and are unread."""
STREAMING: Final = "stream"
"""Id of the operation whose answer does not end by itself."""
_HOP_HEADERS: Final = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"expect",
    )
)  # fmt: skip
_OF_BROKERS: Final = frozenset(
    (PROXIED_HEADER, ROUTED_BY_HEADER, ROOM_HEADER, WAITED_HEADER, REQUEST_ID_HEADER, PASSED_ON_HEADER)
)
"""Headers that only brokers send: those of a client are not passed on."""
_ROOM_MAX: Final = 2**53
_BODYLESS: Final = ("GET", "HEAD", "DELETE")
"""Methods whose body has no meaning: it is read and not forwarded."""


class Proxy:
    def __init__(
        self,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        own_token: OwnToken | None = None,
        tls: ssl.SSLContext | None = None,
        links_max: int = LINKS_MAX,
        unread_size_max: int = UNREAD_SIZE_MAX,
    ) -> None:
        """`transport`: the transport to other brokers; None: TCP. `links_max`: maximum number of connections to one
        broker over which requests run together; 0: each request takes one. `unread_size_max`: maximum bytes of answers
        that have arrived over them and are unread. `own_token`: credentials of this broker; None: those
        of the client are passed on, and requests of this broker have none. `tls`: of connections to brokers whose
        address begins with https; None: those that httpx makes."""
        self._own_token = own_token
        self.passing_headers: Callable[[], list[tuple[bytes, bytes]]] = list
        """Returns the headers that prove to other brokers that this one has passed a request on."""
        self.links: PeerLinks | None = None
        """The connections to brokers over which requests run together; None: there are none."""
        if transport is None:
            http1 = [
                httpx.AsyncHTTPTransport(
                    verify=True if tls is None else tls,
                    limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
                    trust_env=False,
                )
                for _ in range(2)
            ]
            transports: list[httpx.AsyncBaseTransport] = list(http1)
            if links_max:
                headers = partial(Context().run, self._connecting_headers)
                first = PeerTransport(
                    http1[0], headers=headers, tls=tls, links_max=links_max, unread_size_max=unread_size_max
                )
                self.links = first.links
                transports = [first, first.waiting(http1[1])]
        else:
            transports = [transport, transport]
        self._client, self._waiting = (
            httpx.AsyncClient(
                transport=one,
                timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                follow_redirects=False,
                trust_env=False,
            )
            for one in transports
        )

    def _connecting_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with which this broker opens a connection for its requests. They name no client."""
        return [(PROXIED_HEADER, b"1"), *self.passing_headers(), *self._credentials(None)]

    @property
    def own_role(self) -> str | None:
        """The role of the token with which this broker authenticates at others; None: it has none."""
        return None if self._own_token is None else self._own_token.role

    async def forward(self, exchange: Exchange, url: str, *, body_size_max: int) -> None:
        """Forward the request to the broker at `url`, and its answer to the client.

        Raises BadRequest for a path that would change in forwarding, UnsupportedMediaType for an encoded body, NotOwner
        if that broker cannot be reached, or does not own the topic (nothing was done, and nothing is answered),
        OutcomeUnknown if the connection broke, ClientGone if the client has disconnected.
        """
        scope = exchange.scope
        check_codings(scope["headers"])
        target = url.rstrip("/") + exchange.raw_path.decode("ascii")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("ascii")
        has_body = exchange.method not in _BODYLESS
        stays = _HOP_HEADERS if has_body else _HOP_HEADERS | {b"content-length"}
        left_out = _OF_BROKERS | CREDENTIALS if self._own_token is not None else _OF_BROKERS
        headers = [(k, v) for k, v in scope["headers"] if k not in stays and k not in left_out]
        headers += [(PROXIED_HEADER, b"1"), *self.passing_headers(), *self._credentials(exchange.principal)]
        if exchange.allowance is not None and (room := exchange.room(_ROOM_MAX)) < _ROOM_MAX:
            headers.append((ROOM_HEADER, b"%d" % room))  # limits count at this broker only
        if exchange.sent_id:
            headers.append((REQUEST_ID_HEADER, exchange.sent_id))
        if waited_ms := exchange.waited_ms:
            headers.append((WAITED_HEADER, b"%d" % waited_ms))
        if not has_body:
            await exchange.read_body(size_max=exchange.broker.settings.control_bytes_max)
        elif exchange.is_body_kept(size_max=KEPT_BODY_SIZE_MAX):  # so that it can be sent to the next owner
            await exchange.read_body(size_max=body_size_max)
        body_sent = asyncio.Event()
        content = _body(exchange, body_sent, size_max=body_size_max) if has_body else None
        request = self._client.build_request(exchange.method, target, headers=headers, content=content)
        if request.url.raw_path.partition(b"?")[0].count(b"/") != target.partition("?")[0].count("/") - 2:
            raise BadRequest(
                "the path cannot be forwarded unchanged to the topic's owner"
            )  # normalization would change the path
        if not has_body:
            body_sent.set()
        try:
            async with _until_gone(exchange, body_sent):
                await self._pass_on(exchange, request, url)
        except ClientGone:
            if exchange.is_answered:  # the client has its answer
                return
            if exchange.is_expired:
                raise Unauthorized("the credentials of the client have expired, or were taken back") from None
            raise
        await exchange.send_chunk(b"", more=False)

    async def call(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: bytes = JSON_TYPE,
        accept: bytes = b"*/*",
        headers: Sequence[tuple[bytes, bytes]] = (),
        timeout_s: float = ANSWER_TIMEOUT_S,
        is_waiting: bool = False,
        client: Principal | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer of the broker at `url`.

        `client`: on whose behalf the call is made; None: that of this broker. `is_waiting`: the answer may take long.
        Such calls have connections of their own, so that others need not wait for them.

        Raises NotOwner if that broker cannot be reached (nothing was done), OutcomeUnknown if it does not answer,
        TooManyRequests if there is no connection for the call in time.
        """
        sent = [(PROXIED_HEADER, b"1"), (b"accept", accept), *headers, *self._credentials(client)]
        sent += self.passing_headers()
        if body is not None:
            sent.append((b"content-type", content_type))
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        connections = self._waiting if is_waiting else self._client
        try:
            response = await connections.request(
                method, url.rstrip("/") + path, content=body, headers=sent, timeout=timeout
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(error, url) from error
        except httpx.PoolTimeout as error:
            raise TooManyRequests("too many requests to other brokers are in progress; retry") from error
        except httpx.HTTPError as error:
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url) from error
        except ssl.SSLError as error:
            raise _refused(error, url) from error
        return response.status_code, response.content

    def _credentials(self, client: Principal | None) -> list[tuple[bytes, bytes]]:
        return [] if self._own_token is None else self._own_token.headers(client)

    async def _pass_on(self, exchange: Exchange, request: httpx.Request, url: str) -> None:
        """Send the request and forward the answer, except for its end."""
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(error, url) from error
        except httpx.PoolTimeout as error:
            raise TooManyRequests("too many requests to other brokers are in progress; retry") from error
        except httpx.LocalProtocolError as error:
            raise BadRequest("the request cannot be passed on to the topic's owner", reason=str(error)) from error
        except httpx.HTTPError as error:
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url) from error
        except ssl.SSLError as error:
            raise _refused(error, url) from error
        try:
            await self._answer(exchange, response)
        except httpx.HTTPError as error:
            if exchange.is_answered:  # part of the answer is sent: only closing the connection reports the error
                raise
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url) from error
        finally:
            await response.aclose()

    async def _answer(self, exchange: Exchange, response: httpx.Response) -> None:
        headers = [
            (k.lower(), v)
            for k, v in response.headers.raw
            if k.lower() not in _HOP_HEADERS and k.lower() not in (b"x-request-id", NOT_OWNER_HEADER)
        ]
        if response.headers.get(NOT_OWNER_HEADER.decode()) and exchange.may_send_body_again:
            raise NotOwner("the topic's owner has changed; retry", owner=response.url.host)
        chunks = response.aiter_raw()
        if exchange.operation == STREAMING and response.status_code == 200:
            chunks = until_stop(chunks, exchange.broker.stops)
        first = await anext(chunks, b"")
        await exchange.start_stream(response.status_code, headers)
        if first:
            await exchange.send_chunk(first, more=True)
        async for chunk in chunks:
            if exchange.allowance is not None and (debt_s := exchange.allowance.sending_debt_s()):
                await asyncio.sleep(debt_s)
            await exchange.send_chunk(chunk, more=True)

    async def close(self) -> None:
        await self._client.aclose()
        await self._waiting.aclose()


def _unreachable(error: httpx.TransportError, url: str) -> NotOwner:
    """Return the error for a broker to which there is no connection: nothing was done."""
    if "_ALERT_" in str(error):  # in TLS 1.3, the answer to the certificate of this broker
        return NotOwner(
            "the topic's owner ended TLS; check peers.certificate_file of this broker", owner=url, reason=str(error)
        )
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return NotOwner(
            "the certificate of the topic's owner is not trusted, or names another host; check peers.ca_file of this "
            "broker, and the advertised URL and the certificate of the owner",
            owner=url,
        )
    return NotOwner("the topic's owner cannot be reached; retry", owner=url)


def _refused(error: ssl.SSLError, url: str) -> OutcomeUnknown:
    """Return the error for an alert of the owner. In TLS 1.3 it may be the answer to the certificate of this broker,
    and arrives after the request was sent; httpx does not convert it."""
    return OutcomeUnknown(
        "the topic's owner ended TLS; check peers.certificate_file of this broker", owner=url, reason=str(error.reason)
    )


async def _body(exchange: Exchange, sent: asyncio.Event, *, size_max: int) -> AsyncIterator[bytes]:
    """Yield the parts of the request's body; set `sent` after the last one."""
    async for chunk in exchange.stream_body(size_max=size_max):
        yield chunk
    sent.set()


@asynccontextmanager
async def _until_gone(exchange: Exchange, body_sent: asyncio.Event) -> AsyncIterator[None]:
    """End the block with ClientGone if the client disconnects after its request, or its credentials expire.

    Until the body is sent, reading the body detects a disconnect. The block must not send the end of the answer,
    because after it every connection counts as closed.
    """
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        task.cancel()

    async def watch() -> None:
        await body_sent.wait()
        await exchange.watch_connection(stop)

    watcher = asyncio.create_task(watch())
    try:
        with exchange.until_expiry(stop):
            yield
    except asyncio.CancelledError:
        if (exchange.gone or exchange.is_expired) and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
