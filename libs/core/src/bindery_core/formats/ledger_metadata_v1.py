"""Version 1 of ledger metadata, after the header: lines of text. LF ends each line except the state.

| line      | content                                                                                               |
|-----------|-------------------------------------------------------------------------------------------------------|
| 1, 2, 3   | write quorum, ensemble size, length in bytes, each in decimal                                         |
| segment   | first entry id, then each bookie of the ensemble, preceded by a TAB; one line per segment             |
| state     | last entry id (CLOSED) or -102 (IN_RECOVERY), TAB, "CLOSED", without a final LF; no such line: OPEN   |

There is no ack quorum (it equals the write quorum), no password, no digest type. Clients before BookKeeper 4.2
wrote this version.
Source: BookKeeper LedgerMetadataSerDe, serializeVersion1.
"""

from typing import Final, NamedTuple

from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId

_CLOSED: Final = "CLOSED"
_IN_RECOVERY_ENTRY_ID: Final = -102


class Fields(NamedTuple):
    """Content of the lines; quorums and segments are unchecked."""

    write_quorum: int
    ensemble_size: int
    length: int
    segments: tuple[Segment, ...]
    state: LedgerState
    last_entry_id: EntryId


def encode(metadata: LedgerMetadata) -> bytes:
    """Return the lines. Raises BadVersion, with the field, for metadata that they cannot express."""
    for field, lost in (
        ("password", metadata.password is not None or metadata.digest_type is not None),
        ("ack_quorum", metadata.ack_quorum != metadata.write_quorum),
        ("custom", bool(metadata.custom)),
        ("ctime_ms", metadata.ctime_ms is not None),
    ):
        if lost:
            raise BadVersion("ledger metadata of version 1 has no such field", field=field)
    lines = [str(metadata.write_quorum), str(metadata.ensemble_size), str(metadata.length)]
    lines += ("\t".join((str(segment.first_entry_id), *segment.ensemble)) for segment in metadata.segments)
    match metadata.state:
        case LedgerState.IN_RECOVERY:
            lines.append(f"{_IN_RECOVERY_ENTRY_ID}\t{_CLOSED}")
        case LedgerState.CLOSED:
            lines.append(f"{metadata.last_entry_id}\t{_CLOSED}")
        case LedgerState.OPEN:
            lines.append("")
    return "\n".join(lines).encode()


def decode(body: bytes) -> Fields:
    """Parse the lines. Raises Corrupt. Lines after the state are ignored."""
    try:
        lines = body.decode().split("\n")
    except UnicodeDecodeError as error:
        raise Corrupt("ledger metadata is not text", size=len(body)) from error
    if len(lines) < 3:
        raise Corrupt("ledger metadata is cut off", lines=len(lines))
    write_quorum, ensemble_size, length = (_number(line) for line in lines[:3])
    segments: list[Segment] = []
    for line in lines[3:]:
        first, *bookies = line.removesuffix("\r").split("\t")
        if not first and not bookies:
            continue  # after the last LF
        number = _number(first)
        if bookies == [_CLOSED]:
            if number == _IN_RECOVERY_ENTRY_ID:
                return Fields(write_quorum, ensemble_size, 0, tuple(segments), LedgerState.IN_RECOVERY, EntryId(-1))
            if number < -1 or length < 0:
                raise Corrupt(
                    "the ledger is closed, but its last entry is missing", last_entry_id=number, length=length
                )
            return Fields(write_quorum, ensemble_size, length, tuple(segments), LedgerState.CLOSED, EntryId(number))
        segments.append(Segment(EntryId(number), tuple(BookieId(bookie) for bookie in bookies)))
    return Fields(write_quorum, ensemble_size, 0, tuple(segments), LedgerState.OPEN, EntryId(-1))


def _number(text: str) -> int:
    text = text.removesuffix("\r")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise Corrupt("ledger metadata contains a line that is not a number", line=text[:40])
    return int(text)
