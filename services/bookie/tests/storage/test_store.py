"""EntryStore: what its values carry, and that every store of a bookie has the whole interface."""

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.shards import ShardedStorage
from bindery_bookie.storage.store import EntryStore, LacState, ReplayProgress

OPERATIONS: dict[str, Callable[..., Any]] = {
    name: member for name, member in vars(EntryStore).items() if inspect.isfunction(member) and not name.startswith("_")
}


def test_the_interface_has_the_operations_of_the_server() -> None:
    assert set(OPERATIONS) == {
        "open",
        "close",
        "add_many",
        "read_many",
        "fence",
        "write_lac",
        "read_lac",
        "last_add_confirmed",
        "watch_lac",
        "lac_updated_at_ms",
        "force",
        "entry_ids",
        "list_ledger_ids",
        "delete_ledger",
        "disk_usage",
    }


@pytest.mark.parametrize("store", [StorageEngine, ShardedStorage])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_store_has_the_operation_with_the_same_arguments(store: type, name: str) -> None:
    expected = OPERATIONS[name]
    found = getattr(store, name)
    assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(expected)
    wanted = inspect.signature(expected).parameters
    given = inspect.signature(found).parameters
    assert [(key, given[key].kind) for key in wanted] == [(key, wanted[key].kind) for key in wanted]
    extra = [given[key] for key in given if key not in wanted]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in extra)


def test_the_progress_of_a_replay_is_a_value() -> None:
    progress = ReplayProgress(bytes_done=512, bytes_total=2048, entries=3)
    assert progress == ReplayProgress(512, 2048, 3)
    assert progress != ReplayProgress(512, 2048, 4)
    with pytest.raises(FrozenInstanceError):
        progress.entries = 4  # type: ignore[misc]


def test_the_lac_state_tells_a_missing_packet_from_an_empty_one() -> None:
    assert LacState(None, b"last") != LacState(b"", b"last")
    assert LacState(explicit_packet=b"packet", last_entry=None) == LacState(b"packet", None)
