"""A whole bookie in this process, with metadata in memory and real disks, and a second session to observe it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

LAYOUT = LedgersLayout()


class BookieWorld:
    """Bookie b0, not started yet. `settings`: settings other than its directories and ports."""

    def __init__(self, directory: Path, *, wall_clock_ms: Callable[[], int], **settings: Any) -> None:
        self.tree = MemoryTree()
        self.observer = self.tree.connect()
        self.store: MemoryStore | None = None
        """The bookie's session."""
        self.shutdown = Shutdown()
        self.settings = BookieSettings(
            port=0,
            http_port=0,
            bookie_id="b0",
            journal_dir=str(directory / "journal"),
            ledger_dir=str(directory / "ledgers"),
            **settings,
        )
        self.process = BookieProcess(
            self.settings, self.shutdown, connect=self.connect, clock=time.monotonic, wall_clock_ms=wall_clock_ms
        )

    async def connect(self) -> MemoryStore:
        self.store = self.tree.connect()
        return self.store

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{self.process.http_port}{path}")


@asynccontextmanager
async def running(world: BookieWorld) -> AsyncIterator[None]:
    """Initialize the cluster, and stop the bookie at the end."""
    await initialize_cluster(world.observer, LAYOUT, randomness=random.Random(1))
    try:
        yield
    finally:
        await world.process.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
