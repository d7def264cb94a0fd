"""A TCP proxy before ZooKeeper that can break the connection at a chosen moment.

A frame begins with a u32 length. In requests, an i32 xid and an i32 type follow; in answers, an i32 xid. Pings and
watch events have negative xids.
"""

import asyncio
import contextlib
import ssl
import struct

WRITE_TYPES = frozenset({1, 2, 5, 14, 15})  # create, delete, setData, multi, create2
READ_TYPES = frozenset({3, 4, 8, 12})  # exists, getData, getChildren, getChildren2


class Proxy:
    """Forwards connections to one server. Clients connect to `host_port`."""

    def __init__(self, host: str, port: int, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None) -> None:
        """`tls`: contexts towards the clients and towards the server; None: no TLS."""
        self._server_address = (host, port)
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self._lose: tuple[frozenset[int], bool] | None = None
        self._swallow_answer_to: int | None = None
        self.requests: list[int] = []
        """Types of the forwarded requests."""

    async def start(self) -> None:
        self._listener = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, ssl=self._tls[0] if self._tls else None
        )

    @property
    def host_port(self) -> str:
        assert self._listener
        host, port = self._listener.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Break open connections and refuse new ones."""
        self._refusing = True
        self._break()

    def restore(self) -> None:
        self._refusing = False

    def lose_next(self, types: frozenset[int], *, applied: bool) -> None:
        """Break the connection at a request of these types: before the server receives it, or after it applied it."""
        self._lose = (types, applied)

    def send_nonsense(self) -> None:
        """Send the clients a response to a request that they never made."""
        for writer in self._clients:
            writer.write(struct.pack(">iiqi", 16, 12_345, 0, 0))

    async def close(self) -> None:
        assert self._listener
        self._listener.close()
        self._break()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _break(self) -> None:
        self._swallow_answer_to = None
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        self._writers.add(writer)
        try:
            if self._refusing:
                return
            server_reader, server_writer = await asyncio.open_connection(
                *self._server_address, ssl=self._tls[1] if self._tls else None
            )
            self._writers.add(server_writer)
            self._clients.add(writer)
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._forward_requests(reader, server_writer))
                        group.create_task(self._forward_answers(server_reader, writer))
            except* (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                self._writers.discard(server_writer)
                server_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            self._clients.discard(writer)
            writer.transport.abort()

    async def _forward_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        while True:
            frame = await _read_frame(reader)
            if not first:
                xid, kind = struct.unpack_from(">ii", frame, 4)
                if self._lose and kind in self._lose[0]:
                    applied, self._lose = self._lose[1], None
                    if not applied:
                        self._break()
                        return
                    self._swallow_answer_to = xid
                self.requests.append(kind)
            first = False  # the connect request has no xid
            writer.write(frame)
            await writer.drain()

    async def _forward_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        while True:
            frame = await _read_frame(reader)
            if not first and self._swallow_answer_to == struct.unpack_from(">i", frame, 4)[0]:
                self._break()
                return
            first = False
            writer.write(frame)
            await writer.drain()


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(struct.unpack(">I", head)[0])
