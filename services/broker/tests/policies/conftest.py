"""An event loop without real time: waits end at once. The clocks of the broker are those of the harness."""

import asyncio
from collections.abc import Callable

import pytest
from bindery_simulation.instant import InstantLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"instant": InstantLoop}
