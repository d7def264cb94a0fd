"""The stored form of a bucket: golden bytes, round trips, and no damage that goes unnoticed."""

import random
import struct

import pytest
from bindery_broker.dispatch.delays.bucket_codec import (
    BLOB_SIZE_MAX,
    ROWS_MAX,
    Columns,
    build,
    decode_bucket,
    encode_bucket,
)
from bindery_core.errors import BadVersion, Corrupt
from bindery_core.ids import ID_MAX
from bindery_pulsar.message_id import Position
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

Rows = dict[int, tuple[list[int], list[int]]]

GOLDEN_ROWS: Rows = {5: ([7, 9], [1_700_000_000_250, 1_700_000_000_001]), 6: ([0], [1_700_000_000_500])}
GOLDEN = bytes.fromhex(
    "42444c59 01 04 04 00 03000000 02000000"  # magic, version, widths, zero, rows, ledgers
    "0168e5cf8b010000"  # base time 1_700_000_000_001
    "0600000000000000 0400000000000000"  # covered up to 6:4
    "0500000000000000 0600000000000000"  # ledgers 5 and 6
    "0700000000000000 0000000000000000"  # their first entries 7 and 0
    "00000000 02000000"  # their first rows 0 and 2
    "00000000 02000000 00000000"  # entry offsets: entries 7 and 9 of ledger 5, entry 0 of ledger 6
    "f9000000 00000000 f3010000"  # time offsets 249, 0 and 499
)
GOLDEN_BLOB = GOLDEN + struct.pack("<I", crc32c(GOLDEN))


def rows_of(columns: Columns) -> Rows:
    found: Rows = {}
    for index, ledger_id in enumerate(columns.ledgers):
        start, end = columns.starts[index], columns.end(index)
        found[ledger_id] = (
            [columns.firsts[index] + offset for offset in columns.entries[start:end]],
            [columns.base_ms + offset for offset in columns.times[start:end]],
        )
    return found


def sealed(body: bytes) -> bytes:
    """`body` with a valid checksum, as only a defect or an attacker would write it."""
    return body + struct.pack("<I", crc32c(body))


def test_golden_bytes():
    assert encode_bucket(build(GOLDEN_ROWS, covered_upto=Position(6, 4))) == GOLDEN_BLOB
    found = decode_bucket(GOLDEN_BLOB)
    assert rows_of(found) == GOLDEN_ROWS
    assert found.covered_upto == Position(6, 4)


_ids = st.one_of(st.integers(0, 1_000), st.integers(0, ID_MAX))
_times = st.one_of(st.integers(1_700_000_000_000, 1_700_000_000_999), st.integers(0, 2**63 - 1))
_ledger_rows = st.dictionaries(_ids, _times, min_size=1, max_size=30).map(
    lambda rows: (sorted(rows), [rows[entry_id] for entry_id in sorted(rows)])
)


@settings(max_examples=200, deadline=None)
@given(rows=st.dictionaries(_ids, _ledger_rows, min_size=1, max_size=5))
def test_what_is_encoded_is_decoded(rows: Rows):
    blob = encode_bucket(build(rows, covered_upto=Position(ID_MAX, ID_MAX)))
    found = decode_bucket(blob)
    assert rows_of(found) == {ledger_id: rows[ledger_id] for ledger_id in sorted(rows)}
    assert encode_bucket(found) == blob


def test_ordinary_buckets_take_eight_bytes_for_a_row():
    rows = {3: (list(range(1_000)), [1_700_000_000_000 + n * 10_000 for n in range(1_000)])}
    assert len(encode_bucket(build(rows, covered_upto=Position(3, 999)))) == 40 + 20 + 8_000 + 4


def test_the_largest_bucket_fits_into_a_blob_with_the_widest_columns():
    entries = [0, *range(ID_MAX - ROWS_MAX + 2, ID_MAX + 1)]
    rows = {0: (entries, [0, *[2**63 - 1] * (ROWS_MAX - 1)])}
    blob = encode_bucket(build(rows, covered_upto=Position(0, ID_MAX)))
    assert BLOB_SIZE_MAX - 16 < len(blob) <= BLOB_SIZE_MAX
    assert rows_of(decode_bucket(blob)) == rows


def test_each_flipped_bit_and_each_truncation_is_noticed():
    for place in range(len(GOLDEN_BLOB)):
        for bit in range(8):
            damaged = bytearray(GOLDEN_BLOB)
            damaged[place] ^= 1 << bit
            with pytest.raises(Corrupt):
                decode_bucket(bytes(damaged))
        with pytest.raises(Corrupt):
            decode_bucket(GOLDEN_BLOB[:place])
    with pytest.raises(Corrupt):
        decode_bucket(GOLDEN_BLOB + b"\0")


def test_a_later_version_is_named():
    with pytest.raises(BadVersion, match="version=2"):
        decode_bucket(sealed(GOLDEN[:4] + b"\2" + GOLDEN[5:]))


@pytest.mark.parametrize(
    ("offset", "form", "value", "part"),
    [
        (5, "<B", 5, "header"),
        (6, "<B", 2, "header"),
        (7, "<B", 1, "header"),
        (8, "<I", 0, "header"),
        (12, "<I", 0, "header"),
        (5, "<B", 8, "size"),
        (8, "<I", 2, "size"),
        (8, "<I", 2**32 - 1, "size"),
        (12, "<I", 1, "size"),
        (16, "<Q", 2**63 - 1 - 498, "times"),
        (24, "<Q", 5, "covered position"),
        (24, "<Q", ID_MAX + 1, "covered position"),
        (32, "<Q", 2**64 - 1, "covered position"),
        (40, "<Q", 6, "ledger ids"),
        (48, "<Q", 5, "ledger ids"),
        (48, "<Q", ID_MAX + 1, "ledger ids"),
        (56, "<Q", ID_MAX - 1, "entry ids"),
        (72, "<I", 1, "rows of ledgers"),
        (76, "<I", 0, "rows of ledgers"),
        (76, "<I", 3, "rows of ledgers"),
        (80, "<I", 1, "entry ids"),
        (84, "<I", 0, "entry ids"),
        (88, "<I", 1, "entry ids"),
    ],
)
def test_invalid_contents_with_a_valid_checksum_are_refused(offset: int, form: str, value: int, part: str):
    body = bytearray(GOLDEN)
    struct.pack_into(form, body, offset, value)
    with pytest.raises(Corrupt, match=rf"invalid contents \({part}\)"):
        decode_bucket(sealed(bytes(body)))


def test_the_covered_position_is_not_before_the_last_row():
    rows: Rows = {5: ([1, 3], [0, 0])}
    for entry_id, is_valid in ((3, True), (2, False)):
        blob = encode_bucket(build(rows, covered_upto=Position(5, entry_id)))
        if is_valid:
            assert decode_bucket(blob).covered_upto == Position(5, 3)
        else:
            with pytest.raises(Corrupt, match="covered position"):
                decode_bucket(blob)


def test_a_blob_above_the_limit_is_refused_before_it_is_read():
    with pytest.raises(Corrupt, match="impossible size"):
        decode_bucket(bytes(BLOB_SIZE_MAX + 1))


def test_more_rows_than_a_bucket_may_have_are_refused():
    """Narrow columns of more rows than ROWS_MAX fit into the size of a blob, but not into the order of a bucket."""
    rows = ROWS_MAX + 1
    body = struct.pack("<4sBBBBIIQQQ", b"BDLY", 1, 4, 4, 0, rows, 1, 0, 0, ID_MAX) + bytes(20)
    body += struct.pack(f"<{rows}I", *range(rows)) + bytes(4 * rows)
    assert len(body) + 4 <= BLOB_SIZE_MAX
    with pytest.raises(Corrupt, match=r"invalid contents \(size\)"):
        decode_bucket(sealed(body))


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_with_a_valid_checksum_never_raise_anything_else(seed: int):
    chance = random.Random(seed)
    for _ in range(200):
        body = bytearray(GOLDEN)
        for _ in range(chance.randint(1, 6)):
            body[chance.randrange(5, len(body))] = chance.choice((0, 1, 2, 8, 127, 128, 255))
        try:
            found = decode_bucket(sealed(bytes(body)))
        except Corrupt:
            continue
        assert encode_bucket(found) == sealed(bytes(body))
