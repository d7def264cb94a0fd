"""A Spark session that needs nothing but Python: local, quiet, bounded in memory, with our sources registered.

| setting                                   | value                                 | why                              |
|-------------------------------------------|---------------------------------------|----------------------------------|
| spark.master                              | local[cores], unless given            | spark-submit says another        |
| spark.ui.enabled                          | false                                 | no port is opened                |
| spark.driver.host, .bindAddress           | 127.0.0.1, in local mode              | the same; names need not resolve |
| spark.driver.memory                       | DRIVER_MEMORY                         | laptops                          |
| spark.sql.shuffle.partitions              | 2 x cores                             | 200 are for clusters             |
| spark.sql.execution.arrow.*               | on, ARROW_BATCH_ROWS                  | rows cross to Python in batches  |
| spark.sql.python.filterPushdown.enabled   | true                                  | our sources take filters         |
| spark.python.worker.reuse                 | true                                  | a worker takes a second to start |
| spark.driver.extraJavaOptions             | JVM_OPTIONS, in local mode            | Python does the work: the JVM is |
|                                           |                                       | to start soon and be small       |

What `conf` says wins over all of these, and over it nothing; CONF_VARIABLE, a JSON object of texts, comes in between.
"""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bindery_core.errors import BadRequest

from bindery_spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER_MEMORY: Final = "1g"
ARROW_BATCH_ROWS: Final = 16_384
JVM_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
LOG_LEVEL: Final = "ERROR"
"""Of Spark's own log: what an audit has to say it says itself."""
CONF_VARIABLE: Final = "BINDERY_SPARK_CONF"
"""Spark's settings from outside, as a pod has them: master, address of the driver, sizes of executors."""
LOG4J: Final = Path(__file__).parent / "log4j2.properties"
"""Read before the first line of Spark's own code, so that its start is quiet, too."""


AUDIT_CONF: Final[Mapping[str, str]] = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Of audits, whose queries are many and whose tables small: to compile each into Java and to plan it anew at each stage
took nine tenths of the time that a small audit needs. Rows that tell of hundreds of copies need no such help."""


def session(
    cores: int = 2, app_name: str = "bindery", conf: Mapping[str, str] | None = None, *, with_sources: bool = True
) -> "SparkSession":
    """The session of this process, made when there is none. `cores`: Python workers at a time in local mode.
    `with_sources`: ours are registered, which takes a second or two.

    Finds a Java (`bindery_spark.java`) unless a JVM runs already, as under spark-submit. Raises NoJava.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from bindery_spark.sources import register

    # Spark's typed stubs do not show the running gateway; under spark-submit it is there before us.
    if SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        prepare(os.environ)
    builder = SparkSession.builder.appName(app_name)
    chosen = {**conf_of(os.environ), **(conf or {})}
    all_settings = settings(cores, chosen, submitted="PYSPARK_GATEWAY_PORT" in os.environ)
    for name, value in all_settings.items():
        builder = builder.config(name, value)
    with _interrupts_put_off():
        SparkContext._ensure_initialized(conf=SparkConf().setAppName(app_name).setAll(list(all_settings.items())))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(LOG_LEVEL)
    if with_sources:
        register(spark)
    return spark


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Ctrl-C counts at the end of the block: a JVM whose Python goes away before the two have met stays for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def share(spark: "SparkSession", directory: Path) -> None:
    """Executors that are processes of their own keep what is collected in between here, so that one may die. In local
    mode nothing is done: there is one process, and memory is sooner written."""
    if not re.fullmatch(r"local(\[.*\])?", spark.sparkContext.master or ""):
        directory.mkdir(parents=True, exist_ok=True)
        spark.sparkContext.setCheckpointDir(directory.as_uri())


def stop() -> None:
    """End Spark where it runs in this process, so that executors go, too. Its own end does not see to that in a
    container, whose processes are all killed with the first one."""
    spark = sys.modules.get("pyspark")
    context = spark.SparkContext._active_spark_context if spark else None
    if context is not None:
        context.stop()


def conf_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Raises BadRequest when the variable is no JSON object of texts."""
    text = environment.get(CONF_VARIABLE) or "{}"
    try:
        conf = json.loads(text)
    except ValueError:
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        raise BadRequest(f"{CONF_VARIABLE} must be a JSON object whose values are texts", given=text[:200])
    return conf


def prepare(environment: dict[str, str] | os._Environ[str]) -> None:
    """Set what the JVM and Python workers are started with. PYSPARK_PYTHON that is set already is kept."""
    environment["JAVA_HOME"] = str(java_home(environment))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Spark's scripts look at SPARK_HOME first: another Spark of the machine must not answer for ours.
    environment.pop("SPARK_HOME", None)


def settings(cores: int, conf: Mapping[str, str], *, submitted: bool = False) -> dict[str, str]:
    """Spark's settings; `conf` wins. `submitted`: spark-submit chose master and memory, so these are left alone."""
    assert cores >= 1
    ours = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.worker.reuse": "true",
    }
    if not submitted:
        ours |= {
            "spark.master": f"local[{cores}]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": DRIVER_MEMORY,
            "spark.driver.extraJavaOptions": f"{JVM_OPTIONS} -Dlog4j2.configurationFile={LOG4J.as_uri()}",
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "bindery-spark-warehouse"),
        }
    return {**ours, **conf}
