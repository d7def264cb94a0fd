"""LastLogMark: the position up to which journal and entry logs agree. Replay begins at its journal position.

All records in journals before `journal` are in entry logs and index. Entry logs are complete up to (`log_id`,
`log_offset`); everything after that was written by an unfinished flush.

Integers are big-endian. The file `LastLogMark` is replaced atomically: a new file is written and synced, renamed over
the old one, and the directory is synced.

| offset | size | type | field          | meaning                                                        |
|-------:|-----:|------|----------------|----------------------------------------------------------------|
|      0 |    4 | raw  | magic          | `BNDM`                                                         |
|      4 |    4 | u32  | version        | 1                                                              |
|      8 |    8 | u64  | generation     | number of flushes; the index has the same number or one more   |
|     16 |    8 | u64  | journal_id     |                                                                |
|     24 |    8 | u64  | journal_offset | of the first group to replay                                   |
|     32 |    8 | u64  | sequence       | of that group                                                  |
|     40 |    8 | u64  | log_id         | last entry log with durable records; 0: none                   |
|     48 |    8 | u64  | log_offset     | its durable size                                               |
|     56 |    4 | u32  | digest         | CRC32C over [0, 56)                                            |
"""

import struct
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadVersion, DamagedStorage
from crc32c import crc32c

from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal.journal_format import JournalPosition

MAGIC: Final = b"BNDM"
VERSION: Final = 1
FILE_NAME: Final = "LastLogMark"
_TEMPORARY_NAME: Final = "LastLogMark.new"

_FIELDS = struct.Struct(">4sIQQQQQQ")
_DIGEST = struct.Struct(">I")
SIZE: Final = 60

assert _FIELDS.size + _DIGEST.size == SIZE


@dataclass(frozen=True, slots=True)
class LastLogMark:
    """The content of the file; see the table in the module docstring."""

    generation: int
    journal: JournalPosition
    log_id: int
    log_offset: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.generation,
            self.journal.journal_id,
            self.journal.offset,
            self.journal.sequence,
            self.log_id,
            self.log_offset,
        )
        return fields + _DIGEST.pack(crc32c(fields))

    @classmethod
    def unpack(cls, data: bytes, *, path: str) -> "LastLogMark":
        """Return the mark in `data`. Raises DamagedStorage, and BadVersion for an unknown version."""
        if len(data) != SIZE:
            raise DamagedStorage("LastLogMark has the wrong size", path=path, offset=0, size=len(data), expected=SIZE)
        magic, version, generation, journal_id, offset, sequence, log_id, log_offset = _FIELDS.unpack_from(data)
        if magic != MAGIC or _DIGEST.unpack_from(data, _FIELDS.size)[0] != crc32c(data[: _FIELDS.size]):
            raise DamagedStorage("LastLogMark is damaged", path=path, offset=0)
        if version != VERSION:
            raise BadVersion("LastLogMark has an unknown version", path=path, version=version)
        return cls(generation, JournalPosition(journal_id, offset, sequence), log_id, log_offset)


def read_mark(disk: Disk, directory: str) -> LastLogMark | None:
    """Return the mark; None if there is none. Raises DamagedStorage."""
    path = f"{directory}/{FILE_NAME}"
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return None
    try:
        return LastLogMark.unpack(file.read_at(0, SIZE + 1), path=path)
    finally:
        file.close()


def write_mark(disk: Disk, directory: str, mark: LastLogMark) -> None:
    """Replace the mark. Durable on return; if anything fails, the old mark is kept."""
    temporary = f"{directory}/{_TEMPORARY_NAME}"
    if _TEMPORARY_NAME in disk.list_names(directory):
        disk.remove(temporary)
    file = disk.create(temporary)
    try:
        file.write_at(mark.pack(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{directory}/{FILE_NAME}")
    disk.sync_directory(directory)
