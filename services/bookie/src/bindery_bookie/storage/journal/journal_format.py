"""Journal file: `<hex id>.txn`, the record of everything accepted and not yet flushed to entry logs and index.

Integers are big-endian. Offsets and sizes are in bytes. The file is allocated ahead and reads as zeros where nothing
was written. It is a header in the first sector, then groups, each starting on a sector boundary.

File header
| offset | size | type | field      | meaning                                     |
|-------:|-----:|------|------------|---------------------------------------------|
|      0 |    4 | raw  | magic      | `BNDJ`                                      |
|      4 |    4 | u32  | version    | 2                                           |
|      8 |    8 | u64  | journal_id | as in the file's name; from 1, no gaps      |
|     16 |    8 | u64  | file_size  | bytes allocated: a shorter file was cut     |
|     24 |    4 | u32  | digest     | CRC32C over [0, 24)                         |
|     28 |  484 | raw  | zeros      |                                             |

Version 1 had no file_size; its digest stood at 16. It is still read.

Group: what one fdatasync made durable
| offset | size | type | field       | meaning                                                                 |
|-------:|-----:|------|-------------|-------------------------------------------------------------------------|
|      0 |    4 | raw  | magic       | `GRUP`                                                                  |
|      4 |    4 | u32  | size        | n, bytes of records; 1 <= n                                             |
|      8 |    8 | u64  | journal_id  | of the file: bytes of another file are not mistaken for ours            |
|     16 |    8 | u64  | sequence    | 1, 2, 3, ... through all files: a lost group shows as a gap             |
|     24 |    4 | u32  | digest      | CRC32C over the records                                                 |
|     28 |    4 | u32  | head_digest | CRC32C over [0, 28)                                                     |
|     32 |    n | raw  | records     | each `u32 size`, then a body of that size                               |
| 32 + n |    4 | raw  | end         | `DNE!`                                                                  |
|        |      | raw  | zeros       | up to the next sector boundary                                          |

A body is an entry frame or a control record (`control_records`). When a journal goes on in another file, the last group
here holds one record, `continued`, written once the other file is durable: should that be lost, the loss shows.

Torn or damaged? A group is written only after the one before it was synced, so a crash can spoil only the last group,
and only by leaving sectors, or the ends of sectors, as the zeros they were. Hence a bad group is a *tear*, which ends
the journal and loses nothing that was acknowledged, only if no valid group comes after it and zeros explain it: some in
the group, nothing else behind it. Anything else is damage. Limits: damage to the very last group of a crashed bookie is
taken for a tear if one of its sectors ends in a zero byte; groups at the very end that were turned to zeros, as if they
had never been written, leave no trace; and zeros over the last groups up to the last one's head, with its records left
behind them, look like one large group of which the first sectors were not written.

Our own layout: BookKeeper's has no checksums, so a flipped bit there is served as data.
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
HEADER_SIZE: Final = SECTOR_SIZE
GROUP_HEADER_SIZE: Final = 32
GROUP_SIZE_MAX: Final = 1024 * 1024 * 1024
"""Bounds what a reader allocates for a damaged size. Far above any batch: adds are bounded by a byte budget."""

FILE_SUFFIX: Final = ".txn"

_HEADER = struct.Struct(">4sIQQ")
_HEADER_1 = struct.Struct(">4sIQ")
_GROUP = struct.Struct(">4sIQQI")
_DIGEST = struct.Struct(">I")
_RECORD = struct.Struct(">I")
RECORD_OVERHEAD: Final = _RECORD.size

pack_record_size = _RECORD.pack
"""The word before a record's body."""

LINK_SIZE: Final = SECTOR_SIZE
"""Bytes to keep free for a link at the end of each file."""

assert _GROUP.size + _DIGEST.size == GROUP_HEADER_SIZE
assert _HEADER.size == 24
assert _HEADER_1.size == 16
assert _HEADER.size + _DIGEST.size <= HEADER_SIZE
assert GROUP_HEADER_SIZE < SECTOR_SIZE  # a header lies in one sector
assert len(MAGIC) == len(GROUP_MAGIC) == len(GROUP_END) == 4

_SCAN_SIZE: Final = 1024 * 1024
assert _SCAN_SIZE % SECTOR_SIZE == 0


@dataclass(frozen=True, slots=True, order=True)
class JournalPosition:
    """A place between two groups: the next one is (or will be) at `offset` of `journal_id`, or opens a later file."""

    journal_id: int
    offset: int
    sequence: int
    """Of the next group."""


@dataclass(frozen=True, slots=True)
class Group:
    offset: int
    size: int
    """Of the whole group on disk, padding included."""
    sequence: int
    records: Sequence[bytes]


def file_name(journal_id: int) -> str:
    return f"{journal_id:x}{FILE_SUFFIX}"


def parse_file_name(name: str) -> int | None:
    """The journal id, or None for a file that is no journal."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or "." + suffix != FILE_SUFFIX:
        return None
    try:
        journal_id = int(stem, 16)
    except ValueError:
        return None
    return journal_id if journal_id > 0 and file_name(journal_id) == name else None


def pack_file_header(journal_id: int, *, file_size: int) -> bytes:
    """`file_size`: bytes allocated."""
    head = _HEADER.pack(MAGIC, VERSION, journal_id, file_size)
    return (head + _DIGEST.pack(crc32c(head))).ljust(HEADER_SIZE, b"\0")


def pack_group(records: bytes, *, journal_id: int, sequence: int) -> bytes:
    """`records`: size words and bodies, joined; not empty."""
    assert 0 < len(records) <= GROUP_SIZE_MAX
    head = _GROUP.pack(GROUP_MAGIC, len(records), journal_id, sequence, crc32c(records))
    size = GROUP_HEADER_SIZE + len(records) + len(GROUP_END)
    padding = bytes(-size % SECTOR_SIZE)
    return b"".join((head, _DIGEST.pack(crc32c(head)), records, GROUP_END, padding))


def pack_link(*, journal_id: int, sequence: int, next_journal_id: int) -> bytes:
    """The last group of a file that goes on in `next_journal_id`: LINK_SIZE bytes."""
    record = control.pack_continued(next_journal_id)
    group = pack_group(pack_record_size(len(record)) + record, journal_id=journal_id, sequence=sequence)
    assert len(group) == LINK_SIZE
    return group


def following(group: Group) -> int | None:
    """The journal that a link leads to; None for any other group."""
    return control.unpack_continued(group.records[0]) if len(group.records) == 1 else None


def group_size_on_disk(records_size: int) -> int:
    size = GROUP_HEADER_SIZE + records_size + len(GROUP_END)
    return size + -size % SECTOR_SIZE


def is_file_header_valid(file: ReadableFile, *, journal_id: int) -> bool:
    """Whether the header is whole and this file's. Raises BadVersion for a version that is not known."""
    head = file.read_at(0, HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        return False
    magic, version, found_id = _HEADER_1.unpack_from(head)
    layout = _HEADER_1 if version == 1 else _HEADER
    (digest,) = _DIGEST.unpack_from(head, layout.size)
    if magic != MAGIC or digest != crc32c(head[: layout.size]):
        return False
    if version not in (1, VERSION):
        raise BadVersion("journal version is not spoken", version=version, journal_id=found_id)
    return bool(found_id == journal_id) and not any(head[layout.size + _DIGEST.size :])


def check_size(file: ReadableFile, *, path: str) -> None:
    """Raise DamagedStorage if a file with a valid header is shorter than it was made.

    Its size was durable before the first group, so no crash explains that.
    """
    _, version, _, file_size = _HEADER.unpack_from(file.read_at(0, HEADER_SIZE))
    size = file.size()
    if version != 1 and size < file_size:
        raise DamagedStorage("journal is short", path=path, offset=size, expected=file_size)


def read_groups(file: ReadableFile, *, path: str, journal_id: int, offset: int, sequence: int) -> Iterator[Group]:
    """The file's groups from `offset` on, which must count up from `sequence`. Ends at the first tear or at the end.

    Raises DamagedStorage with path and offset. That a *later file* goes on after a tear is for the caller to refuse.
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
    """Offset of the first valid group header at a sector boundary from `offset`, which is one, on.

    Most of a journal that a clean stop leaves was allocated and never written: that is not read.
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
    """The sequence of the group whose header stands at `offset`; None where no valid one does."""
    head = _unpack_group_header(file.read_at(offset, GROUP_HEADER_SIZE), journal_id=journal_id)
    return None if head is None else head[1]


def _unpack_group_header(data: bytes, *, journal_id: int) -> tuple[int, int, int] | None:
    """(size of records, sequence, digest of records), or None if this is no header of this file's."""
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
    """Raise DamagedStorage unless the journal may end at `offset`, where no valid group header is."""
    later = find_group(file, journal_id=journal_id, offset=next_offset)
    if later is not None:
        raise DamagedStorage("journal group is damaged", path=path, offset=offset, next_group=later)
    # A tear that spoilt the header left zeros from there to the end of the sector; records always follow a header.
    if any(sector[GROUP_HEADER_SIZE:]):
        raise DamagedStorage("journal group header is damaged", path=path, offset=offset)


def _is_torn(data: bytes, *, end: int, on_disk: int) -> bool:
    """Whether zeros at the end of some sector explain why this group is not whole."""
    if len(data) < on_disk:
        return True
    if 0 in data[SECTOR_SIZE - 1 : on_disk - SECTOR_SIZE : SECTOR_SIZE]:
        return True
    return data[end + len(GROUP_END) - 1] == 0  # the last sector ends in padding anyway: look at the end mark instead


def _is_unwritten(file: ReadableFile, *, offset: int) -> bool:
    """Whether all from `offset` on is the zeros that it was allocated as."""
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
        if at + size > len(records):  # the digest matched, so this was written wrongly
            raise DamagedStorage("journal record overruns its group", path=path, offset=offset)
        bodies.append(records[at : at + size])
        at += size
    return bodies
