"""Describe the frame of an entry, damaged or not, as text and as JSON.

A verified read returns no damaged bytes; this module shows them, for the diagnosis of damage. No function raises for
the content of a frame.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bindery_core.digest import Digester
from bindery_core.entry import HEADER_SIZE, LAC_HEADER_SIZE, EntryHeader, peek_header, peek_ids
from bindery_core.formats.ledger_metadata import DigestType

PAYLOAD_FORMS: Final = ("hex", "escaped", "base64", "none")
GOOD: Final = "good"
WRONG: Final = "wrong"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class DigestFacts:
    """The digest that a frame contains, and whether it is right."""

    verdict: str
    """GOOD, WRONG or UNKNOWN. UNKNOWN: none of several digest types verifies, so type and size are unknown too."""
    digest_type: str = ""
    found: bytes = b""
    """The digest in the frame."""
    expected: bytes = b""
    """The digest computed from the bytes. Empty unless WRONG."""

    def __str__(self) -> str:
        if self.verdict == UNKNOWN:
            return "unknown: no digest type that was tried fits"
        digest = self.found.hex() or "(nothing to check)"
        if self.verdict == GOOD:
            return f"{self.digest_type} {digest} good"
        return f"{self.digest_type} {digest} WRONG, its bytes give {self.expected.hex()}"

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"digest_verdict": self.verdict}
        if self.verdict != UNKNOWN:
            facts |= {"digest_type": self.digest_type, "digest": self.found.hex()}
        if self.verdict == WRONG:
            facts["digest_expected"] = self.expected.hex()
        return facts


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """The parts of the frame of an entry."""

    header: EntryHeader | None
    """None: the frame is too short for a header."""
    digest: DigestFacts | None
    """None: the frame ends within its digest."""
    payload: bytes
    """The bytes behind the digest; behind the header if the digest is UNKNOWN; the whole frame if it has no header."""

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.header is not None:
            header = self.header
            facts |= {"ledger_id": header.ledger_id, "entry_id": header.entry_id}
            facts |= {"lac": header.lac, "length": header.length}
        facts |= self.digest.as_json() if self.digest is not None else {"digest_verdict": "cut off"}
        return facts | {"size": len(self.payload)}


def candidates(password: bytes) -> tuple[Digester, ...]:
    """Return a digester for each digest type that can be recognized by verification."""
    return tuple(Digester(kind, password) for kind in (DigestType.CRC32C, DigestType.CRC32, DigestType.MAC))


def examine(frame: bytes, digesters: Sequence[Digester]) -> EntryFacts:
    """Split a frame into its parts. One digester: the digest must have its type; several: the type that verifies."""
    if len(frame) < HEADER_SIZE:
        return EntryFacts(None, None, frame)
    digest, size = _check(frame, HEADER_SIZE, digesters)
    return EntryFacts(peek_header(frame), digest, frame[HEADER_SIZE + size :])


def examine_lac(packet: bytes, digesters: Sequence[Digester]) -> tuple[int, int, DigestFacts | None] | None:
    """Return (ledger id, LAC, digest) of a LAC packet; None if it is too short for the ids."""
    if len(packet) < LAC_HEADER_SIZE:
        return None
    ledger_id, lac = peek_ids(packet)
    digest, _ = _check(packet, LAC_HEADER_SIZE, digesters)
    return ledger_id, lac, digest


def _check(data: bytes, header_size: int, digesters: Sequence[Digester]) -> tuple[DigestFacts | None, int]:
    """Return the digest behind the header, and its size in bytes."""
    assert digesters
    header = data[:header_size]
    for digester in digesters:
        end = header_size + digester.size
        if len(data) >= end and digester.verify(header, data[header_size:end], data[end:]):
            return DigestFacts(GOOD, digester.digest_type.name.lower(), data[header_size:end]), digester.size
    if len(digesters) > 1:
        return DigestFacts(UNKNOWN), 0
    (digester,) = digesters
    end = header_size + digester.size
    if len(data) < end:
        return None, len(data) - header_size
    expected = digester.digest(header, data[end:])
    return DigestFacts(WRONG, digester.digest_type.name.lower(), data[header_size:end], expected), digester.size


def payload_text(payload: bytes, form: str) -> str:
    """Return `payload` in one of PAYLOAD_FORMS."""
    match form:
        case "hex":
            return payload.hex()
        case "base64":
            return base64.b64encode(payload).decode()
        case "escaped":
            return escaped(payload)
    return ""


def escaped(data: bytes) -> str:
    r"""Return reversible text: printable ASCII unchanged, a backslash doubled, other bytes as \n, \t, \r or \xNN."""
    return "".join(_ESCAPES.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}") for byte in data)


_ESCAPES: Final = {ord("\\"): "\\\\", ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}
