"""Goal: producers that repeat their requests store each message once, although connections are cut and brokers die."""

from pathlib import Path

import pytest
from bindery_e2e.runs.repeats import run_repeats
from bindery_e2e.traffic.repeats import RepeatsSettings


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
@pytest.mark.parametrize("partitions", [0, 4])
def test_no_message_is_lost_or_stored_twice(tmp_path: Path, partitions: int) -> None:
    settings = RepeatsSettings(seed=5, seconds=12, kills=1, partitions=partitions)
    found = run_repeats(settings, tmp_path, facts={"command": "a test"})
    assert found.verdict == "GOOD", found.examples
    assert (found.kills, found.partitions) == (1, partitions)
    if partitions:
        assert found.deliveries >= 2 * found.messages
