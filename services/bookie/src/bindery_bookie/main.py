"""`bindery-bookie`: settings, logs, signals, and one BookieProcess between them. Exit codes: 0, 1 error, 2 usage."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.configuration.settings import Settings, load, warn_of_unknown_variables
from bindery_kit.observability import last_words
from bindery_kit.observability.logs import LEVELS, configure, error_fields, get_logger
from bindery_kit.process.cluster_wait import limit_s
from bindery_kit.process.runtime import EXIT_USAGE, Shutdown, run_service, unless_shutdown
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_bookie.container import memory_limit
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings

PROGRAM = "bindery-bookie"
HEADROOM: Final = 64 * 1024 * 1024
"""Bytes that a container's limit should leave above `memory_size_max`, which is kept to about 15 %; what the kernel
counts for the container besides, as dirty pages, goes there too."""

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    settings = load(BookieSettings, argv, prog=PROGRAM, description=BookieSettings.__doc__ or "")
    if settings.log_level not in LEVELS:
        last_words.say(PROGRAM, f"--log-level (BOOKIE_LOG_LEVEL) must be one of {', '.join(LEVELS)}")
        return EXIT_USAGE
    configure(service="bookie", level=settings.log_level)
    _look_at_environment(settings)
    warn_of_memory_limit(settings, memory_limit())

    return run_service(lambda shutdown: _serve(settings, shutdown), program=PROGRAM)


def _look_at_environment(settings: BookieSettings) -> None:
    """Tell of names that no setting has. What is wrong with the settings of healing ends the process now."""
    kinds: list[type[Settings]] = [BookieSettings]
    if settings.autorecovery_embedded or any(name.upper().startswith("BOOKIE_RECOVERY_") for name in os.environ):
        from bindery_bookie.embedded_settings import EmbeddedRecoverySettings

        kinds.append(EmbeddedRecoverySettings)
        if settings.autorecovery_embedded:
            load(EmbeddedRecoverySettings, (), prog=PROGRAM)
    warn_of_unknown_variables("BOOKIE_", *kinds)


def warn_of_memory_limit(settings: BookieSettings, limit: int | None) -> None:
    """`limit`: the container's, in bytes."""
    if limit is not None and limit < settings.memory_size_max + HEADROOM:
        log.warning(
            "memory_limit_too_small",
            limit=limit,
            memory_size_max=settings.memory_size_max,
            headroom=HEADROOM,
            reason=f"the container is killed above {limit} bytes, and the bookie means to use up to "
            f"{settings.memory_size_max} and in bad moments {HEADROOM} more; raise the container's memory limit, "
            "or lower BOOKIE_MEMORY_SIZE_MAX",
        )


async def _serve(settings: BookieSettings, shutdown: Shutdown) -> int | None:
    process = BookieProcess(
        settings, shutdown, connect=_connect, clock=time.monotonic, wall_clock_ms=lambda: time.time_ns() // 1_000_000
    )
    try:
        await unless_shutdown(shutdown, process.start())
        if not shutdown.is_set:
            await process.run()
    except (BinderyError, OSError) as error:
        log.error("bookie_failed", **error_fields(error))
        return shutdown.give_up(error)
    finally:
        await process.stop()
    return None


async def _connect(settings: BookieSettings) -> MetadataStore:
    return await ZooKeeperStore.connect(
        settings.zookeeper,
        session_timeout_s=settings.zookeeper_session_timeout_s,
        connect_timeout_s=limit_s(settings.zookeeper_connect_timeout_s),
    )


if __name__ == "__main__":
    sys.exit(main())
