"""`bindery cluster backup|restore` to a file, in memory."""

import json
import stat
from pathlib import Path

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_core.errors import AlreadyExists, BadRequest, Corrupt
from bindery_metadata.stores.memory import MemoryStore
from bindery_pulsar.managed_ledger_codec import (
    TopicInfo,
    encode_topic,
)
from bindery_recovery.backup.backup import walk
from bindery_recovery.backup.restore import CannotRestore
from memory_cluster import MemoryCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """A topic in the metadata, and five ledgers."""
    cluster = MemoryCluster(monkeypatch)
    for _ in range(5):
        cluster.ledger("b0", "b1")
    topic = encode_topic(TopicInfo(ledgers=(LedgerRecord(ledger_id=0, entries=9, size=9, closed_ms=1),)))
    cluster.do(lambda store: store.create("/managed-ledgers/public/default/persistent/t", topic, make_parents=True))
    return cluster


async def tree(store: MemoryStore) -> dict[str, bytes]:
    return {path: node.data for name in await store.children("/") async for path, node in walk(store, f"/{name}")}


def test_a_backup_is_a_private_file_that_restores_the_cluster(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "metadata.jsonl"
    result = cluster.invoke("cluster", "backup", str(file))
    assert result.exit_code == 0
    assert f"{file}: " in result.stdout
    assert "5 of them ledgers" in result.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert isinstance(cluster.invoke("cluster", "backup", str(file)).exception, AlreadyExists)
    assert cluster.invoke("cluster", "backup", str(file), "--overwrite").exit_code == 0
    assert list(tmp_path.iterdir()) == [file]
    before = cluster.do(tree)
    assert isinstance(cluster.invoke("cluster", "restore", str(file)).exception, CannotRestore)

    other = MemoryCluster(monkeypatch)
    for path in ("LAYOUT", "INSTANCEID", "available/readonly", "available", ""):
        other.do(lambda store, path=path: store.delete(f"/ledgers/{path}".rstrip("/"), version=None))
    planned = json.loads(other.invoke("cluster", "restore", str(file), "--dry-run", "--json").stdout)
    assert other.do(tree) == {}
    result = other.invoke("cluster", "restore", str(file), "--id-margin", "7")
    assert result.exit_code == 0
    assert f"created {planned['created']} nodes" in result.stdout
    assert "the next ledger id is 12" in result.stdout
    after = other.do(tree)
    known = json.loads(after["/bindery/collection/known"])
    assert known["skipped"] == [[5, 12]], "the metadata never knew the ids that the margin skips"
    changed = ("/ledgers/idgen", "/bindery", "/bindery/collection", "/bindery/collection/known")
    assert {path: data for path, data in after.items() if path not in changed} == {
        path: data for path, data in before.items() if path not in changed
    }
    assert other.ledger("b0") == 12


def test_a_damaged_or_missing_file_is_named(cluster: MemoryCluster, tmp_path: Path) -> None:
    file = tmp_path / "metadata.jsonl"
    missing = cluster.invoke("cluster", "restore", str(file)).exception
    assert isinstance(missing, BadRequest)
    assert str(missing) == f"cannot read {file}: No such file or directory"
    cluster.invoke("cluster", "backup", str(file))
    file.write_bytes(file.read_bytes()[:-10])
    assert isinstance(cluster.invoke("cluster", "restore", str(file), "--merge").exception, Corrupt)
    nowhere = tmp_path / "no such folder" / "file"
    refused = cluster.invoke("cluster", "backup", str(nowhere)).exception
    assert isinstance(refused, BadRequest)
    assert str(refused) == f"cannot write {nowhere}: No such file or directory"


def test_a_backup_that_fails_leaves_the_old_file_alone(cluster: MemoryCluster, tmp_path: Path) -> None:
    file = tmp_path / "metadata.jsonl"
    cluster.invoke("cluster", "backup", str(file))
    before = file.read_bytes()
    cluster.do(lambda store: store.delete("/ledgers/INSTANCEID", version=None))
    assert cluster.invoke("cluster", "backup", str(file), "--overwrite").exit_code == 1
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
