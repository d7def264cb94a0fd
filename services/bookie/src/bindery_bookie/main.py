"""`bindery-bookie`: settings, logs, signals, and one BookieProcess between them. Exit codes: 0, 1 error, 2 usage."""

import asyncio
import sys
import time
from collections.abc import Sequence

from bindery_core.errors import BinderyError
from bindery_kit.logs import LEVELS, configure, error_fields, get_logger
from bindery_kit.runtime import EXIT_ERROR, EXIT_USAGE, Shutdown, run
from bindery_kit.settings import load
from bindery_metadata.store import MetadataStore
from bindery_metadata.zookeeper import ZooKeeperStore

from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings

PROGRAM = "bindery-bookie"

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    settings = load(BookieSettings, argv, prog=PROGRAM, description=BookieSettings.__doc__ or "")
    if settings.log_level not in LEVELS:
        sys.stderr.write(f"{PROGRAM}: --log-level must be one of {', '.join(LEVELS)}\n")
        return EXIT_USAGE
    configure(service="bookie", level=settings.log_level)

    async def serve(shutdown: Shutdown) -> int | None:
        return await _serve(settings, shutdown)

    return run(serve)


async def _serve(settings: BookieSettings, shutdown: Shutdown) -> int | None:
    try:
        process = BookieProcess(
            settings,
            shutdown,
            connect=_connect,
            clock=time.monotonic,
            wall_clock_ms=lambda: time.time_ns() // 1_000_000,
        )
    except BinderyError as error:
        return _failed(error)
    try:
        if await _start(process, shutdown):
            await process.run()
    except (BinderyError, OSError) as error:
        return _failed(error)
    finally:
        await process.stop()
    return None


def _failed(error: BaseException) -> int:
    log.error("bookie_failed", **error_fields(error))
    sys.stderr.write(f"{PROGRAM}: {error}\n")
    return EXIT_ERROR


async def _start(process: BookieProcess, shutdown: Shutdown) -> bool:
    """False when the shutdown came first: a start may wait long, for ZooKeeper or for a replay."""
    starting, stopping = asyncio.create_task(process.start()), asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
        return starting.done()
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _connect(settings: BookieSettings) -> MetadataStore:
    return await ZooKeeperStore.connect(
        settings.zookeeper,
        session_timeout_s=settings.zookeeper_session_timeout_s,
        connect_timeout_s=settings.zookeeper_connect_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
