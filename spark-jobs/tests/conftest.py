"""Fixtures: one Spark for the whole run; and test modules may import what stands beside them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bindery_spark.session import AUDIT_CONF, session
from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    spark = session(cores=2, app_name="tests", conf={**AUDIT_CONF, "spark.sql.shuffle.partitions": "1"})
    yield spark
    spark.stop()
