"""Two workers with a real ZooKeeper and bookie processes: the entries of a killed bookie are copied to the others."""

import asyncio
import random
from pathlib import Path

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bookie_cluster import LAYOUT, assert_whole, clock_ms, worker_on
from zookeeper_cluster import write_all, zookeeper_cluster

pytestmark = pytest.mark.integration
WAIT_S = 60.0


@pytest.mark.timeout(400)
async def test_the_ledgers_of_a_killed_bookie_are_healed_although_one_of_two_workers_loses_its_session(
    tmp_path: Path,
) -> None:
    async with zookeeper_cluster(tmp_path) as cluster:
        store, client = await cluster.connect()
        counts = await write_all(client, 500, 1, 300, 40, 900, 0, 250, 60)
        marks = UnderreplicationManager(store, LAYOUT, randomness=random.Random(0), clock_ms=clock_ms)
        records = RecoveryRecords(store)
        await marks.prepare()
        lost = BookieId("bookie-1")
        cluster.kill(lost)
        async with asyncio.timeout(WAIT_S):
            while lost in await client.list_bookies():
                await asyncio.sleep(0.1)
        concerned = [
            ledger_id for ledger_id in counts if lost in (await client.metadata(ledger_id)).last_segment.ensemble
        ]
        assert len(concerned) >= 3
        for ledger_id in concerned:
            await records.put(RecoveryRecord(ledger_id, reason=Reason.BOOKIE_LOST, bookies=(lost,)))
            await marks.mark(ledger_id, [lost])
        rate = {"bytes_per_s_max": 150_000, "bytes_per_s_min": 150_000}
        first_store, first_client = await cluster.connect()
        second_store, second_client = await cluster.connect()
        first = worker_on(first_store, first_client, "first", **rate)
        second = worker_on(second_store, second_client, "second", **rate)
        tasks = [asyncio.create_task(worker.run()) for worker in (first, second)]
        async with asyncio.timeout(WAIT_S):
            while not (first.stats.entries_copied and second.stats.entries_copied):
                await asyncio.sleep(0.02)
            assert set((await marks.locks()).values()) <= {"first", "second"}
            await first_store.close()  # as in a crash: its locks are removed, and its later writes fail
            tasks[0].cancel()
            for ledger_id in concerned:
                while await marks.get(ledger_id) is not None:
                    await asyncio.sleep(0.05)
            while [record async for record in records.list()]:
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ledger_id, count in counts.items():
            metadata = await assert_whole(client, ledger_id, count)
            assert lost not in metadata.last_segment.ensemble
        assert await marks.locks() == {}
        healed = {event.fields["ledger_id"] for event in await records.history() if event.kind == "healed"}
        assert healed <= set(concerned)
        assert len(healed) >= len(concerned) - 1, (
            "the worker that lost its session may not have reported its last ledger"
        )
