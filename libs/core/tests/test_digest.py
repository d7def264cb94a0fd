"""Digests and keys, with literal values of BookKeeper 4.17.2 and of the standards."""

import pytest
from bindery_core.digest import MASTER_KEY_SIZE, SIZE_OF, Digester, mac_key, master_key
from bindery_core.formats.ledger_metadata import DigestType

HEADER = bytes.fromhex("00000000000000000000000000000000ffffffffffffffff0000000000000005")
ALL = pytest.mark.parametrize("digest_type", list(DigestType), ids=lambda t: t.name)


def header_of(ledger_id: int) -> bytes:
    return ledger_id.to_bytes(8, "big") + HEADER[8:]


GOLDEN = {
    DigestType.MAC: (header_of(0), "ccbdfa9ed6d09182ca7015f3cf0d08217e7e9014"),
    DigestType.CRC32C: (header_of(4), "a0f3b260"),
    DigestType.CRC32: (header_of(10), "000000004c72536b"),
    DigestType.DUMMY: (header_of(0), ""),
}
"""Header and digest of entry 0 with payload `hello` and password `pw`."""


def test_keys_equal_the_keys_of_bookkeeper() -> None:
    assert master_key(b"pw").hex() == "2aa226ba095b6969a64871977693b14671710d76"
    assert master_key(b"").hex() == "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    assert mac_key(b"pw").hex() == "1f397c2df518ce03229cc4dc92b608068c3a2fad"
    assert mac_key(b"").hex() == "347ead6348e936507920c15d2ae8266ac6ce9b49"
    assert MASTER_KEY_SIZE == len(master_key(b"")) == 20


@pytest.mark.parametrize("digest_type", GOLDEN, ids=lambda t: t.name)
def test_a_digest_covers_header_and_payload(digest_type: DigestType) -> None:
    header, expected = GOLDEN[digest_type]
    digester = Digester(digest_type, b"pw")
    for kind in (bytes, bytearray, memoryview):
        assert digester.digest(kind(header), kind(b"hello")).hex() == expected
    assert digester.verify(header, bytes.fromhex(expected), b"hello")
    assert digester.verify(memoryview(header), memoryview(bytes.fromhex(expected)), memoryview(b"hello"))


def test_the_standard_check_values_are_computed() -> None:
    assert Digester(DigestType.CRC32C).digest(b"1234", b"56789").hex() == "e3069283"
    assert Digester(DigestType.CRC32).digest(b"1234", b"56789").hex() == "00000000cbf43926"


@ALL
def test_a_digester_knows_its_size_and_key(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"pw")
    size = {DigestType.CRC32: 8, DigestType.MAC: 20, DigestType.CRC32C: 4, DigestType.DUMMY: 0}[digest_type]
    assert digester.size == SIZE_OF[digest_type] == size == len(digester.digest(HEADER, b"x"))
    assert digester.digest_type is digest_type
    assert digester.master_key == master_key(b"pw")
    assert Digester(digest_type).master_key == master_key(b"")


@pytest.mark.parametrize("digest_type", [t for t in DigestType if t is not DigestType.DUMMY], ids=lambda t: t.name)
def test_any_other_digest_is_wrong(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"pw")
    digest = digester.digest(HEADER, b"hello")
    assert not digester.verify(HEADER, digest, b"hellp")
    assert not digester.verify(HEADER[:-1] + b"\x06", digest, b"hello")
    for other in (b"", digest[:-1], digest + b"\x00", digest[:-1] + bytes((digest[-1] ^ 1,))):
        assert not digester.verify(HEADER, other, b"hello")


def test_a_dummy_digest_is_empty() -> None:
    dummy = Digester(DigestType.DUMMY)
    assert dummy.verify(HEADER, b"", b"anything")
    assert not dummy.verify(HEADER, b"\x00", b"anything")


def test_only_a_mac_depends_on_the_password() -> None:
    digests = {t: Digester(t, b"a").digest(HEADER, b"x") == Digester(t, b"b").digest(HEADER, b"x") for t in DigestType}
    assert digests == {DigestType.CRC32: True, DigestType.MAC: False, DigestType.CRC32C: True, DigestType.DUMMY: True}


def test_macs_of_one_digester_are_independent() -> None:
    mac = Digester(DigestType.MAC, b"pw")
    first = mac.digest(HEADER, b"hello")
    mac.digest(HEADER, b"other")
    assert mac.digest(HEADER, b"hello") == first
