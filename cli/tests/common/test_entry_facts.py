"""Frames as facts: the digest is good, wrong, unknown or cut off, and no content raises an error."""

import pytest
from bindery.common.entry_facts import (
    DigestFacts,
    EntryFacts,
    candidates,
    escaped,
    examine,
    examine_lac,
    payload_text,
)
from bindery_core.digest import Digester
from bindery_core.entry import EntryHeader, pack, pack_lac
from bindery_core.formats.ledger_metadata import DigestType

CRC32C = Digester(DigestType.CRC32C)
MAC = Digester(DigestType.MAC, b"pw")
HEADER = EntryHeader(7, 3, 2, 20)


def frame(digester: Digester = CRC32C, payload: bytes = b"hello") -> bytes:
    return pack(digester, ledger_id=7, entry_id=3, lac=2, length=20, payload=payload)


DIGEST = frame()[32:36]


@pytest.mark.parametrize("kind", [DigestType.CRC32C, DigestType.CRC32, DigestType.MAC], ids=lambda kind: kind.name)
def test_the_digest_type_is_recognized(kind: DigestType) -> None:
    digester = Digester(kind, b"pw")
    body = frame(digester)
    found = examine(body, candidates(b"pw"))
    digest = body[32 : 32 + digester.size]
    assert found == EntryFacts(HEADER, DigestFacts("good", kind.name.lower(), digest), b"hello")
    assert str(found.digest) == f"{kind.name.lower()} {digest.hex()} good"
    assert found.as_json() == {
        "ledger_id": 7,
        "entry_id": 3,
        "lac": 2,
        "length": 20,
        "digest_verdict": "good",
        "digest_type": kind.name.lower(),
        "digest": digest.hex(),
        "size": 5,
    }


def test_a_digest_that_fits_no_type_is_unknown_and_belongs_to_the_payload() -> None:
    body = frame()[:-1] + b"x"
    found = examine(body, candidates(b""))
    assert found == EntryFacts(HEADER, DigestFacts("unknown"), DIGEST + b"hellx")
    assert str(found.digest) == "unknown: no digest type that was tried fits"
    assert found.as_json()["digest_verdict"] == "unknown"
    assert "digest_type" not in found.as_json()
    assert examine(frame(MAC), candidates(b"other")).digest == DigestFacts("unknown")


def test_a_digest_of_a_known_type_is_wrong() -> None:
    found = examine(frame()[:-1] + b"x", [CRC32C])
    expected = frame(payload=b"hellx")[32:36]
    assert found == EntryFacts(HEADER, DigestFacts("wrong", "crc32c", DIGEST, expected), b"hellx")
    assert str(found.digest) == f"crc32c {DIGEST.hex()} WRONG, its bytes give {expected.hex()}"
    assert found.as_json() | {"size": 0} == {
        "ledger_id": 7,
        "entry_id": 3,
        "lac": 2,
        "length": 20,
        "digest_verdict": "wrong",
        "digest_type": "crc32c",
        "digest": DIGEST.hex(),
        "digest_expected": expected.hex(),
        "size": 0,
    }


def test_a_frame_can_end_within_its_digest_or_header() -> None:
    assert examine(frame()[:35], [CRC32C]) == EntryFacts(HEADER, None, b"")
    assert examine(frame()[:35], [CRC32C]).as_json()["digest_verdict"] == "cut off"
    assert examine(frame()[:32], [CRC32C]) == EntryFacts(HEADER, None, b"")
    assert examine(frame()[:31], [CRC32C]) == EntryFacts(None, None, frame()[:31])
    assert examine(b"", [CRC32C]).as_json() == {"digest_verdict": "cut off", "size": 0}
    whole = examine(frame()[:36], [CRC32C]).digest
    assert whole is not None
    assert whole.verdict == "wrong"


def test_an_entry_without_payload_is_good() -> None:
    assert examine(frame(payload=b""), candidates(b"")).payload == b""
    assert examine(frame(payload=b""), [CRC32C]).digest == DigestFacts("good", "crc32c", frame(payload=b"")[32:])


def test_an_entry_without_a_digest_has_nothing_to_check() -> None:
    found = examine(frame(Digester(DigestType.DUMMY)), [Digester(DigestType.DUMMY)])
    assert found.payload == b"hello"
    assert str(found.digest) == "dummy (nothing to check) good"


def test_a_lac_packet_is_examined() -> None:
    packet = pack_lac(CRC32C, ledger_id=7, lac=3)
    assert examine_lac(packet, candidates(b"")) == (7, 3, DigestFacts("good", "crc32c", packet[16:]))
    assert examine_lac(packet[:18], [CRC32C]) == (7, 3, None)
    assert examine_lac(packet[:16], [CRC32C]) == (7, 3, None)
    assert examine_lac(packet[:15], [CRC32C]) is None


@pytest.mark.parametrize(
    ("form", "text"), [("hex", "610aff"), ("base64", "YQr/"), ("escaped", r"a\n\xff"), ("none", "")]
)
def test_a_payload_has_four_forms(form: str, text: str) -> None:
    assert payload_text(b"a\n\xff", form) == text


def test_escaped_text_is_printable_and_reversible() -> None:
    assert escaped(b" ~\x1f\x7f\\\t\r\x00") == r" ~\x1f\x7f\\\t\r\x00"
    data = bytes(range(256))
    assert escaped(data).encode().decode("unicode_escape").encode("latin-1") == data
