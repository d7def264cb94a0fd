"""The start of a broker while ZooKeeper does not answer."""

import asyncio
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from bindery_broker import main
from bindery_broker.settings import BrokerSettings
from bindery_core.errors import MetadataUnavailable
from bindery_kit.process import cluster_wait
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

LAYOUT = LedgersLayout()


@pytest.fixture
def collector() -> Iterator[None]:
    """Restore the settings of the garbage collector, which the start of a broker changes."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch, collector: None) -> MemoryStore:
    """The store that a broker joins here instead of ZooKeeper."""
    store = MemoryTree().connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))

    async def join(*_: Any, **__: Any) -> MemoryStore:
        return store

    monkeypatch.setattr(main, "join_cluster", join)
    return store


async def until(event: str, logs: list[Any]) -> None:
    async with asyncio.timeout(30):
        while event not in [line["event"] for line in logs]:
            await asyncio.sleep(0.01)


async def test_a_failed_read_of_the_bookies_is_retried(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.01)
    for _ in range(2):
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)
    shutdown = Shutdown()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(BrokerSettings(port=0), shutdown))
        await until("broker_serving", logs)
        shutdown.request("SIGTERM")
        assert await serving == 0
    assert [line["event"] for line in logs].count("bookies_not_read") == 2


async def test_a_stop_during_the_start_ends_the_process(store: MemoryStore) -> None:
    for _ in range(100):
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)
    shutdown = Shutdown()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(BrokerSettings(port=0), shutdown))
        await until("bookies_not_read", logs)
        shutdown.request("SIGTERM")
        async with asyncio.timeout(30):
            assert await serving == 0
    assert "broker_serving" not in [line["event"] for line in logs]
