"""`bindery recovery` on metadata in memory: its output for each state of a cluster, pause, resume and retry."""

import json
from dataclasses import replace
from typing import Any

import pytest
from bindery.recovery.recovery_status import status_lines
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.last_audits import LastAudit, LastAudits
from bindery_metadata.recovery.recovery_records import (
    HistoryEvent,
    Obstacle,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore
from bindery_recovery.records.drain_end import drain_finished
from memory_cluster import LAYOUT, MemoryCluster
from typer.testing import Result


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    cluster = MemoryCluster(monkeypatch)
    cluster.register("b0", "b1", "b2")
    return cluster


def status(cluster: MemoryCluster) -> dict[str, Any]:
    return dict(json.loads(cluster.invoke("recovery", "status", "--json").stdout))


def output_of(result: Result) -> str:
    """Return the output of a command, with its errors."""
    return result.output + str(result.exception or "")


def mark(cluster: MemoryCluster, ledger_id: LedgerId, *replicas: str, **record: Any) -> None:
    async def work(store: MemoryStore) -> None:
        manager = marks(store, cluster)
        await manager.prepare()
        await manager.mark(ledger_id, replicas)
        if record:
            await RecoveryRecords(store).put(RecoveryRecord(ledger_id, first_marked_ms=cluster.now_ms, **record))

    cluster.do(work)


def marks(store: MemoryStore, cluster: MemoryCluster) -> UnderreplicationManager:
    return UnderreplicationManager(store, LAYOUT, randomness=_Lots(), clock_ms=lambda: cluster.now_ms, worker_name="w0")


class _Lots:
    def getrandbits(self, k: int, /) -> int:
        return 0


def report(cluster: MemoryCluster, **fields: Any) -> None:
    """Write the report of a worker. It is persistent, because each session ends with its command."""
    data = json.dumps({"at_ms": cluster.now_ms, "state": "copying", **fields}).encode()
    cluster.do(lambda store: store.create("/bindery/recovery/workers/w0", data, make_parents=True))


def test_a_sound_cluster_is_reported_in_three_lines(cluster: MemoryCluster) -> None:
    cluster.elect("a1", "a2", "a3")
    result = cluster.invoke("recovery", "status")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "automatic recovery is enabled",
        "auditor: a1 (2 on standby)",
        "no ledger is known to be under-replicated",
    ]
    assert status(cluster)["candidates"] == ["a1", "a2", "a3"]


def test_the_last_audits_are_listed_deepest_first(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    assert status(cluster)["audits"] == []
    deep = LastAudit(
        level="deep",
        run_id="r1",
        verdict="CORRUPT",
        exit_code=2,
        began_ms=0,
        ended_ms=cluster.now_ms - 7_200_000,
        copies_expected=400,
        copies_verified=399,
        bytes_read=9,
        oldest_verified_ms=0,
        kinds={"ENTRY_LOST": 2, "ORPHAN_DATA": 1},
        severities={"warning": 1, "unreadable": 2},
    )
    quick = replace(deep, level="quick", run_id="r2", verdict="HEALTHY", exit_code=0, kinds={}, severities={})
    for audit in (quick, deep):
        cluster.do(lambda store, audit=audit: LastAudits(store).put(audit))  # type: ignore[misc]
    facts = status(cluster)["audits"]
    assert [(one["level"], one["verdict"], one["age_s"]) for one in facts] == [
        ("deep", "CORRUPT", 7_200.0),
        ("quick", "HEALTHY", 7_200.0),
    ]
    assert facts[0]["coverage"] == 0.9975
    assert cluster.invoke("recovery", "status").stdout.splitlines()[-2:] == [
        "last deep audit: CORRUPT 2.0 h ago, 399 of 400 copies checked, findings: 2 unreadable, 1 warning (run r1)",
        "last quick audit: HEALTHY 2.0 h ago, 399 of 400 copies checked, findings: none (run r2)",
    ]


def test_without_an_auditor_the_exit_code_is_1(cluster: MemoryCluster) -> None:
    result = cluster.invoke("recovery", "status")
    assert result.exit_code == 1
    assert "auditor: NONE" in result.stdout
    assert "no ledger can be repaired: no auditor is running: lost bookies are not detected" in result.stdout


def test_marked_ledgers_are_counted_by_obstacle_with_bytes_speed_and_time_left(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    first, second = (cluster.ledger("b0", "b1") for _ in range(2))
    third = cluster.ledger("b0", "b1", closed=False)
    mark(cluster, first, "b0", missing_bytes=3 * 2**20, missing_entries=7, state=RecoveryState.COPYING)
    mark(
        cluster,
        second,
        "b0",
        missing_bytes=2**20,
        missing_entries=1,
        state=RecoveryState.BLOCKED,
        obstacle=Obstacle.NO_SPARE,
        detail="no bookie can replace b0",
    )
    cluster.now_ms += 60_000
    mark(cluster, third, "b0")
    report(cluster, bytes_per_s=2**20, ledger_id=first)
    facts = status(cluster)["marked"]
    assert (facts["ledgers"], facts["bytes_left"], facts["entries_left"], facts["size_unknown"]) == (3, 4 * 2**20, 8, 1)
    assert facts["by_obstacle"] == {"copying": 1, "no_spare": 1, "not processed yet": 1}
    assert facts["oldest"] == {"ledger_id": first, "since_ms": cluster.now_ms - 60_000, "age_s": 60.0}
    text = cluster.invoke("recovery", "status").stdout
    assert "3 ledgers are under-replicated: 4.0 MiB to copy, 1 of unknown size, 1.0 MiB/s, about 6 s left" in text
    assert f"1  no_spare, such as ledger {second}: no bookie can replace b0" in text
    assert f"oldest: ledger {first}, marked 60 s ago" in text
    cluster.now_ms += 61_000  # a worker without a recent report copies nothing
    facts = status(cluster)
    assert (facts["bytes_per_s"], facts["eta_s"], facts["workers"][0]["stale"]) == (0, None, True)
    text = cluster.invoke("recovery", "status").stdout
    assert "no estimate: no entries were copied recently" in text
    assert "(stale report)" in text


def test_closed_ledgers_without_a_recorded_size_count_with_the_size_of_their_copies(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    first, *others = (cluster.ledger("b0", "b1", length=2**30) for _ in range(5))
    mark(cluster, first, "b0", missing_bytes=2**29, missing_entries=5, state=RecoveryState.COPYING)
    for ledger_id in others:
        mark(cluster, ledger_id, "b0")
    report(cluster, bytes_per_s=2**20, ledger_id=first)
    facts = status(cluster)
    assert (facts["marked"]["bytes_left"], facts["marked"]["size_unknown"]) == (4.5 * 2**30, 0)
    assert facts["eta_s"] == 4.5 * 1024


def test_marks_without_a_worker_are_a_problem(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    mark(cluster, cluster.ledger("b0"), "b0")
    result = cluster.invoke("recovery", "status")
    assert result.exit_code == 1
    assert "no replication worker is running" in result.stdout


def test_absent_bookies_are_shown_with_the_time_they_have_left(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    cluster.stop("b0")
    cluster.stop("b1")
    cluster.stop("b2")

    async def work(store: MemoryStore) -> None:
        await marks(store, cluster).set_lost_bookie_delay_s(120)
        bookies = {
            "b0": {"absent_s": 30.0, "phase": "waiting", "since_ms": 1},
            "b1": {"absent_s": 500.0, "phase": "handled", "since_ms": 1},
        }
        await RecoveryRecords(store).put_cursor("lost-bookies", {"bookies": bookies, "saved_ms": cluster.now_ms})
        await MembershipStore(store, clock_ms=lambda: cluster.now_ms).set(
            "b2", Intent.MAINTENANCE, until_ms=cluster.now_ms + 60_000
        )

    cluster.do(work)
    report(cluster)
    cluster.now_ms += 10_000
    text = cluster.invoke("recovery", "status").stdout
    assert "absent: b0 for 40 s; its ledgers are marked in 80 s unless it returns" in text
    assert "absent: b1 for 8 min; its ledgers are marked" in text
    assert "absent: b2" not in text
    assert "in maintenance until" in text
    cluster.now_ms += 60_000  # the lease is over, and the auditor has not checked it yet
    assert {"bookie_id": "b2", "phase": "absent", "since_ms": None, "absent_s": None, "left_s": None} in status(
        cluster
    )["lost_bookies"]


def test_a_drain_is_shown_with_its_percent(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    report(cluster)
    for _ in range(4):
        cluster.ledger("b0", "b1")
    assert cluster.invoke("bookie", "drain", "b0").exit_code == 0
    assert "draining: b0, 4 ledgers, 4.0 MiB at the start\n" in cluster.invoke("recovery", "status").stdout
    left = {"b0": {"bytes_left": 2**20, "ledgers_left": 1, "entries_left": 10}}
    cluster.do(lambda store: RecoveryRecords(store).put_cursor("draining", {"bookies": left, "at_ms": cluster.now_ms}))
    cluster.now_ms += 20_000
    assert (
        "draining: b0, 75 %, 1 ledgers and 1.0 MiB left (seen 20 s ago)" in cluster.invoke("recovery", "status").stdout
    )


def test_a_drain_is_not_called_complete_while_ledgers_are_left(cluster: MemoryCluster) -> None:
    cluster.ledger("b0", "b1")
    assert cluster.invoke("bookie", "drain", "b0").exit_code == 0
    left = {"b0": {"bytes_left": 0, "ledgers_left": 1, "entries_left": 0}}
    cluster.do(lambda store: RecoveryRecords(store).put_cursor("draining", {"bookies": left, "at_ms": cluster.now_ms}))
    assert "draining: b0, 99 %, 1 ledgers and 0 B left" in cluster.invoke("recovery", "status").stdout


def test_a_drain_that_ended_is_shown_before_the_auditor_checks_again(cluster: MemoryCluster) -> None:
    cluster.ledger("b0", "b1")
    assert cluster.invoke("bookie", "drain", "b0").exit_code == 0
    left = {"b0": {"bytes_left": 0, "ledgers_left": 1, "entries_left": 0}}
    cluster.do(lambda store: RecoveryRecords(store).put_cursor("draining", {"bookies": left, "at_ms": cluster.now_ms}))
    event = drain_finished(BookieId("b0"), cluster.now_ms)
    cluster.do(lambda store: RecoveryRecords(store).append_history(event))
    assert "draining: b0, empty: stop it" in cluster.invoke("recovery", "status").stdout
    (drained,) = status(cluster)["draining"]
    assert (drained["finished"], drained["ledgers_left"], drained["bytes_left"]) == (True, 0, 0)


def test_pause_and_resume_set_bookkeepers_switch_and_record_the_reason(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    result = cluster.invoke("recovery", "pause", "--reason", "moving rack 3")
    assert result.exit_code == 0
    assert cluster.do(lambda store: store.exists(LAYOUT.replication_disabled)) is not None
    result = cluster.invoke("recovery", "status")
    assert result.exit_code == 1
    assert "moving rack 3" in result.stdout.splitlines()[0]
    assert result.stdout.startswith("automatic recovery is PAUSED by ")
    assert status(cluster)["pause"]["reason"] == "moving rack 3"
    assert cluster.invoke("recovery", "resume").stdout == "automatic recovery is resumed\n"
    assert cluster.do(lambda store: store.exists(LAYOUT.replication_disabled)) is None
    assert cluster.invoke("recovery", "resume").stdout == "automatic recovery was not paused\n"
    kinds = [json.loads(line)["kind"] for line in cluster.invoke("recovery", "history", "--json").stdout.splitlines()]
    assert kinds == ["paused", "resumed"]


def test_a_pause_by_other_tools_is_shown_without_a_reason(cluster: MemoryCluster) -> None:
    cluster.do(lambda store: store.create(LAYOUT.replication_disabled, make_parents=True))
    assert cluster.invoke("recovery", "status").stdout.splitlines()[0] == "automatic recovery is PAUSED"


def test_history_is_newest_last_and_bounded(cluster: MemoryCluster) -> None:
    assert "no events are recorded" in cluster.invoke("recovery", "history").stderr

    async def work(store: MemoryStore) -> None:
        for number in range(5):
            await RecoveryRecords(store).append_history(HistoryEvent(cluster.now_ms, "healed", f"event {number}"))

    cluster.do(work)
    lines = cluster.invoke("recovery", "history", "-n", "2").stdout.splitlines()
    assert [line.split("healed")[1].strip() for line in lines] == ["event 3", "event 4"]
    assert lines[0].startswith("2027-01-15 08:00:00Z")


def test_trigger_writes_the_delay_again(cluster: MemoryCluster) -> None:
    result = cluster.invoke("recovery", "trigger")
    assert "no auditor has been leader yet" in output_of(result)
    cluster.do(lambda store: marks(store, cluster).set_lost_bookie_delay_s(77))
    before = cluster.do(lambda store: store.get(LAYOUT.lost_bookie_delay))
    cluster.elect("a1")
    assert cluster.invoke("recovery", "trigger").stdout == "audit requested from a1\n"
    after = cluster.do(lambda store: store.get(LAYOUT.lost_bookie_delay))
    assert (after.data, after.stat.version) == (b"77", before.stat.version + 1)


def test_retry_ends_back_off_and_terminal_states(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1")
    result = cluster.invoke("recovery", "retry", str(ledger_id))
    assert "is not marked" in output_of(result)
    assert "no such ledger" in output_of(cluster.invoke("recovery", "retry", "999"))
    mark(
        cluster,
        ledger_id,
        "b0",
        state=RecoveryState.UNRECOVERABLE,
        obstacle=Obstacle.NO_COPY_LEFT,
        attempts=9,
        detail="no copy of entry 3 is left",
        next_retry_ms=cluster.now_ms + 300_000,
    )
    result = cluster.invoke("recovery", "retry", str(ledger_id))
    assert result.stdout == f"the repair of ledger {ledger_id} is retried; it was unrecoverable after 9 attempts\n"
    record = cluster.do(lambda store: RecoveryRecords(store).get(ledger_id))
    assert record is not None
    assert (record.state, record.obstacle, record.attempts, record.next_retry_ms) == (
        RecoveryState.WAITING,
        Obstacle.NONE,
        0,
        None,
    )


# --- explain ----------------------------------------------------------------------------------------------------------


def explained(cluster: MemoryCluster, ledger_id: LedgerId) -> tuple[str, int]:
    result = cluster.invoke("recovery", "explain", str(ledger_id), "--json")
    return json.loads(result.stdout)["sentence"], result.exit_code


def test_explain_follows_a_ledger_from_sound_to_unrecoverable(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1")

    def says(words: str, code: int) -> None:
        sentence, found = explained(cluster, ledger_id)
        assert words in sentence
        assert found == code

    says("no copy is known to be missing", 0)
    cluster.stop("b0")
    says("because no auditor is running", 1)
    cluster.elect("a1")
    says("the auditor a1 marks it when the lost-bookie delay has passed", 0)
    mark(cluster, ledger_id, "b0")
    says("no replication worker is running", 1)
    report(cluster)
    says("a worker will start within seconds", 0)
    blocked = {"state": RecoveryState.BLOCKED, "obstacle": Obstacle.TARGET_REFUSES, "detail": "the disk of b2 is full"}
    mark(cluster, ledger_id, "b0", **blocked, next_retry_ms=cluster.now_ms + 20_000)
    says("the disk of b2 is full", 1)
    says("next attempt in 20 s", 1)
    mark(cluster, ledger_id, "b0", state=RecoveryState.UNRECOVERABLE, obstacle=Obstacle.NO_COPY_LEFT, detail="0 of 2")
    says("no good copy of some entries is left (0 of 2)", 1)
    cluster.invoke("recovery", "pause", "--reason", "why not")
    says("automatic recovery was disabled", 1)
    text = cluster.invoke("recovery", "explain", str(ledger_id)).stdout
    assert "bookie           b0: absent" in text
    assert "obstacle         no_copy_left" in text


def test_explain_shows_when_an_audit_last_found_the_ledger_complete(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1")
    assert json.loads(cluster.invoke("recovery", "explain", str(ledger_id), "--json").stdout)["verified"] is None
    record = Verified(ledger_id, "deep", 1_000, "r1", 0)
    cluster.do(lambda store: VerifiedRecords(store).put_all([record]))
    assert json.loads(cluster.invoke("recovery", "explain", str(ledger_id), "--json").stdout)["verified"] == {
        "ledger_id": ledger_id,
        "level": "deep",
        "verified_at_ms": 1_000,
        "run_id": "r1",
        "metadata_version": 0,
    }
    text = cluster.invoke("recovery", "explain", str(ledger_id)).stdout
    assert "verified         1970-01-01 00:00:01Z, level deep, run r1" in text


def test_explain_of_ledgers_that_are_draining_in_maintenance_locked_or_deleted(cluster: MemoryCluster) -> None:
    cluster.elect("a1")
    ledger_id = cluster.ledger("b0", "b1")
    cluster.invoke("bookie", "drain", "b0")
    assert "b0 is leaving the cluster: the auditor a1 marks it soon" in explained(cluster, ledger_id)[0]
    cluster.invoke("bookie", "drain", "b0", "--cancel")
    cluster.invoke("bookie", "maintenance", "b0", "--for", "10m")
    cluster.stop("b0")
    assert "b0 is in maintenance" in explained(cluster, ledger_id)[0]
    mark(cluster, ledger_id, "b0", missing_entries=10, missing_bytes=2**20, state=RecoveryState.COPYING)
    lock = LAYOUT.mark_lock(ledger_id)
    cluster.do(lambda store: store.create(lock, b'bookieId: "w7"\n', make_parents=True))
    sentence, code = explained(cluster, ledger_id)
    assert "is being copied by w7, 10 copies left (1.0 MiB)" in sentence
    assert code == 0
    cluster.do(lambda store: store.delete(LAYOUT.ledger(ledger_id), version=None))
    assert "was deleted" in explained(cluster, ledger_id)[0]
    assert "no such ledger" in output_of(cluster.invoke("recovery", "explain", "999")).lower()


def test_status_lines_of_workers_are_a_table(cluster: MemoryCluster) -> None:
    fields = WorkerReport("w0", cluster.now_ms, "copying", LedgerId(7), 2**20, 9, 2**20, 12.4, 2**22)
    report(
        cluster,
        ledger_id=7,
        bytes_per_s=fields.bytes_per_s,
        budget_bytes_per_s=fields.budget_bytes_per_s,
        bytes_done_total=fields.bytes_done_total,
        foreground_p99_ms=fields.foreground_p99_ms,
    )
    lines = status_lines(status(cluster), now_ms=cluster.now_ms)
    assert lines[-2].split() == ["worker", "state", "ledger", "speed", "allowed", "copied", "foreground", "p99"]
    assert lines[-1].split() == ["w0", "copying", "7", "1.0", "MiB/s", "4.0", "MiB/s", "1.0", "MiB", "12", "ms"]
