"""`bindery cluster backups` in memory: names, retention, records, restore."""

import gzip
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from bindery.cluster import backups
from bindery.cluster.backup_upload import NotUploaded, Store
from bindery.cluster.backups import NoBackup
from bindery_core.errors import BadRequest, Corrupt
from bindery_metadata.recovery.last_backup import LastBackup, LastBackupStore
from memory_cluster import NOW_MS, MemoryCluster

HOUR_MS = 3_600_000


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    cluster = MemoryCluster(monkeypatch)
    monkeypatch.setattr(backups, "connected_store", cluster._connected_store)
    monkeypatch.setattr(backups, "now_ms", lambda: cluster.now_ms)
    for _ in range(3):
        cluster.ledger("b0", "b1")
    return cluster


def record(cluster: MemoryCluster) -> LastBackup:
    found = cluster.do(lambda store: LastBackupStore(store).get())
    assert found is not None
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_backup_is_named_by_time_and_cluster_and_compressed_and_recorded(
    cluster: MemoryCluster, tmp_path: Path
) -> None:
    facts = json.loads(cluster.invoke("cluster", "backups", "create", str(tmp_path), "--json").stdout)
    instance_id = cluster.do(lambda store: store.get("/ledgers/INSTANCEID")).data.decode()
    time = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    name = f"metadata-{time:%Y%m%dT%H%M%SZ}-{instance_id[:8]}.jsonl.gz"
    assert names(tmp_path) == [name]
    path = tmp_path / name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])["instance_id"] == instance_id
    assert (facts["file"], facts["ledgers"], facts["sent_to"], facts["deleted"]) == (str(path), 3, None, [])
    assert record(cluster) == LastBackup(
        ended_ms=NOW_MS, name=name, size=path.stat().st_size, nodes=facts["nodes"], ledgers=3, settled=True
    )
    status = json.loads(cluster.invoke("recovery", "status", "--json").stdout)["backup"]
    assert (status["name"], status["has_failed"]) == (name, False)
    assert (
        f"last backup of the metadata: 0 s ago, {facts['nodes']} nodes" in cluster.invoke("recovery", "status").stdout
    )


def test_only_the_newest_backups_of_this_cluster_and_all_of_others_are_kept(
    cluster: MemoryCluster, tmp_path: Path
) -> None:
    others = ["metadata-20200101T000000Z-01234567.jsonl.gz", "notes.txt", "metadata-20209901T000000Z-01234567.jsonl.gz"]
    for name in others:
        (tmp_path / name).write_text("of another cluster")
    made = []
    for _ in range(4):
        cluster.now_ms += HOUR_MS
        facts = json.loads(
            cluster.invoke("cluster", "backups", "create", str(tmp_path), "--keep", "2", "--json").stdout
        )
        made.append(Path(facts["file"]).name)
    assert names(tmp_path) == sorted([*others, *made[-2:]])
    assert facts["deleted"] == [made[1]]
    listed = cluster.invoke("cluster", "backups", "list", str(tmp_path), "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in listed] == [made[3], made[2], others[0]]


def test_a_failure_is_recorded_with_its_reason_and_deletes_nothing(
    cluster: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.invoke("cluster", "backups", "create", str(tmp_path), "--keep", "1")
    before = names(tmp_path)
    cluster.now_ms += HOUR_MS
    with monkeypatch.context() as damaged:
        damaged.setattr(backups, "verify_backup", lambda _: (_ for _ in ()).throw(Corrupt("cut off")))
        assert isinstance(
            cluster.invoke("cluster", "backups", "create", str(tmp_path), "--keep", "1").exception, Corrupt
        )
    assert set(names(tmp_path)) - {backups.UNFINISHED} == set(before)
    assert (record(cluster).has_failed, record(cluster).name, record(cluster).failure) == (True, before[0], "cut off")
    assert "the last backup of the metadata FAILED 0 s ago: cut off" in cluster.invoke("recovery", "status").stdout
    cluster.now_ms += HOUR_MS
    nowhere = cluster.invoke("cluster", "backups", "create", str(tmp_path / "missing")).exception
    assert isinstance(nowhere, BadRequest)
    assert "cannot write" in record(cluster).failure
    cluster.now_ms += HOUR_MS
    assert cluster.invoke("cluster", "backups", "create", str(tmp_path), "--keep", "1").exit_code == 0
    assert not record(cluster).has_failed
    assert len(names(tmp_path)) == 1, "the unfinished file was replaced"


def test_a_failed_upload_keeps_the_file_and_fails_the_command(
    cluster: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Store, path: Path) -> str:
        raise NotUploaded(f"403 for {path.name}")

    monkeypatch.setattr(Store, "put", refuse)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "url").write_text("https://store.example/backups/\n")
    folder = tmp_path / "backups"
    folder.mkdir()
    result = cluster.invoke("cluster", "backups", "create", str(folder), "--upload", str(tmp_path / "store"))
    assert isinstance(result.exception, NotUploaded)
    assert len(names(folder)) == 1
    assert record(cluster).failure.startswith("403 for metadata-")
    monkeypatch.setattr(Store, "put", lambda *_: "https://store.example/backups/x")
    result = cluster.invoke("cluster", "backups", "create", str(folder), "--upload", str(tmp_path / "store"))
    assert "sent to https://store.example/backups/x" in result.stdout
    assert record(cluster).is_uploaded


def test_the_newest_backup_is_restored_and_a_choice_between_clusters_is_refused(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert isinstance(cluster.invoke("cluster", "backups", "restore", str(tmp_path)).exception, NoBackup)
    cluster.invoke("cluster", "backups", "create", str(tmp_path))
    cluster.ledger("b0")
    cluster.now_ms += HOUR_MS
    cluster.invoke("cluster", "backups", "create", str(tmp_path))
    older, newer = names(tmp_path)
    other = MemoryCluster(monkeypatch)
    for path in ("LAYOUT", "INSTANCEID", "available/readonly", "available", ""):
        other.do(lambda store, path=path: store.delete(f"/ledgers/{path}".rstrip("/"), version=None))
    planned = json.loads(other.invoke("cluster", "backups", "restore", str(tmp_path), "--dry-run", "--json").stdout)
    assert (planned["file"], planned["dry_run"]) == (str(tmp_path / newer), True)
    (tmp_path / "metadata-20990101T000000Z-01234567.jsonl.gz").write_bytes(b"")
    refused = other.invoke("cluster", "backups", "restore", str(tmp_path)).exception
    assert isinstance(refused, NoBackup)
    assert newer in str(refused)
    assert isinstance(other.invoke("cluster", "backups", "restore", str(tmp_path), "--name", "x").exception, NoBackup)
    done = other.invoke("cluster", "backups", "restore", str(tmp_path), "--name", older, "--json")
    assert json.loads(done.stdout)["next_ledger_id"] == 10_003


def test_a_damaged_compressed_file_is_named(cluster: MemoryCluster, tmp_path: Path) -> None:
    cluster.invoke("cluster", "backups", "create", str(tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for content in (whole[:-10], whole[: len(whole) // 2], whole[:60] + b"\0\0\0\0" + whole[64:]):
        path.write_bytes(content)
        failed = cluster.invoke("cluster", "backups", "restore", str(tmp_path), "--merge").exception
        assert isinstance(failed, Corrupt)
