"""A cluster in memory, on an event loop without real time: waits end at once."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from bindery_simulation.instant import InstantLoop
from managed_ledger_cluster import Cluster


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"instant": InstantLoop}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.end()
