"""Fixtures: one Spark session for all tests. Test modules may import the modules of this directory."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bindery_simulation.instant import InstantLoop

sys.path.insert(0, str(Path(__file__).parent))

from bindery_spark.session import AUDIT_CONF, session
from pyspark.sql import SparkSession

WITH_SOCKETS = ("test_orphaned_data.py",)
"""Modules whose asynchronous tests wait for sockets. Those of the others run on a loop without real time: waits end at
once."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in WITH_SOCKETS:
        return {"asyncio": asyncio.new_event_loop}
    return {"instant": InstantLoop}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    conf = {**AUDIT_CONF, "spark.sql.shuffle.partitions": "1", "spark.default.parallelism": "1"}
    spark = session(cores=2, app_name="tests", conf=conf)
    yield spark
    spark.stop()
