"""The life cycle that every service process has: start, serve until something ends it, stop in reverse order.

    make(shutdown)      build the service and bind its ports; a port that is in use fails here, before anything is done
      service.start()   wait for ZooKeeper and its cluster, connect, register, serve; each step records how it is undone
      serve             until a signal, or until a part that must not end ends
      stop              undo the recorded steps, the last one first

`run_life` runs these steps; a service has a `ServiceLife`, on which `start` records its steps:

    life.on_stop(store.close, event="zookeeper_session_not_closed")   an error of this step is only logged
    life.on_stop(engine.close)                                        an error of this step fails the process
    life.on_stop(life.cancel_parts)                                   where in the order the parts end
    life.start_part("maintenance", broker.maintain_forever())         a task that must run until then

Invariants: every recorded step runs exactly once, whether or not `start` succeeded and whether or not other steps fail.
Importing this module is cheap: a bookie serves its ledger port before any HTTP code is loaded.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from bindery_core.errors import BinderyError
from bindery_metadata.stores.store import MetadataStore, SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings
from bindery_kit.observability.health import Health
from bindery_kit.observability.last_words import sentence_of_end
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.cluster_wait import ClusterWait, limit_s
from bindery_kit.process.runtime import EXIT_ERROR, EXIT_USAGE, Shutdown, unless_shutdown

STEP_TIMEOUT_S: Final = 2.0
"""Default timeout in seconds of one step of the stop."""

S = TypeVar("S", bound=MetadataStore)

log = get_logger(__name__)


class ServiceLife:
    """The parts of one service process and the steps that stop it."""

    def __init__(self, name: str, shutdown: Shutdown, health: Health, *, part_died_event: str = "part_died") -> None:
        """`name`: name of the service, as in its log events. `part_died_event`: log event for a part that ends."""
        self.name = name
        self.shutdown = shutdown
        self.health = health
        self._part_died_event = part_died_event
        self._steps = contextlib.AsyncExitStack()
        self._parts: list[asyncio.Task[Any]] = []

    def on_stop(
        self, step: Callable[[], Awaitable[None]], *, event: str | None = None, timeout_s: float = STEP_TIMEOUT_S
    ) -> None:
        """Record a step of the stop.

        With `event`, an error or a timeout is logged under that name. Without it there is no timeout, and an error is
        raised at the end of the stop, after the remaining steps.
        """
        if event is not None:
            self._steps.push_async_callback(quietly, event, step, timeout_s=timeout_s)
        else:
            self._steps.push_async_callback(step)

    def start_part(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` as a task that must not end before the stop. If it ends, the process ends with an error."""
        self._parts.append(asyncio.create_task(work, name=name))

    async def until_shutdown(self) -> None:
        """Return when the shutdown is requested or a part ends. An ended part is logged and requests the shutdown."""
        stop = asyncio.create_task(self.shutdown.wait(), name="shutdown")
        try:
            done, _ = await asyncio.wait({stop, *self._parts}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for part in done - {stop}:
            error = None if part.cancelled() else part.exception()
            log.error(self._part_died_event, part=part.get_name(), exc_info=error)
            self.fail(part.get_name(), sentence_of_end(part.get_name(), error))

    def fail(self, part: str, reason: str) -> None:
        """Record that a part has failed, and request the shutdown, because the process must not run without it."""
        self.health.fail(part, reason)
        self.shutdown.request(reason, exit_code=EXIT_ERROR)

    async def stop(self) -> None:
        """Run the recorded steps, the last one first. Safe after a start that failed half way. Idempotent."""
        try:
            await self._steps.aclose()
        finally:
            await self.cancel_parts()  # parts of a start that failed before it recorded `cancel_parts`

    async def cancel_parts(self) -> None:
        """Cancel all parts and wait for their ends."""
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)


class Service(Protocol):
    """A service that `run_life` can run."""

    @property
    def life(self) -> ServiceLife: ...

    async def start(self) -> None:
        """Return once the service serves. Raises BinderyError, OSError."""
        ...

    async def stop(self) -> None:
        """Make /readyz answer 503, then stop `life`."""
        ...


async def run_life(
    make: Callable[[], Service],
    shutdown: Shutdown,
    *,
    not_started_event: str = "process_not_started",
    failed_event: str = "process_failed",
    usage_errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run a service from start to stop and return the exit code of the process.

    `make` builds the service. If it raises one of `usage_errors`, the error is logged as `not_started_event` and the
    exit code is EXIT_USAGE. An error of the start is logged as `failed_event`.
    """
    try:
        service = make()
    except usage_errors as error:
        log.error(not_started_event, **error_fields(error))
        return shutdown.give_up(error, exit_code=EXIT_USAGE)
    try:
        await unless_shutdown(shutdown, service.start())
        if not shutdown.is_set:
            await service.life.until_shutdown()
    except (BinderyError, OSError) as error:
        log.error(failed_event, **error_fields(error))
        shutdown.give_up(error)
    finally:
        await service.stop()
    return shutdown.exit_code


# --- the cluster --------------------------------------------------------------------------------------------------


async def join_cluster(life: ServiceLife, connect: Callable[[], Awaitable[S]], *, wait: ClusterWait) -> S:
    """Wait for ZooKeeper and for an initialized cluster, and return the session, which the stop closes.

    `connect`: see `zookeeper_connector`. Raises BadRequest for a server list that cannot be parsed, and the errors of
    `wait`.
    """
    store = await wait.for_zookeeper(connect())
    life.on_stop(store.close, event="zookeeper_session_not_closed")
    await wait.for_cluster(store)
    return store


def zookeeper_connector(
    zookeeper: str,
    *,
    session_timeout_s: float,
    connect_timeout_s: float,
    access: ZooKeeperAccessSettings | None = None,
) -> Callable[[], Awaitable[ZooKeeperStore]]:
    """Return a `connect` for `join_cluster`. `connect_timeout_s`: 0 waits without limit.

    `connect` also raises the BadRequest of `access.load`.
    """

    async def connect() -> ZooKeeperStore:
        return await ZooKeeperStore.connect(
            zookeeper,
            session_timeout_s=session_timeout_s,
            connect_timeout_s=limit_s(connect_timeout_s),
            access=access.load() if access is not None else None,
        )

    return connect


def watch_session(store: MetadataStore, health: Health) -> None:
    """Block readiness while there is no ZooKeeper session."""

    def on_change(state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            health.clear("metadata")
        else:
            health.block("metadata", f"the ZooKeeper session is {state.value}")
        log.info("zookeeper_session", state=state.value)

    store.on_session_change(on_change)


async def quietly(event: str, step: Callable[[], Awaitable[None]], *, timeout_s: float = STEP_TIMEOUT_S) -> None:
    """Run one step of a stop. An error or a timeout is logged as `event`, because the next step must still run."""
    try:
        async with asyncio.timeout(timeout_s):
            await step()
    except Exception as error:
        log.warning(event, **error_fields(error))
