"""Count the messages of a topic by key, as a stream that can be interrupted at any time and resumed.

| in CHECKPOINT  | content                                                                         |
|----------------|---------------------------------------------------------------------------------|
| query.json     | topic, cluster and start of the count; a count with other values is rejected    |
| spark/         | Spark's state: offsets (positions) of each micro-batch, counts so far           |
| counts.parquet | all counts after the last micro-batch: key, key_is_base64, messages, unreadable |

A micro-batch is a range of positions, which Spark stores before it reads the messages; the counts are stored with the
number of the micro-batch. An interrupted micro-batch is read again from the same positions and replaces the same file,
so each message counts exactly once.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as parquet
from bindery_core.errors import BadRequest, NoSuchNode
from bindery_metadata.layout.layout import LedgersLayout
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from bindery_spark.reading import zookeeper as zookeeper_connection
from bindery_spark.sources import cluster
from bindery_spark.sources.topic.options import TOPIC_FORMAT, TopicOptions
from bindery_spark.sources.topic.rows import OUT_OF_RANGE

COUNTS: Final = StructType(
    [
        StructField("key", StringType(), True),  # null: messages without a key, and unreadable ones
        StructField("key_is_base64", BooleanType(), False),
        StructField("messages", LongType(), False),
        StructField("unreadable", LongType(), False),
    ]
)
FILE: Final = "counts.parquet"
"""Name of the file of counts in the checkpoint."""
OnBatch = Callable[[int, pa.Table], None]
"""(number of the micro-batch, COUNTS) -> None."""


def counts_by_key(messages: DataFrame) -> DataFrame:
    """MESSAGES -> COUNTS. A message with a value that no column can hold counts as readable."""
    is_message = F.coalesce(F.col("problem").startswith(OUT_OF_RANGE), F.lit(True))
    return messages.groupBy("key", "key_is_base64").agg(
        F.count_if(is_message).alias("messages"), F.count_if(~is_message).alias("unreadable")
    )


def start_count(
    spark: SparkSession, options: Mapping[str, str], checkpoint: Path, *, every_s: float | None, on_batch: OnBatch
) -> StreamingQuery:
    """Start the query. `every_s`: interval of micro-batches; None: count the present messages, then end.

    `on_batch` is called after the counts of a micro-batch are in the file. Raises BadRequest if the checkpoint is of
    another topic, cluster or start.
    """
    claim(checkpoint, options, cluster_id=cluster.run(lambda: _cluster_id(TopicOptions.parse(options, os.environ))))

    def keep(frame: DataFrame, batch_id: int) -> None:
        table = frame.toArrow()
        making = checkpoint / (FILE + ".making")
        parquet.write_table(table, making)
        making.replace(checkpoint / FILE)
        on_batch(batch_id, table)

    messages = spark.readStream.format(TOPIC_FORMAT).options(**options).load()
    writer = counts_by_key(messages).writeStream.outputMode("complete").foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(checkpoint / "spark"))
    if every_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds").start()


def read_counts(checkpoint: Path) -> pa.Table:
    """COUNTS after the last micro-batch; most messages first. Empty before the first one."""
    path = checkpoint / FILE
    if not path.exists():
        return to_arrow_schema(COUNTS).empty_table()
    return parquet.read_table(path).sort_by([("messages", "descending"), ("key", "ascending")])


async def _cluster_id(options: TopicOptions) -> str | None:
    """Return the cluster id; None if the cluster has none, as after manual initialization."""
    store = await zookeeper_connection.connect(options.zookeeper, options.access)
    try:
        node = await store.get(LedgersLayout(options.ledgers_root).instance_id)
    except NoSuchNode:
        return None
    finally:
        await store.close()
    return node.data.decode(errors="replace")


def claim(checkpoint: Path, options: Mapping[str, str], *, cluster_id: str | None) -> None:
    """Create `query.json`, or check that it describes this count. Raises BadRequest if it describes another count.

    A topic with the same name in another cluster has other ledgers, so its positions are meaningless here. Older
    versions wrote no cluster id; such a checkpoint is accepted.
    """
    parsed = TopicOptions.parse(options)
    counted: dict[str, Any] = {
        "topic": parsed.topic.short,
        "ledgers_root": parsed.ledgers_root,
        "start": options.get("start", "earliest"),
        "cluster": cluster_id,
    }
    path = checkpoint / "query.json"
    if not path.exists():
        if checkpoint.exists() and any(checkpoint.iterdir()):
            raise BadRequest("not a checkpoint of a count; choose an empty or a new directory", checkpoint=checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(counted) + "\n")
    elif {"cluster": cluster_id, **(before := json.loads(path.read_text()))} != counted:
        raise BadRequest("the checkpoint counts something else; choose another directory", counts=before)
