"""Columns that may be null: a column that is declared otherwise fails the job that writes null, or hides a null."""

import pytest
from bindery_spark import schemas
from bindery_spark.schemas import NO_LEDGER, NO_SEGMENT
from pyspark.sql.types import ArrayType, MapType, StructType


def inner(kind: object) -> list[bool]:
    """Whether the elements of a column's type may be null, outermost first."""
    match kind:
        case ArrayType(elementType=of, containsNull=may):
            return [may, *inner(of)]
        case MapType(valueContainsNull=may):
            return [may]
        case StructType(fields=fields):
            return [may for field in fields for may in inner(field.dataType)]
    return []


@pytest.mark.parametrize(
    ("table", "nullable"),
    [
        ("REPLICAS", "present digest_ok ledger_length payload_length payload_crc32c lac error"),
        ("BLOCKS", "fingerprint end_length reason states facts"),
        ("SEGMENT", "last_entry"),
        ("LEDGERS", "last_entry_id length created_ms problem"),
        ("BOOKIES", "rack free_bytes total_bytes"),
        ("MARKS", "reason marked_at_ms"),
        ("TOPIC_LEDGER", "closed_ms"),
        ("TOPICS", "problem"),
        ("CURSORS", "mark_delete_ledger mark_delete_entry cursor_ledger_id problem"),
        ("VERIFIED", ""),
        ("MESSAGES", "publish_time event_time key payload producer sequence_id problem encoding"),
        ("FINDINGS", "ledger_id segment first_entry last_entry bookie expected found action"),
    ],
)
def test_only_columns_that_may_be_unknown_are_nullable(table: str, nullable: str) -> None:
    schema: StructType = getattr(schemas, table)
    assert [field.name for field in schema if field.nullable] == nullable.split()
    assert not any(inner(schema)), "no list and no map contains null"


def test_rows_without_a_ledger_or_segment_have_an_id_that_none_has() -> None:
    assert (NO_LEDGER, NO_SEGMENT) == (-1, -1)
