"""Entry log file `<hex id>.log`: the entries of all ledgers, sorted by (ledger, entry) within each flush.

Compaction writes `<hex id>.log.compacting` in the same format and renames it when it is complete (see `log_manifest`).

Integers are big-endian. Offsets and sizes are in bytes. Logs are append-only; ids count up from 1.

File header of a log that a flush wrote
| offset | size | type | field   | meaning                  |
|-------:|-----:|------|---------|--------------------------|
|      0 |    4 | raw  | magic   | `BNDL`                   |
|      4 |    4 | u32  | version | 1                        |
|      8 |    8 | u64  | log_id  | as in the file's name    |
|     16 |    4 | u32  | digest  | CRC32C over [0, 16)      |
|     20 |   12 | raw  | zeros   |                          |

File header of a log that compaction wrote
| offset | size | type | field   | meaning                                          |
|-------:|-----:|------|---------|--------------------------------------------------|
|      0 |    4 | raw  | magic   | `BNDL`                                           |
|      4 |    4 | u32  | version | 2                                                |
|      8 |    8 | u64  | log_id  | as in the file's name                            |
|     16 |    8 | u64  | order   | of the log that it replaced (see `log_manifest`) |
|     24 |    4 | u32  | digest  | CRC32C over [0, 24)                              |
|     28 |    4 | raw  | zeros   |                                                  |

Record
| offset | size | type | field  | meaning                                                             |
|-------:|-----:|------|--------|---------------------------------------------------------------------|
|      0 |    4 | u32  | digest | CRC32C over the body, started from the value of `size`              |
|      4 |    4 | u32  | size   | n, bytes of body; 16 <= n                                           |
|      8 |    n | raw  | body   | an entry frame or a control record; verbatim                        |

An entry's *location* is `log_id << 32 | offset of its body`: the size word is at location - 4, as in BookKeeper, and
the digest at location - 8. The bookie computes this digest itself, so it can detect damage without the ledger's key.

Ledgers map: the last record of the file, written when the log is closed. Its body:
| offset | size | type | field  | meaning                                                             |
|-------:|-----:|------|--------|---------------------------------------------------------------------|
|      0 |    8 | i64  |        | -1                                                                  |
|      8 |    8 | i64  |        | -2                                                                  |
|     16 |    4 | u32  | count  |                                                                     |
|     20 | 16 c | rows | ledger | i64 ledger id, u64 bytes of its records in this log; ascending;     |
|        |      |      |        | bit 63 of the bytes: a `deleted` record of the ledger is among them |

Trailer: the last bytes of a closed log. A log without it is open, or its bookie crashed; it must be scanned.
| offset | size | type | field      | meaning                                  |
|-------:|-----:|------|------------|------------------------------------------|
|      0 |    4 | raw  | magic      | `LEND`                                   |
|      4 |    8 | u64  | map_offset | of the ledgers map's body                |
|     12 |    4 | u32  | digest     | CRC32C over [0, 12)                      |

Source: BookKeeper's DefaultEntryLogger (vocabulary, location, ledgers map); digests and trailer are ours.
"""

import struct
from collections.abc import Container, Mapping
from typing import Final

from bindery_core.errors import BadVersion, DamagedStorage
from crc32c import crc32c

from bindery_bookie.storage.control_records import CONTROL_SIZE_MIN
from bindery_bookie.storage.control_records import unpack_ids as unpack_ids
from bindery_bookie.storage.io.disk import ReadableFile

MAGIC: Final = b"BNDL"
TRAILER_MAGIC: Final = b"LEND"
VERSION: Final = 1
COMPACTED_VERSION: Final = 2
FILE_SUFFIX: Final = ".log"
COMPACTING_SUFFIX: Final = ".log.compacting"
HEADER_SIZE: Final = 32
RECORD_HEADER_SIZE: Final = 8
TRAILER_SIZE: Final = 16
BODY_SIZE_MIN: Final = CONTROL_SIZE_MIN
BODY_SIZE_MAX: Final = 256 * 1024 * 1024
"""Maximum size of a body in bytes, so that a reader allocates no more for a damaged size. Frames are much smaller."""

LOG_ID_MAX: Final = 2**31 - 1
"""Greatest log id, so that a location fits into 63 bits."""
OFFSET_BITS: Final = 32
OFFSET_MASK: Final = 2**OFFSET_BITS - 1

_HEADER = struct.Struct(">4sIQ")
_COMPACTED_HEADER = struct.Struct(">4sIQQ")
_DIGEST = struct.Struct(">I")
_RECORD = struct.Struct(">II")
_TRAILER = struct.Struct(">4sQ")
_MAP_HEAD = struct.Struct(">qqI")
_MAP_ROW = struct.Struct(">qQ")
_MAP_LEDGER: Final = -1
_MAP_ENTRY: Final = -2
_HAS_DELETION: Final = 1 << 63

pack_record_header = _RECORD.pack
"""Packs (digest, size), which precede a body; digest = crc32c(body, size)."""

unpack_record_header = _RECORD.unpack_from

Located = tuple[int, int, int]
"""(entry id, location, body size)."""

assert _HEADER.size + _DIGEST.size <= HEADER_SIZE
assert _COMPACTED_HEADER.size + _DIGEST.size <= HEADER_SIZE
assert _RECORD.size == RECORD_HEADER_SIZE
assert _TRAILER.size + _DIGEST.size == TRAILER_SIZE
assert BODY_SIZE_MIN >= CONTROL_SIZE_MIN
assert (LOG_ID_MAX << OFFSET_BITS) < 2**63


def file_name(log_id: int) -> str:
    return f"{log_id:x}{FILE_SUFFIX}"


def parse_file_name(name: str) -> int | None:
    """Return the log id; None for a file that is not an entry log."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or "." + suffix != FILE_SUFFIX:
        return None
    try:
        log_id = int(stem, 16)
    except ValueError:
        return None
    return log_id if log_id > 0 and file_name(log_id) == name else None


def pack_file_header(log_id: int, *, order: int | None = None) -> bytes:
    """Return a file header. `order`: set for a log that compaction writes; None: a flush writes it."""
    if order is None:
        head = _HEADER.pack(MAGIC, VERSION, log_id)
    else:
        head = _COMPACTED_HEADER.pack(MAGIC, COMPACTED_VERSION, log_id, order)
    return (head + _DIGEST.pack(crc32c(head))).ljust(HEADER_SIZE, b"\0")


def check_file_header(file: ReadableFile, *, path: str, log_id: int) -> int | None:
    """Return the order of a log that compaction wrote; None if a flush wrote it. Raises DamagedStorage, BadVersion."""
    head = file.read_at(0, HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        raise DamagedStorage("entry log header is damaged", path=path, offset=0)
    magic, version, found_id = _HEADER.unpack_from(head)
    size = _COMPACTED_HEADER.size if version == COMPACTED_VERSION else _HEADER.size
    if _DIGEST.unpack_from(head, size)[0] != crc32c(head[:size]):
        raise DamagedStorage("entry log header is damaged", path=path, offset=0)
    if magic != MAGIC or found_id != log_id or any(head[size + _DIGEST.size :]):
        raise DamagedStorage("entry log header is damaged", path=path, offset=0)
    if version == COMPACTED_VERSION:
        return int(_COMPACTED_HEADER.unpack_from(head)[3])
    if version != VERSION:
        raise BadVersion("entry log has an unknown version", path=path, version=version)
    return None


def pack_record(body: bytes) -> bytes:
    """Return a record: header and body."""
    size = len(body)
    return _RECORD.pack(crc32c(body, size), size) + body


def intact_entry(data: bytes, at: int, size: int, ledger_id: int, entry_id: int) -> bytes | None:
    """Return the body of `size` bytes at `at`, after its record header, if it is intact and has these ids.

    None otherwise; `check_record` then gives the reason.
    """
    body = data[at : at + size]
    if at < RECORD_HEADER_SIZE or len(body) != size or size < BODY_SIZE_MIN:
        return None
    digest, found = _RECORD.unpack_from(data, at - RECORD_HEADER_SIZE)
    if found != size or digest != crc32c(body, size) or unpack_ids(body) != (ledger_id, entry_id):
        return None
    return body


def check_record(header: bytes, body: bytes, *, path: str, offset: int) -> None:
    """Raise DamagedStorage unless `header` matches `body`. `offset`: of the body, for the message."""
    if len(header) != RECORD_HEADER_SIZE:
        raise DamagedStorage("entry log is short", path=path, offset=offset)
    digest, size = _RECORD.unpack(header)
    if size != len(body):
        raise DamagedStorage("entry size differs", path=path, offset=offset, size=size, found=len(body))
    if digest != crc32c(body, size):
        raise DamagedStorage("entry digest mismatch", path=path, offset=offset)


def pack_ledgers_map(sizes: Mapping[int, int], deletions: Container[int] = ()) -> bytes:
    """Return the map's body. `sizes`: bytes of records by ledger id; `deletions`: ledgers with a `deleted` record."""
    rows = [
        _MAP_ROW.pack(ledger_id, sizes[ledger_id] | (_HAS_DELETION if ledger_id in deletions else 0))
        for ledger_id in sorted(sizes)
    ]
    return _MAP_HEAD.pack(_MAP_LEDGER, _MAP_ENTRY, len(rows)) + b"".join(rows)


def pack_trailer(map_offset: int) -> bytes:
    """Return a trailer. `map_offset`: offset of the body of the ledgers map in the file."""
    head = _TRAILER.pack(TRAILER_MAGIC, map_offset)
    return head + _DIGEST.pack(crc32c(head))


def read_ledgers_map(file: ReadableFile, *, path: str) -> dict[int, int] | None:
    """Return the bytes of records by ledger id; None for a log that was not closed. Raises DamagedStorage."""
    found = read_ledgers_and_deletions(file, path=path)
    return None if found is None else found[0]


def read_ledgers_and_deletions(file: ReadableFile, *, path: str) -> tuple[dict[int, int], frozenset[int]] | None:
    """Return the result of `read_ledgers_map`, and the ledgers with a `deleted` record. Raises DamagedStorage."""
    size = file.size()
    tail = file.read_at(max(size - TRAILER_SIZE, 0), TRAILER_SIZE)
    if len(tail) < TRAILER_SIZE or tail[:4] != TRAILER_MAGIC:
        return None
    (digest,) = _DIGEST.unpack_from(tail, _TRAILER.size)
    if digest != crc32c(tail[: _TRAILER.size]):
        return None  # these may be bytes of an entry; the caller scans the log, which verifies every record
    _, offset = _TRAILER.unpack_from(tail)
    if not HEADER_SIZE + RECORD_HEADER_SIZE <= offset <= size - TRAILER_SIZE:
        return None  # not a trailer either, but bytes that a client chose for its entry
    header = file.read_at(offset - RECORD_HEADER_SIZE, RECORD_HEADER_SIZE)
    body = file.read_at(offset, size - TRAILER_SIZE - offset)
    check_record(header, body, path=path, offset=offset)
    ledger_id, entry_id, count = _MAP_HEAD.unpack_from(body)
    if (ledger_id, entry_id) != (_MAP_LEDGER, _MAP_ENTRY) or len(body) != _MAP_HEAD.size + count * _MAP_ROW.size:
        raise DamagedStorage("ledgers map is damaged", path=path, offset=offset)
    sizes: dict[int, int] = {}
    deletions: set[int] = set()
    for found_id, found in _MAP_ROW.iter_unpack(body[_MAP_HEAD.size :]):
        sizes[found_id] = found & (_HAS_DELETION - 1)
        if found & _HAS_DELETION:
            deletions.add(found_id)
    return sizes, frozenset(deletions)
