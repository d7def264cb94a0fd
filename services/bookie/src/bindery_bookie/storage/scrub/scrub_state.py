"""Scrub state: position and findings of a shard's scrub, kept across restarts.

The file `scrub` in a shard's ledger directory (`current`) is replaced atomically: a new file is written and synced,
renamed over the old one, and the directory is synced. It has two lines of ASCII:

| line | content                                                                                                |
|-----:|--------------------------------------------------------------------------------------------------------|
|    1 | `BNDS 1 ` and CRC32C of the second line without its line feed, eight hexadecimal digits                |
|    2 | one JSON object: the fields of ScrubRecord, sorted; a region is the list of the fields of Region       |

An unreadable file counts as missing: the next round finds the damage again.
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
"""Maximum number of quarantined regions recorded per shard."""
SIZE_MAX: Final = 4 * 1024 * 1024
"""Maximum size of the file in bytes: much more than REGIONS_MAX regions with long paths."""


@dataclass(frozen=True, slots=True)
class Region:
    """A quarantined region: bytes known to be damaged. They stay in their file."""

    path: str
    offset: int
    size: int
    """Size in bytes; 0: unknown (a missing file, a row of the index)."""
    reason: str
    ledger_id: int | None
    first_entry_id: int | None
    entries: int
    """Number of affected entries, from `first_entry_id` on; 0: unknown."""
    found_ms: int
    """Time of detection in ms since 1970."""


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """The content of the file. Times are ms since 1970; 0: never."""

    rounds: int = 0
    """Number of finished rounds."""
    last_start_ms: int = 0
    last_end_ms: int = 0
    """End of the last finished round. Everything stored before `last_start_ms` was verified after it."""
    start_ms: int = 0
    """Start of the current round; 0: none."""
    cursor: ScrubCursor = field(default_factory=ScrubCursor)
    entries: int = 0
    """Number of entries verified in the current or last round."""
    size: int = 0
    """Bytes of these entries."""
    total_size: int = 0
    """Bytes of all entry logs when the current or last round began."""
    regions: tuple[Region, ...] = ()
    """Regions found by the last and the current round."""

    def pack(self) -> bytes:
        """Return the content of the file."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        fields["cursor"] = asdict(self.cursor)
        fields["regions"] = [list(asdict(region).values()) for region in self.regions]
        line = json.dumps(fields, sort_keys=True).encode("ascii")
        return _MAGIC + b"%08x\n" % crc32c(line) + line + b"\n"

    @classmethod
    def unpack(cls, data: bytes) -> "ScrubRecord":
        """Return the record in `data`. Raises ValueError for anything that `pack` did not return."""
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
            raise ValueError(f"field is missing in scrub state: {error}") from error


_NUMBERS: Final = ("rounds", "last_start_ms", "last_end_ms", "start_ms", "entries", "size", "total_size")

assert len(_MAGIC) + _DIGEST_SIZE == 15


def read_scrub_record(disk: Disk, directory: str) -> ScrubRecord:
    """Return the scrub state of the shard whose `current` is `directory`; an empty one if there is none.

    Raises OSError.
    """
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
    """Replace the file; durable on return. Raises OSError."""
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
