"""Journal file `<hex id>.txn`: everything that was accepted and is not yet flushed to entry logs and index.

Integers are big-endian. Offsets and sizes are in bytes. The file is preallocated and reads as zeros where nothing was
written. It has a header in the first sector, then groups, each of which starts at a sector boundary.

File header
| offset | size | type | field      | meaning                                     |
|-------:|-----:|------|------------|---------------------------------------------|
|      0 |    4 | raw  | magic      | `BNDJ`                                      |
|      4 |    4 | u32  | version    | 2                                           |
|      8 |    8 | u64  | journal_id | as in the file's name; from 1, no gaps      |
|     16 |    8 | u64  | file_size  | bytes allocated: a shorter file is damaged  |
|     24 |    4 | u32  | digest     | CRC32C over [0, 24)                         |
|     28 |  484 | raw  | zeros      |                                             |

Version 1 has no file_size, and its digest is at offset 16. It can still be read.

Group: the records made durable by one fdatasync
| offset | size | type | field       | meaning                                                                 |
|-------:|-----:|------|-------------|-------------------------------------------------------------------------|
|      0 |    4 | raw  | magic       | `GRUP`                                                                  |
|      4 |    4 | u32  | size        | n, bytes of records; 1 <= n                                             |
|      8 |    8 | u64  | journal_id  | of the file: detects bytes of another file                              |
|     16 |    8 | u64  | sequence    | 1, 2, 3, ... through all files: a lost group leaves a gap               |
|     24 |    4 | u32  | digest      | CRC32C over the records                                                 |
|     28 |    4 | u32  | head_digest | CRC32C over [0, 28)                                                     |
|     32 |    n | raw  | records     | each `u32 size`, then a body of that size                               |
| 32 + n |    4 | raw  | end         | `DNE!`                                                                  |
|        |      | raw  | zeros       | up to the next sector boundary                                          |

A body is an entry frame or a control record (`control_records`). When a journal continues in another file, the last
group of this file is a *link*: one record `continued`, written once the other file is durable, so that a loss of that
file is detected.

Tear or damage. A group is written only after the previous one was synced, so a crash can affect only the last group. A
crash can only leave sectors, or the ends of sectors, unwritten, so that they still contain zeros. An invalid group is
therefore a *tear* if no valid group follows it and zeros explain it: some zeros in the group, and only zeros after it.
A tear ends the journal; no acknowledged record is lost. Any other invalid group is damage.

Limits: damage to the last group of a crashed bookie is treated as a tear if one of its sectors ends in a zero byte. If
the last groups are overwritten with zeros, as if they had never been written, this is not detected. Zeros over the last
groups up to and including the header of the last one, with its records kept, look like one large group whose first
sectors were not written.

The layout is Bindery's own: BookKeeper's journal has no checksums, so a flipped bit in it would be served as data.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadVersion, DamagedStorage
from crc32c import crc32c

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.io.disk import ReadableFile

MAGIC: Final = b"BNDJ"
VERSION: Final = 2
GROUP_MAGIC: Final = b"GRUP"
GROUP_END: Final = b"DNE!"
SECTOR_SIZE: Final = 512
"""Size in bytes of the unit at whose boundaries groups start."""
HEADER_SIZE: Final = SECTOR_SIZE
GROUP_HEADER_SIZE: Final = 32
GROUP_SIZE_MAX: Final = 1024 * 1024 * 1024
"""Maximum size of the records of a group in bytes, so that a reader allocates no more for a damaged size. Groups are
much smaller, because a byte budget limits the adds."""

FILE_SUFFIX: Final = ".txn"

_HEADER = struct.Struct(">4sIQQ")
_HEADER_1 = struct.Struct(">4sIQ")
_GROUP = struct.Struct(">4sIQQI")
_DIGEST = struct.Struct(">I")
_RECORD = struct.Struct(">I")
RECORD_OVERHEAD: Final = _RECORD.size
"""Bytes of a record in addition to its body."""

pack_record_size = _RECORD.pack
"""Packs the size word before a record's body."""

LINK_SIZE: Final = SECTOR_SIZE
"""Bytes kept free for a link at the end of each file."""

assert _GROUP.size + _DIGEST.size == GROUP_HEADER_SIZE
assert _HEADER.size == 24
assert _HEADER_1.size == 16
assert _HEADER.size + _DIGEST.size <= HEADER_SIZE
assert GROUP_HEADER_SIZE < SECTOR_SIZE  # a header fits in one sector
assert len(MAGIC) == len(GROUP_MAGIC) == len(GROUP_END) == 4

_SCAN_SIZE: Final = 1024 * 1024
assert _SCAN_SIZE % SECTOR_SIZE == 0


@dataclass(frozen=True, slots=True, order=True)
class JournalPosition:
    """A position between two groups. The next group is (or will be) at `offset` of `journal_id`, or in a later file."""

    journal_id: int
    offset: int
    sequence: int
    """Sequence of the next group."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group that was read from a journal file."""

    offset: int
    """Offset in the file in bytes."""
    size: int
    """Size of the group on disk in bytes, including padding."""
    sequence: int
    records: Sequence[bytes]
    """Bodies of the records, in order."""


def file_name(journal_id: int) -> str:
    return f"{journal_id:x}{FILE_SUFFIX}"


def parse_file_name(name: str) -> int | None:
    """Return the journal id; None for a file that is not a journal."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or "." + suffix != FILE_SUFFIX:
        return None
    try:
        journal_id = int(stem, 16)
    except ValueError:
        return None
    return journal_id if journal_id > 0 and file_name(journal_id) == name else None


def pack_file_header(journal_id: int, *, file_size: int) -> bytes:
    """Return the header. `file_size`: bytes allocated."""
    head = _HEADER.pack(MAGIC, VERSION, journal_id, file_size)
    return (head + _DIGEST.pack(crc32c(head))).ljust(HEADER_SIZE, b"\0")


def pack_group(records: bytes, *, journal_id: int, sequence: int) -> bytes:
    """Return a group. `records`: size words and bodies, joined; not empty."""
    assert 0 < len(records) <= GROUP_SIZE_MAX
    head = _GROUP.pack(GROUP_MAGIC, len(records), journal_id, sequence, crc32c(records))
    size = GROUP_HEADER_SIZE + len(records) + len(GROUP_END)
    padding = bytes(-size % SECTOR_SIZE)
    return b"".join((head, _DIGEST.pack(crc32c(head)), records, GROUP_END, padding))


def record_parts(body: bytes) -> tuple[bytes, bytes]:
    """Return the size word and the body of one record, as `Journal.append` takes them."""
    return pack_record_size(len(body)), body


def pack_link(*, journal_id: int, sequence: int, next_journal_id: int) -> bytes:
    """Return the last group of a file that is continued in `next_journal_id`: LINK_SIZE bytes."""
    record = control.pack_continued(next_journal_id)
    group = pack_group(pack_record_size(len(record)) + record, journal_id=journal_id, sequence=sequence)
    assert len(group) == LINK_SIZE
    return group


def following(group: Group) -> int | None:
    """Return the id of the journal that a link refers to; None for any other group."""
    return control.unpack_continued(group.records[0]) if len(group.records) == 1 else None


def group_size_on_disk(records_size: int) -> int:
    """Return the size on disk, including padding, of a group with `records_size` bytes of records."""
    size = GROUP_HEADER_SIZE + records_size + len(GROUP_END)
    return size + -size % SECTOR_SIZE


def is_file_header_valid(file: ReadableFile, *, journal_id: int) -> bool:
    """Return True if the header is intact and has this journal id. Raises BadVersion for an unknown version."""
    head = file.read_at(0, HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        return False
    magic, version, found_id = _HEADER_1.unpack_from(head)
    layout = _HEADER_1 if version == 1 else _HEADER
    (digest,) = _DIGEST.unpack_from(head, layout.size)
    if magic != MAGIC or digest != crc32c(head[: layout.size]):
        return False
    if version not in (1, VERSION):
        raise BadVersion("journal has an unknown version", version=version, journal_id=found_id)
    return bool(found_id == journal_id) and not any(head[layout.size + _DIGEST.size :])


def check_size(file: ReadableFile, *, path: str) -> None:
    """Raise DamagedStorage if a file with a valid header is shorter than its allocated size.

    The size is durable before the first group, so no crash explains a shorter file.
    """
    _, version, _, file_size = _HEADER.unpack_from(file.read_at(0, HEADER_SIZE))
    size = file.size()
    if version != 1 and size < file_size:
        raise DamagedStorage("journal is short", path=path, offset=size, expected=file_size)


def read_groups(file: ReadableFile, *, path: str, journal_id: int, offset: int, sequence: int) -> Iterator[Group]:
    """Yield the file's groups from `offset` on, whose sequences count up from `sequence`. Ends at a tear or the end.

    Raises DamagedStorage with path and offset. The caller must refuse groups in a *later file* after a tear.
    """
    size = file.size()
    while offset < size:
        sector = file.read_at(offset, SECTOR_SIZE)
        head = _unpack_group_header(sector, journal_id=journal_id)
        if head is None:
            _check_end(file, sector, path=path, journal_id=journal_id, offset=offset, next_offset=offset + SECTOR_SIZE)
            return
        records_size, found_sequence, digest = head
        if found_sequence != sequence:
            raise DamagedStorage(
                "journal groups are missing", path=path, offset=offset, expected=sequence, found=found_sequence
            )
        on_disk = group_size_on_disk(records_size)
        data = file.read_at(offset, on_disk)
        end = GROUP_HEADER_SIZE + records_size
        records = data[GROUP_HEADER_SIZE:end]
        whole = len(data) == on_disk and data[end : end + 4] == GROUP_END and not any(data[end + 4 :])
        if not whole or crc32c(records) != digest:
            later = find_group(file, journal_id=journal_id, offset=offset + on_disk)
            if later is not None:
                raise DamagedStorage("journal group is damaged", path=path, offset=offset, next_group=later)
            if not _is_torn(data, end=end, on_disk=on_disk) or not _is_unwritten(file, offset=offset + on_disk):
                raise DamagedStorage("journal group is damaged", path=path, offset=offset)
            return
        yield Group(
            offset=offset, size=on_disk, sequence=sequence, records=_split_records(records, path=path, offset=offset)
        )
        offset += on_disk
        sequence += 1


def find_group(file: ReadableFile, *, journal_id: int, offset: int) -> int | None:
    """Return the offset of the first valid group header at a sector boundary from `offset` (a boundary itself) on.

    Allocated ranges that were never written are not read; after a clean stop they are most of a journal.
    """
    for start, end in file.data_ranges(offset):
        place = max(offset, start // SECTOR_SIZE * SECTOR_SIZE)
        end = -(-end // SECTOR_SIZE) * SECTOR_SIZE
        while place < end and (chunk := file.read_at(place, min(_SCAN_SIZE, end - place))):
            starts = chunk[::SECTOR_SIZE]
            sector = starts.find(GROUP_MAGIC[0])
            while sector >= 0:
                at = sector * SECTOR_SIZE
                if _unpack_group_header(chunk[at : at + GROUP_HEADER_SIZE], journal_id=journal_id):
                    return place + at
                sector = starts.find(GROUP_MAGIC[0], sector + 1)
            place += len(chunk)
    return None


def sequence_at(file: ReadableFile, *, journal_id: int, offset: int) -> int | None:
    """Return the sequence of the group whose header is at `offset`; None if there is no valid header."""
    head = _unpack_group_header(file.read_at(offset, GROUP_HEADER_SIZE), journal_id=journal_id)
    return None if head is None else head[1]


def _unpack_group_header(data: bytes, *, journal_id: int) -> tuple[int, int, int] | None:
    """Return (size of records, sequence, digest of records); None if this is not a header of this file."""
    if len(data) < GROUP_HEADER_SIZE:
        return None
    magic, size, found_id, sequence, digest = _GROUP.unpack_from(data)
    (head_digest,) = _DIGEST.unpack_from(data, _GROUP.size)
    if magic != GROUP_MAGIC or head_digest != crc32c(data[: _GROUP.size]):
        return None
    if found_id != journal_id or not 0 < size <= GROUP_SIZE_MAX:
        return None
    return size, sequence, digest


def _check_end(file: ReadableFile, sector: bytes, *, path: str, journal_id: int, offset: int, next_offset: int) -> None:
    """Raise DamagedStorage unless the journal may end at `offset`, where there is no valid group header."""
    later = find_group(file, journal_id=journal_id, offset=next_offset)
    if later is not None:
        raise DamagedStorage("journal group is damaged", path=path, offset=offset, next_group=later)
    # A tear within the header leaves zeros up to the end of the sector; after an intact header there are records.
    if any(sector[GROUP_HEADER_SIZE:]):
        raise DamagedStorage("journal group header is damaged", path=path, offset=offset)


def _is_torn(data: bytes, *, end: int, on_disk: int) -> bool:
    """Return True if zeros at the end of a sector explain why this group is invalid."""
    if len(data) < on_disk:
        return True
    if 0 in data[SECTOR_SIZE - 1 : on_disk - SECTOR_SIZE : SECTOR_SIZE]:
        return True
    return data[end + len(GROUP_END) - 1] == 0  # the last sector always ends in padding, so check the end marker


def _is_unwritten(file: ReadableFile, *, offset: int) -> bool:
    """Return True if the file has only zeros from `offset` on, as allocated."""
    while chunk := file.read_at(offset, _SCAN_SIZE):
        if chunk != bytes(len(chunk)):
            return False
        offset += len(chunk)
    return True


def _split_records(records: bytes, *, path: str, offset: int) -> Sequence[bytes]:
    bodies: list[bytes] = []
    at = 0
    while at < len(records):
        (size,) = _RECORD.unpack_from(records, at) if at + RECORD_OVERHEAD <= len(records) else (GROUP_SIZE_MAX,)
        at += RECORD_OVERHEAD
        if at + size > len(records):  # the digest matched, so the writer was wrong
            raise DamagedStorage("journal record overruns its group", path=path, offset=offset)
        bodies.append(records[at : at + size])
        at += size
    return bodies
