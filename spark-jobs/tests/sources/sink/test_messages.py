"""Rows as messages: columns, their types, and rows that cannot be written."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from bindery_spark.sources.sink.messages import check_columns, messages_of, with_sequence_id
from pyspark.sql.types import StructType

T = TopicName.parse("t")
AT = datetime(2026, 12, 1, 8, 0, 0, 1_999, tzinfo=UTC)
AT_MS = 1_796_112_000_001


def lines(rows: dict[str, Any], topic: TopicName | None = T) -> list[Any]:
    batch = pa.RecordBatch.from_pydict(rows)
    found: list[Any] = []
    for each in messages_of(batch, topic):
        found.append(each if isinstance(each, BadRequest) else (each[0].short, json.loads(each[1])))
    return found


def test_all_columns() -> None:
    rows = {
        "value": ["a", "b"],
        "key": ["k", None],
        "properties": pa.array([[("z", "1"), ("a", "2")], None], pa.map_(pa.string(), pa.string())),
        "event_time": [AT, None],
        "deliver_at": pa.array([AT_MS, None], pa.int64()),
        "topic": ["other", None],
    }
    line = {"payload": "a", "key": "k", "properties": {"a": "2", "z": "1"}, "event_time": AT_MS, "deliver_at": AT_MS}
    assert lines(rows) == [("public/default/other", line), ("public/default/t", {"payload": "b"})]


def test_bytes_are_base64_and_keys_are_text() -> None:
    assert lines({"payload": [b"\xff"], "key": [b"k"]}) == [
        ("public/default/t", {"payload_base64": "/w==", "key": "k"})
    ]


def test_the_bytes_of_a_message_do_not_depend_on_the_order_of_its_properties() -> None:
    kind = pa.map_(pa.string(), pa.string())
    pairs = [("a", "1"), ("b", "2")]
    batch = pa.RecordBatch.from_pydict({"value": ["x"] * 2, "properties": pa.array([pairs, pairs[::-1]], kind)})
    one, two = messages_of(batch, T)
    assert one == two


def test_rows_that_cannot_be_written_are_errors_of_these_rows() -> None:
    found = lines({"value": ["a", None, "c"], "key": [b"\xff", b"k", b"k"]})
    assert [isinstance(each, BadRequest) for each in found] == [True, True, False]
    assert "not UTF-8" in str(found[0])
    assert "column value is null" in str(found[1])
    (error,) = lines({"value": ["a"], "topic": pa.array([None], pa.string())}, None)
    assert "column topic is null" in str(error)
    kind = pa.map_(pa.string(), pa.string())
    (error,) = lines({"value": ["a"], "properties": pa.array([[("x", None)]], kind)})
    assert "a property is null" in str(error)


def test_a_sequence_id_is_added_to_the_json() -> None:
    assert json.loads(with_sequence_id(b'{"payload":"a"}', 7)) == {"payload": "a", "sequence_id": 7}


@pytest.mark.parametrize(
    "schema",
    [
        "value string",
        "payload binary, key string",
        "value string, key binary, properties map<string,string>, event_time timestamp, deliver_at bigint",
        "value string, topic string",
    ],
)
def test_these_columns_can_be_written(schema: str, spark: Any) -> None:
    check_columns(StructType.fromDDL(schema), T)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("key string", "need a column `value`"),
        ("value string, payload string", "need a column `value`"),
        ("value int", "column value must be string or binary"),
        ("value string, colour string", "no column for colour"),
        ("value string, properties map<string,int>", "column properties must be map of strings"),
        ("value string, event_time string", "column event_time must be timestamp"),
    ],
)
def test_other_columns_are_refused(schema: str, reason: str, spark: Any) -> None:
    with pytest.raises(BadRequest, match=reason):
        check_columns(StructType.fromDDL(schema), T)
    with pytest.raises(BadRequest, match="option topic is missing"):
        check_columns(StructType.fromDDL("value string"), None)
