"""Turn rows into messages of the broker's HTTP API, as JSON. Pure.

| column     | type                             | message                                                 |
|------------|----------------------------------|---------------------------------------------------------|
| value      | string or binary, not null       | payload; `payload` is accepted as the name, too         |
| key        | string, or binary with UTF-8     | key; null: none                                         |
| properties | map of strings                   | properties; null: none                                  |
| event_time | timestamp, or long (ms)          | event time; null: none                                  |
| deliver_at | timestamp, or long (ms)          | when shared subscriptions deliver it; null: at once     |
| topic      | string                           | topic of the row; null: that of the option              |

Timestamps are rounded down to milliseconds. The bytes of a message depend on nothing else than its row.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pyarrow as pa
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_TEXTS: Final = (StringType, BinaryType)
_TIMES: Final = (TimestampType, TimestampNTZType, LongType, IntegerType)
COLUMNS: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "value": _TEXTS,
    "payload": _TEXTS,
    "key": _TEXTS,
    "properties": (MapType,),
    "event_time": _TIMES,
    "deliver_at": _TIMES,
    "topic": (StringType,),
}
"""Types of each column."""


def check_columns(schema: StructType, topic: TopicName | None) -> None:
    """Raise BadRequest if rows with this schema cannot be written. `topic`: that of the option."""
    known = ", ".join(name for name in COLUMNS if name != "payload")
    for field in schema.fields:
        kinds = COLUMNS.get(field.name)
        if kinds is None:
            raise BadRequest(
                f"a topic has no column for {field.name}; select some of {known}, or drop it", column=field.name
            )
        is_map_of_others = isinstance(field.dataType, MapType) and not (
            isinstance(field.dataType.keyType, StringType) and isinstance(field.dataType.valueType, StringType)
        )
        if not isinstance(field.dataType, kinds) or is_map_of_others:
            kinds_text = " or ".join(kind.typeName() for kind in kinds)
            raise BadRequest(
                f"column {field.name} must be {kinds_text}" + (" of strings" if MapType in kinds else ""),
                given=field.dataType.simpleString(),
            )
    names = schema.fieldNames()
    if len({"value", "payload"} & set(names)) != 1:
        raise BadRequest("the rows need a column `value`, string or binary, with the payload", columns=", ".join(names))
    if topic is None and "topic" not in names:
        raise BadRequest("option topic is missing, and the rows have no column `topic`")


def messages_of(batch: pa.RecordBatch, topic: TopicName | None) -> Iterator[tuple[TopicName, bytes] | BadRequest]:
    """Return topic and JSON of each row of the batch, or what is wrong with the row."""
    columns = {name: _values(batch.column(i)) for i, name in enumerate(batch.schema.names)}
    topics: dict[str, TopicName] = {}
    for i in range(batch.num_rows):
        try:
            row = {name: values[i] for name, values in columns.items()}
            yield _topic(row.pop("topic", None), topic, topics), _line(row)
        except BadRequest as error:
            yield error


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column; timestamps in ms since 1970."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _topic(name: str | None, default: TopicName | None, known: dict[str, TopicName]) -> TopicName:
    if name is None:
        if default is None:
            raise BadRequest("column topic is null, and option topic is missing")
        return default
    found = known.get(name)
    if found is None:
        found = known[name] = TopicName.parse(name)
    return found


def _line(row: Mapping[str, Any]) -> bytes:
    value = row["value"] if "value" in row else row["payload"]
    if value is None:
        raise BadRequest("column value is null")
    line: dict[str, Any] = {}
    if isinstance(value, str):
        line["payload"] = value
    else:
        line["payload_base64"] = b64encode(value).decode("ascii")
    key = row.get("key")
    if key is not None:
        line["key"] = _text(key, "key")
    properties = row.get("properties")
    if properties:
        pairs = dict(properties)
        if None in pairs.values():
            raise BadRequest("a property is null", property=next(name for name in pairs if pairs[name] is None))
        line["properties"] = {name: pairs[name] for name in sorted(pairs)}
    for name in ("event_time", "deliver_at"):
        at = row.get(name)
        if at is not None:
            line[name] = at
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError as error:
        raise BadRequest("a text is not valid Unicode") from error


def _text(value: str | bytes, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"column {name} has bytes that are not UTF-8") from None


def with_sequence_id(line: bytes, sequence_id: int) -> bytes:
    """Return the JSON of a message with its sequence id."""
    return b'%s,"sequence_id":%d}' % (line[:-1], sequence_id)
