"""Messages as rows of `schemas.MESSAGES`, gathered into Arrow batches. Pure."""

from base64 import b64encode
from typing import Any, Final

import pyarrow as pa
from bindery_core.errors import BinderyError
from bindery_metadata.topics.message_codec import Message, decode_entry, read_head
from bindery_metadata.topics.message_id import MessageId
from pyspark.sql.pandas.types import to_arrow_schema

from bindery_spark.schemas import MESSAGES
from bindery_spark.topic_positions import Bounds

ROWS_MAX: Final = 16_384
BYTES_MAX: Final = 8 * 2**20
"""Payload bytes of a batch, if no single entry has more."""
ARROW_SCHEMA: Final = to_arrow_schema(MESSAGES, timezone="UTC")


class MessageRows:
    """Gathers rows; `take` gives them away. `bounds`: only its times count here."""

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
        """All messages of one entry. One that cannot be taken apart is one row that says why in `problem`: its digest
        was good, so nothing is lost but the way to read it."""
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
        self._size += len(message.payload)
        self._rows.append((
            str(MessageId(ledger_id, entry_id, message.batch_index, partition)), ledger_id, entry_id,
            message.batch_index, message.publish_time_ms * 1_000, message.event_time_ms * 1_000 or None,
            b64encode(key).decode() if isinstance(key, bytes) else key, isinstance(key, bytes),
            list(message.properties.items()), None if message.null_value else message.payload, message.producer_name,
            message.sequence_id, None,
        ))  # fmt: skip

    def _add_problem(self, entry: bytes, why: str, ledger_id: int, entry_id: int, partition: int) -> None:
        time_ms, producer, sequence_id = None, None, None
        try:
            head = read_head(entry)
        except BinderyError:
            pass  # nothing of it can be told but where it stands
        else:
            time_ms, producer, sequence_id = head.publish_time_ms, head.producer_name, head.sequence_id
            if not self._bounds.has_time(time_ms):
                return
        self._size += len(entry)
        self._rows.append((
            str(MessageId(ledger_id, entry_id, -1, partition)), ledger_id, entry_id, -1,
            None if time_ms is None else time_ms * 1_000, None, None, False, [], None, producer, sequence_id, why,
        ))  # fmt: skip

    def take(self) -> pa.RecordBatch:
        """The rows so far, at least one."""
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)]
        self._rows, self._size = [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)
