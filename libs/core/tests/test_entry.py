"""Entries equal BookKeeper's bytes, and damage of any kind is a digest mismatch."""

import hashlib
import hmac
import zlib

import pytest
from bindery_core.digest import SIZE_OF, Digester, mac_key, master_key
from bindery_core.entry import (
    HEADER_SIZE,
    PAYLOAD_SIZE_MAX,
    Entry,
    EntryHeader,
    pack,
    pack_lac,
    pack_many,
    peek_header,
    peek_ids,
    peek_lac,
    unpack,
    unpack_lac,
)
from bindery_core.errors import BadRequest, DigestMismatch
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v3
from bindery_core.wire.framing import FRAME_SIZE_MAX
from bindery_core.wire.messages import AddRequest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

ALL_TYPES = pytest.mark.parametrize("digest_type", list(DigestType), ids=lambda t: t.name)

# (ledger, digest of entry 0 with payload "hello", digest of the LAC packet for 1); password "pw"; BookKeeper 4.17.2.
GOLDEN = {
    DigestType.MAC: (0, "ccbdfa9ed6d09182ca7015f3cf0d08217e7e9014", "36c31a6ccd74230975cafd3650f9ab47dc77cb74"),
    DigestType.CRC32C: (4, "a0f3b260", "6ed4dbda"),
    DigestType.CRC32: (10, "000000004c72536b", "000000000e92f15d"),
}


def test_keys_equal_the_keys_of_bookkeeper() -> None:
    assert master_key(b"pw").hex() == "2aa226ba095b6969a64871977693b14671710d76"
    assert master_key(b"").hex() == "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    assert mac_key(b"pw") == hashlib.sha1(b"macpw").digest()
    assert Digester(DigestType.DUMMY, b"pw").master_key == master_key(b"pw")


def test_crc32c_computes_the_standard_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("digest_type", GOLDEN, ids=lambda t: t.name)
def test_frames_equal_the_bytes_of_bookkeepers_client(digest_type: DigestType) -> None:
    ledger_id, entry_digest, lac_digest = GOLDEN[digest_type]
    digester = Digester(digest_type, b"pw")
    frame = pack(digester, ledger_id=ledger_id, entry_id=0, lac=-1, length=5, payload=b"hello")
    ids = ledger_id.to_bytes(8, "big")
    assert frame.hex() == ids.hex() + "0000000000000000ffffffffffffffff0000000000000005" + entry_digest + b"hello".hex()
    assert pack_lac(digester, ledger_id=ledger_id, lac=1).hex() == ids.hex() + "0000000000000001" + lac_digest


def test_a_dummy_frame_has_no_digest() -> None:
    frame = pack(Digester(DigestType.DUMMY), ledger_id=1, entry_id=0, lac=-1, length=2, payload=b"hi")
    assert len(frame) == HEADER_SIZE + 2
    assert frame.endswith(b"hi")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=20))
def test_digests_equal_a_naive_computation(payload: bytes, password: bytes) -> None:
    header = bytes(range(32))
    covered = header + payload
    assert Digester(DigestType.CRC32, password).digest(header, payload) == zlib.crc32(covered).to_bytes(8, "big")
    assert Digester(DigestType.CRC32C, password).digest(header, payload) == crc32c(covered).to_bytes(4, "big")
    expected = hmac.new(hashlib.sha1(b"mac" + password).digest(), covered, "sha1").digest()
    assert Digester(DigestType.MAC, password).digest(header, payload) == expected


@ALL_TYPES
@pytest.mark.parametrize("payload", [b"", b"x", bytes(1000)], ids=["empty", "one byte", "kilobyte"])
def test_entries_round_trip(digest_type: DigestType, payload: bytes) -> None:
    digester = Digester(digest_type, b"secret")
    frame = pack(digester, ledger_id=7, entry_id=42, lac=40, length=5000, payload=payload)
    expected = Entry(7, 42, 40, 5000, payload)
    assert unpack(digester, frame, ledger_id=7, entry_id=42) == expected
    assert unpack(digester, memoryview(frame), ledger_id=7, entry_id=None) == expected
    assert peek_ids(frame) == (7, 42)
    assert peek_lac(frame) == 40
    assert peek_header(frame) == EntryHeader(7, 42, 40, 5000)


@ALL_TYPES
def test_a_batch_packs_the_same_frames_as_single_calls(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"pw")
    payloads = [b"", b"abc", b"d" * 500, b""]
    length = 1000
    singles = []
    for entry_id, payload in enumerate(payloads, 10):
        length += len(payload)
        singles.append(pack(digester, ledger_id=3, entry_id=entry_id, lac=8, length=length, payload=payload))
    assert pack_many(digester, payloads, ledger_id=3, first_entry_id=10, lac=8, length=1000) == singles
    assert pack_many(digester, [], ledger_id=3, first_entry_id=0, lac=-1, length=0) == []


@pytest.mark.parametrize("digest_type", [DigestType.MAC, DigestType.CRC32, DigestType.CRC32C], ids=lambda t: t.name)
def test_every_flipped_bit_and_every_truncation_is_a_digest_mismatch(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"pw")
    frame = pack(digester, ledger_id=7, entry_id=42, lac=40, length=5000, payload=b"payload")
    packet = pack_lac(digester, ledger_id=7, lac=3)
    for at in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[at] ^= 1 << bit
            with pytest.raises(DigestMismatch):
                unpack(digester, bytes(damaged), ledger_id=7, entry_id=42)
        with pytest.raises(DigestMismatch):
            unpack(digester, frame[:at], ledger_id=7, entry_id=42)
    for at in range(len(packet)):
        for bit in range(8):
            damaged = bytearray(packet)
            damaged[at] ^= 1 << bit
            with pytest.raises(DigestMismatch):
                unpack_lac(digester, damaged, ledger_id=7)
        with pytest.raises(DigestMismatch):
            unpack_lac(digester, packet[:at], ledger_id=7)
    with pytest.raises(DigestMismatch):
        unpack(digester, frame + b"\x00", ledger_id=7, entry_id=42)


@ALL_TYPES
def test_the_frame_of_another_ledger_or_entry_is_a_digest_mismatch(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"pw")
    frame = pack(digester, ledger_id=7, entry_id=42, lac=40, length=5000, payload=b"payload")
    for ledger_id, entry_id in ((8, 42), (7, 41), (8, None)):
        with pytest.raises(DigestMismatch, match="the response contains a different entry"):
            unpack(digester, frame, ledger_id=ledger_id, entry_id=entry_id)
    with pytest.raises(DigestMismatch, match="too short"):
        unpack(digester, frame[: HEADER_SIZE + SIZE_OF[digest_type] - 1], ledger_id=7, entry_id=42)
    with pytest.raises(DigestMismatch, match="another ledger"):
        unpack_lac(digester, pack_lac(digester, ledger_id=7, lac=3), ledger_id=8)


def test_another_password_fails_only_if_the_digest_has_a_key() -> None:
    for digest_type, fails in ((DigestType.MAC, True), (DigestType.CRC32C, False)):
        frame = pack(Digester(digest_type, b"a"), ledger_id=1, entry_id=0, lac=-1, length=1, payload=b"x")
        other = Digester(digest_type, b"b")
        if fails:
            with pytest.raises(DigestMismatch):
                unpack(other, frame, ledger_id=1, entry_id=0)
        else:
            assert unpack(other, frame, ledger_id=1, entry_id=0).payload == b"x"


@ALL_TYPES
@pytest.mark.parametrize("lac", [-1, 0, 2**63 - 1])
def test_lac_packets_round_trip(digest_type: DigestType, lac: int) -> None:
    digester = Digester(digest_type, b"pw")
    packet = pack_lac(digester, ledger_id=9, lac=lac)
    assert len(packet) == 16 + SIZE_OF[digest_type]
    assert unpack_lac(digester, packet, ledger_id=9) == lac


def test_peeking_detects_short_bodies() -> None:
    with pytest.raises(BadRequest):
        peek_ids(bytes(15))
    assert peek_ids(bytes(16)) == (0, 0)
    assert peek_lac(bytes(23)) == -1
    with pytest.raises(BadRequest):
        peek_header(bytes(31))


def test_the_largest_payload_fits_into_a_frame() -> None:
    digester = Digester(DigestType.MAC)
    body = pack(digester, ledger_id=2**62, entry_id=2**62, lac=2**61, length=2**62, payload=bytes(PAYLOAD_SIZE_MAX))
    request = AddRequest(2**64 - 1, 2**62, 2**62, digester.master_key, body, True, 1, 100)
    assert len(v3.encode_request(request)) <= FRAME_SIZE_MAX


def test_a_digester_never_prints_its_keys() -> None:
    assert repr(Digester(DigestType.MAC, b"pw")) == "Digester(MAC)"
