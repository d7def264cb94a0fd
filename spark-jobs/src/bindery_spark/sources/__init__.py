"""The data sources: `bindery-metadata`, `bindery-ledgers` and `bindery-topic`, registered by `register`.

Each module names its options. Spark starts the readers in Python workers of their own, so these modules are
composition roots: they create the event loop, the clock and the connection to ZooKeeper.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Register `bindery-metadata`, `bindery-ledgers` and `bindery-topic` as formats of this session."""
    from bindery_spark.sources.ledgers import LedgersSource
    from bindery_spark.sources.metadata import MetadataSource
    from bindery_spark.sources.topic.source import TopicSource

    spark.dataSource.register(MetadataSource)
    spark.dataSource.register(LedgersSource)
    spark.dataSource.register(TopicSource)
