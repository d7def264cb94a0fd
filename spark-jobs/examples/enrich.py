"""Example of a pipeline from topic to topic in which each message counts exactly once: orders are enriched and summed.

    python spark-jobs/examples/enrich.py --zookeeper HOST:PORT --url http://BROKER:8080 --from orders --to enriched \\
        --checkpoint DIR [--totals totals] [--until-now]

Input: JSON orders with `customer` and `amount`. A payload that is no such order, or whose amount is not below
AMOUNT_MAX, is left out.

| option     | output                                                             | key      |
|------------|--------------------------------------------------------------------|----------|
| `--to`     | each order, with its `message_id` and whether it is `large`        | customer |
| `--totals` | number and sum of a customer's orders, whenever they have changed: | customer |
|            | the last message of a customer is the present total                |          |

The job can be killed at any time and started again with the same command. Each output is a query of its own, with its
own checkpoint and its own position in the input: a kill may leave one ahead of the other, and each continues where it
was. Spark repeats a micro-batch that was not committed, and the sink skips the rows that are stored already; that needs
the same rows in the same order. The query of the orders has that from the source. An aggregation does not by itself:
- its rows come out of a shuffle in any order, so they are sorted;
- a sum of floating point numbers depends on the order of the additions, so amounts become decimals.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from bindery_spark.session import session
from bindery_spark.sources.topic.options import TOPIC_FORMAT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

ORDER: Final = StructType([StructField("customer", StringType()), StructField("amount", DoubleType())])
LARGE: Final = 100.0
"""Amount from which an order is large."""
AMOUNT_MAX: Final = 1e12
"""Amounts are smaller, so that they fit into AMOUNT. JSON may hold anything, and a value that cannot be converted would
stop the query for ever."""
AMOUNT: Final = "decimal(18, 2)"
QUERY_ID: Final = "sql.streaming.queryId"
"""Local property of Spark with the id of the query that calls foreachBatch. The checkpoint keeps it."""
POLL_S: Final = 1


def orders_of(messages: DataFrame) -> DataFrame:
    """MESSAGES -> message_id, event_time, customer, amount; only those that are orders."""
    order = F.from_json(F.col("payload").cast("string"), ORDER)
    return messages.select("message_id", "event_time", order.alias("order")).where(
        f"order.customer is not null and abs(order.amount) < {AMOUNT_MAX}"
    ).select("message_id", "event_time", "order.customer", "order.amount")  # fmt: skip


def enriched(orders: DataFrame) -> DataFrame:
    """Return a message for each order."""
    content = F.struct("message_id", "customer", "amount", (F.col("amount") >= LARGE).alias("large"))
    return orders.select(F.to_json(content).alias("value"), F.col("customer").alias("key"), "event_time")


def totals_of(orders: DataFrame) -> DataFrame:
    """ORDERS -> customer, orders, total; a row for each customer."""
    total = F.sum(F.col("amount").cast(AMOUNT)).alias("total")
    return orders.groupBy("customer").agg(F.count("*").alias("orders"), total)


def write_totals(totals: DataFrame, *, url: str, topic: str) -> None:
    """Store a message for each row of a micro-batch. The same micro-batch may be written again."""
    content = F.to_json(F.struct("customer", "orders", "total"))
    rows = totals.sortWithinPartitions("customer").select(content.alias("value"), F.col("customer").alias("key"))
    sink_id = totals.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    assert sink_id, "called by foreachBatch"
    rows.write.format(TOPIC_FORMAT).mode("append").options(url=url, topic=topic, sink_id=sink_id).save()


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    source = {"zookeeper": args.zookeeper, "topic": args.source, "max_entries_per_trigger": str(args.max_entries)}
    orders = orders_of(spark.readStream.format(TOPIC_FORMAT).options(**source).load())
    to_topic = enriched(orders).writeStream.queryName("enriched").format(TOPIC_FORMAT).outputMode("append")
    writers = [to_topic.options(url=args.url, topic=args.to, checkpointLocation=args.checkpoint)]
    if args.totals is not None:
        sums = totals_of(orders).writeStream.queryName("totals").outputMode("update")
        sums = sums.foreachBatch(lambda frame, _batch: write_totals(frame, url=args.url, topic=args.totals))
        writers.append(sums.option("checkpointLocation", args.checkpoint.rstrip("/") + "-totals"))
    queries: list[StreamingQuery] = []
    try:
        for writer in writers:
            queries.append(_triggered(writer, args).start())
            _wait_begun(queries[-1])
        waiting = queries
        while waiting:  # the first one that fails ends all
            waiting = [query for query in waiting if not query.awaitTermination(POLL_S)]
    finally:
        for query in queries:
            query.stop()


def _wait_begun(query: StreamingQuery) -> None:
    """Wait until the query has ended a micro-batch. The Python process of a query must start within ten seconds, and
    those of several queries that start at the same time may take longer on a busy machine."""
    while query.lastProgress is None and not query.awaitTermination(POLL_S):
        pass


def _triggered(writer: DataStreamWriter, args: argparse.Namespace) -> DataStreamWriter:
    return writer.trigger(availableNow=True) if args.until_now else writer.trigger(processingTime=args.every)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Enrich the orders of a topic, and sum them by customer.")
    parser.add_argument("--zookeeper", required=True, metavar="HOST:PORT", help="ZooKeeper of the cluster")
    parser.add_argument("--url", required=True, help="URL of a broker, or several, separated by commas")
    parser.add_argument("--from", required=True, dest="source", metavar="TOPIC", help="topic of the orders")
    parser.add_argument("--to", required=True, metavar="TOPIC", help="topic of the enriched orders")
    parser.add_argument("--totals", metavar="TOPIC", help="also write number and sum of each customer's orders to it")
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="directory or URI of Spark's checkpoint; that of the totals is DIR-totals. Executors must reach it",
    )
    parser.add_argument("--until-now", action="store_true", help="end after the present messages")
    parser.add_argument("--every", default="1 second", help="interval of micro-batches (1 second)")
    parser.add_argument("--max-entries", type=int, default=10_000, help="maximum entries of a micro-batch (10000)")
    args = parser.parse_args(arguments)
    run(session(2, "enrich"), args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
