"""A writer that continued without a copy is killed, and its ledger is recovered and then checked. Real processes.

No check of all ledgers runs, and no bookie is absent for the lost-bookie delay: only the closing record leads to the
hole.
"""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import Verdict
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.stores.embedded import die_with_parent
from bindery_recovery.auditor import AuditorLimits
from bindery_recovery.service import RecoveryService
from bindery_recovery.settings import RecoverySettings
from bookie_cluster import LAYOUT, assert_whole, clock_ms
from hole_writer import BEFORE, END
from zookeeper_cluster import ZooKeeperCluster, zookeeper_cluster

pytestmark = pytest.mark.integration
WAIT_S = 60.0
MISSED = BookieId("bookie-1")


async def killed_writer(cluster: ZooKeeperCluster) -> LedgerId:
    """Return the ledger of a writer that was killed before it reported that MISSED lacks the last entries."""
    here = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, str(here / "hole_writer.py"), cluster.spec.hosts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here)},
        preexec_fn=die_with_parent,
    )
    assert process.stdin is not None
    try:
        ledger_id = LedgerId(int(await printed(process, "ledger ")))
        cluster.kill(MISSED)
        process.stdin.write("\n")
        process.stdin.flush()
        await printed(process, "done")
    finally:
        process.kill()
        process.wait()
    return ledger_id


async def printed(process: "subprocess.Popen[str]", word: str) -> str:
    """Return the rest of the next line of the output that starts with `word`; other lines are log events."""
    assert process.stdout is not None
    while line := await asyncio.to_thread(process.stdout.readline):
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError("the writer exited")


async def missing_entries(client: LedgerClient, ledger_id: LedgerId) -> list[int]:
    metadata = await client.metadata(ledger_id)
    ids = [EntryId(n) for n in range(END)]
    answers = await client.read_replicas(ledger_id, metadata, MISSED, ids, lambda read: (read.entry_id, read.verdict))
    assert {verdict for _, verdict in answers} <= {Verdict.GOOD, Verdict.ABSENT}
    return [entry_id for entry_id, verdict in answers if verdict is Verdict.ABSENT]


@pytest.mark.timeout(400)
async def test_the_hole_of_a_killed_writer_is_found_and_repaired_within_seconds(tmp_path: Path) -> None:
    exits: list[str] = []
    async with zookeeper_cluster(tmp_path) as cluster:
        ledger_id = await killed_writer(cluster)
        cluster.start_bookie(MISSED)
        await cluster.wait_for_bookies(4)
        store, client = await cluster.connect()
        reader = await client.open(ledger_id, password=b"pw")
        assert (reader.is_closed, reader.last_add_confirmed) == (True, END - 1)
        record = await ClosingRecords(store).get(ledger_id)
        assert record is not None
        assert record.cause is ClosingCause.RECOVERED
        holes = await missing_entries(client, ledger_id)
        assert len(holes) >= (END - BEFORE) // 2, "recovery restores only the entries after the last confirmed one"

        auditor_store, auditor_client = await cluster.connect()
        service = RecoveryService(
            auditor_store,
            LAYOUT,
            auditor_client,
            name="auditor",
            settings=RecoverySettings(lost_bookie_delay_s=600, ledger_check_interval_s=0),
            randomness=random.SystemRandom(),
            clock_ms=clock_ms,
            ask_exit=exits.append,
            limits=AuditorLimits(settle_s=1.0, debounce_s=0.1, poll_interval_s=1.0),
        )
        await service.prepare()
        task = asyncio.create_task(service.run())
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(WAIT_S):
            while await ClosingRecords(store).ledger_ids():
                await asyncio.sleep(0.1)
        took_s = loop.time() - began
        print(f"{len(holes)} missing copies found and restored {took_s:.1f} s after the auditor started")
        assert await missing_entries(client, ledger_id) == []
        await assert_whole(client, ledger_id, END)
        assert [mark async for mark in service.marks.list()] == []
        assert service.worker.stats.entries_copied == len(holes), "only missing entries are copied"
        assert service.auditor.state.closings.findings.keys() >= {"marked", "whole"}
        assert exits == []
        await service.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
