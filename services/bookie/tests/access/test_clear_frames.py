"""Frames in clear text are read up to the handshake, of which no byte is consumed. Both ends are in this process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest
from bindery_bookie.access.clear_frames import CLEAR_FRAME_SIZE_MAX, frames_before_handshake
from bindery_core.errors import TooLarge

HELLO = b"\x16\x03\x01\x00\x05hello"


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class PausedTransport(asyncio.Transport):
    """A transport that does not read."""

    def __init__(self, sock: socket.socket | None) -> None:
        super().__init__({"socket": sock})


class Ends:
    def __init__(self) -> None:
        self.ours, self.clients = socket.socketpair()
        self.ours.setblocking(False)
        self.reading: asyncio.Task[list[bytes]] | None = None

    def read(self) -> asyncio.Task[list[bytes]]:
        self.reading = asyncio.create_task(frames_before_handshake(PausedTransport(self.ours)))
        return self.reading

    def left(self) -> bytes:
        """Return the bytes that were not consumed."""
        try:
            return self.ours.recv(2**20)
        except BlockingIOError:
            return b""


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    if ends.reading is not None:
        ends.reading.cancel()
        await asyncio.gather(ends.reading, return_exceptions=True)
    ends.ours.close()
    ends.clients.close()


async def test_a_simulation_has_no_socket_and_no_frames() -> None:
    assert await frames_before_handshake(PausedTransport(None)) == []


async def test_a_handshake_without_frames_is_left_alone(ends: Ends) -> None:
    ends.clients.send(HELLO)
    assert await ends.read() == []
    assert ends.left() == HELLO


async def test_frames_before_the_handshake_are_returned_whole(ends: Ends) -> None:
    before = set(os.listdir("/proc/self/fd"))
    ends.clients.send(frame(b"first") + frame(b"x") + HELLO)
    assert await ends.read() == [frame(b"first"), frame(b"x")]
    assert ends.left() == HELLO
    assert set(os.listdir("/proc/self/fd")) <= before
    assert ends.ours.fileno() >= 0, "the connection stays open"


async def test_a_client_that_disconnects_ends_the_wait(ends: Ends) -> None:
    ends.clients.send(frame(b"first"))
    ends.clients.shutdown(socket.SHUT_WR)
    assert await ends.read() == [frame(b"first")]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8])
async def test_the_rest_of_a_partial_frame_is_awaited(ends: Ends, size: int) -> None:
    whole = frame(b"first")
    ends.clients.send(whole[:size])
    reading = ends.read()
    await asyncio.sleep(0.1)
    assert not reading.done()
    assert ends.ours.recv(100, socket.MSG_PEEK) == whole[:size]
    ends.clients.send(whole[size:] + HELLO)
    assert await reading == [whole]
    assert ends.left() == HELLO


async def test_frames_that_arrive_one_by_one_are_awaited(ends: Ends) -> None:
    reading = ends.read()
    await asyncio.sleep(0)
    for body in (b"a", b"b"):
        ends.clients.send(frame(body))
        for _ in range(5):
            await asyncio.sleep(0)
    assert not reading.done()
    assert ends.left() == b""
    ends.clients.send(HELLO)
    assert await reading == [frame(b"a"), frame(b"b")]


async def test_the_largest_frame_is_accepted(ends: Ends) -> None:
    ends.clients.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    largest = frame(bytes(CLEAR_FRAME_SIZE_MAX - 4))
    assert len(largest) == 65_536
    ends.clients.sendall(largest + HELLO)
    assert await ends.read() == [largest]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        ((65_533).to_bytes(4, "big"), 65_537),
        (b"\x00\x00\x00\x00", 4),
        (b"\xff\xff\xff\xff", 3),
        (b"GET ", 0x47455420 + 4),
    ],
    ids=["one over", "empty", "negative", "HTTP"],
)
async def test_a_frame_that_is_too_large_or_empty_is_refused(ends: Ends, data: bytes, size: int) -> None:
    ends.clients.send(data)
    with pytest.raises(TooLarge) as raised:
        await ends.read()
    assert raised.value.facts == {"frame_size": size}


async def test_all_frames_together_have_the_maximum_size(ends: Ends) -> None:
    ends.clients.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    ends.clients.sendall(frame(bytes(65_000)) + (533).to_bytes(4, "big"))
    with pytest.raises(TooLarge) as raised:
        await ends.read()
    assert raised.value.facts == {"frame_size": 537}
