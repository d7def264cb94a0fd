"""Settings of a session, the delay of interrupts, and shared directories, without a JVM."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_spark import session as module
from bindery_spark.session import settings, share, stop


def test_local_mode_has_the_settings_in_the_table() -> None:
    found = settings(3, {})
    assert found["spark.master"] == "local[3]"
    assert found["spark.sql.shuffle.partitions"] == "6"
    assert found["spark.sql.execution.arrow.maxRecordsPerBatch"] == "16384"
    assert found["spark.driver.host"] == found["spark.driver.bindAddress"] == "127.0.0.1"
    assert found["spark.driver.memory"] == "1g"
    assert "spark.driver.memory" not in settings(3, {}, submitted=True)
    assert settings(3, {"spark.driver.memory": "2g"})["spark.driver.memory"] == "2g"


class Context:
    """Replaces Spark's context."""

    def __init__(self, master: str | None) -> None:
        self.master = master
        self.directories: list[str] = []
        self.is_stopped = False

    def setCheckpointDir(self, directory: str) -> None:
        self.directories.append(directory)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize(
    ("master", "is_shared"),
    [
        ("local", False),
        ("local[*]", False),
        ("local[2]", False),
        ("k8s://x", True),
        ("local-cluster[1]", True),
        (None, True),
    ],
)
def test_only_executors_in_other_processes_share_a_directory(
    tmp_path: Path, master: str | None, is_shared: bool
) -> None:
    context, directory = Context(master), tmp_path / "a" / "b"
    for _ in range(2):
        share(SimpleNamespace(sparkContext=context), directory)  # type: ignore[arg-type]
    assert context.directories == ([directory.as_uri()] * 2 if is_shared else [])
    assert directory.is_dir() is is_shared


def test_stop_ends_the_context_of_this_process_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context("local")
    for pyspark in (None, SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=None))):
        monkeypatch.setitem(sys.modules, "pyspark", pyspark)
        stop()
    monkeypatch.setitem(
        sys.modules, "pyspark", SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=context))
    )
    stop()
    assert context.is_stopped


def test_an_interrupt_is_delayed_until_the_jvm_is_connected() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[str] = []

    def interrupted() -> None:
        with module._interrupts_delayed():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is before
    with module._interrupts_delayed():
        reached.append("again")
    assert reached == ["end", "again"]


def test_another_thread_handles_no_signals() -> None:
    reached: list[str] = []

    def work() -> None:
        with module._interrupts_delayed():
            reached.append("thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == ["thread"]


class Spark:
    """Replaces PySpark: records what a session is created with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pyspark
        import pyspark.sql

        self.configured: dict[str, str] = {}
        self.initialized: list[dict[str, str]] = []
        self.prepared: list[Any] = []
        self.registered: list[Any] = []
        self.looked_up: list[str] = []
        self.level = ""
        self.gateway: object | None = None
        world = self

        class FakeContext:
            @staticmethod
            def _ensure_initialized(*, conf: Any) -> None:
                world.initialized.append(dict(conf))

        class Conf(dict):  # type: ignore[type-arg]
            def setAppName(self, name: str) -> "Conf":
                return self

            def setAll(self, pairs: list[tuple[str, str]]) -> "Conf":
                self.update(pairs)
                return self

        self.context = FakeContext
        monkeypatch.setattr(pyspark, "SparkContext", FakeContext)
        monkeypatch.setattr(pyspark, "SparkConf", Conf)
        monkeypatch.setattr(pyspark.sql, "SparkSession", SimpleNamespace(builder=self))
        monkeypatch.setattr(module, "prepare", self.prepared.append)
        monkeypatch.setattr("bindery_spark.sources.register", self.registered.append)
        monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
        monkeypatch.delenv("BINDERY_SPARK_CONF", raising=False)

    def appName(self, name: str) -> "Spark":
        self.name = name
        return self

    def config(self, name: str, value: str) -> "Spark":
        self.configured[name] = value
        return self

    def getOrCreate(self) -> "Spark":
        return self

    @property
    def sparkContext(self) -> "Spark":
        return self

    @property
    def _jvm(self) -> "Spark":
        return self

    def setLogLevel(self, level: str) -> None:
        self.level = level

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        self.looked_up.append(name)
        return f"class {name}"


@pytest.mark.parametrize(("gateway", "port", "is_prepared"), [(None, "", True), ("a", "", False), (None, "1", False)])
def test_a_session_is_prepared_unless_a_jvm_runs(
    monkeypatch: pytest.MonkeyPatch, gateway: str | None, port: str, is_prepared: bool
) -> None:
    spark = Spark(monkeypatch)
    spark.context._gateway = gateway  # type: ignore[attr-defined]
    if port:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", port)
    monkeypatch.setenv("BINDERY_SPARK_CONF", '{"a": "1", "b": "1"}')
    assert module.session(conf={"b": "2"}) is spark
    assert spark.prepared == ([os.environ] if is_prepared else [])
    assert spark.configured == spark.initialized[0] == {**settings(2, {"a": "1", "b": "2"}, submitted=bool(port))}
    assert (spark.name, spark.level, spark.registered) == ("bindery", "ERROR", [spark])
    assert spark.__dict__["functions"] == "class functions", "looked up once"


def test_a_session_without_data_sources_registers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = Spark(monkeypatch)
    spark.context._gateway = "a"  # type: ignore[attr-defined]
    assert module.session(4, "mine", with_sources=False) is spark
    assert (spark.registered, spark.name) == ([], "mine")
    assert spark.configured["spark.master"] == "local[4]"
