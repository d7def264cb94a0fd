"""The list of entries that a bookie holds: its bytes, and its limits against hostile peers."""

import struct

import pytest
from bindery_core.errors import BadVersion, Corrupt, TooLarge
from bindery_core.formats.availability import RUN_SIZE_MAX, decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st


def groups(*fields: tuple[int, int, int, int], version: int = 0, count: int | None = None) -> bytes:
    header = struct.pack(">ii", version, len(fields) if count is None else count) + bytes(56)
    return header + b"".join(struct.pack(">qqii", *group) for group in fields)


def test_the_encoded_list_equals_the_bytes_of_bookkeeper() -> None:
    golden = bytes.fromhex("0000000000000001" + "00" * 56 + "00000000000000050000000000000005" + "0000000100000000")
    assert encode([(5, 1)]) == golden
    assert decode(golden) == [(5, 1)]
    assert encode([(0, 2), (3, 2)]) == groups((0, 0, 2, 0), (3, 3, 2, 0))
    assert encode([]) == bytes(64)


def test_groups_of_many_runs_are_read() -> None:
    assert decode(groups((0, 9, 2, 3), (20, 20, 1, 0))) == [(0, 2), (3, 2), (6, 2), (9, 2), (20, 1)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 2**20)), max_size=20))
def test_runs_round_trip(gaps_and_counts: list[tuple[int, int]]) -> None:
    runs = []
    at = 0
    for gap, count in gaps_and_counts:
        runs.append((at + gap, count))
        at += gap + count
    assert decode(encode(runs)) == runs


def test_a_run_longer_than_its_field_allows_is_split() -> None:
    assert decode(encode([(7, RUN_SIZE_MAX + 1)])) == [(7, RUN_SIZE_MAX), (7 + RUN_SIZE_MAX, 1)]


@pytest.mark.parametrize(
    "data",
    [
        bytes(63),
        groups((5, 5, 1, 0))[:-1],
        groups((5, 5, 1, 0)) + b"\x00",
        groups(count=-1),
        groups((-1, -1, 1, 0)),
        groups((5, 4, 1, 1)),
        groups((5, 5, 0, 0)),
        groups((0, 10, 2, 0)),
        groups((0, 10, 2, 1)),
        groups((0, 10, 2, 3)),
    ],
)
def test_invalid_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data)


def test_a_newer_version_and_too_many_runs_are_refused() -> None:
    with pytest.raises(BadVersion, match="version=1"):
        decode(groups(version=1))
    with pytest.raises(TooLarge):
        decode(groups((0, 2**62, 1, 1)))
