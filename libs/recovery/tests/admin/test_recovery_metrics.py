"""The metrics page of a process with recovery."""

import random
from collections.abc import AsyncIterator

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import BookieId
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.layout.layout import CheckKind, LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.checks.closing_check import Finding
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
