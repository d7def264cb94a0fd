"""Goal: the disk of real bookies stays small while ledgers or topics come and go, and what is kept stays readable."""

import asyncio
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_e2e.judging.space import ChurnLimits
from bindery_e2e.runs.churn import SHORT, run_churn
from bindery_e2e.traffic.churn import KIB, MIB, ChurnSettings
from bindery_metadata.stores.zookeeper import ZooKeeperStore

SETTINGS = ChurnSettings(
    seed=5,
    seconds=40,
    rate=6 * MIB,
    writers=4,
    size_min=MIB // 2,
    size_max=2 * MIB,
    delete_s_min=0.5,
    delete_s_max=3.0,
    window_s=5.0,
)


@pytest.mark.long_run
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


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_topics_come_and_go_and_the_kept_ones_stay_readable(tmp_path: Path) -> None:
    settings = replace(SETTINGS, seconds=15, rate=2 * MIB, entry_size=64 * KIB, size_max=MIB, window_s=3.0)
    limits = ChurnLimits(allowance=96 * MIB, latency_ratio_max=math.inf)
    summary = run_churn(settings, limits, tmp_path, facts={"command": "a test"}, are_topics=True, environment=SHORT)
    assert summary["verdict"] == "GOOD", summary["judgement"]["findings"]
    assert summary["topics"]["deleted"] > summary["topics"]["kept"] > 0
    assert summary["entries"]["verified"] > 0


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_deleted_topic_leaves_the_metadata_at_once_and_the_bookies_soon() -> None:
    with ThrowawayCluster(bookies=3, auditors=0, environment=SHORT) as cluster:
        topic = f"{cluster.url}/v1/topics/public/default/short-lived"
        with httpx.Client(timeout=60.0) as http:
            for _ in range(5):
                http.post(f"{topic}/messages", content=bytes(10_000)).raise_for_status()
            assert all(ledgers_of(http, cluster, number) for number in range(3)), "each entry has three replicas"
            http.delete(topic, params={"force": "true"}).raise_for_status()
            assert asyncio.run(ledgers_in(cluster.zookeeper)) == []
            deadline = time.monotonic() + 120
            while any(ledgers_of(http, cluster, number) for number in range(3)):
                assert time.monotonic() < deadline, "the bookies kept ledgers of the deleted topic"
                time.sleep(0.1)


def ledgers_of(http: httpx.Client, cluster: ThrowawayCluster, number: int) -> list[list[int]]:
    """Ranges of ids of the ledgers that a bookie stores."""
    answer = http.get(f"{cluster.bookie_url(number)}/api/v1/bookie/ledgers").raise_for_status()
    found: list[list[int]] = answer.json()["ledgers"]
    return found


async def ledgers_in(zookeeper: str) -> list[int]:
    store = await ZooKeeperStore.connect(zookeeper)
    try:
        client = await LedgerClient.connect(store, randomness=random.Random(1))
        try:
            return [ledger_id async for ledger_id in client.list_ledgers()]
        finally:
            await client.close()
    finally:
        await store.close()
