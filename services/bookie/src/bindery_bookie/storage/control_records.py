"""Control records: the state of a ledger besides its entries, in journals and entry logs.

A control record begins like an entry frame. Its negative entry id is the type of the record. Integers are big-endian.

| entry id | name         | rest of the record                            |
|---------:|--------------|-----------------------------------------------|
|   -4096  | master key   | u32 size, then the key                        |
|   -8192  | fence        | nothing                                       |
|  -32768  | explicit LAC | u32 size, then the LAC packet (ids, digest)   |
|  -65536  | deleted      | nothing: earlier records are void             |
| -131072  | continued    | u64 id of the journal that follows this one   |

`continued` occurs in journals only, with the ledger id -1.

The engine refuses adds with negative entry ids, so that a client cannot forge control records.
Source: BookKeeper's BookieImpl.METAENTRY_ID_*; `deleted` and `continued` are Bindery's.
"""

import struct
from typing import Final

from bindery_core.errors import DamagedStorage

MASTER_KEY: Final = -0x1000
FENCE: Final = -0x2000
EXPLICIT_LAC: Final = -0x8000
DELETED: Final = -0x10000
CONTINUED: Final = -0x20000
NO_LEDGER: Final = -1
"""Ledger id of a `continued` record."""

_IDS = struct.Struct(">qq")
_SIZED = struct.Struct(">qqI")
_CONTINUED = struct.Struct(">qqQ")
_IDS_AND_LAC = struct.Struct(">qqq")

ENTRY_SIZE_MIN: Final = _IDS_AND_LAC.size
"""Size in bytes of the fields of an entry frame that the bookie reads: ledger id, entry id, last add confirmed."""

LAC_PACKET_SIZE_MIN: Final = _IDS.size
"""Minimum size in bytes of an explicit LAC packet: ledger id and LAC."""
CONTROL_SIZE_MIN: Final = _IDS.size
"""Minimum size in bytes of a control record, which is the size of one without further fields."""

unpack_ids = _IDS.unpack_from
"""Returns (ledger id, entry id) of an entry frame or control record."""

unpack_ids_and_lac = _IDS_AND_LAC.unpack_from
"""Returns (ledger id, entry id, last add confirmed) of an entry frame."""

assert ENTRY_SIZE_MIN == 24
assert CONTROL_SIZE_MIN == 16


def pack_master_key(ledger_id: int, master_key: bytes) -> bytes:
    return _SIZED.pack(ledger_id, MASTER_KEY, len(master_key)) + master_key


def pack_fence(ledger_id: int) -> bytes:
    return _IDS.pack(ledger_id, FENCE)


def pack_explicit_lac(ledger_id: int, packet: bytes) -> bytes:
    return _SIZED.pack(ledger_id, EXPLICIT_LAC, len(packet)) + packet


def pack_deleted(ledger_id: int) -> bytes:
    return _IDS.pack(ledger_id, DELETED)


def pack_continued(journal_id: int) -> bytes:
    return _CONTINUED.pack(NO_LEDGER, CONTINUED, journal_id)


def unpack_continued(record: bytes) -> int | None:
    """Return the id of the next journal; None for any other record."""
    if len(record) != _CONTINUED.size or unpack_ids(record) != (NO_LEDGER, CONTINUED):
        return None
    return int(_CONTINUED.unpack(record)[2])


def unpack_sized(record: bytes) -> bytes:
    """Return the bytes after the size word of a master key or explicit LAC record. Raises DamagedStorage."""
    if len(record) < _SIZED.size:
        raise DamagedStorage("control record is short", size=len(record))
    _, _, size = _SIZED.unpack_from(record)
    if _SIZED.size + size != len(record):
        raise DamagedStorage("control record has the wrong size", size=len(record), expected=_SIZED.size + size)
    return record[_SIZED.size :]


def lac_of_packet(packet: bytes) -> int:
    """Return the last add confirmed in an explicit LAC packet."""
    return int(_IDS.unpack_from(packet)[1])
