"""Connections for one call from Spark: how they are opened and closed, and event loops for synchronous callers."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_client.connection.pool import BookiePool
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import BadRequest, NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.directory import BookieDirectory
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from bindery_spark.sources import cluster as module
from bindery_spark.sources.cluster import connected, iterate, now_ms, quiet, run

LAYOUT = LedgersLayout("/mine")


class Opened:
    """ZooKeeper in memory, and the order in which connections are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = MemoryTree()
        self.closed: list[str] = []
        self.zookeeper: list[str] = []
        self.access: AccessFiles = NO_ACCESS
        monkeypatch.setattr(module, "zookeeper_connection", SimpleNamespace(connect=self._connect))
        for kind in (BookiePool, BookieDirectory, LedgerManager):
            monkeypatch.setattr(module, kind.__name__, self._noting(kind))

    def _noting(self, kind: Any) -> Any:
        closed = self.closed

        class Noting(kind):
            async def close(self) -> None:
                closed.append(kind.__name__)
                await super().close()

        return Noting

    async def _connect(self, zookeeper: str, access: AccessFiles) -> MetadataStore:
        self.zookeeper.append(zookeeper)
        self.access = access
        store = self.tree.connect()
        close = store.close

        async def closing() -> None:
            self.closed.append("store")
            await close()

        store.close = closing  # type: ignore[method-assign]
        return store

    async def initialize(self) -> None:
        await self.tree.connect().create(LAYOUT.available_readonly, b"", make_parents=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


# --- connections ------------------------------------------------------------------------------------------------------


async def test_everything_is_open_inside_and_closed_in_reverse_order(opened: Opened) -> None:
    await opened.initialize()
    access = AccessFiles(credentials_file="/z")
    async with connected("h:1", "/mine", timeout_s=8.0, access=access) as here:
        assert (opened.zookeeper, opened.access, opened.closed) == (["h:1"], access, [])
        assert here.layout == LAYOUT
        assert here.pool.directory is here.directory
        assert dict(here.directory.bookies) == {}
    assert opened.closed == ["BookiePool", "BookieDirectory", "LedgerManager", "store"]


async def test_everything_is_closed_after_an_error(opened: Opened) -> None:
    await opened.initialize()
    with pytest.raises(KeyError):
        async with connected("h:1", "/mine", timeout_s=8.0):
            raise KeyError
    assert opened.closed == ["BookiePool", "BookieDirectory", "LedgerManager", "store"]


async def test_the_store_is_closed_if_there_is_no_cluster(opened: Opened) -> None:
    with pytest.raises(NoSuchNode):
        async with connected("h:1", "/mine", timeout_s=8.0):
            pass
    assert opened.closed == ["store"]


async def test_unusable_credentials_are_refused_before_connecting(opened: Opened) -> None:
    with pytest.raises(BadRequest):
        async with connected("h:1", "/mine", timeout_s=8.0, security=SecurityFiles(token_file="/none/such")):
            pass
    assert opened.zookeeper == []


@pytest.mark.parametrize(
    ("timeout_s", "connect_timeout_s", "timer_tick_s"),
    [(8.0, 5.0, 0.05), (2.0, 2.0, 0.05), (0.1, 0.1, 0.025)],
)
async def test_timeouts_follow_the_read_timeout(
    opened: Opened, timeout_s: float, connect_timeout_s: float, timer_tick_s: float
) -> None:
    await opened.initialize()
    async with connected("h:1", "/mine", timeout_s=timeout_s) as here:
        settings = here.pool.settings
    assert (settings.read_timeout_s, settings.connect_timeout_s, settings.timer_tick_s) == (
        timeout_s,
        connect_timeout_s,
        timer_tick_s,
    )
    assert (settings.wire_version, settings.reconnect_pause_s, settings.reconnect_pause_s_max) == (2, 0.1, 1.0)


async def test_the_metadata_of_a_ledger_is_read_without_its_version(opened: Opened) -> None:
    await opened.initialize()
    segments = (Segment(EntryId(0), (BookieId("a"),)),)
    metadata = LedgerMetadata(ensemble_size=1, write_quorum=1, ack_quorum=1, segments=segments)
    async with connected("h:1", "/mine", timeout_s=8.0) as here:
        ledger_id = LedgerId(7)
        await here.manager.create_with_id(ledger_id, metadata)
        assert (await here.read(ledger_id)).segments == segments


# --- event loops ------------------------------------------------------------------------------------------------------


def test_a_coroutine_runs_to_completion_on_a_loop_of_its_own() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert (run(work), run(work)) == (7, 7)


class Items:
    """An asynchronous generator that notes when it ends."""

    def __init__(self, *items: Any, error: Exception | None = None) -> None:
        self._items = items
        self._error = error
        self.given: list[Any] = []
        self.is_ended = False

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            for item in self._items:
                await asyncio.sleep(0)
                self.given.append(item)
                yield item
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)
            self.is_ended = True


def test_items_are_iterated_in_order_and_one_at_a_time() -> None:
    items = Items(3, 0, "")
    found = iterate(items)
    assert items.given == []
    assert next(found) == 3
    assert items.given == [3]
    assert list(found) == [0, ""], "empty items do not end the iteration"
    assert items.is_ended


def test_a_generator_ends_if_its_iterator_is_closed_early() -> None:
    items = Items(1, 2, 3)
    found = iterate(items)
    assert next(found) == 1
    found.close()  # type: ignore[attr-defined]
    assert (items.given, items.is_ended) == ([1], True)


def test_errors_of_a_generator_reach_the_caller() -> None:
    items = Items(1, error=KeyError("x"))
    found = iterate(items)
    assert next(found) == 1
    with pytest.raises(KeyError):
        next(found)
    assert items.is_ended


def test_logging_is_configured_only_if_nobody_did(monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[dict[str, str]] = []
    monkeypatch.setattr(module, "logs", SimpleNamespace(configure=lambda **given: configured.append(given)))
    for is_configured in (True, False):
        monkeypatch.setattr(module, "structlog", SimpleNamespace(is_configured=lambda answer=is_configured: answer))
        quiet()
        assert len(configured) == int(not is_configured)
    assert configured == [{"service": "spark", "level": "warning"}]
    run(Items().__call__().aclose)  # type: ignore[arg-type]
    list(iterate(Items()))
    assert len(configured) == 3, "both kinds of calls are quiet"


def test_the_wall_clock_has_whole_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(time_ns=lambda: 1_800_000_000_123_999_999))
    assert now_ms() == 1_800_000_000_123
