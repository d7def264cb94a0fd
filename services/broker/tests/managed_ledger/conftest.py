"""A cluster in memory, on an event loop without real time: no test here depends on the speed of the machine."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from bindery_simulation.instant import InstantLoop
from managed_ledger_cluster import Cluster


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name == "test_crashes.py":  # its consumers poll without a pause, so the loop is never idle
        return {"asyncio": asyncio.new_event_loop}
    return {"instant": InstantLoop}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.end()
