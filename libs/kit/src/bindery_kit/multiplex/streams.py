"""One request and its response on a connection, and the turns in which the streams of a connection send.

Flow control is per stream: an end sends at most WINDOW_SIZE bytes of a body that the other end has not read. A client
that reads slowly therefore keeps WINDOW_SIZE bytes at most, and no other stream waits for it. If the connection itself
is slow, its streams take turns of one frame each.

| a body       | is kept                                             | above the limit                   |
|--------------|-----------------------------------------------------|--------------------------------------------|
| that arrives | WINDOW_SIZE bytes per stream; those above FREE_SIZE | the stream that has held its bytes longest |
|              | count for a limit of all streams (`HeldBytes`)      | is ended                                   |
| that is sent | by its sender, which waits                          | nobody                                     |
"""

import asyncio
from collections import deque
from typing import Final, Protocol

from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.multiplex.frames import (
    BODY_SIZE_MAX,
    WINDOW_SIZE,
    Kind,
    ProtocolViolation,
    encode,
    encode_number,
)

FREE_SIZE: Final = 4 * 1024
"""Bytes of an unread body up to which they do not count for the limit of all streams."""
CREDIT_SIZE: Final = WINDOW_SIZE // 2
"""Bytes that are read before the other end is told."""
JOINED_SIZE: Final = 64 * 1024
"""Bytes of frames that are written at once, without waiting for the end of the round of the loop."""
CREDIT_MAX: Final = 2**30
"""Maximum bytes of credit that a stream can have."""


class StreamOver(Exception):
    """The other end needs nothing more of this stream, or it was cancelled."""


class Sending:
    """The turns of a connection: while the transport is full, streams wait, and then send one frame each."""

    __slots__ = ("_is_closed", "_is_paused", "_loop", "_size", "_transport", "_unwritten", "_waiting")

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unwritten: list[bytes] = []
        """Frames of this round of the loop, which are written together: each write is a call of the system."""
        self._size = 0
        """Bytes in `_unwritten`."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_paused = False
        self._is_closed = False

    @property
    def is_free(self) -> bool:
        """Whether a frame may be sent now."""
        return not self._is_paused and not self._waiting and not self._is_closed

    def write(self, data: bytes) -> None:
        """Send at once: frames without a body, which are small and few, or after `turn`."""
        if self._is_closed:
            return
        if not self._unwritten:
            self._loop.call_soon(self.flush)
        self._unwritten.append(data)
        self._size += len(data)
        if self._size >= JOINED_SIZE:
            self.flush()

    def flush(self) -> None:
        """Write what `write` has collected. Call it before the transport is closed."""
        if self._unwritten:
            data = self._unwritten[0] if len(self._unwritten) == 1 else b"".join(self._unwritten)
            self._unwritten = []
            self._size = 0
            if not self._transport.is_closing():
                self._transport.write(data)

    async def turn(self) -> None:
        """Return when it is the caller's turn. It must send one frame at once, and call `end_turn`.

        Raises StreamOver if the connection has ended.
        """
        if self.is_free:
            return
        if self._is_closed:
            raise StreamOver
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.end_turn()
            else:
                self._waiting.remove(future)
            raise
        if self._is_closed:
            raise StreamOver

    def end_turn(self) -> None:
        """Let the next stream send."""
        while self._waiting and not self._is_paused:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.end_turn()

    def close(self) -> None:
        """The connection has ended."""
        self._is_closed = True
        self._unwritten = []
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


class StreamConnection(Protocol):
    """What a stream uses of its connection."""

    sending: Sending

    @property
    def held(self) -> HeldBytes:
        """The unread bodies of all streams of the process that arrive from this side."""
        ...


class Stream:
    """The two bodies of a request. Subclasses are the two ends of it."""

    __slots__ = ("_chunks", "_consumed", "_credit", "_credited", "_more", "_unread", "connection", "has_ended", "id")

    def __init__(self, connection: StreamConnection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.has_ended = False
        """Whether the other end has sent all of its body."""
        self._credit = WINDOW_SIZE
        """Bytes of the body that may be sent."""
        self._credited: asyncio.Future[None] | None = None
        """Ends the wait for credit."""
        self._chunks: deque[bytes] = deque()
        self._unread = 0
        """Bytes in `_chunks`."""
        self._consumed = 0
        """Bytes that were read since the last CREDIT."""
        self._more: asyncio.Future[None] | None = None
        """Ends the wait for a chunk, or for the end."""

    def evict(self, kind: str, held_size: int) -> None:
        """Give up the stream, because all together hold too much. See `limits.held_bytes.Holder`."""
        raise NotImplementedError

    # --- the body that arrives

    def add(self, data: bytes, *, is_end: bool) -> None:
        """Keep a piece of the body. Raises ProtocolViolation if the other end had no credit for it, or had ended."""
        if self.has_ended:
            raise ProtocolViolation("a body goes on after its end")
        self.has_ended = is_end
        if data:
            self._unread += len(data)
            if self._unread + self._consumed > WINDOW_SIZE:
                raise ProtocolViolation("a body is longer than its credit")
            self._chunks.append(data)
            if self._unread > FREE_SIZE:
                self.connection.held.hold(self, self._unread)
        self.wake_reader()

    def take(self) -> bytes:
        """Return what has arrived of the body, and give the other end credit for it."""
        if not self._unread:
            return b""
        size = self._unread
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self.drop()
        if not self.has_ended:
            self._consumed += size
            if self._consumed >= CREDIT_SIZE:
                self.connection.sending.write(encode_number(Kind.CREDIT, self.id, self._consumed))
                self._consumed = 0
        return data

    def drop(self) -> None:
        """Forget what has arrived and is unread."""
        if self._unread > FREE_SIZE:
            self.connection.held.release(self)
        self._chunks.clear()
        self._unread = 0

    async def wait_for_more(self) -> None:
        """Return when something has arrived, or `wake_reader` was called."""
        self._more = asyncio.get_running_loop().create_future()
        try:
            await self._more
        finally:
            self._more = None

    def wake_reader(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    # --- the body that is sent

    def add_credit(self, size: int) -> None:
        """The other end has read `size` bytes. Raises ProtocolViolation for an impossible number."""
        self._credit += size
        if self._credit > CREDIT_MAX:
            raise ProtocolViolation("a stream has too much credit")
        self.wake_writer()

    def wake_writer(self) -> None:
        if self._credited is not None and not self._credited.done():
            self._credited.set_result(None)

    @property
    def may_send(self) -> bool:
        """Whether the stream is open for what this end sends."""
        raise NotImplementedError

    async def send_body(self, data: bytes, *, is_end: bool, credit_timeout_s: float | None = None) -> None:
        """Send a piece of the body, as fast as the other end reads it.

        Raises StreamOver if the other end needs no more of it, TimeoutError if it gives no credit in time.
        """
        rest = memoryview(data)
        while True:
            if len(rest) and not self._credit:
                await self._wait_for_credit(credit_timeout_s)
            sending = self.connection.sending
            if not sending.is_free:
                await sending.turn()
            if not self.may_send:
                sending.end_turn()
                raise StreamOver
            size = min(len(rest), self._credit, BODY_SIZE_MAX)
            if size < len(rest) and not size:  # the credit was used up meanwhile
                sending.end_turn()
                continue
            part, rest = rest[:size], rest[size:]
            self._credit -= size
            is_last = not len(rest)
            sending.write(encode(Kind.BODY, self.id, part, is_end=is_end and is_last))
            sending.end_turn()
            if is_last:
                return

    async def _wait_for_credit(self, timeout_s: float | None) -> None:
        while not self._credit:
            if not self.may_send:
                raise StreamOver
            self._credited = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._credited
            finally:
                self._credited = None
        if not self.may_send:
            raise StreamOver
