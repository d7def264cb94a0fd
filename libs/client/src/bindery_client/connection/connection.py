"""BookieConnection: pipelined requests to one bookie over one TCP connection, which is opened again when needed.

Flow: `send` takes a batch of encoded frames and records the sink of their responses; everything sent in one turn of
the event loop is one write. A socket read is split into messages, all are decoded, and each sink is called once with
its responses. The connection is opened by the first request; after a failed attempt, requests fail at once until a
delay has passed.

A connection always uses the same wire version. Responses are matched by key: in v3 the transaction id; in v2, which has
none, the operation with ledger and entry id (for batch reads, with a request id). If two equal v2 requests are in
flight, each response may match either of them. For adds and plain reads this makes no difference; fencing reads and
recovery adds therefore use v3. START_TLS and authentication precede all requests.

Invariants: each request sent ends exactly once, as answered, failed or expired, and never within `send`; bytes in
flight never exceed `connection_bytes_max` (except for a single larger request); one timer serves all deadlines, and
requests expire at most two ticks late.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, Protocol, cast

import structlog
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.ids import BookieId
from bindery_core.wire import v2, v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    AuthRequest,
    AuthResponse,
    ErrorResponse,
    Operation,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    Status,
)

from bindery_client.connection.security import NO_SECURITY, ClientSecurity
from bindery_client.settings import ClientSettings

log = structlog.get_logger()

CLOSED_BY_PEER: Final = "closed by peer"
"""Cause in the error for a connection that the bookie closed in an orderly way."""
REFUSES_CLIENT: Final = "bookie refuses the operation: not authenticated, or not allowed"
REJECTS_CREDENTIALS: Final = "bookie rejects the credentials"
REFUSES_TLS: Final = "bookie refuses TLS"
NOT_TRUSTED: Final = "its certificate is not trusted"
HANDSHAKE_TXN_ID: Final = 0
"""Transaction id of START_TLS and AUTH, which precede all requests: no request uses it."""

Resolve = Callable[[BookieId], Awaitable[tuple[str, int]]]
"""Returns host and port of a bookie. Raises BookieUnavailable if it is not registered."""


class ResponseSink(Protocol):
    """Receives responses in the event loop, never within `send`. The ids in a response identify its request."""

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        """Process the `Response`s of one socket read."""
        ...

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        """Process a refused or lost connection: all outstanding requests failed."""
        ...

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        """Process requests that were not answered in time. Sinks with their own deadlines may ignore this."""
        ...


class _Batch:
    """Requests sent by one call of `send`. Its bytes count as in flight until its last response."""

    __slots__ = ("keys", "left", "sent_at", "sink", "size")

    def __init__(self, sink: ResponseSink, keys: Sequence[Hashable], size: int, sent_at: float) -> None:
        self.sink = sink
        self.keys = keys
        self.left = len(keys)
        self.size = size
        self.sent_at = sent_at


class BookieConnection(asyncio.Protocol):
    """See the module. Owned by the pool; used from one event loop."""

    def __init__(
        self,
        bookie_id: BookieId,
        *,
        resolve: Resolve,
        settings: ClientSettings,
        wire_version: int = 3,
        security: ClientSecurity = NO_SECURITY,
    ) -> None:
        self.bookie_id: Final = bookie_id
        self.wire_version: Final = wire_version
        self._security = security
        self.generation = security.generation
        """Generation of the credentials (`ClientSecurity.generation`) with which the newest attempt began."""
        self._handshaking: asyncio.Transport | None = None
        """Set during START_TLS and authentication."""
        self._tls_granted = False
        self._handshake_message: asyncio.Future[bytes] | None = None
        """Completed by the next message of the handshake."""
        self._resolve = resolve
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._decoder = FrameDecoder(frame_size_max=settings.frame_size_max)
        self._pending: dict[Hashable, _Batch] = {}
        """Key -> batch that the response belongs to."""
        self._duplicates: dict[Hashable, deque[_Batch]] = {}
        """v2: key -> further batches that wait for a response with this key."""
        self._outgoing: list[bytes] = []
        self._flush_scheduled = False
        self._paused = False
        self._bytes_in_flight = 0
        self._slots: dict[int, list[_Batch]] = {}
        """Batches by the tick of their deadline."""
        self._fresh: set[int] = set()
        """Slots that received batches since the last tick. `_settling`: slots that received batches in the tick
        before."""
        self._settling: set[int] = set()
        self._tick_done = 0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._backoff = Backoff(settings.reconnect_pause_s, settings.reconnect_pause_s_max)
        self._retry_at = 0.0
        self._why = ""
        """Why the last attempt to connect failed, as `_reason_of` returns it."""
        self._received_at = 0.0
        self._closed = False

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def is_unreachable(self) -> bool:
        """Whether there is no connection and the last attempt failed."""
        return self._transport is None and self._backoff.failures > 0

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes_in_flight

    @property
    def requests_in_flight(self) -> int:
        return len(self._pending) + sum(map(len, self._duplicates.values()))

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, frames: bytes, keys: Sequence[Hashable], sink: ResponseSink, *, timeout_s: float) -> None:
        """Send `frames`, joined whole requests, whose keys are `keys` (v3: transaction ids).

        A transaction id must not be in flight on this connection. `keys` must not be changed afterwards.
        """
        now = self._loop.time()
        error = self._refusal(now, len(frames))
        if error is not None:
            self._loop.call_soon(sink.failed, self.bookie_id, error)
            return
        batch = _Batch(sink, keys, len(frames), now)
        if self.wire_version == v3.VERSION:
            self._pending.update(dict.fromkeys(keys, batch))
        else:
            for key in keys:
                if self._pending.setdefault(key, batch) is not batch or key in self._duplicates:
                    self._duplicates.setdefault(key, deque()).append(batch)
        self._bytes_in_flight += len(frames)
        self._outgoing.append(frames)
        self._watch(batch, now + timeout_s)
        if self._transport is None:
            if self._connecting is None:
                self._connecting = self._loop.create_task(self._connect())
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _refusal(self, now: float, size: int) -> BinderyError | None:
        if self._closed:
            return BookieUnavailable("connection was closed", bookie_id=self.bookie_id)
        if self._transport is None and self._connecting is None and now < self._retry_at:
            return BookieUnavailable(
                f"bookie cannot be reached{self._why}",
                bookie_id=self.bookie_id,
                retry_in_s=round(self._retry_at - now, 3),
            )
        if self._bytes_in_flight and self._bytes_in_flight + size > self._settings.connection_bytes_max:
            return BookieUnavailable(
                "bookie is too slow: too many bytes in flight",
                bookie_id=self.bookie_id,
                bytes_in_flight=self._bytes_in_flight,
                bytes_in_flight_max=self._settings.connection_bytes_max,
            )
        return None

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._transport is None or self._paused or not self._outgoing:
            return
        frames, self._outgoing = self._outgoing, []
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    # -- connecting ---------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                host, port = await self._resolve(self.bookie_id)
                await self._loop.create_connection(lambda: self, host, port)
                if self._handshaking is not None:
                    await self._handshake(self._handshaking, host)
        except (OSError, TimeoutError, BinderyError) as error:
            delay_s = self._backoff.next_delay_s()
            self._retry_at = self._loop.time() + delay_s
            log.info("bookie_connect_failed", bookie_id=self.bookie_id, error=repr(error), pause_s=delay_s)
            self._why = _reason_of(error)
            self._fail_all(_unavailable(f"bookie cannot be reached{self._why}", self.bookie_id, error))
        finally:
            self._connecting = None
            if self._handshaking is not None:
                self._handshaking.abort()
                self._handshaking = None

    async def _handshake(self, transport: asyncio.Transport, host: str) -> None:
        """Secure the connection and authenticate. Raises OSError, BinderyError."""
        security = self._security
        security.poll()
        self.generation, token = security.generation, security.current_token
        if security.tls is not None:
            answer = await self._ask(transport, v3.encode_request(StartTlsRequest(HANDSHAKE_TXN_ID)))
            status = getattr(v3.decode_response(answer), "status", None)
            if status != Status.OK:
                raise BookieUnavailable(REFUSES_TLS, bookie_id=self.bookie_id, status=status)
            self._tls_granted = True
            secured = await self._loop.start_tls(transport, self, security.tls, server_hostname=host)
            if secured is None or secured.is_closing():
                raise BookieUnavailable("connection ended during the TLS handshake", bookie_id=self.bookie_id)
            self._handshaking = transport = secured
        if token is not None:
            codec = v3 if self.wire_version == v3.VERSION else v2
            request = AuthRequest(HANDSHAKE_TXN_ID, security.plugin, token)
            response = codec.decode_response(await self._ask(transport, codec.encode_request(request)))
            # A bookie without authentication answers OK under another plugin name.
            if not isinstance(response, AuthResponse) or response.status != Status.OK:
                raise BookieUnavailable(REJECTS_CREDENTIALS, bookie_id=self.bookie_id)
        self._handshaking = None
        self._begin(transport)

    async def _ask(self, transport: asyncio.Transport, frame: bytes) -> bytes:
        self._handshake_message = self._loop.create_future()
        try:
            transport.write(frame)
            return await self._handshake_message
        finally:
            self._handshake_message = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        if self._closed:
            transport.abort()
            return
        self._decoder = FrameDecoder(frame_size_max=self._settings.frame_size_max)
        self._tls_granted = False
        if self._security.is_needed:
            self._handshaking = transport
        else:
            self._begin(transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Start sending requests."""
        self._transport = transport
        self._paused = False
        self._received_at = 0.0
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            if self._handshake_message is not None and not self._handshake_message.done():
                self._handshake_message.set_exception(
                    _unavailable("connection to bookie was lost before it was ready", self.bookie_id, exc)
                )
            return
        self._transport = None
        # Only a failed attempt to connect delays the next; after a lost connection, the next request connects at once.
        self._backoff.failures += 1
        self._fail_all(_unavailable("connection to bookie was lost", self.bookie_id, exc))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def retry_now(self) -> None:
        """End the delay before the next attempt, because the bookie registered again."""
        self._retry_at = 0.0

    async def probe(self) -> bool:
        """Try to connect now, without the delay; return whether connected. Takes `connect_timeout_s` at most."""
        if self._transport is None and not self._closed:
            if self._connecting is None:
                self._connecting = self._loop.create_task(self._connect())
            await asyncio.wait([self._connecting])
        return self._transport is not None

    def shut(self) -> None:
        """Fail all requests in flight and all later ones. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self._handshaking is not None:
            self._handshaking.abort()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        self._fail_all(BookieUnavailable("connection was closed", bookie_id=self.bookie_id))

    async def close(self) -> None:
        """Like `shut`; returns when all tasks of this connection have ended."""
        connecting = self._connecting
        self.shut()
        if connecting is not None:
            await asyncio.gather(connecting, return_exceptions=True)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            self._handshake_received(data)
            return
        in_v3 = self.wire_version == v3.VERSION
        try:
            responses = (v3 if in_v3 else v2).decode_responses(self._decoder.feed(data))
        except BinderyError as error:
            log.warning("bookie_response_malformed", bookie_id=self.bookie_id, error=repr(error))
            self._abort()
            return
        self._received_at = self._loop.time()
        self._backoff.reset()
        pending_pop = self._pending.pop
        by_sink: dict[ResponseSink, list[Response]] = {}
        refusals: dict[ResponseSink, ErrorResponse] = {}
        last_sink: ResponseSink | None = None
        answers: list[Response] = []
        for response in responses:
            batch = pending_pop(response.txn_id, None) if in_v3 else self._take(v2.key_of(response))
            if batch is None:
                continue  # it arrived after its deadline
            if batch.sink is not last_sink:
                last_sink = batch.sink
                answers = by_sink.setdefault(last_sink, [])
            batch.left -= 1
            if not batch.left:
                self._bytes_in_flight -= batch.size
                batch.keys = ()
            if type(response) is ErrorResponse:
                refusals[batch.sink] = response
            else:
                answers.append(response)
        for sink, answers in by_sink.items():
            if answers:
                sink.answered(self.bookie_id, answers)
        for sink, refusal in refusals.items():
            sink.failed(
                self.bookie_id,
                BookieUnavailable(
                    REFUSES_CLIENT if refusal.status == Status.UNAUTHORIZED else "bookie refuses the operation",
                    bookie_id=self.bookie_id,
                    operation=refusal.operation,
                    status=refusal.status,
                ),
            )

    def _handshake_received(self, data: bytes) -> None:
        """Process the response to START_TLS or AUTH. Each request has one response; anything else ends the connection.

        There may be a second response to START_TLS: an Apache bookie with an auth provider sends it if the client did
        not authenticate before TLS, which would send its token in clear text. The bookie then accepts AUTH.
        Source: BookKeeper, BookieRequestProcessor.processStartTLSRequestV3.
        """
        try:
            messages = self._decoder.feed(data)
        except BinderyError as error:
            messages = []
            if self._handshake_message is not None and not self._handshake_message.done():
                self._handshake_message.set_exception(error)
        for message in messages:
            if self._tls_granted and _is_about_tls(message):
                continue
            if self._handshake_message is not None and not self._handshake_message.done():
                self._handshake_message.set_result(message)
            elif self._handshaking is not None:
                self._handshaking.abort()

    def _take(self, key: Hashable) -> _Batch | None:
        """Remove and return the batch that has waited longest for a response with this key."""
        batch = self._pending.pop(key, None)
        duplicates = self._duplicates.get(key)
        if duplicates:
            self._pending[key] = duplicates.popleft()
            if not duplicates:
                del self._duplicates[key]
        return batch

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # connection_lost follows and fails what is in flight

    def _fail_all(self, error: BinderyError) -> None:
        pending, self._pending = self._pending, {}
        self._outgoing.clear()
        self._slots.clear()
        self._bytes_in_flight = 0
        sinks: dict[ResponseSink, None] = {}  # ordered, each once
        duplicates, self._duplicates = self._duplicates, {}
        for batch in [*pending.values(), *(batch for queue in duplicates.values() for batch in queue)]:
            batch.left = 0
            batch.keys = ()
            sinks[batch.sink] = None
        for sink in sinks:
            sink.failed(self.bookie_id, error)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _watch(self, batch: _Batch, deadline: float) -> None:
        tick_s = self._settings.timer_tick_s
        slot = int(deadline / tick_s) + 1
        self._slots.setdefault(slot, []).append(batch)
        self._fresh.add(slot)
        if self._tick_timer is None:
            self._tick_done = int(self._loop.time() / tick_s)
            self._tick_timer = self._loop.call_later(tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        tick = int(self._loop.time() / self._settings.timer_tick_s)
        for slot in range(self._tick_done + 1, tick + 1):
            for batch in self._slots.pop(slot, ()):
                if batch.left:
                    self._expire(batch)
        self._tick_done = tick
        self._forget_answered()
        if self._slots:
            self._tick_timer = self._loop.call_later(self._settings.timer_tick_s, self._tick)

    def _forget_answered(self) -> None:
        """Drop answered batches, so that they do not stay in memory until their deadline."""
        for slot in self._settling:
            batches = self._slots.get(slot)
            if batches is not None:
                waiting = [batch for batch in batches if batch.left]
                if waiting:
                    self._slots[slot] = waiting
                else:
                    del self._slots[slot]
        self._settling, self._fresh = self._fresh, set()

    def _expire(self, batch: _Batch) -> None:
        for key in batch.keys:
            if self._pending.get(key) is batch:
                self._take(key)
            elif key in self._duplicates:
                kept = deque(duplicate for duplicate in self._duplicates.pop(key) if duplicate is not batch)
                if kept:
                    self._duplicates[key] = kept
        self._bytes_in_flight -= batch.size
        batch.left = 0
        batch.keys = ()
        batch.sink.expired(self.bookie_id, BookieUnavailable("no answer in time", bookie_id=self.bookie_id))
        if self._received_at <= batch.sent_at:
            # No byte arrived since: the peer may be gone without closing, so the next request opens a new connection.
            self._abort()


def _reason_of(error: Exception) -> str:
    """Return why a handshake failed, as a part of a message; empty if the network is the reason. Messages of failed
    operations on several bookies have only the messages of their errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f": {NOT_TRUSTED} ({error.verify_message.rstrip('.')})"
    return f": {error.message}" if isinstance(error, BinderyError) else ""


def _unavailable(message: str, bookie_id: BookieId, cause: BaseException | None) -> BookieUnavailable:
    error = BookieUnavailable(message, bookie_id=bookie_id, cause=repr(cause) if cause else CLOSED_BY_PEER)
    error.__cause__ = cause
    return error


def _is_about_tls(message: bytes) -> bool:
    """Return whether this is a response to START_TLS: always v3, also if the connection uses v2."""
    try:
        response = v3.decode_response(message)
    except BinderyError:
        return False
    return isinstance(response, StartTlsResponse) or (
        isinstance(response, ErrorResponse) and response.operation == Operation.START_TLS
    )
