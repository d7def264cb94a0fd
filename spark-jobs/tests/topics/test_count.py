"""Messages counted by key."""

import pyarrow as pa
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_spark.schemas import MESSAGES
from bindery_spark.sources.topic.positions import (
    ALL,
)
from bindery_spark.sources.topic.rows import MessageRows
from bindery_spark.topics.count import counts_by_key
from pyspark.sql import SparkSession


def test_a_message_with_times_out_of_range_counts_as_readable(spark: SparkSession) -> None:
    rows = MessageRows(ALL)
    odd = OutgoingMessage(payload=b"", key="k", null_value=True, event_time_ms=2**63)
    rows.add(
        encode_message(odd, producer_name="me", publish_time_ms=7, sequence_id=1), ledger_id=3, entry_id=0, partition=-1
    )
    rows.add(b"no message", ledger_id=3, entry_id=1, partition=-1)
    counts = counts_by_key(spark.createDataFrame(pa.Table.from_batches([rows.take()]), MESSAGES)).collect()
    assert {row.key: (row.messages, row.unreadable) for row in counts} == {"k": (1, 0), None: (0, 1)}
