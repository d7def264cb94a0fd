"""Ledger metadata: the content of a ledger's znode. The codecs are in `ledger_metadata_codec`.

Invariants: ack_quorum <= write_quorum <= ensemble_size; segments ascend by first entry id, the first starts at 0, each
lists exactly ensemble_size bookies; last_entry_id and length are valid only when CLOSED.
Source: BookKeeper's LedgerMetadataFormat.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Self

from bindery_core.ids import INVALID_ENTRY_ID, BookieId, EntryId


class DigestType(IntEnum):
    """Type of the digests of a ledger's entries (`digest.py`). Numbers: LedgerMetadataFormat.DigestType."""

    CRC32 = 1
    MAC = 2
    CRC32C = 3
    DUMMY = 4


class LedgerState(IntEnum):
    """State of a ledger. Numbers: LedgerMetadataFormat.State."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """One ensemble and the first entry that it holds."""

    first_entry_id: EntryId
    ensemble: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMetadata:
    """The content of a ledger's znode. Invariants: see the module docstring."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    segments: tuple[Segment, ...]
    state: LedgerState = LedgerState.OPEN
    last_entry_id: EntryId = INVALID_ENTRY_ID
    """-1 unless CLOSED; -1 in a CLOSED ledger means that it is empty."""
    length: int = 0
    """Payload bytes; 0 unless CLOSED."""
    digest_type: DigestType | None = DigestType.CRC32C
    password: bytes | None = b""
    """In clear text, as in BookKeeper. None only in metadata written by very old clients."""
    ctime_ms: int | None = None
    """Creation time in milliseconds since 1970; None: not stored."""
    custom: dict[str, bytes] = field(default_factory=dict)
    """Metadata that the client attached to the ledger."""
    c_token: int | None = None
    """Random token by which the creator of a znode recognizes it as its own; None: not stored."""
    format_version: int = 3
    """Serialization that the znode uses; an update keeps it."""

    def __post_init__(self) -> None:
        assert 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size
        assert self.segments
        assert self.segments[0].first_entry_id == 0
        assert all(len(s.ensemble) == self.ensemble_size for s in self.segments)
        assert all(a.first_entry_id < b.first_entry_id for a, b in zip(self.segments, self.segments[1:], strict=False))

    def with_changes(self, **changes: object) -> Self:
        """Return a copy with `changes`; fields as in the constructor."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def last_segment(self) -> Segment:
        return self.segments[-1]

    def segment_of(self, entry_id: EntryId) -> Segment:
        """Return the segment that holds `entry_id` (>= 0): the one with the greatest first entry id <= entry_id."""
        for segment in reversed(self.segments):
            if segment.first_entry_id <= entry_id:
                return segment
        raise AssertionError(f"no segment for entry {entry_id}")
