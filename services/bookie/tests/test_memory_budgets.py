"""Memory budgets are derived from one setting unless they are set, and together they do not exceed it."""

import re

import pytest
from bindery_bookie import memory
from bindery_bookie.memory import BASE_SIZE, LEDGER_SIZE, MIB, PENDING_READ_SIZE, SECURED_SIZE
from bindery_bookie.server.port_limits import PAUSED_FACTOR
from bindery_bookie.settings import BookieSettings


def most(settings: BookieSettings) -> int:
    """Return the bytes of all budgets together."""
    server, storage = settings.server, settings.storage
    return (
        BASE_SIZE
        + 2 * storage.write_cache_size_max
        + 2 * server.adds_size_max
        + server.reads_size_max * 3 // 2
        + storage.read_cache_size_max
        + storage.index_block_cache_size
        + 2 * storage.index_write_buffer_size
        + (1 + PAUSED_FACTOR) * server.unfinished_size_max
        + server.secured_connections_max * SECURED_SIZE
        + server.pending_reads_max * PENDING_READ_SIZE
        + storage.ledgers_max * LEDGER_SIZE
    )


@pytest.mark.parametrize("size", [memory.SIZE_MIN, 384 * MIB, 4096 * MIB])
def test_budgets_add_up_to_the_maximum_of_the_process(size: int) -> None:
    settings = BookieSettings(memory_size_max=size)
    assert 0.99 * size <= most(settings) <= size
    assert settings.storage.waiting_size_max == settings.server.adds_size_max
    assert settings.storage.read_job_size_max == settings.server.reads_size_max


def test_the_default_memory_size_is_384_mib() -> None:
    assert BookieSettings().memory_size_max == 384 * MIB


def test_settings_that_are_set_keep_their_value_and_the_others_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKIE_STORAGE_READ_CACHE_SIZE_MAX", "12345678")
    plain, tuned = BookieSettings(), BookieSettings(server={"adds_size_max": 7 * MIB})
    assert tuned.server.adds_size_max == 7 * MIB
    assert tuned.storage.read_cache_size_max == 12345678
    assert tuned.storage.write_cache_size_max == memory.derived("storage", 384 * MIB)["write_cache_size_max"]
    assert plain.memory_size_max == 384 * MIB
    sources = {setting.name: setting.source for setting in tuned.effective()}
    assert sources["server.adds_size_max"] == "argument"
    assert sources["storage.read_cache_size_max"] == "environment BOOKIE_STORAGE_READ_CACHE_SIZE_MAX"
    assert sources["storage.write_cache_size_max"] == "default"


def test_the_table_in_the_docstring_matches_the_formula() -> None:
    rows = re.findall(r"\| (storage|server)\.(\w+) +\| +([\d.]+) % \| +([\d.]+) \| +(\d+) % \|", memory.__doc__ or "")
    assert len(rows) == 10
    assert sum(int(whole) for *_, whole in rows) == 100
    rest = 512 * MIB - BASE_SIZE
    units = {
        "pending_reads_max": PENDING_READ_SIZE,
        "ledgers_max": LEDGER_SIZE,
        "secured_connections_max": SECURED_SIZE,
    }
    for group, name, share, times, whole in rows:
        assert float(share) * float(times) == int(whole)
        found = memory.derived(group, 512 * MIB)[name] * units.get(name, 1)
        assert abs(found - rest * float(share) / 100) < 2 * units.get(name, 1)
