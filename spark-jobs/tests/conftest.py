"""Fixtures: one Spark session for all tests. Test modules may import the modules of this directory."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bindery_spark.session import AUDIT_CONF, session
from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    conf = {**AUDIT_CONF, "spark.sql.shuffle.partitions": "1", "spark.default.parallelism": "1"}
    spark = session(cores=2, app_name="tests", conf=conf)
    yield spark
    spark.stop()
