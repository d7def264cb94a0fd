"""The start of a broker while ZooKeeper does not answer."""

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from bindery_broker import main
from bindery_broker.settings import AuthSettings, BrokerSettings
from bindery_core.errors import MetadataUnavailable
from bindery_kit.process import cluster_wait, followed_files
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


async def test_files_are_followed_while_the_start_waits(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.01)
    monkeypatch.setattr(followed_files, "POLL_INTERVAL_S", 0.01)

    def fail_again() -> None:
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)

    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    fail_again()
    shutdown = Shutdown()
    settings = BrokerSettings(port=0, auth=AuthSettings(tokens_keys_file=str(keys)))
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(settings, shutdown))
        await until("bookies_not_read", logs)
        keys.write_text("n" * 33)
        async with asyncio.timeout(30):
            while "followed_file_read" not in (events := [line["event"] for line in logs]):
                fail_again()
                await asyncio.sleep(0.001)
        shutdown.request("SIGTERM")
        assert await serving == 0
    assert "broker_serving" not in events
