"""One entry in the files of a bookie, as JSON and as text."""

from typing import Any

from bindery.bookie.entries import PREVIEW_SIZE, entry_facts, entry_lines
from bindery_bookie.offline.views import Found
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_pulsar.message_codec import OutgoingMessage, encode_message


def body(payload: bytes = b"hello", kind: DigestType = DigestType.CRC32C) -> bytes:
    return pack(Digester(kind, b"pw"), ledger_id=7, entry_id=3, lac=2, length=max(20, len(payload)), payload=payload)


def facts_of(found: Found, *, password: bytes = b"", decode: bool = False) -> dict[str, Any]:
    return entry_facts(found, password=password, decode=decode)


def test_a_good_entry_has_its_place_header_digests_and_payload() -> None:
    facts = facts_of(Found("entry log", "/l/1.log", 64, body()))
    digest = body()[32:36].hex()
    assert facts == {
        "found_in": "entry log", "path": "/l/1.log", "offset": 64, "bookie_verdict": "good",
        "ledger_id": 7, "entry_id": 3, "lac": 2, "length": 20,
        "digest_verdict": "good", "digest_type": "crc32c", "digest": digest, "size": 5, "payload_base64": "aGVsbG8=",
    }  # fmt: skip
    assert entry_lines(facts) == [
        "entry log /l/1.log at 64",
        "  bookie's digest  good",
        "  header           ledger 7, entry 3, lac 2, ledger length 20",
        "  writer's digest  crc32c good",
        "  payload          5 bytes: hello",
    ]


def test_damage_and_the_record_of_a_journal_are_shown() -> None:
    facts = facts_of(Found("journal", "/j/1.txn", 512, body()[:-1] + b"\n", 0, "the digest differs"))
    assert (facts["record"], facts["bookie_verdict"], facts["problem"]) == (0, "damaged", "the digest differs")
    lines = entry_lines(facts)
    assert lines[:2] == [
        "journal /j/1.txn at 512, record 0 of the group",
        "  bookie's digest  damaged: the digest differs",
    ]
    assert lines[3] == "  writer's digest  unknown: damaged, or a mac, which needs --password-file"
    assert lines[4].endswith(r"hell\n")


def test_a_mac_is_verified_with_the_password() -> None:
    found = Found("entry log", "/l", 0, body(kind=DigestType.MAC))
    assert facts_of(found, password=b"pw")["digest_type"] == "mac"
    assert facts_of(found)["digest_verdict"] == "unknown"


def test_a_frame_without_a_header_has_none() -> None:
    lines = entry_lines(facts_of(Found("entry log", "/l", 0, b"short")))
    assert lines[2:] == ["  writer's digest  cut off", "  payload          5 bytes: short"]


def test_a_long_payload_is_cut() -> None:
    assert PREVIEW_SIZE == 200
    whole, cut = (entry_lines(facts_of(Found("entry log", "/l", 0, body(b"x" * n))))[-1] for n in (200, 201))
    assert whole == "  payload          200 bytes: " + "x" * 200
    assert cut == "  payload          201 bytes: " + "x" * 200 + " ..."


def test_messages_are_decoded_on_request() -> None:
    entry = encode_message(OutgoingMessage(payload=b"m"), producer_name="p", publish_time_ms=1, sequence_id=5)
    found = Found("entry log", "/l", 0, body(entry))
    assert "messages" not in facts_of(found)
    facts = facts_of(found, decode=True)
    assert facts["messages"]["producer"] == "p"
    assert entry_lines(facts)[-2:] == [
        "  one message, producer p, sequence 5, published 1",
        "    sequence_id=5 (1 bytes) m",
    ]
