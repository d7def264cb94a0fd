"""One broker over in-memory bookies and metadata. Puts the helper modules of this folder on the import path."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import Clock, Harness


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


@pytest.fixture
def ledgers() -> MemoryLedgers:
    return MemoryLedgers()


@pytest.fixture
async def broker(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> AsyncIterator[Harness]:
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one")
    yield harness
    await harness.close()


@pytest.fixture
async def pair(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> AsyncIterator[tuple[Harness, Harness]]:
    """Two brokers that reach one another."""
    one, two = (Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}") for name in ("one", "two"))
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    two.peers["one"] = httpx.ASGITransport(app=one.app)
    yield one, two
    for harness in (one, two):
        await harness.close()
