"""The number of stored ledgers is counted once after the start, then updated, and always exact."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.settings import StorageSettings


async def opened(tmp_path: Path) -> StorageEngine:
    settings = StorageSettings(journal_directory=str(tmp_path / "journal"), ledger_directory=str(tmp_path / "ledgers"))
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1)
    await engine.open()
    return engine


@pytest.mark.parametrize("flush", [False, True])
async def test_the_count_is_exact_after_creations_deletions_and_restarts(tmp_path: Path, flush: bool) -> None:
    expected: set[int] = set()
    for start in range(3):
        engine = await opened(tmp_path)
        for ledger_id in range(10 * start, 10 * start + 10):  # while the count of ledgers on disk is running
            await engine.fence(ledger_id, b"k" * 20)
            expected.add(ledger_id)
        if flush:
            await engine.flush()
        await engine.delete_ledger(10 * start)
        await engine.delete_ledger(10 * start)
        await engine.delete_ledger(10 * start - 5)
        expected -= {10 * start, 10 * start - 5}
        await engine.force(1)
        assert list(await engine.list_ledger_ids()) == sorted(expected)
        async with asyncio.timeout(30):
            while engine.ledgers_count is None:
                await asyncio.sleep(0.001)
        assert engine.ledgers_count == len(expected)
        await engine.close()


def test_a_ledger_in_memory_and_index_is_counted_once_and_the_balance_has_later_changes() -> None:
    index = Index(MemoryKV())
    rows = {ledger_id: LedgerRow(b"k" * 20, False, -1, -1, None) for ledger_id in range(10)}
    index.commit(runs=[], merges={}, ledgers=rows, deleted=[], generation=1, sync=True)
    table = LedgerTable(index, ledgers_max=100, tombstones_max=10)
    table.find(3)
    table.create(50, b"k")
    table.delete(4)
    count = table.count_job()
    table.create(51, b"k")
    table.delete(5)
    table.delete(50)
    assert count() + table.balance == 9 == len({*index.ledger_ids(), *table.states} - table.hidden_ids())


async def test_reads_from_disk_do_not_wait_for_the_count(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await opened(tmp_path)
    bodies = await kit.fill(engine, 1, 3)
    await engine.close()
    may_end = threading.Event()
    monkeypatch.setattr(LedgerTable, "count_job", lambda table: lambda: may_end.wait(60) and 7)
    engine = await opened(tmp_path)
    async with asyncio.timeout(30):
        assert await kit.read(engine, (1, 2)) == bodies[2:]
    assert engine.ledgers_count is None
    may_end.set()
    async with asyncio.timeout(30):
        while engine.ledgers_count != 7:
            await asyncio.sleep(0.001)
    await engine.close()
