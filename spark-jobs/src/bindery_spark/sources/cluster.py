"""Connect to the cluster for the duration of one call from Spark: event loop, ZooKeeper, connections to bookies."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog
import uvloop
from bindery_client.connection.pool import BookiePool
from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_client.settings import ClientSettings
from bindery_core.errors import NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import LedgerId
from bindery_kit.observability import logs
from bindery_metadata.bookies.directory import BookieDirectory
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles

from bindery_spark.reading import zookeeper as zookeeper_connection
from bindery_spark.sources import bookie_access

T = TypeVar("T")
TIMER_TICK_S: Final = 0.05
"""Granularity in seconds of request timeouts."""
CHECK_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds that a bookie may take to accept the credentials of a job before it begins."""
RANDOMNESS: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Open connections to one cluster. `connected` opens and closes them."""

    store: ZooKeeperStore
    layout: LedgersLayout
    directory: BookieDirectory
    manager: LedgerManager
    pool: BookiePool

    async def read(self, ledger_id: LedgerId) -> LedgerMetadata:
        """See `reader.MetadataReader`."""
        return (await self.manager.read(ledger_id)).value


@asynccontextmanager
async def connected(
    zookeeper: str,
    ledgers_root: str,
    *,
    timeout_s: float,
    security: SecurityFiles = NO_FILES,
    access: AccessFiles = NO_ACCESS,
) -> AsyncIterator[Cluster]:
    """Connect to the cluster. `timeout_s`: per-bookie read timeout; `security`: credentials presented to bookies;
    `access`: those presented to ZooKeeper.

    Raises MetadataUnavailable if ZooKeeper does not answer, BadRequest if a credential file is unusable, Unauthorized
    if the bookies refuse the credentials.
    """
    credentials = security.load()
    layout = LedgersLayout(ledgers_root)
    settings = ClientSettings(
        wire_version=2,
        read_timeout_s=timeout_s,
        connect_timeout_s=min(5.0, timeout_s),
        reconnect_pause_s=0.1,
        reconnect_pause_s_max=1.0,
        timer_tick_s=min(TIMER_TICK_S, timeout_s / 4),
    )
    randomness = RANDOMNESS
    store = await zookeeper_connection.connect(zookeeper, access)
    try:
        directory = BookieDirectory(store, layout)
        await directory.start()
        pool = BookiePool(directory, settings=settings, randomness=randomness, security=credentials)
        manager = LedgerManager(store, layout, randomness=randomness)
        try:
            async with bookie_access.explained(security):
                yield Cluster(store, layout, directory, manager, pool)
        finally:
            await pool.close()
            await directory.close()
            await manager.close()
    finally:
        await store.close()


def check_access(zookeeper: str, ledgers_root: str, security: SecurityFiles, access: AccessFiles) -> None:
    """Connect to ZooKeeper and the bookies before Spark starts. Raises Unauthorized if the bookies refuse the
    credentials, what ZooKeeper raises, and BadRequest if a file cannot be used. It does not report that there is no
    cluster."""

    async def ask() -> None:
        async with connected(
            zookeeper, ledgers_root, timeout_s=CHECK_TIMEOUT_S, security=security, access=access
        ) as here:
            await bookie_access.check(here.pool, security, timeout_s=CHECK_TIMEOUT_S)

    with suppress(NoSuchNode):
        run(ask)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to completion on a new event loop."""
    quiet()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def iterate(source: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Iterate over an asynchronous generator from synchronous code. The event loop does not run between two items, so
    the generator must have no request with a deadline in flight when it yields."""
    quiet()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        items = source()
        try:
            while (item := runner.run(_next(items))) is not None:
                yield item
        finally:
            runner.run(items.aclose())


async def _next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


def quiet() -> None:
    """Log warnings and errors only: Spark shows the output of its worker processes to the user."""
    if not structlog.is_configured():
        logs.configure(service="spark", level="warning")


def now_ms() -> int:
    return time.time_ns() // 1_000_000
