"""Goal: a real broker that is killed with SIGKILL keeps counts and acknowledgements."""

from collections import Counter
from pathlib import Path

import pytest
from bindery_e2e.judging.history import read_history
from bindery_e2e.judging.observed import Observed
from bindery_e2e.reporting.report import text_summary
from bindery_e2e.runs.kills import figures_of, run_kills
from bindery_e2e.traffic.kills import KillsSettings


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
def test_a_killed_broker_keeps_counts_and_acknowledgements(tmp_path: Path) -> None:
    settings = KillsSettings(seed=5, kills=3, ack_timeout_ms=(1_500, 2_500), up_s=(0.5, 1.5))
    report = run_kills(settings, tmp_path, facts={"command": "a test"})
    assert not report.judgement.findings, text_summary(report)
    records = list(read_history(report.history))
    figures = figures_of(Observed(records))
    assert figures.kills == 3
    assert min(figures.acks.values()) > 0, figures
    assert figures.delivered > figures.acknowledged > 100, figures
    ops = Counter(record.values["op"] for record in records if record.type == "invoke")
    assert ops["nack"] > 0
