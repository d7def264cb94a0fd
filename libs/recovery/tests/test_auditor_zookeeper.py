"""Failover of the auditor on a real ZooKeeper with real bookies: a bookie is killed, then the leading auditor."""

import asyncio
import random
from pathlib import Path

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_recovery.auditor import AuditorLimits
from bindery_recovery.reporting.progress import collect, summarize
from bindery_recovery.service import RecoveryService
from bindery_recovery.settings import RecoverySettings
from bookie_cluster import LAYOUT, assert_whole, clock_ms
from zookeeper_cluster import write_all, zookeeper_cluster

pytestmark = pytest.mark.integration
DELAY_S = 8
ROUNDING_S = 0.1
"""Resolution of the stored absence in seconds."""
OBSERVED_S = 3.0
"""Absence of the bookie in seconds that the first leader stores before it is stopped."""
WAIT_S = 120.0


async def observed_s(service: RecoveryService, bookie_id: BookieId) -> float:
    """Return the absence of a bookie in seconds as stored for the next leader; -1: none is stored."""
    bookies = (await service.records.get_cursor("lost-bookies") or {}).get("bookies", {})
    return float(bookies[bookie_id]["absent_s"]) if bookie_id in bookies else -1.0


@pytest.mark.timeout(400)
async def test_a_killed_bookie_is_lost_after_its_delay_although_the_leader_is_killed_too(tmp_path: Path) -> None:
    exits: list[str] = []
    async with zookeeper_cluster(tmp_path) as cluster:

        async def start(name: str) -> tuple[RecoveryService, ZooKeeperStore, asyncio.Task[None]]:
            store, client = await cluster.connect()
            service = RecoveryService(
                store,
                LAYOUT,
                client,
                settings=RecoverySettings(lost_bookie_delay_s=DELAY_S),
                name=name,
                randomness=random.SystemRandom(),
                clock_ms=clock_ms,
                ask_exit=exits.append,
                limits=AuditorLimits(settle_s=2.0, debounce_s=0.1, poll_interval_s=1.0, save_interval_s=0.5),
            )
            await service.prepare()
            return service, store, asyncio.create_task(service.run())

        store, client = await cluster.connect()
        counts = await write_all(client, 200, 1, 300, 40, 0, 60)
        both = [await start("one"), await start("other")]
        loop = asyncio.get_running_loop()
        lost = BookieId("bookie-1")
        async with asyncio.timeout(WAIT_S):
            while not (led := [trio for trio in both if trio[0].is_leader and trio[0].auditor.state.audit.audits]):
                await asyncio.sleep(0.05)
            (first, first_store, first_task), (second, _, second_task) = sorted(both, key=lambda trio: trio not in led)
            killed_at = loop.time()
            cluster.kill(lost)
            while await observed_s(first, lost) < OBSERVED_S:
                await asyncio.sleep(0.05)
            assert [mark async for mark in first.marks.list()] == []
            await first_store.close()  # ends the session, so that the other auditor is elected
            first_task.cancel()
            while await current_auditor(store, LAYOUT) != second.name:
                await asyncio.sleep(0.05)
            while not [mark async for mark in second.marks.list()]:
                assert loop.time() - killed_at < DELAY_S + 30
                await asyncio.sleep(0.02)
            assert loop.time() - killed_at >= DELAY_S - ROUNDING_S, "only time after the kill counts as absence"
            snapshot = await collect(
                store,
                LAYOUT,
                marks=second.marks,
                records=second.records,
                memberships=second.memberships,
                clock_ms=clock_ms,
            )
            progress = summarize(snapshot)
            assert progress.auditor == second.name
            assert [(b.bookie_id) for b in progress.lost] == [lost]
            # Workers may repair the first ledgers before the audit has marked the last one. The audit records its event
            # after all marks, so the test waits for the event and then for the end of the repair.
            while "bookie_lost" not in [event.kind for event in await second.records.history()]:
                await asyncio.sleep(0.1)
            while [mark async for mark in second.marks.list()]:
                await asyncio.sleep(0.1)
        for ledger_id, count in counts.items():
            metadata = await assert_whole(client, ledger_id, count)
            assert lost not in metadata.last_segment.ensemble
        kinds = [event.kind for event in await second.records.history()]
        assert kinds.count("bookie_lost") == 1
        assert exits == []
        await second.stop()
        second_task.cancel()
        await asyncio.gather(first_task, second_task, return_exceptions=True)
