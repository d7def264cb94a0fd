"""Make the helper modules of this folder importable for its tests, and run the tests on both event loops.

The services run on uvloop, whose transports and timers differ from asyncio's in details that matter here.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from bindery_simulation.instant import InstantLoop

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ledger_client_contract")

WITHOUT_SOCKETS = (
    "test_add_window.py",
    "test_bookie_requests_in_memory.py",
    "test_connection_without_sockets.py",
    "test_deadline_timer.py",
    "test_in_flight_budget.py",
    "test_memory.py",
    "test_memory_replicas.py",
    "test_metadata_changes_in_memory.py",
    "test_pool_without_sockets.py",
    "test_read_operation.py",
    "test_reader_without_sockets.py",
    "test_recovery.py",
    "test_requests.py",
)
"""Modules whose tests run on a loop whose time advances at once to the next timer."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("integration"):
        return {"uvloop": uvloop.new_event_loop}
    if item.path.name in WITHOUT_SOCKETS:
        return {"instant": InstantLoop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
