"""Call an EntryStore with coroutines instead of callbacks, and create entry frames."""

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Final

from bindery_core.wire.messages import AddRequest

MASTER_KEY: Final = b"k" * 20
"""Master key of all ledgers."""
_HEADER: Final = struct.Struct(">qqqq")
_LAC_PACKET: Final = struct.Struct(">qqI")


def entry(ledger_id: int, entry_id: int, payload: bytes, *, lac: int = -1) -> bytes:
    """Return an entry frame with only the fields that the storage reads."""
    return _HEADER.pack(ledger_id, entry_id, lac, len(payload)) + payload


def entry_id_of(body: bytes) -> int:
    return int.from_bytes(body[8:16], "big", signed=True)


def add_request(body: bytes, *, recovery: bool = False, flags: int = 0, master_key: bytes = MASTER_KEY) -> AddRequest:
    ledger_id, entry_id, _, _ = _HEADER.unpack_from(body)
    return AddRequest(0, ledger_id, entry_id, master_key, body, recovery, flags)


def lac_packet(ledger_id: int, lac: int) -> bytes:
    return _LAC_PACKET.pack(ledger_id, lac, 7)


async def add(store: Any, adds: Sequence[AddRequest]) -> list[int]:
    """Add entries. Return their statuses in the order of `adds`."""
    answered: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    store.add_many(adds, lambda statuses: answered.set_result(list(statuses)))
    return await answered


async def read(store: Any, keys: Sequence[tuple[int, int]]) -> list[bytes | int]:
    """Read entries. Return entries or statuses in the order of `keys`."""
    answered: asyncio.Future[list[bytes | int]] = asyncio.get_running_loop().create_future()
    store.read_many(keys, lambda answers: answered.set_result(list(answers)))
    return await answered
