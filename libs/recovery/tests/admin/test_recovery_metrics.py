"""The metrics page of a process with recovery."""

import random
from collections.abc import AsyncIterator

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_metadata.layout.layout import CheckKind, LedgersLayout
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryRecord, RecoveryState
from bindery_metadata.recovery.underreplication import Mark
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.checks.closing_check import Finding
from bindery_recovery.reporting.progress import Snapshot, summarize
from bindery_recovery.service import RecoveryService
from bindery_recovery.settings import RecoverySettings


@pytest.fixture
async def service() -> AsyncIterator[RecoveryService]:
    store = MemoryTree().connect()
    yield RecoveryService(
        store,
        LedgersLayout(),
        MemoryLedgerClient(MemoryLedgers(bookies=[BookieId("b1")])),
        settings=RecoverySettings(),
        name="auditor-0",
        randomness=random.Random(1),
        clock_ms=lambda: 0,
        ask_exit=lambda reason: None,
    )
    await store.close()


def samples(metrics: RecoveryMetrics) -> dict[str, str]:
    """Return the values of the page by name and labels."""
    page = Page()
    metrics.add_to(page)
    lines = page.render().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


async def test_returned_bookies_and_check_results_have_bookkeepers_metric_names(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    before = samples(metrics)
    assert before["replication_auditor_NUM_DELAYED_BOOKIE_AUDITS_CANCELLED"] == "0"
    assert "replication_auditor_NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY" not in before, "no check has finished"
    service.auditor.state.checks[CheckKind.PLACEMENT].result = {"failed": 3, "soft": 5}
    after = samples(metrics)
    assert after["replication_auditor_NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY"] == "3"
    assert after["replication_auditor_NUM_LEDGERS_SOFTLY_ADHERING_TO_PLACEMENT_POLICY"] == "5"


async def test_an_operation_is_counted_once_when_it_has_ended(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    count = 'replication_auditor_AUDIT_BOOKIES_TIME_count{success="true"}'
    assert samples(metrics)[count] == "0"
    audit = service.auditor.state.audit
    audit.audits, audit.duration_s = 1, 0.5
    assert samples(metrics)[count] == "1"
    assert samples(metrics)[count] == "1", "the same audit on the next page"
    assert samples(metrics)['replication_auditor_AUDIT_BOOKIES_TIME_sum{success="true"}'] == "500"


async def test_checks_of_closing_records_are_counted_by_finding(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    name = "bindery_recovery_this_closing_looks_total"
    assert not any(sample.startswith(name) for sample in samples(metrics))
    service.auditor.state.closings.findings.update({Finding.MARKED: 2, Finding.WHOLE: 5})
    found = {sample: value for sample, value in samples(metrics).items() if sample.startswith(name)}
    assert found == {f'{name}{{finding="marked"}}': "2", f'{name}{{finding="whole"}}': "5"}


async def test_each_kind_of_operation_has_its_duration_in_milliseconds(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    audit = service.auditor.state.audit
    audit.audits, audit.duration_s, audit.index_s, audit.marked, audit.postponed = 2, 0.5, 0.25, 7, 1
    for number, kind in enumerate(CheckKind, 1):
        check = service.auditor.state.checks[kind]
        check.finished_ms, check.duration_s = 1000, float(number)
    found = samples(metrics)
    sums = {
        name.removeprefix("replication_auditor_").removesuffix('_sum{success="true"}'): float(value)
        for name, value in found.items()
        if name.endswith('_sum{success="true"}')
    }
    numbers = {kind: 1000.0 * number for number, kind in enumerate(CheckKind, 1)}
    assert sums == {
        "AUDIT_BOOKIES_TIME": 500,
        "BOOKIE_TO_LEDGERS_MAP_CREATION_TIME": 250,
        "NUM_UNDER_REPLICATED_LEDGERS": 7,
        "CHECK_ALL_LEDGERS_TIME": numbers[CheckKind.LEDGERS],
        "PLACEMENT_POLICY_CHECK_TIME": numbers[CheckKind.PLACEMENT],
        "REPLICAS_CHECK_TIME": numbers[CheckKind.REPLICAS],
    }
    failed = 'replication_auditor_AUDIT_BOOKIES_TIME_count{success="false"}'
    assert found[failed] == samples(metrics)[failed] == "1"
    audit.postponed, audit.audits = 2, 3
    found = samples(metrics)
    assert found[failed] == "2"
    assert found['replication_auditor_AUDIT_BOOKIES_TIME_count{success="true"}'] == "2", "two were observed"


async def test_the_work_of_the_process_is_counted(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    service.worker.stats.ledgers_healed, service.worker.stats.ledgers_without_need = 9, 2
    service.worker.stats.entries_copied, service.worker.stats.attempts_failed = 40, 3
    service.auditor.state.terms = 4
    service.auditor.state.audit.marked_total = {"bookie_lost": 6, "draining": 1}
    found = samples(metrics)
    assert found["replication_replication_worker_NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED"] == "7", (
        "those that needed copies"
    )
    assert found["bindery_recovery_this_ledgers_healed_total"] == "9"
    assert (
        found["replication_replication_worker_NUM_ENTRIES_WRITTEN"]
        == found["bindery_recovery_this_entries_copied_total"]
        == "40"
    )
    assert found["replication_replication_worker_NUM_DEFER_LEDGER_LOCK_RELEASE_OF_FAILED_LEDGER"] == "3"
    assert found["replication_auditor_election_attempts"] == "4"
    assert found["bindery_recovery_this_leads"] == "0"
    name = "bindery_recovery_this_ledgers_marked_total"
    assert found[f'{name}{{reason="bookie_lost"}}'] == "6"
    assert found[f'{name}{{reason="draining"}}'] == "1"


async def test_the_response_time_of_bookies_is_in_seconds_and_unknown_without_requests(
    service: RecoveryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    name = "bindery_recovery_this_foreground_p99_seconds"
    assert samples(metrics)[name] == "NaN"
    monkeypatch.setattr(type(service.budget), "foreground_p99_ms", 250.0)
    assert samples(metrics)[name] == "0.25"


async def test_the_cluster_is_described_as_of_the_last_read_of_the_progress(service: RecoveryService) -> None:
    metrics = RecoveryMetrics(service, clock=lambda: 0.0)
    assert not any(name.startswith("bindery_recovery_marked_ledgers") for name in samples(metrics))
    now_ms = 1_000_000
    b1, b2 = BookieId("b1"), BookieId("b2")
    blocked = RecoveryRecord(
        LedgerId(1),
        RecoveryState.BLOCKED,
        obstacle=Obstacle.NO_SPARE,
        missing_entries=5,
        missing_bytes=500,
        first_marked_ms=now_ms - 7200_000,
    )
    snapshot = Snapshot(
        now_ms=now_ms,
        marks=[Mark(LedgerId(number), ("b1",), now_ms - 10_000, 0) for number in (1, 2, 3)],
        records={LedgerId(1): blocked},
        locks={LedgerId(2): "w1"},
        is_enabled=False,
        memberships={b1: Membership(b1, Intent.DRAINING), b2: Membership(b2, Intent.MAINTENANCE)},
        lost={"bookies": {name: {"phase": "handled", "since_ms": 1} for name in ("b3", "b4")}},
    )

    def cluster(found: dict[str, str]) -> dict[str, str]:
        return {name.removeprefix("bindery_recovery_"): value for name, value in found.items()}

    service.progress.latest = summarize(snapshot)
    found = cluster(samples(metrics))
    assert found['marked_ledgers{obstacle="none"}'] == "2"
    assert found['marked_ledgers{obstacle="no_spare"}'] == "1"
    assert found['marked_ledgers_by_age{le="inf"}'] == "3"
    assert found['absent_bookies{phase="handled"}'] == "2"
    assert found['absent_bookies{phase="waiting"}'] == found['absent_bookies{phase="forced"}'] == "0"
    expected = {
        "paused": "1",
        "auditor_elected": "0",
        "eta_seconds": "NaN",
        "oldest_mark_age_seconds": "7200",
        "oldest_closing_note_age_seconds": "0",
        "closing_notes": "0",
        "copying_ledgers": "1",
        "unrecoverable_ledgers": "0",
        "entries_left": "5",
        "bytes_left": "500",
        "draining_bookies": "1",
        "maintained_bookies": "1",
        "workers": "0",
    }
    assert {name: found[name] for name in expected} == expected
    service.progress.latest = summarize(Snapshot(now_ms=now_ms, auditor="a1"))
    found = cluster(samples(metrics))
    assert [found[name] for name in ("paused", "auditor_elected", "eta_seconds")] == ["0", "1", "0"]
    assert found["oldest_mark_age_seconds"] == "0"
