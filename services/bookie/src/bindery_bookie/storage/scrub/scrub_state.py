"""Scrub state: what the scrub of a shard has verified and found, kept across restarts.

The file is `scrub` in a shard's ledger directory (`current`), replaced as a whole: a new file is written and synced,
renamed over the old one, and the directory synced. Two lines of ASCII:

| line | what                                                                                                   |
|-----:|--------------------------------------------------------------------------------------------------------|
|    1 | `BNDS 1 ` and CRC32C of the second line without its line feed, eight hexadecimal digits                |
|    2 | one JSON object: the fields of ScrubRecord, sorted; a region is the list of the fields of Region       |

Nothing depends on it but how soon the next round begins: one that cannot be read is taken for none.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import structlog
from crc32c import crc32c

from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.scrub.scrub_walk import ScrubCursor, ScrubPhase

log = structlog.get_logger(__name__)

FILE_NAME: Final = "scrub"
_TEMPORARY_NAME: Final = "scrub.new"
_MAGIC: Final = b"BNDS 1 "
_DIGEST_SIZE: Final = 8
REGIONS_MAX: Final = 1000
SIZE_MAX: Final = 4 * 1024 * 1024
"""Far above 1000 regions with long paths. Bytes."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes that are not what they should be: quarantined, which means known to be bad; they stay where they are."""

    path: str
    offset: int
    size: int
    """Bytes; 0 where that is not known (a missing file, a row of the index)."""
    reason: str
    ledger_id: int | None
    first_entry_id: int | None
    entries: int
    """Entries concerned, from `first_entry_id` on; 0 where that is not known."""
    found_ms: int
    """Wall clock."""


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """What the file holds. Times are wall clock milliseconds, 0: never."""

    rounds: int = 0
    """Finished ones."""
    last_start_ms: int = 0
    last_end_ms: int = 0
    """Of the last finished round. Whatever is stored since before `last_start_ms` was verified after it."""
    start_ms: int = 0
    """Of the round under way; 0: none is."""
    cursor: ScrubCursor = field(default_factory=ScrubCursor)
    entries: int = 0
    """Verified in the round under way, or in the last one."""
    size: int = 0
    """Bytes of them."""
    total_size: int = 0
    """Bytes of all entry logs when that round began."""
    regions: tuple[Region, ...] = ()
    """Found by the last round and the one under way."""

    def pack(self) -> bytes:
        """The file's bytes."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        fields["cursor"] = asdict(self.cursor)
        fields["regions"] = [list(asdict(region).values()) for region in self.regions]
        line = json.dumps(fields, sort_keys=True).encode("ascii")
        return _MAGIC + b"%08x\n" % crc32c(line) + line + b"\n"

    @classmethod
    def unpack(cls, data: bytes) -> "ScrubRecord":
        """Raises ValueError for anything that `pack` did not make."""
        head, _, rest = data.partition(b"\n")
        line = rest.removesuffix(b"\n")
        if head != _MAGIC + b"%08x" % crc32c(line) or rest == line:
            raise ValueError("scrub state is damaged")
        try:
            fields: Mapping[str, Any] = json.loads(line)
            cursor = fields["cursor"]
            return cls(
                **{name: int(fields[name]) for name in _NUMBERS},
                cursor=ScrubCursor(ScrubPhase(cursor["phase"]), int(cursor["first"]), int(cursor["entry_id"])),
                regions=tuple(Region(*region) for region in fields["regions"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"scrub state lacks a field: {error}") from error


_NUMBERS: Final = ("rounds", "last_start_ms", "last_end_ms", "start_ms", "entries", "size", "total_size")

assert len(_MAGIC) + _DIGEST_SIZE == 15


def read_scrub_record(disk: Disk, directory: str) -> ScrubRecord:
    """What is known of the shard whose `current` is `directory`; an empty one if nothing is. Raises OSError."""
    path = f"{directory}/{FILE_NAME}"
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return ScrubRecord()
    try:
        return ScrubRecord.unpack(file.read_at(0, SIZE_MAX))
    except ValueError as error:
        log.warning("scrub_state_ignored", path=path, error=str(error))
        return ScrubRecord()
    finally:
        file.close()


def write_scrub_record(disk: Disk, directory: str, record: ScrubRecord) -> None:
    """Replace it; durable on return. Raises OSError."""
    temporary = f"{directory}/{_TEMPORARY_NAME}"
    if _TEMPORARY_NAME in disk.list_names(directory):
        disk.remove(temporary)
    file = disk.create(temporary)
    try:
        file.write_at(record.pack(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{directory}/{FILE_NAME}")
    disk.sync_directory(directory)
