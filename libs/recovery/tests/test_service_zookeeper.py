"""Recovery embedded in bookies, without an auditor process: the leading bookie is killed and does not return."""

import asyncio
import random
from pathlib import Path

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bookie_cluster import LAYOUT, assert_whole, clock_ms
from zookeeper_cluster import write_all, zookeeper_cluster

pytestmark = pytest.mark.integration
WAIT_S = 120.0


@pytest.mark.timeout(400)
async def test_standbys_elect_mark_and_heal_when_the_leading_bookie_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKIE_RECOVERY_LOST_BOOKIE_DELAY_S", "2")
    async with zookeeper_cluster(tmp_path, "--autorecovery-embedded") as cluster:
        store, client = await cluster.connect()
        counts = await write_all(client, 200, 1, 300, 40, 0, 60, 120, 80)
        marks = UnderreplicationManager(store, LAYOUT, randomness=random.Random(0), clock_ms=clock_ms)
        records = RecoveryRecords(store)

        async with asyncio.timeout(WAIT_S):
            while (leader := await current_auditor(store, LAYOUT)) is None:
                await asyncio.sleep(0.1)
            lost = BookieId(leader)
            concerned = {i for i in counts if lost in (await client.metadata(i)).last_segment.ensemble}
            assert concerned
            cluster.kill(lost)
            while await current_auditor(store, LAYOUT) in (None, leader):
                await asyncio.sleep(0.1)
            healed: set[int] = set()
            while healed < concerned:
                events = [event for event in await records.history() if event.kind == "healed"]
                healed = {int(event.fields["ledger_id"]) for event in events}
                await asyncio.sleep(0.1)
            while [mark async for mark in marks.list()]:
                await asyncio.sleep(0.1)

        assert healed == concerned
        assert lost not in {event.fields["worker"] for event in events}
        for ledger_id, count in counts.items():
            metadata = await assert_whole(client, ledger_id, count)
            assert lost not in metadata.last_segment.ensemble
