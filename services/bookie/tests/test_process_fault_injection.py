"""Fault injection in a whole bookie: off unless enabled, controlled over HTTP, until it is cleared."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.settings import StorageSettings
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree

DRILL = "/api/v1/bookie/drill"


@pytest.fixture(params=[True, False], ids=["allowed", "off"])
async def bookie(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BookieProcess]:
    tree = MemoryTree()
    await initialize_cluster(tree.connect(), LedgersLayout(), randomness=random.Random(1))
    settings = BookieSettings(
        port=0,
        http_port=0,
        bookie_id="b0",
        journal_dir=f"{tmp_path}/journal",
        ledger_dir=f"{tmp_path}/ledgers",
        storage=StorageSettings(drills=request.param),
    )

    async def connect() -> Any:
        return tree.connect()

    process = BookieProcess(settings, Shutdown(), connect=connect, clock=time.monotonic, wall_clock_ms=lambda: 1)
    await process.start()
    yield process
    await process.stop()


async def test_an_injected_delay_slows_the_journal_until_it_is_cleared(bookie: BookieProcess) -> None:
    async def fence_s(ledger_id: int) -> float:
        began = time.monotonic()
        await bookie.shards[0].fence(ledger_id, b"k" * 20)
        return time.monotonic() - began

    base = f"http://127.0.0.1:{bookie.http_port}"
    async with httpx.AsyncClient(base_url=base) as http, asyncio.timeout(30):
        rule = "datasync */journal/* delay 0.3"
        answer = await http.put(DRILL, json={"rules": [rule]})
        if bookie.drills is None:
            assert answer.status_code == 404
            assert "--storage-drills" in answer.text
            assert await fence_s(1) > 0
            return
        assert answer.status_code == 200
        assert answer.json()["drills"][0]["rule"] == rule
        assert await fence_s(1) >= 0.3
        assert (await http.get(DRILL)).json()["drills"][0]["acted"] >= 1
        wrong = await http.put(DRILL, json={"rules": ["datasync * explode"]})
        assert wrong.status_code == 400
        assert (await http.delete(DRILL)).json()["drills"] == []
        assert bookie.drills.states() == []
        assert await fence_s(2) > 0
