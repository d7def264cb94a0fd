"""Varints at every size border, compared with protobuf's."""

import pytest
from bindery_core.varint import NEGATIVE_ONE, NotAVarint, decode, encode, to_signed
from bindery_core.wire import bookkeeper_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

BORDERS = [border + step for power in range(1, 64) for border in (2**power,) for step in (-1, 0, 1)]


@pytest.mark.parametrize("value", [0, *BORDERS, 2**64 - 1])
def test_values_at_size_borders_round_trip_and_equal_protobufs_bytes(value: int) -> None:
    header = pb.Header(txn_id=value)
    assert encode(value) == header.SerializePartialToString()[1:]
    assert decode(encode(value), 0) == (value, len(encode(value)))


@given(st.integers(-(2**63), -1))
def test_negative_numbers_take_ten_bytes(value: int) -> None:
    assert len(encode(value)) == 10
    assert to_signed(decode(encode(value), 0)[0]) == value
    assert encode(-1) == NEGATIVE_ONE


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_a_truncated_or_too_large_value_is_not_a_varint(data: bytes) -> None:
    with pytest.raises(NotAVarint):
        decode(data, 0)
