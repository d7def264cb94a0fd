"""Frames that a client sends in clear between START_TLS and its handshake, read without touching the handshake.

Apache's client sends its first AUTH together with START_TLS, before it knows the answer. TCP may deliver it after we
answered, and then it would be taken for the handshake. Event loops cannot give bytes back, so the socket is looked at
with MSG_PEEK first: a TLS record begins with 0x16, a frame, by its length, never does.
"""

import asyncio
import os
import socket
import struct
from typing import Final

from bindery_core.errors import TooLarge

CLEAR_FRAME_SIZE_MAX: Final = 64 * 1024
"""A token has no need of more."""
_TLS_HANDSHAKE: Final = 0x16
_LENGTH = struct.Struct(">i")
_PAUSE_S: Final = 0.005
"""Between two looks at half a frame: it is readable all the time, so its readability tells nothing."""


async def frames_before_handshake(transport: asyncio.Transport) -> list[bytes]:
    """Whole frames with their lengths, until a TLS record begins or the client is gone. Nothing else is consumed.

    `transport` must not be reading. The caller bounds the time. All together may have CLEAR_FRAME_SIZE_MAX bytes.
    Raises TooLarge, OSError.
    """
    of_transport = transport.get_extra_info("socket")
    if of_transport is None:
        return []  # no socket, as in a simulation, where nothing is sent in clear
    frames: list[bytes] = []
    room = CLEAR_FRAME_SIZE_MAX
    with socket.socket(fileno=os.dup(of_transport.fileno())) as sock:
        sock.setblocking(False)
        while True:
            await _readable(sock)
            try:
                start = sock.recv(_LENGTH.size, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            if not start or start[0] == _TLS_HANDSHAKE:
                return frames
            if len(start) == _LENGTH.size:
                size = _LENGTH.size + _LENGTH.unpack(start)[0]
                if not _LENGTH.size < size <= room:
                    raise TooLarge("bytes in clear behind START_TLS", frame_size=size)
                if len(sock.recv(size, socket.MSG_PEEK)) == size:
                    frames.append(sock.recv(size))
                    room -= size
                    continue
            await asyncio.sleep(_PAUSE_S)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
