"""Convert messages to rows of `schemas.MESSAGES` in Arrow batches. Pure.

Producers may set values that no column can hold: a time in us instead of ms is beyond the year 10000, and a sequence id
may be above 2^63 - 1. Such a column is null, and `problem` has OUT_OF_RANGE and the value. The message still counts as
readable.

An entry that is not decoded (for example, encrypted) is one row with its payload as stored: `problem` has NOT_DECODED
and the reason, and `encoding` has what is needed to decode it, as in the HTTP API.
"""

import json
from base64 import b64encode
from typing import Any, Final

import pyarrow as pa
from bindery_core.errors import BinderyError
from bindery_core.ids import ID_MAX
from bindery_pulsar.message_codec import Message, OpaqueMessage, decode_entry, read_head
from bindery_pulsar.message_id import MessageId
from pyspark.sql.pandas.types import to_arrow_schema

from bindery_spark.schemas import MESSAGES
from bindery_spark.sources.topic.positions import TIME_MS_MAX, Bounds

ROWS_MAX: Final = 16_384
"""Number of rows at which a batch is full."""
BYTES_MAX: Final = 8 * 2**20
"""Payload size in bytes at which a batch is full."""
OUT_OF_RANGE: Final = "out of range: "
"""Beginning of `problem` if a value does not fit its column."""
NOT_DECODED: Final = "not decoded: "
"""Beginning of `problem` if the payload is as stored."""
ARROW_SCHEMA: Final = to_arrow_schema(MESSAGES, timezone="UTC")


class MessageRows:
    """Collects rows of messages whose publish time is in `bounds`."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= ROWS_MAX or self._size >= BYTES_MAX

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def add(self, entry: bytes, *, ledger_id: int, entry_id: int, partition: int) -> None:
        """Add all messages of one entry. An entry that cannot be decoded becomes one row with the reason in `problem`;
        its digest is valid, so its bytes are intact."""
        try:
            messages = decode_entry(entry)
        except BinderyError as error:
            self._add_problem(entry, str(error), ledger_id, entry_id, partition)
            return
        for message in messages:
            if self._bounds.has_time(message.publish_time_ms):
                self._add_message(message, ledger_id, entry_id, partition)

    def _add_message(self, message: Message, ledger_id: int, entry_id: int, partition: int) -> None:
        key = message.key
        published, happened, number, problem = _fitting(
            message.publish_time_ms, message.event_time_ms or None, message.sequence_id
        )
        encoding = None
        if isinstance(message, OpaqueMessage):
            encoding = json.dumps(message.encoding.as_json())
            problem = NOT_DECODED + message.encoding.reason + (f"; {problem}" if problem else "")
        self._size += len(message.payload)
        self._rows.append(
            (
                str(MessageId(ledger_id, entry_id, message.batch_index, partition)),
                ledger_id,
                entry_id,
                message.batch_index,
                published,
                happened,
                b64encode(key).decode() if isinstance(key, bytes) else key,
                isinstance(key, bytes),
                list(message.properties.items()),
                None if message.null_value else message.payload,
                message.producer_name,
                number,
                problem,
                encoding,
            )
        )

    def _add_problem(self, entry: bytes, why: str, ledger_id: int, entry_id: int, partition: int) -> None:
        time_ms, producer, sequence_id = None, None, None
        try:
            head = read_head(entry)
        except BinderyError:
            pass  # only the position of the entry is known
        else:
            time_ms, producer, sequence_id = head.publish_time_ms, head.producer_name, head.sequence_id
            if not self._bounds.has_time(time_ms):
                return
        published, _, number, _ = _fitting(time_ms, None, sequence_id)
        self._size += len(entry)
        self._rows.append(
            (
                str(MessageId(ledger_id, entry_id, -1, partition)),
                ledger_id,
                entry_id,
                -1,
                published,
                None,
                None,
                False,
                [],
                None,
                producer,
                number,
                why,
                None,
            )
        )

    def take(self) -> pa.RecordBatch:
        """Return all rows, at least one, and remove them."""
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)]
        self._rows, self._size = [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _fitting(
    published_ms: int | None, happened_ms: int | None, number: int | None
) -> tuple[int | None, int | None, int | None, str | None]:
    """Return publish time and event time in us, the sequence id, and a text of the values that do not fit, or None."""
    if (published_ms or 0) < TIME_MS_MAX and (happened_ms or 0) < TIME_MS_MAX and (number or 0) <= ID_MAX:
        return _us(published_ms), _us(happened_ms), number, None
    wrong = []
    if published_ms is not None and published_ms >= TIME_MS_MAX:
        wrong.append(f"publish_time {published_ms} ms")
        published_ms = None
    if happened_ms is not None and happened_ms >= TIME_MS_MAX:
        wrong.append(f"event_time {happened_ms} ms")
        happened_ms = None
    if number is not None and number > ID_MAX:
        wrong.append(f"sequence_id {number}")
        number = None
    return _us(published_ms), _us(happened_ms), number, OUT_OF_RANGE + ", ".join(wrong)


def _us(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms * 1_000
