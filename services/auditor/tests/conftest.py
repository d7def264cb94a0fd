"""Run tests without real processes on a loop whose time advances at once to the next timer."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bindery_simulation.instant import InstantLoop

sys.path.insert(0, str(Path(__file__).parent))

REAL = ("test_process.py",)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in REAL:
        return {"asyncio": asyncio.new_event_loop}
    return {"instant": InstantLoop}
