"""Check LevelDB's logs strictly before LevelDB opens them.

LevelDB reads its write-ahead logs and its MANIFEST block by block (32 KiB). It skips zeros and the rest of a damaged
block silently, and continues with the next block. Zeros in the middle of a file therefore lose writes without an error.
This check requires that a log is valid up to some point and has no valid record after it, which is the state after a
crash. Writes lost at the end are detected by the batch numbers of the index (`index`).

A log is a sequence of blocks of 32768 bytes, each a sequence of records; a record never spans blocks, and fewer than 7
bytes at the end of a block are zeros. Integers are little-endian.

| offset | size | type | field  | meaning                                                      |
|-------:|-----:|------|--------|--------------------------------------------------------------|
|      0 |    4 | u32  | digest | masked CRC32C over type and data                             |
|      4 |    2 | u16  | size   | n, bytes of data                                             |
|      6 |    1 | u8   | type   | 1 whole, 2 first, 3 middle, 4 last part of an entry          |
|      7 |    n | raw  | data   |                                                              |

Source: LevelDB, doc/log_format.md; mask: util/crc32c.h.
"""

import re
import struct
from typing import Final

from crc32c import crc32c

from bindery_bookie.storage.io.disk import Disk, ReadableFile
from bindery_bookie.storage.io.errors import DamagedIndex

BLOCK_SIZE: Final = 32 * 1024
_HEADER = struct.Struct("<IHB")
_MASK_DELTA: Final = 0xA282EAD8
_TYPES: Final = (1, 2, 3, 4)
_CURRENT: Final = re.compile(rb"(MANIFEST-\d{6,})\n")
_LOG: Final = re.compile(r"(MANIFEST-\d{6,}|\d{6,}\.log)")

assert _HEADER.size == 7


def check_files(disk: Disk, directory: str) -> None:
    """Check all logs of a store. A missing store is accepted. Raises DamagedIndex with path and offset, OSError."""
    names = disk.list_names(directory)
    if "CURRENT" not in names:
        if any(name.endswith(".ldb") for name in names):
            raise DamagedIndex("file CURRENT of the index is missing", path=f"{directory}/CURRENT", offset=0)
        return
    file = disk.open_read(f"{directory}/CURRENT")
    try:
        found = _CURRENT.fullmatch(file.read_at(0, 4096))
    finally:
        file.close()
    if found is None or found[1].decode() not in names:
        raise DamagedIndex("CURRENT of the index names no existing file", path=f"{directory}/CURRENT", offset=0)
    for name in names:
        if _LOG.fullmatch(name):
            path = f"{directory}/{name}"
            file = disk.open_read(path)
            try:
                check_log(file, path=path)
            finally:
                file.close()


def check_log(file: ReadableFile, *, path: str) -> None:
    """Raise DamagedIndex if a valid record follows invalid bytes."""
    bad_at: int | None = None
    offset = 0
    while block := file.read_at(offset, BLOCK_SIZE):
        if bad_at is not None:
            if _record_size(block, 0) is not None:
                raise DamagedIndex("a log of the index is damaged", path=path, offset=bad_at, valid_again=offset)
        else:
            end = _valid_size(block)
            if any(block[end:]) or len(block) - end >= _HEADER.size:
                bad_at = offset + end
        offset += len(block)


def _valid_size(block: bytes) -> int:
    """Return the bytes of valid records at the start of a block."""
    at = 0
    while (size := _record_size(block, at)) is not None:
        at += size
    return at


def _record_size(block: bytes, at: int) -> int | None:
    """Return the size of the valid record at `at`; None if there is none."""
    if at + _HEADER.size > len(block):
        return None
    digest, size, kind = _HEADER.unpack_from(block, at)
    end = at + _HEADER.size + size
    if kind not in _TYPES or end > len(block):
        return None
    found = crc32c(block[at + _HEADER.size - 1 : end])
    masked = ((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF
    return end - at if masked == digest else None
