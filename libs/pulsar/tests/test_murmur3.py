"""The hash of keys equals that of Pulsar."""

import pytest
from bindery_pulsar.murmur3 import HASH_MAX, murmur3_hash
from hypothesis import given
from hypothesis import strategies as st

BYTES = bytes(range(256))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"a", 1009084850),
        (b"ab", 465557343),
        (b"abc", 870159354),
        (b"abcd", 1139631978),
        (b"k1", 2110152746),
        (b"k2", 1479966664),
        (b"key1", 462881061),
        (b"key2", 1936800180),
        (b"key01", 39696932),
        (b"hello, world", 345750399),
        (BYTES[-1:], 2104291597),
        (BYTES[-2:], 993810984),
        (BYTES[-3:], 112978759),
        (BYTES[-4:], 1255361422),
        (BYTES[-5:], 1927445040),
        (BYTES[-127:], 809691875),
        (BYTES[-128:], 802750065),
        (BYTES[-129:], 712545993),
        (BYTES[-255:], 1737067472),
        (BYTES, 1678380630),
    ],
)
def test_the_hash_is_that_of_pulsar(data: bytes, expected: int) -> None:
    """The values were printed by `Murmur3_32Hash.getInstance().makeHash` of Pulsar 4.0.7."""
    assert murmur3_hash(data) == expected


@given(st.binary(max_size=100))
def test_the_hash_is_that_of_the_definition(data: bytes) -> None:
    assert murmur3_hash(data) == _by_definition(data) & HASH_MAX


def _by_definition(data: bytes) -> int:
    mask = 2**32 - 1
    found = 0
    whole = len(data) & ~3
    for offset in range(0, len(data), 4):
        word = int.from_bytes(data[offset : offset + 4], "little") * 0xCC9E2D51 & mask
        found ^= (word << 15 | word >> 17) * 0x1B873593 & mask
        if offset < whole:
            found = (found << 13 | found >> 19) * 5 + 0xE6546B64 & mask
    found ^= len(data)
    found = (found ^ found >> 16) * 0x85EBCA6B & mask
    found = (found ^ found >> 13) * 0xC2B2AE35 & mask
    return found ^ found >> 16
