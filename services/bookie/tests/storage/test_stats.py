"""StorageStats: a shard begins with all counters at zero, and without listeners."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from bindery_bookie.storage.stats import StorageStats

ONE_VALUE = ("observe_sync_s", "observe_group_size", "observe_flush_s", "observe_read_ahead", "observe_gc_s")
WITH_COUNT = ("observe_journal_add", "observe_journal_queue")
FLAGS = ("journal_failed", "journal_full", "flush_failed")


def test_all_counters_and_gauges_begin_at_zero() -> None:
    stats = StorageStats()
    numbers = {field.name: getattr(stats, field.name) for field in fields(stats)}
    numbers = {name: value for name, value in numbers.items() if not callable(value)}
    assert len(numbers) == len(fields(stats)) - len(ONE_VALUE) - len(WITH_COUNT) - 1  # the last one is `no_space`
    assert set(numbers.values()) == {0}
    assert {name for name, value in numbers.items() if value is False} == set(FLAGS)


def test_seconds_are_fractions() -> None:
    seconds = {name: getattr(StorageStats(), name) for name in ("journal_sync_s", "flush_s", "gc_s", "replay_s")}
    assert {type(value) for value in seconds.values()} == {float}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (1.5,)) for name in ONE_VALUE),
        *((name, (1.5, 3)) for name in WITH_COUNT),
        ("no_space", ("No space left on device",)),
    ],
)
def test_a_hook_does_nothing_until_it_is_set(name: str, values: tuple[Any, ...]) -> None:
    stats = StorageStats()
    hook: Callable[..., None] = getattr(stats, name)
    hook(*values)
    assert stats == StorageStats()
    heard: list[tuple[Any, ...]] = []

    def listen(*found: Any) -> None:
        heard.append(found)

    setattr(stats, name, listen)
    getattr(stats, name)(*values)
    assert heard == [values]


def test_shards_count_separately() -> None:
    first, second = StorageStats(), StorageStats()
    heard: list[float] = []
    first.adds_ok += 3
    first.observe_sync_s = heard.append
    assert second.adds_ok == 0
    assert second.observe_sync_s is StorageStats().observe_sync_s


def test_a_misspelled_field_is_refused() -> None:
    with pytest.raises(AttributeError):
        setattr(StorageStats(), "adds_okay", 1)  # noqa: B010 - mypy refuses the assignment
