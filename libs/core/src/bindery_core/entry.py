"""Entry frame: one ledger entry as a client builds it and as a bookie receives, stores and returns it, verbatim.

Integers are big-endian. Offsets and sizes are in bytes; D is the digest's size (`digest.SIZE_OF`).

| offset | size | type | field     | meaning                                                                    |
|-------:|-----:|------|-----------|----------------------------------------------------------------------------|
|      0 |    8 | i64  | ledger_id |                                                                            |
|      8 |    8 | i64  | entry_id  | position in the ledger: dense, from 0                                      |
|     16 |    8 | i64  | lac       | last add confirmed, as of the time when the writer sent this; -1: none     |
|     24 |    8 | i64  | length    | payload bytes of entries 0 .. entry_id of the ledger, this one included    |
|     32 |    D | raw  | digest    | over [0, 32), then the payload                                             |
|   32+D |    n | raw  | payload   | n >= 0; bounded by the wire's frame limit only                             |

LAC packet, the body of WRITE_LAC and of the response to READ_LAC:

| offset | size | type | field     | meaning                                                                    |
|-------:|-----:|------|-----------|----------------------------------------------------------------------------|
|      0 |    8 | i64  | ledger_id |                                                                            |
|      8 |    8 | i64  | lac       |                                                                            |
|     16 |    D | raw  | digest    | over [0, 16)                                                               |

Clients verify every entry that they read. A bookie reads only the ids and the LAC, so that it needs no password.
Source: BookKeeper DigestManager.
"""

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from bindery_core.digest import Buffer, Digester
from bindery_core.errors import BadRequest, DigestMismatch

_HEADER = struct.Struct(">qqqq")
_IDS = struct.Struct(">qq")
_LAC = struct.Struct(">q")
_LAC_OFFSET = 16

HEADER_SIZE: Final = 32
"""Bytes of an entry's header."""
LAC_HEADER_SIZE: Final = 16
"""Bytes of a LAC packet's header."""
IDS_SIZE: Final = 16
"""Bytes of the two ids, which are the shortest body that a bookie can store."""

PAYLOAD_SIZE_MAX: Final = 5 * 1024 * 1024 - 1024
"""Maximum payload bytes that our writers send: the frame limit (5 MiB), less 1 KiB for header, digest and request."""

assert _HEADER.size == HEADER_SIZE
assert _IDS.size == IDS_SIZE == LAC_HEADER_SIZE == _LAC_OFFSET


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A verified entry. `payload` is a separate copy, so it does not keep the frame in memory."""

    ledger_id: int
    entry_id: int
    lac: int
    length: int
    payload: bytes


class EntryHeader(msgspec.Struct, frozen=True, gc=False):
    """The header fields of an entry whose digest was not verified."""

    ledger_id: int
    entry_id: int
    lac: int
    length: int


def pack(digester: Digester, *, ledger_id: int, entry_id: int, lac: int, length: int, payload: bytes) -> bytes:
    """Return the frame of one entry. `length` includes this payload; `lac` < `entry_id`, -1 for none."""
    assert -1 <= lac < entry_id
    assert ledger_id >= 0
    assert length >= len(payload)
    header = _HEADER.pack(ledger_id, entry_id, lac, length)
    return b"".join((header, digester.digest(header, payload), payload))


def pack_many(
    digester: Digester, payloads: Sequence[bytes], *, ledger_id: int, first_entry_id: int, lac: int, length: int
) -> list[bytes]:
    """Return the frames of consecutive entries from `first_entry_id` on; `length`: the ledger's length before them.

    All frames carry the same `lac`, the current one. The length of the ledger afterwards is `length` plus the sizes of
    the payloads.
    """
    assert -1 <= lac < first_entry_id
    assert ledger_id >= 0
    assert length >= 0
    frames = []
    pack_header = _HEADER.pack
    digest = digester.digest
    for entry_id, payload in enumerate(payloads, first_entry_id):
        length += len(payload)
        header = pack_header(ledger_id, entry_id, lac, length)
        frames.append(b"".join((header, digest(header, payload), payload)))
    return frames


def unpack(digester: Digester, frame: Buffer, *, ledger_id: int, entry_id: int | None) -> Entry:
    """Verify `frame` as the response to a read of `entry_id` (None: of the last entry, whatever its id).

    Raises DigestMismatch if the frame is too short, if its digest differs, or if it belongs to another ledger or entry.
    These cases are one error, because each means that this bookie's response must not be used.
    """
    payload_offset = HEADER_SIZE + digester.size
    if len(frame) < payload_offset:
        raise DigestMismatch("entry too short", ledger_id=ledger_id, entry_id=entry_id, size=len(frame))
    header = frame[:HEADER_SIZE]
    payload = bytes(frame[payload_offset:])
    if not digester.verify(header, frame[HEADER_SIZE:payload_offset], payload):
        raise DigestMismatch(
            "entry digest mismatch", ledger_id=ledger_id, entry_id=entry_id, digest_type=digester.digest_type.name
        )
    found_ledger_id, found_entry_id, lac, length = _HEADER.unpack(header)
    if found_ledger_id != ledger_id or (entry_id is not None and found_entry_id != entry_id):
        raise DigestMismatch(
            "the response contains a different entry",
            ledger_id=ledger_id,
            entry_id=entry_id,
            found_ledger_id=found_ledger_id,
            found_entry_id=found_entry_id,
        )
    return Entry(found_ledger_id, found_entry_id, lac, length, payload)


def pack_lac(digester: Digester, *, ledger_id: int, lac: int) -> bytes:
    """Return the explicit LAC packet."""
    assert ledger_id >= 0
    assert lac >= -1
    header = _IDS.pack(ledger_id, lac)
    return header + digester.digest(header, b"")


def unpack_lac(digester: Digester, packet: Buffer, *, ledger_id: int) -> int:
    """Return the LAC in a verified packet. Raises DigestMismatch, which callers treat as "no explicit LAC"."""
    if len(packet) != LAC_HEADER_SIZE + digester.size:
        raise DigestMismatch("LAC packet has a wrong size", ledger_id=ledger_id, size=len(packet))
    header = packet[:LAC_HEADER_SIZE]
    if not digester.verify(header, packet[LAC_HEADER_SIZE:], b""):
        raise DigestMismatch("LAC packet digest mismatch", ledger_id=ledger_id)
    found_ledger_id, lac = _IDS.unpack(header)
    if found_ledger_id != ledger_id:
        raise DigestMismatch("LAC packet of another ledger", ledger_id=ledger_id, found_ledger_id=found_ledger_id)
    return int(lac)


def peek_ids(body: Buffer) -> tuple[int, int]:
    """Return (ledger_id, entry_id) of an unverified body. Raises BadRequest if it is shorter than 16 bytes."""
    if len(body) < IDS_SIZE:
        raise BadRequest("entry is shorter than its ids", size=len(body))
    return _IDS.unpack_from(body)


def peek_lac(body: Buffer) -> int:
    """Return the LAC of an unverified body; -1 if the body is too short for one (bookies store such bodies too)."""
    if len(body) < _LAC_OFFSET + _LAC.size:
        return -1
    return int(_LAC.unpack_from(body, _LAC_OFFSET)[0])


def peek_header(body: Buffer) -> EntryHeader:
    """Return all header fields of an unverified body. Raises BadRequest if it is shorter than a header."""
    if len(body) < HEADER_SIZE:
        raise BadRequest("entry is shorter than its header", size=len(body))
    return EntryHeader(*_HEADER.unpack_from(body))
