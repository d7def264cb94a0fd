"""Topics on a real cluster: read completely and by time, exported, counted as a stream that is interrupted and resumed.

The topic `made` is written here, so that times and ledgers are known: three ledgers, the last one open, with an
unconfirmed entry at its end. A broker writes the topic `live`, with batches, keys, properties and partitions.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as parquet
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_core.errors import BadRequest
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import TopicInfo, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch
from bindery_spark.main import main
from bindery_spark.sources.topic.options import TopicOptions
from bindery_spark.sources.topic.source import TopicReader, TopicStreamReader
from bindery_spark.topics.count import read_counts, start_count
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import GreaterThanOrEqual
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

HOUR_MS = 3_600_000
BEGIN_MS = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
"""First publish time in the topic `made`. Ledger n has the messages of hour n, one entry per second."""
ENTRIES, PER_ENTRY, LEDGERS = 40, 3, 3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Data:
    zookeeper: str
    url: str
    ledgers: list[int]


def at(ledger: int, entry: int) -> str:
    """Publish time of that entry, as text."""
    return datetime.fromtimestamp(BEGIN_MS / 1_000 + ledger * 3_600 + entry, UTC).isoformat()


def batch(ledger: int, entry: int) -> bytes:
    messages = [
        OutgoingMessage(payload=b"%d %d %d" % (ledger, entry, n), key=f"k{entry % 4}", properties={"n": str(n)})
        for n in range(PER_ENTRY)
    ]
    time_ms = BEGIN_MS + ledger * HOUR_MS + entry * 1_000
    ids = [PER_ENTRY * entry + n for n in range(PER_ENTRY)]
    return encode_batch(messages, producer_name="p", publish_time_ms=time_ms, sequence_ids=ids)


async def make(cluster: ThrowawayCluster) -> Data:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    records = []
    for number in range(LEDGERS):
        handle = await client.create()
        is_last = number == LEDGERS - 1
        await handle.add_many([batch(number, entry) for entry in range(ENTRIES)])
        if is_last:
            await handle.add(batch(number, ENTRIES))  # no later entry confirms this one
            await handle.abandon()
        else:
            await handle.close()
        closed_ms = 0 if is_last else BEGIN_MS + (number + 1) * HOUR_MS
        records.append(LedgerRecord(ledger_id=handle.ledger_id, entries=ENTRIES, size=1, closed_ms=closed_ms))
    path = znode_layout.managed_ledger(tenant="public", namespace="default", topic="made")
    await store.create(path, encode_topic(TopicInfo(ledgers=tuple(records))), make_parents=True)
    partitioned = znode_layout.partitioned_topic(tenant="public", namespace="default", topic="parts")
    await store.create(partitioned, b'{"partitions":2}', make_parents=True)
    await client.close()
    await store.close()
    return Data(cluster.zookeeper, cluster.url, [record.ledger_id for record in records])


@pytest.fixture(scope="module")
def data() -> Iterator[Data]:
    with ThrowawayCluster(bookies=3, auditors=0) as cluster:
        yield asyncio.run(make(cluster))


def produce(data: Data, topic: str, keys: list[str]) -> list[str]:
    lines = [{"payload": f"to {key}", "key": key, "properties": {"of": key}} for key in keys]
    url = f"{data.url}/v1/topics/public/default/{topic}/messages"
    answer = httpx.post(url, json=lines, timeout=30.0)
    return [str(each) for each in answer.raise_for_status().json()["message_ids"]]


def table(spark: SparkSession, data: Data, topic: str, **options: Any) -> DataFrame:
    reader = spark.read.format("bindery-topic").option("zookeeper", data.zookeeper).option("topic", topic)
    return reader.options(**options).load()


# --- as a table -------------------------------------------------------------------------------------------------------


def test_every_confirmed_message_is_a_row(spark: SparkSession, data: Data) -> None:
    found = table(spark, data, "made", partition_entries=50).collect()
    assert len(found) == LEDGERS * ENTRIES * PER_ENTRY
    assert len({row.message_id for row in found}) == len(found)
    for row in found:
        ledger = data.ledgers.index(row.ledger_id)
        assert row.payload == b"%d %d %d" % (ledger, row.entry_id, row.batch_index)
        assert row.message_id == f"{row.ledger_id}:{row.entry_id}:-1:{row.batch_index}"
        assert (row.key, row.properties) == (f"k{row.entry_id % 4}", {"n": str(row.batch_index)})
        assert (row.producer, row.problem) == ("p", None)
        assert row.sequence_id == PER_ENTRY * row.entry_id + row.batch_index


def test_times_positions_and_ledgers_narrow_what_is_read(spark: SparkSession, data: Data) -> None:
    hour = {"start": at(1, 10), "end": at(1, 12)}
    assert [row.entry_id for row in table(spark, data, "made", **hour).collect()] == [10] * 3 + [11] * 3
    one = f"{data.ledgers[1]}:5"
    assert table(spark, data, "made", start=one, end=one).count() == PER_ENTRY
    assert table(spark, data, "made").where(f"ledger_id = {data.ledgers[0]}").count() == ENTRIES * PER_ENTRY
    late = F.to_timestamp(F.lit(at(2, 39)))
    rows = table(spark, data, "made").where(F.col("publish_time") >= late).collect()
    assert [(row.ledger_id, row.entry_id) for row in rows] == [(data.ledgers[2], 39)] * 3

    reader = TopicReader(TopicOptions.parse({"zookeeper": data.zookeeper, "topic": "made"}))
    moment = rows[0].publish_time.astimezone()
    assert len(list(reader.pushFilters([GreaterThanOrEqual(("publish_time",), moment)]))) == 1
    assert {each.ledger_id for part in reader.planned() for each in part.slices} == set(data.ledgers[1:])


def test_messages_of_brokers_and_of_partitions_are_rows(spark: SparkSession, data: Data) -> None:
    found = all_rows(spark, data, "live", produce(data, "live", ["a", "b", "a", "c"]))
    assert [row.payload.decode() for row in found] == ["to a", "to b", "to a", "to c"]
    assert [(row.key, row.properties["of"]) for row in found] == [(key, key) for key in "abac"]
    parts = produce(data, "parts-partition-1", ["x", "y"])
    assert {part.split(":")[2] for part in parts} == {"1"}
    assert [row.key for row in all_rows(spark, data, "parts", parts)] == ["x", "y"]


def all_rows(spark: SparkSession, data: Data, topic: str, ids: list[str]) -> list[Any]:
    """The rows of these messages, in their order. A broker confirms its last entry shortly after its response."""
    for _ in range(20):
        found = {row.message_id: row for row in table(spark, data, topic).collect()}
        if found.keys() == set(ids):
            break
    assert found.keys() == set(ids)
    return [found[each] for each in ids]


# --- exported ---------------------------------------------------------------------------------------------------------


def test_export_writes_parquet_and_replaces_only_with_overwrite(
    spark: SparkSession, data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    words = ["export", "--zookeeper", data.zookeeper, "--topic", "made", "--out", str(out)]
    assert main([*words, "--from", at(1, 0), "--to", at(2, 0)]) == 0
    rows = parquet.read_table(out).to_pylist()
    assert len(rows) == ENTRIES * PER_ENTRY
    assert {row["ledger_id"] for row in rows} == {data.ledgers[1]}
    assert dict(rows[0]["properties"]) == {"n": str(rows[0]["batch_index"])}
    assert "120 messages of public/default/made" in capsys.readouterr().out

    assert main(words) == 4
    assert "--overwrite replaces" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == LEDGERS * ENTRIES * PER_ENTRY
    assert parquet.read_table(out).num_rows == LEDGERS * ENTRIES * PER_ENTRY
    assert [path.name for path in tmp_path.iterdir()] == ["made"]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    assert main([*words[:-1], str(foreign), "--overwrite"]) == 4
    assert (foreign / "thesis.txt").exists()
    assert "not an export" in capsys.readouterr().err


# --- as a stream ------------------------------------------------------------------------------------------------------


def test_offsets_end_at_the_last_confirmed_entry(data: Data) -> None:
    reader = TopicStreamReader(TopicOptions.parse({"zookeeper": data.zookeeper, "topic": "made"}))
    start = reader.initialOffset()
    name = "public/default/made"
    assert start == {name: {"ledger": -1, "entry": -1}}
    begin = reader.latestOffset(start, ReadAllAvailable())
    assert begin == {name: {"ledger": data.ledgers[0], "entry": -1}}, "no entry is read before the beginning is stored"
    end = reader.latestOffset(begin, ReadAllAvailable())
    assert end == {name: {"ledger": data.ledgers[2], "entry": ENTRIES - 1}}
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert reader.latestOffset(begin, ReadMaxRows(7)) == {name: {"ledger": data.ledgers[0], "entry": 6}}
    assert reader.latestOffset(begin, ReadMaxRows(ENTRIES)) == {name: {"ledger": data.ledgers[1], "entry": -1}}


class Killed(Exception):
    pass


def run_count(
    spark: SparkSession, data: Data, topic: str, checkpoint: Path, *, kill_at: int = -1, start: str = "earliest"
) -> list[int]:
    """Run a count and return its micro-batches. `kill_at`: fail after this one wrote its counts, before its commit."""
    seen = []

    def on_batch(batch_id: int, _: Any) -> None:
        seen.append(batch_id)
        if batch_id == kill_at:
            raise Killed

    options = {"zookeeper": data.zookeeper, "topic": topic, "max_entries_per_trigger": "50", "start": start}
    query = start_count(spark, options, checkpoint, every_s=None, on_batch=on_batch)
    if kill_at < 0:
        query.awaitTermination()
    else:
        with pytest.raises(StreamingQueryException):
            query.awaitTermination()
    return seen


def counted(checkpoint: Path) -> dict[str, int]:
    return {row["key"]: row["messages"] for row in read_counts(checkpoint).to_pylist()}


def test_a_count_that_is_killed_is_resumed_and_counts_each_message_once(
    spark: SparkSession, data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "count"
    assert run_count(spark, data, "made", checkpoint, kill_at=2) == [0, 1, 2], "the first one is empty"
    assert sum(counted(checkpoint).values()) == 100 * PER_ENTRY
    assert run_count(spark, data, "made", checkpoint) == [2, 3], "the interrupted one is repeated"
    assert counted(checkpoint) == {f"k{n}": LEDGERS * ENTRIES // 4 * PER_ENTRY for n in range(4)}
    words = ["count", "--zookeeper", data.zookeeper, "--topic", "made", "--checkpoint", str(checkpoint), "--until-now"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == LEDGERS * ENTRIES * PER_ENTRY
    with pytest.raises(BadRequest, match="counts something else"):
        run_count(spark, data, "live", checkpoint)


def test_a_resumed_count_includes_messages_added_meanwhile(spark: SparkSession, data: Data, tmp_path: Path) -> None:
    keys = [random.Random(1).choice("uvw") for _ in range(30)]
    produce(data, "growing", keys)
    run_count(spark, data, "growing", tmp_path / "c")
    produce(data, "growing", keys)
    run_count(spark, data, "growing", tmp_path / "c")
    expected = {key: 2 * n for key, n in Counter(keys).items()}
    for _ in range(20):
        if counted(tmp_path / "c") == expected:
            break
        run_count(spark, data, "growing", tmp_path / "c")
    assert counted(tmp_path / "c") == expected


@pytest.mark.parametrize("kill_at", [0, 1])
def test_a_count_from_latest_that_is_killed_early_counts_all_later_messages(
    spark: SparkSession, data: Data, tmp_path: Path, kill_at: int
) -> None:
    """If the first micro-batch was interrupted, Spark requests the beginning again, which must be the same."""
    topic, checkpoint = f"latest-{kill_at}", tmp_path / "c"
    confirmed(spark, data, topic, produce(data, topic, ["before", "before"]))
    if kill_at == 0:
        run_count(spark, data, topic, checkpoint, start="latest", kill_at=0)
    else:
        run_count(spark, data, topic, checkpoint, start="latest")
        confirmed(spark, data, topic, produce(data, topic, ["a", "b"]))
        run_count(spark, data, topic, checkpoint, start="latest", kill_at=1)
    confirmed(spark, data, topic, produce(data, topic, ["a", "c"]))
    run_count(spark, data, topic, checkpoint, start="latest")
    assert counted(checkpoint) == ({"a": 1, "c": 1} if kill_at == 0 else {"a": 2, "b": 1, "c": 1})


def confirmed(spark: SparkSession, data: Data, topic: str, ids: list[str]) -> None:
    """Wait until these messages can be read."""
    for _ in range(20):
        if set(ids) <= {row.message_id for row in table(spark, data, topic).collect()}:
            return
    raise AssertionError(f"never confirmed: {ids}")
