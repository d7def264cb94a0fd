"""The client's end of a connection: from connecting through the upgrade to the end of its last request.

| state     | event                                    | next    | effect                                            |
|-----------|------------------------------------------|---------|---------------------------------------------------|
| UPGRADING | the answer is 101                        | OPEN    | requests may begin                                |
| UPGRADING | any other answer                         | CLOSED  | NotMultiplexed: that process serves HTTP/1.1 only |
| OPEN      | LEAVING, or the last number of a stream  | LEAVING | requests in progress go on, others are not begun  |
| OPEN      | idle for IDLE_S                          | CLOSED  |                                                   |
| LEAVING   | the last request ends                    | CLOSED  |                                                   |
| all       | nothing arrives for SILENT_TICKS, or the | CLOSED  | requests in progress end with LinkBroken          |
|           | connection breaks                        |         |                                                   |

The time in which nothing arrives is counted in ticks of TICK_S, so that a process that was stopped itself does not
count the time in which it could not receive.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, cast

from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.multiplex.frames import (
    NUMBER,
    STREAM_MAX,
    TOKEN,
    Frame,
    FrameReader,
    Kind,
    ProtocolViolation,
    Reason,
    encode,
)
from bindery_kit.multiplex.heads import Headers, decode_response
from bindery_kit.multiplex.streams import Sending, Stream

TICK_S: Final = 1.0
"""Seconds between two checks of a connection."""
PING_TICKS: Final = 2
"""Number of ticks without a byte of the other end after which it is asked for one."""
SILENT_TICKS: Final = 10
"""Number of ticks without a byte of the other end after which the connection is given up. They take as long as the
default session timeout of ZooKeeper, after which another process may take what this one owned."""
IDLE_S: Final = 300.0
"""Seconds without a request after which a connection is closed."""
ANSWER_SIZE_MAX: Final = 16 * 1024
"""Maximum bytes of the head of the answer to the upgrade."""
WRITE_MARK: Final = 256 * 1024
"""Bytes in the buffer of the transport above which requests wait for their turn to send."""
_PING: Final = b"bindery?"

log = logging.getLogger(__name__)


class LinkError(Exception):
    """A request has no complete response."""


class NotBegun(LinkError):
    """The application at the other end has surely not seen the request. It can be sent again."""


class TooBusy(NotBegun):
    """Too many requests are in progress at the other end, or on their way there."""


class LinkBroken(LinkError):
    """The connection broke, or the other end could not complete the response. What the request did is not known."""


class NotMultiplexed(Exception):
    """The other end does not accept the upgrade. `status`: that of its answer; 0: it gave none that is HTTP/1.1."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the answer to the upgrade has the status {status}")
        self.status = status


class State(Enum):
    UPGRADING = auto()
    OPEN = auto()
    LEAVING = auto()
    CLOSED = auto()


class PeerRequest(Stream):
    """A request to the other end. Its `cancel` must be called at the end, also after a complete response."""

    __slots__ = ("_error", "_head", "_is_over", "link")

    def __init__(self, link: "Link", stream_id: int) -> None:
        super().__init__(link, stream_id)
        self.link = link
        self._head: tuple[int, Headers] | None = None
        self._error: LinkError | None = None
        self._is_over = False
        """Whether nothing more is sent or received."""

    @property
    def may_send(self) -> bool:
        return not self._is_over and not self.has_ended and self._error is None

    async def response(self) -> tuple[int, Headers]:
        """Return status and headers. Raises NotBegun, LinkBroken."""
        while self._head is None:
            if self._error is not None:
                raise self._error
            await self.wait_for_more()
        return self._head

    async def read(self) -> bytes:
        """Return the next piece of the response's body; empty: it is complete. Raises LinkBroken."""
        while True:
            if data := self.take():
                return data
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return b""
            await self.wait_for_more()

    def cancel(self) -> None:
        """End the request. The other end is told unless the response is complete. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self.drop()
        self.link.forget(self)
        if self._error is None and not self.has_ended:
            self.link.sending.write(encode(Kind.CANCEL, self.id, bytes((Reason.GONE,))))

    def evict(self, kind: str, held_size: int) -> None:
        log.warning("a response was ended because its client reads too slowly", extra={"held_size": held_size})
        self.link.sending.write(encode(Kind.CANCEL, self.id, bytes((Reason.GONE,))))
        self.drop()
        self.fail(LinkBroken("the response was read too slowly, while others needed the memory"))

    # --- called by the link

    def begin_response(self, head: tuple[int, Headers], *, is_end: bool) -> None:
        if self._head is not None:
            raise ProtocolViolation("a request is answered twice")
        self._head = head
        self.has_ended = is_end
        self.wake_reader()

    def add(self, data: bytes, *, is_end: bool) -> None:
        if self._head is None:
            raise ProtocolViolation("a body begins before its head")
        super().add(data, is_end=is_end)
        if is_end:
            self.wake_writer()  # what is left of the request's body is not needed

    def fail(self, error: LinkError) -> None:
        if self._error is None and not self.has_ended:
            self._error = error
            self.wake_reader()
            self.wake_writer()


class Link(asyncio.Protocol):
    """One connection. `upgrade`: the bytes of the request that begins it. `held`: counts unread responses.
    `on_closed`: called once at the end. `streams_max`: maximum number of requests in progress."""

    def __init__(
        self,
        upgrade: bytes,
        *,
        held: HeldBytes,
        streams_max: int,
        on_closed: Callable[["Link"], None],
    ) -> None:
        self.state = State.UPGRADING
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when requests may begin. Raises NotMultiplexed, or NotBegun if the connection ends before."""
        self.sending = cast(Sending, None)
        self.held = held
        self.requests: dict[int, PeerRequest] = {}
        """Requests in progress, by stream."""
        self._upgrade = upgrade
        self._streams_max = streams_max
        self._on_closed = on_closed
        self._transport = cast(asyncio.Transport, None)
        self._frames = FrameReader()
        self._answer = b""
        """Bytes of the answer to the upgrade."""
        self._last_stream = 0
        self._silent_ticks = 0
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a request can begin, as far as this end knows."""
        return self.state is State.OPEN and not self._transport.is_closing()

    @property
    def is_full(self) -> bool:
        return len(self.requests) >= self._streams_max

    def begin(self, head: bytes, *, has_body: bool) -> PeerRequest:
        """Send the head of a request. Raises NotBegun, with nothing sent, if the connection is not usable."""
        if not self.is_usable:
            raise NotBegun("the connection has ended")
        if self.is_full:
            raise TooBusy("too many requests to this process are in progress")
        self._last_stream += 1
        request = self.requests[self._last_stream] = PeerRequest(self, self._last_stream)
        self._idle_ticks = 0
        self.sending.write(encode(Kind.REQUEST, request.id, head, is_end=not has_body))
        if self._last_stream == STREAM_MAX:
            self.state = State.LEAVING
        return request

    def forget(self, request: PeerRequest) -> None:
        """The request has ended."""
        self.requests.pop(request.id, None)
        if self.state is State.LEAVING and not self.requests:
            self.close()

    def close(self) -> None:
        """End the connection. Requests in progress fail."""
        if not self._transport.is_closing():
            self.sending.flush()
            self._transport.close()

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_MARK)
        self.sending = Sending(self._transport)
        self._transport.write(self._upgrade)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        if self.state is State.UPGRADING:
            self._answer += data
            rest = self._read_answer()
            if rest is None:
                return
            data = rest
        try:
            for frame in self._frames.feed(data):
                self._received(frame)
        except ProtocolViolation as error:
            log.warning("a peer does not follow the protocol: %s", error)
            self._transport.abort()

    def _read_answer(self) -> bytes | None:
        """Return the bytes after the answer to the upgrade; None: it is not complete, or no 101."""
        head, end, rest = self._answer.partition(b"\r\n\r\n")
        if not end and len(self._answer) <= ANSWER_SIZE_MAX:
            return None
        status_line, *lines = head.split(b"\r\n")
        parts = status_line.split(b" ")
        is_http = len(parts) >= 2 and parts[0] == b"HTTP/1.1" and parts[1].isdigit() and len(parts[1]) == 3
        status = int(parts[1]) if is_http and end else 0
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._answer = b""
        if status != 101 or fields.get(b"upgrade") != TOKEN:
            if not self.opened.done():
                self.opened.set_exception(NotMultiplexed(status))
            self._transport.close()
            return None
        self.state = State.OPEN
        if not self.opened.done():
            self.opened.set_result(None)
        return rest

    def _received(self, frame: Frame) -> None:
        kind, stream, payload, is_end = frame
        if kind is Kind.PING:
            self.sending.write(encode(Kind.PONG, 0, payload))
        elif kind is Kind.PONG:
            return
        elif kind is Kind.LEAVING:
            self._leave(NUMBER.unpack(payload)[0])
        elif kind is Kind.REQUEST or stream > self._last_stream:
            raise ProtocolViolation(f"{kind.name} of stream {stream}, which this end did not begin")
        elif (request := self.requests.get(stream)) is None:
            return  # cancelled meanwhile
        elif kind is Kind.RESPONSE:
            request.begin_response(decode_response(payload), is_end=is_end)
        elif kind is Kind.BODY:
            request.add(payload, is_end=is_end)
        elif kind is Kind.CREDIT:
            request.add_credit(NUMBER.unpack(payload)[0])
        else:
            request.fail(_error_of(payload[0]))

    def _leave(self, last: int) -> None:
        """The other end serves no stream above `last`."""
        if self.state is State.OPEN:
            self.state = State.LEAVING
        for request in list(self.requests.values()):
            if request.id > last:
                request.fail(NotBegun("the other process is stopping"))
        if not self.requests:
            self.close()

    def pause_writing(self) -> None:
        self.sending.pause()

    def resume_writing(self) -> None:
        self.sending.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = State.CLOSED
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.sending.close()
        if not self.opened.done():
            error = NotBegun("the connection ended before its upgrade")
            error.__cause__ = exc
            self.opened.set_exception(error)
            self.opened.exception()  # perhaps nobody waits any more
        for request in list(self.requests.values()):
            request.fail(LinkBroken("the connection broke"))
        self._on_closed(self)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._silent_ticks += 1
        self._idle_ticks = 0 if self.requests else self._idle_ticks + 1
        if self._silent_ticks >= SILENT_TICKS:
            log.warning("a peer does not answer; its connection is given up")
            self._transport.abort()
        elif self._idle_ticks * TICK_S >= IDLE_S:
            self.state = State.LEAVING
            self.close()
        elif self._silent_ticks >= PING_TICKS and self.state is not State.UPGRADING:
            self.sending.write(encode(Kind.PING, 0, _PING))


def _error_of(reason: int) -> LinkError:
    if reason == Reason.NOT_BEGUN:
        return NotBegun("the other process does not begin the request")
    if reason == Reason.BUSY:
        return TooBusy("too many requests are in progress at the other process")
    return LinkBroken("the other process could not complete the response")
