"""A writer is killed that went on without a copy; who recovers its ledger has it looked at: real processes throughout.

No check of all ledgers runs, and no bookie is away for the delay: only the note tells of the hole.
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
    """Its ledger, of which MISSED lacks what came last: the writer is dead before it told anybody."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(here / "hole_writer.py"), cluster.spec.hosts],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(here)}, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        ledger_id = LedgerId(int(await said(process, "ledger ")))
        cluster.kill(MISSED)
        process.stdin.write("\n")
        process.stdin.flush()
        await said(process, "done")
    finally:
        process.kill()
        process.wait()
    return ledger_id


async def said(process: "subprocess.Popen[str]", word: str) -> str:
    """What stands behind the word that it says, among the lines of its log."""
    assert process.stdout is not None
    while line := await asyncio.to_thread(process.stdout.readline):
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError("the writer ended by itself")


async def lacked(client: LedgerClient, ledger_id: LedgerId) -> list[int]:
    metadata = await client.metadata(ledger_id)
    ids = [EntryId(n) for n in range(END)]
    answers = await client.read_replicas(ledger_id, metadata, MISSED, ids, lambda read: (read.entry_id, read.verdict))
    assert {verdict for _, verdict in answers} <= {Verdict.GOOD, Verdict.ABSENT}
    return [entry_id for entry_id, verdict in answers if verdict is Verdict.ABSENT]


@pytest.mark.timeout(400)
async def test_the_hole_of_a_killed_writer_is_marked_and_healed_within_seconds(tmp_path: Path) -> None:
    exits: list[str] = []
    async with zookeeper_cluster(tmp_path) as cluster:
        ledger_id = await killed_writer(cluster)
        cluster.start_bookie(MISSED)
        await cluster.wait_for_bookies(4)
        store, client = await cluster.connect()
        reader = await client.open(ledger_id, password=b"pw")
        assert (reader.is_closed, reader.last_add_confirmed) == (True, END - 1)
        note = await ClosingRecords(store).get(ledger_id)
        assert note is not None
        assert note.cause is ClosingCause.RECOVERED
        holes = await lacked(client, ledger_id)
        assert len(holes) >= (END - BEFORE) // 2, "recovery fills what lies behind the last confirmed entry, no more"

        auditor_store, auditor_client = await cluster.connect()
        service = RecoveryService(
            auditor_store, LAYOUT, auditor_client, name="auditor",
            settings=RecoverySettings(lost_bookie_delay_s=600, ledger_check_interval_s=0),
            randomness=random.SystemRandom(), clock_ms=clock_ms, ask_exit=exits.append,
            limits=AuditorLimits(settle_s=1.0, debounce_s=0.1, look_interval_s=1.0),
        )  # fmt: skip
        await service.prepare()
        task = asyncio.create_task(service.run())
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(WAIT_S):
            while await ClosingRecords(store).ledger_ids():
                await asyncio.sleep(0.1)
        took_s = loop.time() - began
        print(
            f"{len(holes)} copies missing; marked, healed and seen to be whole {took_s:.1f} s after the auditor began"
        )
        assert await lacked(client, ledger_id) == []
        await assert_whole(client, ledger_id, END)
        assert [mark async for mark in service.marks.list()] == []
        assert service.worker.stats.entries_copied == len(holes), "what was there is not copied"
        assert service.auditor.state.closings.findings.keys() >= {"marked", "whole"}
        assert exits == []
        await service.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
