"""Find the faults of one entry from all its copies. Pure Python, for the few entries that are suspicious.

| kind               | about     | when                                                                              |
|--------------------|-----------|-----------------------------------------------------------------------------------|
| MISSING_REPLICA    | the copy  | its bookie reports that it does not have it                                       |
| DIGEST_MISMATCH    | the copy  | it does not match its digest, or its bookie cannot read it                        |
| ENTRY_LOST         | the entry | no copy is good, and every bookie answered                                        |
| REPLICA_DIVERGENCE | the copy  | its payload differs from the most common one of the good copies, or there is none |
| LENGTH_MISMATCH    | the copy  | the same for the ledger's length, among the copies with the most common payload   |
"""

import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bindery_spark.audit.findings.findings import Kind


@dataclass(frozen=True, slots=True)
class Copy:
    """One bookie's copy. `status`: see `bindery_spark.audit.checks.copies`."""

    bookie: str
    status: str
    payload_length: int | None = None
    payload_crc32c: int | None = None
    ledger_length: int | None = None

    @property
    def payload(self) -> tuple[int | None, int | None]:
        return self.payload_length, self.payload_crc32c


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one entry or of one of its copies."""

    kind: str
    bookie: str | None
    """None: the whole entry."""
    expected: str
    found: str
    evidence: int
    """Hash of what was found; 0: the kind describes it fully."""
    repairable: bool = False


def faults_of(copies: Sequence[Copy]) -> Iterator[Fault]:
    """All faults of one entry."""
    good = [copy for copy in copies if copy.status == "good"]
    for copy in copies:
        if copy.status == "missing":
            yield Fault(Kind.MISSING_REPLICA, copy.bookie, "a copy", "the bookie denies it", 0, bool(good))
        elif copy.status == "corrupt":
            expected, found = "a copy that matches its digest", "the copy does not match its digest"
            yield Fault(Kind.DIGEST_MISMATCH, copy.bookie, expected, found, 0, bool(good))
        elif copy.status == "damaged":
            expected, found = "a copy that its bookie can read", "the bookie reports it damaged"
            yield Fault(Kind.DIGEST_MISMATCH, copy.bookie, expected, found, 0, bool(good))
    if not any(copy.status in ("good", "unknown") for copy in copies):
        text = ", ".join(sorted(f"{copy.bookie} {copy.status}" for copy in copies))
        yield Fault(Kind.ENTRY_LOST, None, "a good copy", text, _hash(text))
    yield from _differences([copy for copy in good if copy.payload_crc32c is not None])


def _differences(known: Sequence[Copy]) -> Iterator[Fault]:
    payload = _most_common(copy.payload for copy in known)
    expected = "equal payloads" if payload is None else "the payload of most copies"
    for copy in known:
        if copy.payload != payload:
            found = f"payload of {copy.payload_length} bytes, crc32c {copy.payload_crc32c:08x}"
            yield Fault(Kind.REPLICA_DIVERGENCE, copy.bookie, expected, found, _hash(found))
    same = [copy for copy in known if copy.payload == payload and copy.ledger_length is not None]
    length = _most_common(copy.ledger_length for copy in same)
    expected = "equal ledger lengths" if length is None else f"ledger length {length}, as in most copies"
    for copy in same:
        if copy.ledger_length != length:
            found = f"ledger length {copy.ledger_length}"
            yield Fault(Kind.LENGTH_MISMATCH, copy.bookie, expected, found, _hash(found))


def _most_common(values: Iterable[Hashable]) -> Any:
    """The most common value. None: there is no value, or several are equally common."""
    leaders = Counter(values).most_common(2)
    if not leaders or (len(leaders) == 2 and leaders[0][1] == leaders[1][1]):
        return None
    return leaders[0][0]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
