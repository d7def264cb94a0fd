"""The data sources on a real cluster: intact, with a stopped bookie, with a damaged entry on disk, and with filters."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bindery.standalone.control import ask
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.last_audits import LastAudit, LastAudits
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_spark.audit.cluster_facts import write_last
from bindery_spark.sources.ledgers import LedgersReader
from bindery_spark.sources.options import LedgersOptions
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, LessThanOrEqual

MARKER = b"here is the entry that shall be damaged "
DENSE, STRIPED, OPEN = 400, 90, 30

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


class Data:
    """Ids of the written ledgers, by kind."""

    def __init__(self) -> None:
        self.dense = self.striped = self.open = self.gone = LedgerId(-1)
        self.topic_ids: list[str] = []


async def write(cluster: ThrowawayCluster) -> Data:
    data = Data()
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    for name, sizes, count in (("dense", (3, 3, 2), DENSE), ("striped", (4, 2, 2), STRIPED), ("gone", (3, 3, 2), 5)):
        handle = await client.create(
            ensemble_size=sizes[0], write_quorum=sizes[1], ack_quorum=sizes[2], custom={"kind": name.encode()}
        )
        await handle.add_many([b"%s %d" % (MARKER, n) + b"." * 500 for n in range(count)])
        await handle.close()
        setattr(data, name, handle.ledger_id)
    handle = await client.create()
    await handle.add_many([b"open"] * OPEN)
    await handle.add(b"the last one, whose confirmation no other entry carries")
    data.open = handle.ledger_id
    await handle.abandon()
    await client.delete(data.gone)
    await UnderreplicationManager(
        store, LedgersLayout(), randomness=random.SystemRandom(), clock_ms=lambda: 1_700_000_000_000
    ).mark(data.dense, ["bookie-9"])
    await VerifiedRecords(store).put_all([Verified(data.dense, "deep", 5, "r1", 0)])
    await client.close()
    await store.close()
    topic = f"{cluster.url}/v1/topics/public/default/t%20one"
    async with httpx.AsyncClient() as http:
        await http.post(f"{topic}/subscriptions/s1/receive", json={"consumer": "c", "wait_ms": 0})
        answer = await http.post(f"{topic}/messages", content=b"hello", headers={"content-type": "text/plain"})
        data.topic_ids = answer.raise_for_status().json()["message_ids"]
    return data


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=4, auditors=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def data(cluster: ThrowawayCluster) -> Data:
    return asyncio.run(write(cluster))


def table(spark: SparkSession, cluster: ThrowawayCluster, name: str) -> DataFrame:
    return spark.read.format("bindery-metadata").option("zookeeper", cluster.zookeeper).option("table", name).load()


def replicas(spark: SparkSession, cluster: ThrowawayCluster, **options: Any) -> DataFrame:
    reader = spark.read.format("bindery-ledgers").option("zookeeper", cluster.zookeeper).option("timeout_s", 2)
    return reader.options(**options).load()


def counts(frame: DataFrame) -> dict[tuple[Any, ...], int]:
    """Number of rows by (ledger, expected, present, digest_ok, first word of the error)."""
    word = F.split_part("error", F.lit(":"), F.lit(1)).alias("error")
    grouped = frame.groupBy("ledger_id", "expected", "present", "digest_ok", word).count()
    return {tuple(row)[:-1]: row["count"] for row in grouped.collect()}


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_tables_of_metadata_contain_ledgers_bookies_marks_and_verified_records(
    spark: SparkSession, cluster: ThrowawayCluster, data: Data
) -> None:
    ledgers = {row.ledger_id: row for row in table(spark, cluster, "ledgers").collect()}
    dense = ledgers[data.dense]
    assert (dense.state, dense.last_entry_id, dense.write_quorum, dense.digest_type) == (
        "closed",
        DENSE - 1,
        3,
        "crc32c",
    )
    assert dense.custom["kind"] == b"dense"
    assert [(s.first_entry, s.last_entry, len(s.ensemble)) for s in dense.segments] == [(0, DENSE - 1, 3)]
    assert (ledgers[data.open].state, ledgers[data.open].length) == ("open", None)
    assert data.gone not in ledgers

    bookies = table(spark, cluster, "bookies").collect()
    assert [(b.bookie, b.registration, b.intent, b.cookie) for b in bookies] == [
        (f"bookie-{n}", "writable", "active", True) for n in range(4)
    ]
    assert all(0 < b.free_bytes <= b.total_bytes for b in bookies)

    (mark,) = table(spark, cluster, "marks").collect()
    assert (mark.ledger_id, mark.bookies, mark.locked, mark.attempts) == (data.dense, ["bookie-9"], False, 0)
    (verified,) = table(spark, cluster, "verified").collect()
    assert tuple(verified) == (data.dense, "deep", 5, "r1")


def test_the_result_of_an_audit_is_recorded_for_services(cluster: ThrowawayCluster) -> None:
    audit = LastAudit(
        level="deep",
        run_id="r1",
        verdict="HEALTHY",
        exit_code=0,
        began_ms=1,
        ended_ms=2,
        copies_expected=3,
        copies_verified=3,
        bytes_read=4,
        oldest_verified_ms=1,
    )
    write_last(cluster.zookeeper, audit)

    async def read() -> list[LastAudit]:
        store = await ZooKeeperStore.connect(cluster.zookeeper)
        try:
            return await LastAudits(store).all()
        finally:
            await store.close()

    assert asyncio.run(read()) == [audit]


def test_topics_and_cursors_name_their_ledgers(spark: SparkSession, cluster: ThrowawayCluster, data: Data) -> None:
    (topic,) = table(spark, cluster, "topics").collect()
    (cursor,) = table(spark, cluster, "cursors").collect()
    ledger_id = int(data.topic_ids[0].split(":")[0])
    assert topic.topic == "public/default/t one"
    assert [each.ledger_id for each in topic.ledgers] == [ledger_id]
    assert (cursor.topic, cursor.subscription, cursor.problem) == (topic.topic, "s1", None)
    # The subscription is older than the topic's first ledger, which the first message creates.
    assert (cursor.mark_delete_ledger, cursor.mark_delete_entry) in ((0, -1), (ledger_id, -1))


def test_ledgers_are_filtered_at_the_source(spark: SparkSession, cluster: ThrowawayCluster, data: Data) -> None:
    ledgers = table(spark, cluster, "ledgers")
    closed = ledgers.where("state = 'closed' and ledger_id <= 1")
    assert [row.ledger_id for row in closed.collect()] == [data.dense, data.striped]
    assert "Filter (" not in executed_plan(closed), "nothing is left for Spark to filter"
    assert ledgers.where("ledger_id > 5 and ledger_id < 5").count() == 0


def executed_plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_every_copy_of_a_healthy_cluster_is_good(spark: SparkSession, cluster: ThrowawayCluster, data: Data) -> None:
    found = replicas(spark, cluster).where(F.col("ledger_id").isin(data.dense, data.striped, data.open)).cache()
    assert counts(found) == {
        (data.dense, True, True, True, None): 3 * DENSE,
        (data.striped, True, True, True, None): 2 * STRIPED,
        # No later entry confirms the last one.
        (data.open, True, True, True, None): 3 * OPEN,
        (data.open, False, True, True, None): 3,
    }
    copies = found.groupBy("ledger_id", "entry_id").agg(
        F.countDistinct("payload_crc32c", "payload_length", "ledger_length").alias("kinds")
    )
    assert copies.where("kinds != 1").count() == 0
    assert found.where("ledger_id = 0 and entry_id = 3").select("payload_length").first()[0] == len(MARKER) + 2 + 500
    found.unpersist()


def test_ends_and_filters_limit_the_rows(spark: SparkSession, cluster: ThrowawayCluster, data: Data) -> None:
    ends = replicas(spark, cluster, entries="ends").where(f"ledger_id = {data.dense}")
    assert counts(ends) == {(data.dense, True, True, True, None): 6}
    one = replicas(spark, cluster).where(f"ledger_id = {data.striped} and bookie = 'bookie-2'")
    (row,) = one.groupBy("bookie").count().collect()
    assert row.bookie == "bookie-2"
    assert abs(row["count"] - STRIPED // 2) <= 1


def test_filters_reduce_the_number_of_tasks(cluster: ThrowawayCluster, data: Data) -> None:
    options = LedgersOptions(zookeeper=cluster.zookeeper, partition_entries=100)
    everything = LedgersReader(options)
    narrow = LedgersReader(options)
    assert list(narrow.pushFilters([EqualTo(("bookie",), "bookie-1"), LessThanOrEqual(("ledger_id",), 1)])) == []
    all_tasks, tasks = ([part.task for part in reader.partitions()] for reader in (everything, narrow))
    assert {task.bookie_id for task in all_tasks} == {f"bookie-{n}" for n in range(4)}
    assert {task.bookie_id for task in tasks} == {"bookie-1"}
    assert max(task.ledger_range[1] for task in tasks) <= 1
    assert 0 < len(tasks) < len(all_tasks)


def test_orphaned_data_is_found(spark: SparkSession, cluster: ThrowawayCluster, data: Data) -> None:
    found = replicas(spark, cluster, include_unexpected="true").where(f"ledger_id = {data.gone}")
    assert counts(found) in (
        {(data.gone, False, True, None, None): 15},
        {},
    )  # {}: garbage collection has deleted the data
    assert replicas(spark, cluster, include_unexpected="true").where("not expected and ledger_id = 0").count() == 0


# --- faults; they change the cluster, so these tests are last ---------------------------------------------------------


def control(cluster: ThrowawayCluster, verb: str, name: str) -> None:
    answer = ask(cluster.directory.control_socket, {"verb": verb, "name": name}, timeout_s=60.0)
    assert answer["ok"], answer


def test_entries_of_a_stopped_bookie_are_unknown_and_a_damaged_entry_is_reported(
    spark: SparkSession, cluster: ThrowawayCluster, data: Data
) -> None:
    victim = table(spark, cluster, "ledgers").where(f"ledger_id = {data.dense}").first().segments[0].ensemble[1]
    control(cluster, "stop", victim)
    found = counts(replicas(spark, cluster).where(f"ledger_id = {data.dense}"))
    assert found == {
        (data.dense, True, True, True, None): 2 * DENSE,
        (data.dense, True, None, None, "unreachable"): DENSE,
    }
    assert dict(table(spark, cluster, "bookies").select("bookie", "registration").collect())[victim] == "absent"
    damage(cluster, victim, b"%s %d" % (MARKER, 77))
    control(cluster, "start", victim)
    found = counts(replicas(spark, cluster).where(f"ledger_id = {data.dense}"))
    (bad,) = found.keys() - {(data.dense, True, True, True, None)}
    assert found == {(data.dense, True, True, True, None): 3 * DENSE - 1, bad: 1}
    assert bad in {(data.dense, True, True, False, None), (data.dense, True, None, None, "io_error")}


def damage(cluster: ThrowawayCluster, bookie: str, text: bytes) -> None:
    """Flip a bit of the payload in each entry log that contains it."""
    hits = 0
    for path in cluster.directory.root.rglob("*.log"):
        if bookie not in path.parts or "current" not in path.parts:
            continue
        content = path.read_bytes()
        if text in content:
            at = content.index(text)
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))
            hits += 1
    assert hits
