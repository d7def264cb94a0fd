"""Fixtures: `world` gives each test both worlds."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.store import MetadataStore
from worlds import MemoryWorld, World, ZooKeeperWorld, free_port


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    """One real server for the whole run."""
    spec = ServerSpec(tmp_path_factory.mktemp("zookeeper"), free_port(), tick_ms=200, session_timeout_ms_min=400)
    server = EmbeddedZooKeeper(spec)
    asyncio.run(server.start())
    yield spec
    asyncio.run(server.stop())


@pytest.fixture(params=["memory", pytest.param("zookeeper", marks=pytest.mark.integration)])
def server(request: pytest.FixtureRequest) -> ServerSpec | None:
    """None: the world in memory."""
    return None if request.param == "memory" else request.getfixturevalue("zookeeper")


@pytest.fixture
async def world(server: ServerSpec | None) -> AsyncIterator[World]:
    if server is None:
        world: World = MemoryWorld()
    else:
        world = ZooKeeperWorld(server.host, server.client_port)
        await world.wipe()
    yield world
    await world.close()


@pytest.fixture
async def store(world: World) -> MetadataStore:
    return await world.connect()


@pytest.fixture
async def other(world: World) -> MetadataStore:
    return await world.connect()
