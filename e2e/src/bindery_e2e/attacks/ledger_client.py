"""LedgerClient: a well-behaved client of a bookie's ledger port, which adds entries and reads them back."""

import asyncio
import time
from typing import Final, Self

from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, ReadRequest, Request, Response

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
    async def connect(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection(HOST, port, limit=2**20))

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
            data = await self._reader.read(2**20)
            if not data:
                raise ConnectionResetError("the bookie closed the connection")
            messages = self._decoder.feed(data)
            if messages:
                (message,) = messages
                return v3.decode_response(message)
