"""`bindery-bookie`: the process of one bookie (`bindery_kit.process.service_life` has the life cycle).

Exit codes: 0 after a requested stop, 1 after an error, 2 for settings that cannot be used.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from bindery_kit.configuration.settings import Settings, load
from bindery_kit.limits.container import memory_limit
from bindery_kit.observability.logs import get_logger
from bindery_kit.process.program import run_program
from bindery_kit.process.runtime import Shutdown
from bindery_kit.process.service_life import run_life, zookeeper_connector

from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings

PROGRAM = "bindery-bookie"
DESCRIPTION = BookieSettings.__doc__ or ""
HEADROOM: Final = 64 * 1024 * 1024
"""Bytes by which a container's memory limit should exceed `memory_size_max`: the process may exceed that maximum by
about 15 %, and the kernel also counts dirty pages for the container."""

log = get_logger(__name__)


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


async def serve(settings: BookieSettings, shutdown: Shutdown) -> int:
    """Run the bookie until `shutdown`, and return the exit code."""
    connect = zookeeper_connector(
        settings.zookeeper,
        session_timeout_s=settings.zookeeper_session_timeout_s,
        connect_timeout_s=settings.zookeeper_connect_timeout_s,
        access=settings.zookeeper_access,
    )
    return await run_life(
        lambda: BookieProcess(settings, shutdown, connect=connect, clock=time.monotonic, wall_clock_ms=wall_clock_ms),
        shutdown,
        failed_event="bookie_failed",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return run_program(
        PROGRAM, BookieSettings, serve, argv, service="bookie", description=DESCRIPTION, check=_check_environment
    )


def _check_environment(settings: BookieSettings) -> Sequence[type[Settings]]:
    """Warn of a memory limit that is too small, and return the settings of recovery inside a bookie if they are used.

    If recovery is enabled and one of these settings has an invalid value, the process ends now.
    """
    warn_of_memory_limit(settings, memory_limit())
    if not settings.autorecovery_embedded and not any(
        name.upper().startswith("BOOKIE_RECOVERY_") for name in os.environ
    ):
        return ()
    from bindery_bookie.autorecovery.embedded_settings import EmbeddedRecoverySettings

    if settings.autorecovery_embedded:
        load(EmbeddedRecoverySettings, (), prog=PROGRAM)
    return (EmbeddedRecoverySettings,)


def warn_of_memory_limit(settings: BookieSettings, limit: int | None) -> None:
    """Log a warning if the container's memory limit in bytes, `limit`, leaves too little above `memory_size_max`."""
    if limit is not None and limit < settings.memory_size_max + HEADROOM:
        log.warning(
            "memory_limit_too_small",
            limit=limit,
            memory_size_max=settings.memory_size_max,
            headroom=HEADROOM,
            reason=f"the container is killed above {limit} bytes, and the bookie may use {settings.memory_size_max} "
            f"bytes and up to {HEADROOM} more under load. Raise the container's memory limit, or lower "
            "BOOKIE_MEMORY_SIZE_MAX",
        )


if __name__ == "__main__":
    sys.exit(main())
