"""What the life of a service is made of: its ZooKeeper session, the wait for its end, and closing without surprises."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from bindery_metadata.stores.store import MetadataStore, SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_kit.http.http_server import HttpServer
from bindery_kit.observability.health import Health
from bindery_kit.observability.last_words import sentence_of_end
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.cluster_wait import ClusterWait
from bindery_kit.process.runtime import EXIT_ERROR, Shutdown, unless_shutdown

STEP_TIMEOUT_S: Final = 2.0
"""Longest that closing a connection takes at the end."""

log = get_logger(__name__)


async def join_cluster(
    zookeeper: str,
    *,
    wait: ClusterWait,
    session_timeout_s: float,
    shutdown: Shutdown,
) -> ZooKeeperStore | None:
    """A session with a ZooKeeper that has the cluster; None when the process is to stop first.

    Raises BadRequest (a list of servers that cannot be read) and what `wait` gives up with.
    """

    async def join() -> ZooKeeperStore:
        connecting = ZooKeeperStore.connect(
            zookeeper, session_timeout_s=session_timeout_s, connect_timeout_s=wait.limit_s
        )
        store = await wait.for_zookeeper(connecting)
        try:
            await wait.for_cluster(store)
        except BaseException:
            await store.close()
            raise
        return store

    return await unless_shutdown(shutdown, join())


def watch_session(store: MetadataStore, health: Health) -> None:
    """Not ready while there is no session."""

    def on_change(state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            health.clear("metadata")
        else:
            health.block("metadata", f"the ZooKeeper session is {state.value}")
        log.info("zookeeper_session", state=state.value)

    store.on_session_change(on_change)


def ask_exit(health: Health, shutdown: Shutdown, part: str, reason: str) -> None:
    """A part cannot go on, and the process must not go on without it."""
    health.fail(part, reason)
    shutdown.request(reason, exit_code=EXIT_ERROR)


async def until_shutdown(
    shutdown: Shutdown, parts: Iterable["asyncio.Task[Any]"], server: HttpServer, health: Health
) -> None:
    """Until the signal, or until a part ends that must not."""
    stop = asyncio.create_task(shutdown.wait(), name="shutdown")
    http = asyncio.create_task(server.wait(), name="http")
    try:
        done, _ = await asyncio.wait([stop, http, *parts], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        http.cancel()
    for part in done - {stop}:
        error = None if part.cancelled() else part.exception()
        log.error("part_died", part=part.get_name(), exc_info=error)
        ask_exit(health, shutdown, part.get_name(), sentence_of_end(part.get_name(), error))


async def quietly(event: str, step: Callable[[], Awaitable[None]], *, timeout_s: float = STEP_TIMEOUT_S) -> None:
    """At the end of a process an error is for the log: the next step must still run."""
    try:
        async with asyncio.timeout(timeout_s):
            await step()
    except Exception as error:
        log.warning(event, **error_fields(error))
