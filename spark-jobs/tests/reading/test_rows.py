"""Verification of entries in bulk, compared with that of single entries, and the resulting columns."""

import pyarrow as pa
import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, LedgerId
from bindery_spark.reading.fragments import Fragment, Ledger
from bindery_spark.reading.rows import SCHEMA, EntryRows, Rows, digester_of, judge
from bindery_spark.schemas import REPLICAS
from crc32c import crc32c
from pyspark.sql.pandas.types import to_arrow_schema

PAYLOADS = [b"", b"x", b"payload" * 100]


@pytest.mark.parametrize("digest_type", DigestType)
def test_valid_entries_fill_all_columns(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"secret")
    frames = pack_many(digester, PAYLOADS, ledger_id=7, first_entry_id=5, lac=4, length=100)
    assert judge(digester, 7, range(5, 8), frames) == (
        [True] * 3,
        [100, 101, 801],
        [0, 1, 700],
        [crc32c(payload) for payload in PAYLOADS],
        [4, 4, 4],
    )


@pytest.mark.parametrize("digest_type", [kind for kind in DigestType if kind is not DigestType.DUMMY])
def test_every_flipped_byte_is_detected(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"secret")
    (frame,) = pack_many(digester, [b"payload"], ledger_id=7, first_entry_id=5, lac=4, length=100)
    for at in range(len(frame)):
        bad = frame[:at] + bytes([frame[at] ^ 0x40]) + frame[at + 1 :]
        assert judge(digester, 7, [5], [bad]) == ([False], [None], [None], [None], [None]), at


def test_a_truncated_entry_or_one_of_another_position_is_corrupt() -> None:
    digester = Digester(DigestType.CRC32C)
    (frame,) = pack_many(digester, [b"payload"], ledger_id=7, first_entry_id=5, lac=4, length=100)
    for size in range(len(frame)):
        assert judge(digester, 7, [5], [frame[:size]])[0] == [False]
    assert judge(digester, 7, [6], [frame])[0] == [False]
    assert judge(digester, 8, [5], [frame])[0] == [False]


def test_the_columns_are_those_of_the_declared_schema() -> None:
    assert to_arrow_schema(REPLICAS, timezone="UTC").equals(SCHEMA)


def test_each_kind_of_row_has_its_columns() -> None:
    rows = Rows("b1")
    rows.add_present(7, 0, [1, 2], limit=1, judged=([True, False], [9, None], [3, None], [5, None], [0, None]))
    rows.add_absent(7, 1, [3])
    rows.add_error(7, 1, [4], limit=None, error="timeout: no answer in time")
    rows.add_unexpected(8, -1, [0])
    rows.add_absent(7, 1, [])
    assert len(rows) == 5
    table = pa.Table.from_batches([rows.take()])
    assert len(rows) == 0
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (7, 0, 1, "b1", True, True, True, 9, 3, 5, 0, None),
        (7, 0, 2, "b1", False, True, False, None, None, None, None, None),
        (7, 1, 3, "b1", True, False, None, None, None, None, None, None),
        (7, 1, 4, "b1", True, None, None, None, None, None, None, "timeout: no answer in time"),
        (8, -1, 0, "b1", False, True, None, None, None, None, None, None),
    ]


@pytest.mark.parametrize("size", [31, 32, 35, 36])
def test_a_frame_without_a_whole_digest_is_corrupt(size: int) -> None:
    digester = Digester(DigestType.CRC32C)
    (frame,) = pack_many(digester, [b""], ledger_id=7, first_entry_id=5, lac=4, length=100)
    assert len(frame) == 36
    assert judge(digester, 7, [5], [frame[:size]])[0] == [size == 36]


LEDGER = Ledger(LedgerId(7), DigestType.CRC32C, b"", 3, 3, True, 4, 10)
MINE = Fragment(LEDGER, BookieId("b1"), 2, (0,), 0, 9)


def test_the_rows_of_a_reader_have_the_place_of_the_fragment() -> None:
    rows = EntryRows("b1")
    (frame,) = pack_many(Digester(DigestType.CRC32C), [b"xy"], ledger_id=7, first_entry_id=4, lac=3, length=9)
    rows.add_frames(MINE, [4], [frame])
    rows.add_listed(MINE, [4, 5])
    rows.add_absent(MINE, [6])
    rows.add_error(MINE, [4, 5], "busy: x")
    rows.add_unexpected(9, -1, [0, 3])
    rows.add_unlisted(8, -1, "unlisted: x")
    rows.complete(MINE, 10, is_last=True)
    assert len(rows) == 9
    nothing = (None,) * 6
    assert [tuple(row.values()) for row in rows.take().to_pylist()] == [
        (7, 2, 4, "b1", True, True, True, 11, 2, crc32c(b"xy"), 3, None),
        (7, 2, 4, "b1", True, True, *nothing),
        (7, 2, 5, "b1", False, True, *nothing),
        (7, 2, 6, "b1", True, False, *nothing),
        (7, 2, 4, "b1", True, None, *nothing[1:], "busy: x"),
        (7, 2, 5, "b1", False, None, *nothing[1:], "busy: x"),
        (9, -1, 0, "b1", False, True, *nothing),
        (9, -1, 3, "b1", False, True, *nothing),
        (8, -1, -1, "b1", False, None, *nothing[1:], "unlisted: x"),
    ]
    assert len(rows) == 0


def test_only_entries_up_to_the_limit_are_expected() -> None:
    rows = Rows("b1")
    for limit in (3, 4, 5):
        rows.add_error(7, 0, [3, 4], limit=limit, error="x")
    assert [row["expected"] for row in rows.take().to_pylist()] == [True, False, True, True, True, True]


def test_a_batch_is_full_at_16384_rows() -> None:
    rows = EntryRows("b1")
    rows.add_absent(MINE, range(16_383))
    assert not rows.is_full
    rows.add_absent(MINE, [0])
    assert rows.is_full
    assert rows.take().num_rows == 16_384
    assert not rows.is_full


def test_columns_of_different_lengths_are_rejected() -> None:
    rows = Rows("b1")
    rows.add_present(7, 0, [1, 2], limit=None, judged=([True], [1], [1], [1], [1]))
    with pytest.raises(ValueError, match="not all the same length"):
        rows.take()


def test_a_digester_is_made_once_for_each_type_and_password() -> None:
    one = digester_of(DigestType.CRC32C, b"")
    assert digester_of(DigestType.CRC32C, b"") is one
    assert digester_of(DigestType.MAC, b"x") is not digester_of(DigestType.MAC, b"y")


def test_at_most_a_thousand_digesters_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may have a password for each of millions of ledgers."""
    kept: dict[object, Digester] = {}
    monkeypatch.setattr("bindery_spark.reading.rows._DIGESTERS", kept)
    for number in range(1_000):
        digester_of(DigestType.CRC32C, b"%d" % number)
    assert len(kept) == 1_000
    digester_of(DigestType.CRC32C, b"another")
    assert len(kept) == 1
