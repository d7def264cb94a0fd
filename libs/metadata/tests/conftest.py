"""Fixtures of all tests. `environment` runs each test in memory and with a real ZooKeeper."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.store import MetadataStore
from store_environments import MemoryEnvironment, StoreEnvironment, ZooKeeperEnvironment, free_port


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    """One real server for all tests."""
    spec = ServerSpec(tmp_path_factory.mktemp("zookeeper"), free_port(), tick_ms=200, session_timeout_ms_min=400)
    server = EmbeddedZooKeeper(spec)
    asyncio.run(server.start())
    yield spec
    asyncio.run(server.stop())


@pytest.fixture(params=["memory", pytest.param("zookeeper", marks=pytest.mark.integration)])
def server(request: pytest.FixtureRequest) -> ServerSpec | None:
    """Return the server of the environment; None: the in-memory environment."""
    return None if request.param == "memory" else request.getfixturevalue("zookeeper")


@pytest.fixture
async def environment(server: ServerSpec | None) -> AsyncIterator[StoreEnvironment]:
    if server is None:
        environment: StoreEnvironment = MemoryEnvironment()
    else:
        environment = ZooKeeperEnvironment(server.host, server.client_port)
        await environment.wipe()
    yield environment
    await environment.close()


@pytest.fixture
async def store(environment: StoreEnvironment) -> MetadataStore:
    return await environment.connect()


@pytest.fixture
async def other(environment: StoreEnvironment) -> MetadataStore:
    return await environment.connect()
