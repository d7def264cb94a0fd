"""`bindery-broker`: the process. Settings, connections, HTTP, and an orderly end.

    start: bind the port -> ZooKeeper -> ledger client -> serve -> register
    SIGTERM: not ready -> end waiting calls, finish requests -> close topics (cursors stored, ledgers sealed)
             -> give bundles and the registration up -> end the session

The port is bound before anything else, so that a second broker on it fails at once; until ZooKeeper answers /startupz
says what the start waits for.
"""

import asyncio
import contextlib
import gc
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from bindery_client.client import LedgerClient
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit import logs
from bindery_kit.health import Health, OpsApp
from bindery_kit.http_server import BindRefused, HttpServer
from bindery_kit.logs import error_fields, get_logger
from bindery_kit.metrics import Metrics
from bindery_kit.runtime import EXIT_ERROR, EXIT_USAGE, Shutdown, run
from bindery_kit.settings import load
from bindery_metadata.layout import LedgersLayout
from bindery_metadata.leases import Leases
from bindery_metadata.store import MetadataStore, SessionState
from bindery_metadata.zookeeper import ZooKeeperStore

from bindery_broker.broker import Broker, Components
from bindery_broker.http.late_app import LateApp
from bindery_broker.http.protocol import ProblemHttpProtocol
from bindery_broker.registration import keep_registered
from bindery_broker.settings import BrokerSettings

DESCRIPTION = "The broker: topics over HTTP, stored in replicated ledgers."
CONNECT_RETRY_S = 1.0
STEP_TIMEOUT_S = 2.0
"""Longest that closing a connection takes at the end."""
GC_THRESHOLD = 50_000
"""Allocations between young collections. The default of 700 finds nothing thousands of times a second here."""

log = get_logger(__name__)


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


async def serve(settings: BrokerSettings, shutdown: Shutdown) -> int:
    """Run the broker until `shutdown`; the exit code."""
    health, metrics = Health(), Metrics("broker")
    late = LateApp()
    try:
        server = HttpServer(
            OpsApp(health, metrics, app=late),
            host=settings.host,
            port=settings.port,
            insecure=settings.insecure,
            stop_timeout_s=settings.stop_timeout_s / 2,
            http=ProblemHttpProtocol,
            proxy_headers=False,  # nothing here looks at the client's address
        )
    except BindRefused as error:
        log.error("broker_not_started", **error_fields(error))
        return EXIT_USAGE
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        url = settings.advertised_url or _own_url(server)
        health.progress("loading the HTTP API")
        from bindery_broker.http.app import BrokerApp  # FastAPI takes a while: not before the port, nor in a session

        health.progress(f"connecting to ZooKeeper at {settings.zookeeper}")
        store = await _connect(settings, shutdown)
        if store is None:
            return shutdown.exit_code
        stack.push_async_callback(_quietly, "zookeeper_session_not_closed", store.close)
        _watch_session(store, health)
        health.progress("reading the bookies")
        client = await LedgerClient.connect(
            store, randomness=random.SystemRandom(), layout=LedgersLayout(settings.ledgers_root)
        )
        stack.push_async_callback(_quietly, "ledger_client_not_closed", client.close)
        leases = Leases(store)
        stack.push_async_callback(leases.close)
        loop = asyncio.get_running_loop()
        components = Components(
            client=client, store=store, leases=leases, clock=wall_clock_ms, now=loop.time, metrics=metrics
        )
        broker = Broker(settings, components, url=url)
        app = BrokerApp(broker)
        stack.push_async_callback(app.close)
        late.put(app)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        health.started()
        log.info("broker_serving", url=url, zookeeper=settings.zookeeper)
        tasks = [
            asyncio.create_task(broker.maintain_forever(), name="maintenance"),
            asyncio.create_task(keep_registered(leases, url=url), name="registration"),
        ]
        await _until_shutdown(shutdown, tasks, server, health)
        health.block("stopping", shutdown.reason)
        broker.drain()
        await server.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _quietly("broker_not_closed", broker.close, timeout_s=settings.stop_timeout_s / 2)
        log.info("broker_stopped", reason=shutdown.reason)
    return shutdown.exit_code


def _own_url(server: HttpServer) -> str:
    """Where other brokers reach us: the address, or this machine's name when we listen on all of them."""
    if server.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return server.url
    name = socket.getfqdn()
    log.warning("advertising_the_host_name", host=name, hint="--advertised-url says it better")
    return f"http://{name}:{server.port}"


async def _connect(settings: BrokerSettings, shutdown: Shutdown) -> ZooKeeperStore | None:
    """The session, tried until there is one; None when the process is to stop first."""
    while not shutdown.is_set:
        try:
            return await ZooKeeperStore.connect(
                settings.zookeeper, session_timeout_s=settings.zookeeper_session_ms / 1000
            )
        except BadRequest:
            raise
        except BinderyError as error:
            log.warning("zookeeper_not_reached", **error_fields(error))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shutdown.wait(), CONNECT_RETRY_S)
    return None


def _watch_session(store: MetadataStore, health: Health) -> None:
    def on_change(state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            health.clear("metadata")
        else:
            health.block("metadata", f"the ZooKeeper session is {state.value}")
        log.info("zookeeper_session", state=state.value)

    store.on_session_change(on_change)


async def _until_shutdown(
    shutdown: Shutdown, tasks: Sequence[asyncio.Task[None]], server: HttpServer, health: Health
) -> None:
    """Until the signal, or until a part ends that must not."""
    stop = asyncio.create_task(shutdown.wait(), name="shutdown")
    http = asyncio.create_task(server.wait(), name="http")
    try:
        done, _ = await asyncio.wait([stop, http, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        http.cancel()
    for task in done - {stop}:
        error = None if task.cancelled() else task.exception()
        reason = f"{task.get_name()} ended: {error!r}"
        log.error("part_died", part=task.get_name(), exc_info=error)
        health.fail(task.get_name(), reason)
        shutdown.request(reason, exit_code=EXIT_ERROR)


async def _quietly(event: str, step: Callable[[], Awaitable[None]], *, timeout_s: float = STEP_TIMEOUT_S) -> None:
    """At the end of a process an error is for the log: the next step must still run."""
    try:
        async with asyncio.timeout(timeout_s):
            await step()
    except Exception as error:
        log.warning(event, **error_fields(error))


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    settings = load(BrokerSettings, argv, prog="bindery-broker", description=DESCRIPTION)
    try:
        logs.configure(service="broker", level=settings.log_level)
    except ValueError as error:
        sys.stderr.write(f"bindery-broker: {error}\n")
        return EXIT_USAGE

    async def serve_until(shutdown: Shutdown) -> int:
        try:
            return await serve(settings, shutdown)
        except BinderyError as error:
            log.error("broker_failed", **error_fields(error))
            return EXIT_ERROR

    return run(serve_until)


if __name__ == "__main__":
    sys.exit(main())
