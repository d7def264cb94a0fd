"""Goal: real processes that are killed with SIGKILL leave exactly one copy of each message that is retried."""

from pathlib import Path

import pytest
from bindery_e2e.runs.retries import run_retries
from bindery_e2e.traffic.retries import RetriesSettings


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
@pytest.mark.parametrize("brokers", [1, 2])
def test_killed_brokers_and_bookies_leave_one_copy_of_each_retry(tmp_path: Path, brokers: int) -> None:
    settings = RetriesSettings(seed=5, kills=2, bookie_share=1.0, up_s=(1.0, 2.0), ack_timeout_ms=(1_500, 2_500))
    found = run_retries(settings, tmp_path, facts={"command": "a test"}, brokers=brokers)
    assert found.verdict == "GOOD", found.examples
    assert sum(found.kills[f"broker-{number}"] for number in range(brokers)) == 1
    assert found.kills.total() == 2
    assert found.messages > 50
    assert min(found.copies, found.by_retry, found.by_returns, found.acked) > 0, str(found)
