"""Create a local Spark session with bounded memory, without log output, and with the data sources registered.

| setting                                 | value                      | why                              |
|-----------------------------------------|----------------------------|----------------------------------|
| spark.master                            | local[cores], unless given | spark-submit sets another        |
| spark.ui.enabled                        | false                      | no port is opened                |
| spark.driver.host, .bindAddress         | 127.0.0.1, in local mode   | loopback only; no name lookup    |
| spark.driver.memory                     | DRIVER_MEMORY              | fits laptops                     |
| spark.sql.shuffle.partitions            | 2 x cores                  | Spark's 200 are for clusters     |
| spark.sql.execution.arrow.*             | on, ARROW_BATCH_ROWS       | rows cross to Python in batches  |
| spark.sql.python.filterPushdown.enabled | true                       | the data sources apply filters   |
| spark.python.worker.reuse               | true                       | a worker takes a second to start |
| spark.python.sql.dataFrameDebugging     | false                      | true: Spark finds the call site  |
| .enabled                                |                            | of each call of a column method  |
| spark.sql.dataFrameQueryContext.enabled | false                      | the same in the JVM              |
| spark.driver.extraJavaOptions           | JVM_OPTIONS, in local mode | Python does the work: the JVM    |
|                                         |                            | must start fast and stay small   |

`conf` overrides CONF_VARIABLE, a JSON object of texts, which overrides these settings.
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
"""Maximum heap of the driver's JVM."""
ARROW_BATCH_ROWS: Final = 16_384
"""Maximum number of rows of an Arrow batch."""
JVM_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
"""Options of the JVM in local mode."""
LOG_LEVEL: Final = "ERROR"
"""Level of Spark's own log. Audits print all that users need."""
CONF_VARIABLE: Final = "BINDERY_SPARK_CONF"
"""Environment variable with Spark's settings in a pod: master, address of the driver, sizes of executors."""
LOG4J: Final = Path(__file__).parent / "log4j2.properties"
"""Log settings that the JVM reads before Spark's code runs, so that its start prints nothing."""
JAVA_CLASSES: Final = (
    "functions",
    "PythonUtils",
    "PythonSQLUtils",
    "PythonRDD",
    "SimplePythonFunction",
    "org.apache.spark.sql.functions",
)
"""Names by which PySpark finds the Java classes that it uses most."""

AUDIT_CONF: Final[Mapping[str, str]] = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings of audits, which run many queries over small tables. Compiling each query to Java and planning it again at
each stage took nine tenths of the time of a small audit. There are few rows, because a row describes hundreds of
copies."""


def session(
    cores: int = 2, app_name: str = "bindery", conf: Mapping[str, str] | None = None, *, with_sources: bool = True
) -> "SparkSession":
    """Return the session of this process; create it if there is none. `cores`: maximum number of concurrent Python
    workers in local mode. `with_sources`: register the data sources, which takes one or two seconds.

    Finds a Java (`bindery_spark.java`) unless a JVM runs already, as under spark-submit. Raises NoJava.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from bindery_spark.sources import register

    # Spark's type stubs do not have the gateway. Under spark-submit the gateway runs already.
    if SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        prepare(os.environ)
    builder = SparkSession.builder.appName(app_name)
    chosen = {**conf_of(os.environ), **(conf or {})}
    all_settings = settings(cores, chosen, submitted="PYSPARK_GATEWAY_PORT" in os.environ)
    for name, value in all_settings.items():
        builder = builder.config(name, value)
    with _interrupts_delayed():
        SparkContext._ensure_initialized(conf=SparkConf().setAppName(app_name).setAll(list(all_settings.items())))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(LOG_LEVEL)
    _keep_java_classes(spark)
    if with_sources:
        register(spark)
    return spark


def _keep_java_classes(spark: "SparkSession") -> None:
    """Look up the Java classes of JAVA_CLASSES once. PySpark does so at each use, and for a short name the JVM searches
    all of Spark's jars each time: a tenth of the processor time of a small audit."""
    jvm = spark.sparkContext._jvm
    for name in JAVA_CLASSES:
        setattr(jvm, name, getattr(jvm, name))


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. If Python exits before the JVM is connected to it, the JVM never exits."""
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
    """Let executors that are separate processes keep intermediate results below `directory`, so that a run survives the
    loss of an executor. Does nothing in local mode: there is one process, and memory is faster."""
    if not re.fullmatch(r"local(\[.*\])?", spark.sparkContext.master or ""):
        directory.mkdir(parents=True, exist_ok=True)
        spark.sparkContext.setCheckpointDir(directory.as_uri())


def stop() -> None:
    """Stop Spark if it runs in this process, and with it the executors. Spark's exit hook cannot do that in a
    container, where all processes are killed when the first one exits."""
    spark = sys.modules.get("pyspark")
    context = spark.SparkContext._active_spark_context if spark else None
    if context is not None:
        context.stop()


def conf_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in CONF_VARIABLE. Raise BadRequest if it is not a JSON object of texts."""
    text = environment.get(CONF_VARIABLE) or "{}"
    try:
        conf = json.loads(text)
    except ValueError:
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        raise BadRequest(f"{CONF_VARIABLE} must be a JSON object whose values are texts", given=text[:200])
    return conf


def prepare(environment: dict[str, str] | os._Environ[str]) -> None:
    """Set the variables with which the JVM and Python workers start. An existing PYSPARK_PYTHON is kept."""
    environment["JAVA_HOME"] = str(java_home(environment))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Spark's scripts prefer SPARK_HOME, which may name another installation of Spark.
    environment.pop("SPARK_HOME", None)


def settings(cores: int, conf: Mapping[str, str], *, submitted: bool = False) -> dict[str, str]:
    """Return Spark's settings; `conf` overrides them. `submitted`: omit master and memory, which spark-submit sets."""
    assert cores >= 1
    ours = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.worker.reuse": "true",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.dataFrameQueryContext.enabled": "false",
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
