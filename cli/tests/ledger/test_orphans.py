"""`bindery ledgers orphans` on the metadata that brokers write, in memory."""

import json
from typing import Any

import pytest
from bindery.ledger import orphans
from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_core.errors import BadRequest, Corrupt
from bindery_core.ids import LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, MetadataRollbackSuspected, RollbackReport
from bindery_metadata.stores.memory import MemoryStore
from bindery_pulsar.managed_ledger_codec import (
    CursorInfo,
    CursorState,
    TopicInfo,
    encode_cursor,
    encode_topic,
)
from bindery_pulsar.message_id import Position
from memory_cluster import LAYOUT, MemoryCluster

TOPIC = "/managed-ledgers/public/default/persistent/t"
MANAGED = {
    "application": b"pulsar",
    "component": b"managed-ledger",
    "pulsar/managed-ledger": b"public/default/persistent/t",
}
HOUR_MS = 3_600_000


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """Ledgers 0 (the topic's), 1 (its cursor's), 2 (orphan), 3 (of another application), 4 (young)."""
    cluster = MemoryCluster(monkeypatch)
    for _ in range(3):
        cluster.ledger("b0", "b1", **MANAGED)
    cluster.ledger("b0", application=b"other")
    cluster.now_ms += 2 * HOUR_MS
    cluster.ledger("b0", **MANAGED)
    state = CursorState(mark_delete=Position(0, 3))

    async def work(store: MemoryStore) -> None:
        topic = encode_topic(TopicInfo(ledgers=(LedgerRecord(ledger_id=0, entries=9, size=9, closed_ms=1),)))
        await store.create(TOPIC, topic, make_parents=True)
        await store.create(f"{TOPIC}/s", encode_cursor(CursorInfo(ledger_id=1, state=state)))

    cluster.do(work)
    return cluster


def found(cluster: MemoryCluster, *arguments: str) -> tuple[list[int], dict[str, Any]]:
    lines = [
        json.loads(line) for line in cluster.invoke("ledgers", "orphans", "--json", *arguments).stdout.splitlines()
    ]
    return [line["ledger_id"] for line in lines[:-1]], lines[-1]


def test_orphans_are_listed_and_deletion_needs_two_options(cluster: MemoryCluster) -> None:
    ids, summary = found(cluster)
    assert ids == [2]
    assert summary["fates"] == {
        "referenced": 2,
        "young": 1,
        "uncertain": 0,
        "unreadable": 0,
        "foreign": 1,
        "orphan": 1,
    }
    result = cluster.invoke("ledgers", "orphans")
    assert result.exit_code == 0
    assert "1 of 5 ledgers are orphans, 2.0 MiB in all copies" in result.stdout
    assert "1 younger than --older-than, 1 of other applications" in result.stderr
    result = cluster.invoke("ledgers", "orphans", "--delete")
    assert result.exit_code == 1
    assert "no ledger was deleted; pass --delete --yes to delete them" in result.stderr
    assert cluster.deleted == []
    result = cluster.invoke("ledgers", "orphans", "--delete", "--yes")
    assert result.exit_code == 0
    assert "deleted 1; the bookies free the space" in result.stdout
    assert cluster.deleted == [LedgerId(2)]
    assert found(cluster) == (
        [],
        {**summary, "ledgers": 4, "orphans": 0, "bytes": 0, "fates": {**summary["fates"], "orphan": 0}},
    )


def test_options_select_the_age_and_other_applications(cluster: MemoryCluster) -> None:
    assert found(cluster, "--older-than", "3h")[0] == []
    assert found(cluster, "--all")[0] == [2, 3]
    assert "not listed: 1 younger than --older-than\n" in cluster.invoke("ledgers", "orphans", "--all").stderr
    cluster.now_ms += 2 * HOUR_MS
    assert found(cluster)[0] == [2, 4]


def test_without_any_topic_nothing_is_deleted(cluster: MemoryCluster) -> None:
    async def work(store: MemoryStore) -> None:
        await store.delete(f"{TOPIC}/s", version=None)
        await store.delete(TOPIC, version=None)

    cluster.do(work)
    assert found(cluster)[0] == [0, 1, 2]
    result = cluster.invoke("ledgers", "orphans", "--delete", "--yes")
    assert isinstance(result.exception, BadRequest)
    assert "this ZooKeeper has no topics" in str(result.exception)
    assert cluster.deleted == []


def test_a_ledger_that_a_topic_names_since_the_survey_is_not_deleted(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references of a topic are read again immediately before the deletion."""
    read_references = orphans.read_references

    async def then_name_it(store: Any, codec: Any) -> Any:
        found = await read_references(store, codec)
        records = tuple(LedgerRecord(ledger_id=number, entries=9, size=9, closed_ms=1) for number in (0, 2))
        await store.set(TOPIC, encode_topic(TopicInfo(ledgers=records)), version=None)
        return found

    monkeypatch.setattr(orphans, "read_references", then_name_it)
    result = cluster.invoke("ledgers", "orphans", "--delete", "--yes")
    assert "deleted 0;" in result.stdout
    assert cluster.deleted == []


@pytest.mark.parametrize(
    "state",
    [CursorState(mark_delete=Position(0, 3), properties={"compacted": 2}), CursorState(mark_delete=Position(2, -1))],
    ids=["property", "position"],
)
def test_a_ledger_that_only_a_cursor_names_is_in_use(cluster: MemoryCluster, state: CursorState) -> None:
    cursor = encode_cursor(CursorInfo(ledger_id=1, state=state))
    cluster.do(lambda store: store.set(f"{TOPIC}/s", cursor, version=None))
    assert found(cluster)[0] == []
    cluster.invoke("ledgers", "orphans", "--delete", "--yes")
    assert cluster.deleted == []


def test_a_topic_that_cannot_be_read_protects_all_ledgers(cluster: MemoryCluster) -> None:
    cluster.do(lambda store: store.set(TOPIC, b"\xff\xff", version=None))
    result = cluster.invoke("ledgers", "orphans", "--delete", "--yes")
    assert isinstance(result.exception, Corrupt)
    assert cluster.deleted == []


def test_nothing_is_deleted_while_a_rollback_of_the_metadata_is_suspected(cluster: MemoryCluster) -> None:
    """A rolled-back ZooKeeper may lack the topic that refers to the ledger."""

    async def suspect(store: MemoryStore) -> None:
        instance_id = await CookieStore(store, LAYOUT).instance_id()
        report = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)
        await KnownLedgersStore(store, instance_id=instance_id).update(lambda one: one.with_report("b0", report))

    cluster.do(suspect)
    assert found(cluster)[0] == [2], "listing is allowed"
    error = cluster.invoke("ledgers", "orphans", "--delete", "--yes").exception
    assert isinstance(error, MetadataRollbackSuspected)
    assert "no ledgers are deleted" in str(error)
    assert cluster.deleted == []
