"""Jobs on a cluster with TLS on all ports, tokens, and credentials of ZooKeeper: they work with them, fail without
them and say what to do, and nothing that Spark prints or stores contains a secret.

A stream and an audit run in Spark. The refusals are those of the same readers and writers, called without Spark: each
start of a task in Spark takes seconds.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bindery.standalone.secured import Secured
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_core.errors import BinderyError
from bindery_pulsar.topic_name import TopicName
from bindery_simulation.certificates import CA as OTHER_CA
from bindery_spark.main import main
from bindery_spark.sources.sink.client import Brokers
from bindery_spark.sources.sink.options import SinkOptions
from bindery_spark.sources.sink.writer import write_rows
from bindery_spark.sources.topic.options import TOPIC_FORMAT, TopicOptions
from bindery_spark.sources.topic.source import TopicReader
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ORDERS = TopicName.parse("orders")
PAYLOADS = ["one", "two", "three"]
TOO_SLOW = "failed to connect back"
"""What Spark says if a Python process does not start within its ten seconds, as on a machine that is very busy."""


class Access:
    """The files of a cluster, as options of the data source and as the environment of commands."""

    def __init__(self, cluster: ThrowawayCluster) -> None:
        secured = Secured(cluster.directory.root)
        self.environment = secured.variables(url=cluster.url, zookeeper=cluster.zookeeper, access=secured.access())
        named = self.environment
        self.read = {
            "zookeeper": named["BINDERY_ZOOKEEPER"],
            "zookeeper_ca_file": named["BINDERY_ZOOKEEPER_CA_FILE"],
            "zookeeper_credentials_file": named["BINDERY_ZOOKEEPER_CREDENTIALS_FILE"],
            "ca_file": named["BINDERY_CLIENT_CA_FILE"],
            "token_file": named["BINDERY_CLIENT_TOKEN_FILE"],
        }
        self.write = {
            "url": named["BINDERY_URL"],
            "ca_file": named["BINDERY_HTTP_CA_FILE"],
            "token_file": named["BINDERY_TOKEN_FILE"],
            "retry_s": "20",
        }

    def secrets(self) -> list[str]:
        """Return what nothing may show: the token, and the password of ZooKeeper."""
        token = Path(self.read["token_file"]).read_text().strip()
        password = Path(self.read["zookeeper_credentials_file"]).read_text().strip().partition(":")[2]
        assert min(len(token), len(password)) > 10
        return [token, password]


@pytest.fixture(scope="module")
def access() -> Iterator[Access]:
    with ThrowawayCluster(bookies=3, auditors=0, options=("--secure",)) as cluster:
        access = Access(cluster)
        brokers = Brokers(
            [access.write["url"]],
            timeout_s=30,
            retry_s=60,
            now=time.monotonic,
            sleep=time.sleep,
            randomness=random.Random(1),
            ca_file=access.write["ca_file"],
            token_file=access.write["token_file"],
        )
        lines = [json.dumps({"payload": text, "sequence_id": n}).encode() for n, text in enumerate(PAYLOADS)]
        brokers.send(ORDERS, "made", lines, range(len(lines)))
        brokers.close()
        yield access


@pytest.fixture
def wrong_token(tmp_path: Path) -> str:
    path = tmp_path / "wrong"
    path.write_text("a-token-that-nobody-has-signed\n")
    return str(path)


def read(options: dict[str, str], topic: str = "orders") -> list[str]:
    reader = TopicReader(TopicOptions.parse({**options, "topic": topic}))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [row["payload"].decode() for batch in batches for row in batch.to_pylist()]


def write(options: dict[str, str]) -> int:
    rows = pa.RecordBatch.from_pydict({"value": ["a"]})
    parsed = SinkOptions.parse({**options, "topic": "refused"})
    return write_rows(iter([rows]), parsed, sink_id="me", batch=0, partition=0).stored


def run_stream(spark: SparkSession, source: dict[str, str], sink: dict[str, str], checkpoint: Path) -> StreamingQuery:
    """Run a stream over the present messages, and return its query. Raises PySparkException. A start that Spark gives
    up, because a Python process was too slow, is repeated."""
    while True:
        messages = spark.readStream.format(TOPIC_FORMAT).options(**source, topic="orders").load()
        writer = messages.select("payload", "key").writeStream.format(TOPIC_FORMAT).options(**sink)
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = writer.start()
        try:
            query.awaitTermination()
        except PySparkException as error:
            if TOO_SLOW not in str(error):
                raise
        else:
            return query


def without(options: dict[str, str], name: str, value: str | None = None) -> dict[str, str]:
    """Return the options with another value, or without the option."""
    return {each: text for each, text in {**options, name: value}.items() if text is not None}


@pytest.mark.long_run
def test_a_stream_runs_from_topic_to_topic_and_shows_no_secret(
    spark: SparkSession, access: Access, tmp_path: Path
) -> None:
    query = run_stream(spark, access.read, {**access.write, "topic": "copies"}, tmp_path / "checkpoint")
    shown = [
        query._jsq.explainInternal(True),
        str(query.recentProgress),
        str(spark.sparkContext.getConf().getAll()),
        *(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()),
    ]
    assert "bindery-topic" in shown[0]
    assert [secret for secret in access.secrets() for text in shown if secret in text] == []
    assert read(access.read, "copies") == PAYLOADS


def test_the_plan_of_a_stream_masks_the_files_of_secrets(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"token_file": "/of/the/token", "zookeeper_credentials_file": "/of/zookeeper", "ca_file": "/of/the/ca"}
    messages = spark.readStream.format(TOPIC_FORMAT).options(**files, zookeeper="h:1", topic="t").load()
    messages.explain(extended=True)
    plan = capsys.readouterr().out
    masked = {name: f"{name}=*********(redacted)" in plan for name in files}
    assert masked == {"token_file": True, "zookeeper_credentials_file": True, "ca_file": False}
    assert "ca_file=/of/the/ca" in plan


def test_a_stream_with_a_wrong_token_fails_and_says_what_to_do(
    spark: SparkSession, access: Access, tmp_path: Path, wrong_token: str
) -> None:
    options = without(access.read, "token_file", wrong_token)
    with pytest.raises(PySparkException, match="bookie rejects the credentials") as error:
        run_stream(spark, options, {**access.write, "topic": "refused"}, tmp_path / "checkpoint")
    assert "Put a token that the bookies accept into the file of option token_file" in str(error.value)
    assert Path(wrong_token).read_text().strip() not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "reasons"),
    [
        ("token_file", None, ("bookie refuses the operation", "option token_file or BINDERY_CLIENT_TOKEN_FILE")),
        (
            "token_file",
            "wrong",
            ("bookie rejects the credentials", "Put a token that the bookies accept into the file"),
        ),
        ("token_file", "/none", ("cannot read the token file", "token_file=/none")),
        ("ca_file", None, ("bookie rejects the credentials", "option ca_file or BINDERY_CLIENT_CA_FILE")),
        ("ca_file", str(OTHER_CA), ("certificate is not trusted", "option ca_file or BINDERY_CLIENT_CA_FILE")),
        ("zookeeper_credentials_file", None, ("access list", "BINDERY_ZOOKEEPER_CREDENTIALS_FILE")),
    ],
)
def test_a_source_that_is_refused_says_why_and_what_to_do(
    access: Access, wrong_token: str, name: str, value: str | None, reasons: tuple[str, ...]
) -> None:
    with pytest.raises(BinderyError) as error:
        read(without(access.read, name, wrong_token if value == "wrong" else value))
    assert [reason for reason in reasons if reason not in str(error.value)] == [], error.value


@pytest.mark.parametrize(
    ("name", "value", "reasons"),
    [
        ("token_file", None, ("401", "No token was sent: name its file in option token_file or BINDERY_TOKEN_FILE")),
        ("token_file", "wrong", ("401", "Put a token that the brokers accept into")),
        ("ca_file", None, ("CERTIFICATE_VERIFY_FAILED", "option ca_file or BINDERY_HTTP_CA_FILE")),
        ("ca_file", "/none", ("cannot use option ca_file or BINDERY_HTTP_CA_FILE",)),
        ("url", "http", ("https_required",)),
    ],
)
def test_a_sink_that_is_refused_says_why_and_what_to_do(
    access: Access, wrong_token: str, name: str, value: str | None, reasons: tuple[str, ...]
) -> None:
    values: dict[str | None, str] = {"wrong": wrong_token, "http": access.write["url"].replace("https:", "http:")}
    began = time.monotonic()
    with pytest.raises(BinderyError) as error:
        write(without(access.write, name, values.get(value, value)))  # type: ignore[arg-type]
    assert [reason for reason in reasons if reason not in str(error.value)] == [], error.value
    assert time.monotonic() - began < float(access.write["retry_s"]), "a refusal is not repeated"


@pytest.mark.parametrize(
    ("variable", "value", "reasons"),
    [
        ("CLIENT_TOKEN_FILE", None, ("no bookie accepts this job", "option token_file or BINDERY_CLIENT_TOKEN_FILE")),
        ("CLIENT_TOKEN_FILE", "wrong", ("bookie rejects the credentials", "Put a token that the bookies accept")),
        ("CLIENT_CA_FILE", None, ("bookie rejects the credentials", "option ca_file or BINDERY_CLIENT_CA_FILE")),
    ],
)
def test_an_audit_that_is_refused_ends_before_spark_starts_and_says_what_to_do(
    access: Access,
    wrong_token: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variable: str,
    value: str | None,
    reasons: tuple[str, ...],
) -> None:
    given = without(access.environment, f"BINDERY_{variable}", wrong_token if value == "wrong" else value)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("bindery_spark.session.session", lambda *_, **__: pytest.fail("Spark was started"))
    assert main(["run", "--out", str(tmp_path / "runs")]) == 4
    shown = capsys.readouterr().err
    assert [reason for reason in reasons if reason not in shown] == [], shown
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.long_run
def test_an_audit_reads_every_copy_and_lists_orphaned_data_by_https(
    spark: SparkSession,
    access: Access,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, text in access.environment.items():
        monkeypatch.setenv(name, text)
    settings = {"spark.sql.shuffle.partitions": spark.conf.get("spark.sql.shuffle.partitions")}
    monkeypatch.setenv("BINDERY_SPARK_CONF", json.dumps(settings))
    assert main(["run", "--out", str(tmp_path), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (facts["verdict"], {row["unlisted"] for row in facts["bookies"]}) == ("HEALTHY", {None})
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert [secret for secret in access.secrets() if secret.encode() in written] == []
