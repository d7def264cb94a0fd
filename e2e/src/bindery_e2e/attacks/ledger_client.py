"""LedgerClient: a well-behaved client of a bookie's ledger port, which adds entries and reads them back."""

import asyncio
import ssl
import time
from typing import Final, Self

from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, ReadRequest, Request, Response, StartTlsRequest

HOST: Final = "127.0.0.1"
LEDGER_ID: Final = 5
ENTRY_SIZE: Final = 1000
_KEY: Final = master_key(b"")
_DIGESTER: Final = Digester(DigestType.CRC32C)


class LedgerClient:
    """One connection with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()

    @classmethod
    async def connect(cls, port: int, *, address: str = HOST) -> Self:
        """Connect, from `address`."""
        return cls(*await asyncio.open_connection(HOST, port, limit=2**20, local_addr=(address, 0)))

    @classmethod
    async def connect_securely(cls, port: int, context: ssl.SSLContext) -> Self:
        """Connect with TLS."""
        client = await cls.connect(port)
        response = await client._ask(StartTlsRequest(1))
        assert response.status == 0, response
        await client._writer.start_tls(context, server_hostname="localhost")
        return client

    async def read_after_pause(self, ledger_id: int, count: int, pause_s: float, *, first: int = 0) -> None:
        """Request `count` entries, read nothing for `pause_s`, and then the responses."""
        self._writer.write(v3.encode_requests(ReadRequest(n, ledger_id, first + n) for n in range(count)))
        transport = self._writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(pause_s)
        transport.resume_reading()  # type: ignore[attr-defined]
        left = count
        while left:
            messages = self._decoder.feed(await self._some())
            assert all(v3.decode_response(message).status == 0 for message in messages)
            left -= len(messages)

    async def call(self) -> float:
        """Add an entry and read it back. Return the seconds that the slower of both took."""
        began = time.monotonic()
        body = await self.add(LEDGER_ID, 0, ENTRY_SIZE)
        added = time.monotonic()
        response = await self._ask(ReadRequest(2, LEDGER_ID, 0))
        assert response.status == 0, response
        assert response.body == body, "the bookie returned another entry"  # type: ignore[union-attr]
        return max(added - began, time.monotonic() - added)

    async def add(self, ledger_id: int, entry_id: int, size: int) -> bytes:
        """Add an entry of `size` bytes, and return its body."""
        body = pack(_DIGESTER, ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=size, payload=bytes(size))
        response = await self._ask(AddRequest(1, ledger_id, entry_id, _KEY, body))
        assert response.status == 0, response
        return body

    async def store_entries(self, ledger_id: int, count: int, size: int) -> None:
        """Add entries 0 to `count` - 1 of `size` bytes."""
        for entry_id in range(count):
            await self.add(ledger_id, entry_id, size)

    def close(self) -> None:
        self._writer.close()

    async def _ask(self, request: Request) -> Response:
        self._writer.write(v3.encode_request(request))
        while True:
            messages = self._decoder.feed(await self._some())
            if messages:
                (message,) = messages
                return v3.decode_response(message)

    async def _some(self) -> bytes:
        data = await self._reader.read(2**20)
        if not data:
            raise ConnectionResetError("the bookie closed the connection")
        return data
