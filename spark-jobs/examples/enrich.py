"""Example of a pipeline from topic to topic in which each message counts exactly once: orders are enriched.

    python spark-jobs/examples/enrich.py --zookeeper HOST:PORT --url http://BROKER:8080 --from orders --to enriched \\
        --checkpoint DIR [--until-now]

Input: JSON orders with `customer` and `amount`. Output: each order with its `message_id` and whether it is `large`; the
key is the customer. A payload that is no order is left out. The job can be killed at any time and started again with
the same command: its query id in the checkpoint is its sink id.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bindery_spark.session import session
from bindery_spark.sources.topic.options import TOPIC_FORMAT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

ORDER: Final = StructType([StructField("customer", StringType()), StructField("amount", DoubleType())])
LARGE: Final = 100.0
"""Amount from which an order is large."""


def orders_of(messages: DataFrame) -> DataFrame:
    """MESSAGES -> message_id, event_time, customer, amount; only those that are orders."""
    order = F.from_json(F.col("payload").cast("string"), ORDER)
    return messages.select("message_id", "event_time", order.alias("order")).where(
        "order.customer is not null and order.amount is not null"
    ).select("message_id", "event_time", "order.customer", "order.amount")  # fmt: skip


def enriched(orders: DataFrame) -> DataFrame:
    """Return a message for each order."""
    content = F.struct("message_id", "customer", "amount", (F.col("amount") >= LARGE).alias("large"))
    return orders.select(F.to_json(content).alias("value"), F.col("customer").alias("key"), "event_time")


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    source = {"zookeeper": args.zookeeper, "topic": args.source, "max_entries_per_trigger": str(args.max_entries)}
    orders = orders_of(spark.readStream.format(TOPIC_FORMAT).options(**source).load())
    writer = enriched(orders).writeStream.queryName("enriched").format(TOPIC_FORMAT)
    writer = writer.options(url=args.url, topic=args.to, checkpointLocation=str(args.checkpoint)).outputMode("append")
    query = (writer.trigger(availableNow=True) if args.until_now else writer.trigger(processingTime=args.every)).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Enrich the orders of a topic.")
    parser.add_argument("--zookeeper", required=True, metavar="HOST:PORT")
    parser.add_argument("--url", required=True, help="URL of a broker")
    parser.add_argument("--from", required=True, dest="source", metavar="TOPIC")
    parser.add_argument("--to", required=True, metavar="TOPIC")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR")
    parser.add_argument("--until-now", action="store_true", help="end after the present messages")
    parser.add_argument("--every", default="1 second", help="interval of micro-batches")
    parser.add_argument("--max-entries", type=int, default=10_000, help="maximum entries of a micro-batch")
    args = parser.parse_args(arguments)
    run(session(2, "enrich"), args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
