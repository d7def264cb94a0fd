"""Example of a pipeline from topic to topics in which each message counts exactly once: orders with totals by customer.

    spark-submit --master 'local[2]' pipeline.py --zookeeper HOST:PORT --url http://BROKER:8080 --from orders \\
        --to enriched --totals totals --checkpoint DIR [--until-now]

| query    | input                                   | output                                                       |
|----------|-----------------------------------------|--------------------------------------------------------------|
| enriched | a JSON order with `customer`, `amount`  | the order with `message_id` and `large`; key: the customer   |
| totals   | the same                                | after each micro-batch, the new totals of customers in it    |

Each query has its checkpoint, so its own sink id. A payload that is no order goes to neither. Both can be killed at any
time and started again with the same command.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from bindery_spark.session import session
from bindery_spark.sources.topic.options import TOPIC_FORMAT

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


def totals(orders: DataFrame) -> DataFrame:
    """Return a message for each customer with the number and the sum of all orders so far.

    Spark computes a repeated micro-batch from the same state and input, so it has the same rows in the same order.
    """
    sums = orders.groupBy("customer").agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))
    content = F.struct("customer", "orders", F.round("amount", 2).alias("amount"))
    return sums.select(F.to_json(content).alias("value"), F.col("customer").alias("key"))


def start(
    frame: DataFrame, name: str, *, url: str, topic: str, checkpoint: Path, until_now: bool, every: str
) -> StreamingQuery:
    writer = frame.writeStream.queryName(name).format(TOPIC_FORMAT).options(url=url, topic=topic)
    writer = writer.outputMode("update").option("checkpointLocation", str(checkpoint / name))
    trigger = writer.trigger(availableNow=True) if until_now else writer.trigger(processingTime=every)
    return trigger.start()


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    source = {"zookeeper": args.zookeeper, "topic": args.source, "max_entries_per_trigger": str(args.max_entries)}
    orders = orders_of(spark.readStream.format(TOPIC_FORMAT).options(**source).load())
    common = {"url": args.url, "checkpoint": args.checkpoint, "until_now": args.until_now, "every": args.every}
    queries = [
        start(enriched(orders), "enriched", topic=args.to, **common),
        start(totals(orders), "totals", topic=args.totals, **common),
    ]
    try:
        for query in queries:
            query.awaitTermination()
    finally:
        for query in queries:
            query.stop()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Enrich orders from one topic, and total them by customer.")
    parser.add_argument("--zookeeper", required=True, metavar="HOST:PORT")
    parser.add_argument("--url", required=True, help="URL of a broker")
    parser.add_argument("--from", required=True, dest="source", metavar="TOPIC")
    parser.add_argument("--to", required=True, metavar="TOPIC")
    parser.add_argument("--totals", required=True, metavar="TOPIC")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR")
    parser.add_argument("--until-now", action="store_true", help="end after the present messages")
    parser.add_argument("--every", default="1 second", help="interval of micro-batches")
    parser.add_argument("--max-entries", type=int, default=10_000, help="maximum entries of a micro-batch")
    args = parser.parse_args(arguments)
    run(session(2, "pipeline"), args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
