"""Goal: the disk of real bookies stays small while ledgers come and go, and what is kept stays readable."""

import math
from pathlib import Path

import pytest
from bindery_e2e.judging.space import ChurnLimits
from bindery_e2e.runs.churn import SHORT, run_churn
from bindery_e2e.traffic.churn import MIB, ChurnSettings

SETTINGS = ChurnSettings(
    seed=5,
    seconds=40,
    rate=6 * MIB,
    writers=4,
    ledger_size_min=MIB // 2,
    ledger_size_max=2 * MIB,
    delete_s_min=0.5,
    delete_s_max=3.0,
    window_s=5.0,
)


@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
def test_the_disk_of_bookies_follows_their_live_bytes(tmp_path: Path) -> None:
    limits = ChurnLimits(allowance=96 * MIB, latency_ratio_max=math.inf)  # other tests use the machine
    summary = run_churn(SETTINGS, limits, tmp_path, facts={"command": "a test"}, environment=SHORT)
    assert summary["verdict"] == "GOOD", summary["judgement"]["findings"]
    assert summary["ledgers"]["deleted"] > 10 * summary["ledgers"]["kept"] / 2
    assert summary["entries"]["verified"] > 0
    for bookie, space in summary["judgement"]["bookies"].items():
        shards = summary["garbage"][bookie]["shards"]
        assert sum(shard["logBytes"] for shard in shards) < 0.8 * space["written"], "logs of deleted ledgers were freed"
