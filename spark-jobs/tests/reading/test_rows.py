"""Verification of entries in bulk, compared with that of single entries, and the resulting columns."""

import pyarrow as pa
import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_spark.reading.rows import SCHEMA, Rows, judge
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
