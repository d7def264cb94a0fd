"""ReadHandle: which metadata it accepts, and when it polls bookies."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import EntryId
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned
from fake_cluster import FakeCluster

Listener = Callable[[Versioned[LedgerMetadata] | None], None]
LIMIT_S = 30.0


@pytest.fixture
def listeners(monkeypatch: pytest.MonkeyPatch) -> list[Listener]:
    """The listeners that readers register with `LedgerManager.watch`, so that a test can call them."""
    found: list[Listener] = []
    watch = LedgerManager.watch

    def recording(self: LedgerManager, ledger_id: Any, listener: Listener) -> Callable[[], None]:
        found.append(listener)
        return watch(self, ledger_id, listener)

    monkeypatch.setattr(LedgerManager, "watch", recording)
    return found


async def test_older_metadata_is_ignored(listeners: list[Listener]) -> None:
    """A read of the metadata that was delayed must not bring back an ensemble that was replaced."""
    async with FakeCluster(bookies=4) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        old = reader.metadata
        await cluster.of(old.last_segment.ensemble)[0].stop()
        await writer.add(b"1")
        async with asyncio.timeout(LIMIT_S):
            while reader.metadata.segments == old.segments:
                await asyncio.sleep(0.01)
        replaced = reader.metadata
        for listener in listeners:
            listener(Versioned(old, 0))
        assert reader.metadata == replaced
        await writer.close()


async def test_a_stale_open_state_does_not_reopen_a_closed_ledger(listeners: list[Listener]) -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        old = reader.metadata
        await writer.close()
        async with asyncio.timeout(LIMIT_S):
            while not reader.is_closed:
                await asyncio.sleep(0.01)
        for listener in listeners:
            listener(Versioned(old, 0))
        assert reader.is_closed
        assert reader.last_add_confirmed == 0


async def test_nothing_changes_after_the_handle_was_released(listeners: list[Listener]) -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        await reader.release()
        await writer.close()
        for listener in listeners:
            listener(Versioned(writer.metadata, 99))
        assert not reader.is_closed


async def test_waiting_for_a_confirmed_entry_returns_at_once_and_polls_no_bookie() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        assert await reader.wait_for_entry(EntryId(0), timeout_s=LIMIT_S)
        confirmed = reader.last_add_confirmed
        before = sum(bookie.requests["ReadRequest"] for bookie in cluster.bookies.values())
        assert await reader.wait_for_entry(EntryId(confirmed), timeout_s=LIMIT_S)
        assert sum(bookie.requests["ReadRequest"] for bookie in cluster.bookies.values()) == before


async def test_an_entry_from_a_long_poll_is_not_read_again() -> None:
    """A long poll that returns an entry saves the read of it, once."""
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client(long_poll_s=30.0)).open(writer.ledger_id, recover=False)
        assert await reader.wait_for_entry(EntryId(0), timeout_s=LIMIT_S)
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(1), timeout_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while not any(bookie.ledgers[writer.ledger_id].polls for bookie in cluster.bookies.values()):
                await asyncio.sleep(0.01)
        await writer.add(b"1")
        assert await waiting
        for bookie in cluster.bookies.values():
            bookie.ledgers[writer.ledger_id].entries.pop(1, None)
        assert [entry.payload for entry in await reader.read(EntryId(1), EntryId(1))] == [b"1"]
