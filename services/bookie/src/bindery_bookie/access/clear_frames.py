"""Read frames that a client sends in clear text between START_TLS and its handshake, without consuming the handshake.

Apache's client sends its first AUTH together with START_TLS, before it has the response. TCP may deliver it after the
response was sent; the TLS library would then read it as a part of the handshake. Event loops cannot return bytes that
were read, so this module peeks at the socket (MSG_PEEK): a TLS record begins with 0x16, and a frame never does because
of its length field.
"""

import asyncio
import os
import socket
import struct
from typing import Final

from bindery_core.errors import TooLarge

CLEAR_FRAME_SIZE_MAX: Final = 64 * 1024
"""Maximum bytes of frames in clear text; a token is smaller."""
_TLS_HANDSHAKE: Final = 0x16
_LENGTH = struct.Struct(">i")
_PAUSE_S: Final = 0.005
"""Seconds between two checks for the rest of a partial frame, during which the socket is readable all the time."""


async def frames_before_handshake(transport: asyncio.Transport) -> list[bytes]:
    """Return whole frames with their length fields, until a TLS record begins or the client disconnects.

    Nothing else is consumed. `transport` must not be reading. The caller sets a timeout. All frames together have at
    most CLEAR_FRAME_SIZE_MAX bytes. Raises TooLarge, OSError.
    """
    of_transport = transport.get_extra_info("socket")
    if of_transport is None:
        return []  # a simulation has no socket, and sends nothing in clear text
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
                    raise TooLarge("bytes in clear text after START_TLS", frame_size=size)
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
