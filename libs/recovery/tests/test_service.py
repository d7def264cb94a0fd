"""The parts of recovery in one process: they run from `run` to `stop`, and stopping is no failure of a part."""

import asyncio
import random

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.service import ELECTION, PROGRESS, WORKER, RecoveryService
from bindery_recovery.settings import RecoverySettings
from simulated import simulate


async def service_of(tree: MemoryTree, exits: list[str], *, workers: int = 1) -> RecoveryService:
    layout, store = LedgersLayout(), tree.connect()
    await store.create(layout.root)
    service = RecoveryService(
        store,
        layout,
        MemoryLedgerClient(MemoryLedgers(bookies=[BookieId("b1")])),
        settings=RecoverySettings(workers=workers),
        name="auditor-0",
        randomness=random.Random(1),
        clock_ms=lambda: 0,
        ask_exit=exits.append,
    )
    await service.prepare()
    return service


@pytest.mark.parametrize(("workers", "parts"), [(1, {ELECTION, WORKER, PROGRESS}), (0, {ELECTION, PROGRESS})])
def test_all_parts_run_until_the_service_is_stopped(workers: int, parts: set[str]) -> None:
    async def scenario() -> None:
        exits: list[str] = []
        service = await service_of(MemoryTree(), exits, workers=workers)
        assert not service.is_leader
        running = asyncio.create_task(service.run())
        await asyncio.sleep(60)
        assert service.is_leader
        assert service.progress.latest is not None
        assert service.watcher.states.keys() == parts
        assert service.watcher.dead == []
        for _ in range(2):
            await service.stop()
            assert not service.is_leader
        await asyncio.sleep(60)
        assert all(not state.deaths for state in service.watcher.states.values())
        running.cancel()
        await asyncio.wait([running])
        assert exits == []

    simulate(scenario())
