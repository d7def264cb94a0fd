"""`bindery-broker`: the process. Settings, connections, HTTP, and an orderly end.

    start: bind the port -> ZooKeeper -> ledger client -> serve -> register
    SIGTERM: not ready -> end waiting calls, finish requests -> close topics (cursors stored, ledgers sealed)
             -> give bundles and the registration up -> mark ledgers that lack copies -> end the session

The port is bound before anything else, so that a second broker on it fails at once; until ZooKeeper answers /startupz
says what the start waits for.
"""

import bindery_kit.process.early_end  # noqa: F401 - first

# isort: split
import asyncio
import contextlib
import gc
import random
import socket
import sys
import time
from collections.abc import Sequence

from bindery_client.client import LedgerClient
from bindery_core.errors import BadRequest
from bindery_kit.configuration.settings import load, warn_of_unknown_variables
from bindery_kit.http.http_server import BindRefused, HttpServer
from bindery_kit.observability import last_words, logs
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.metrics import Metrics
from bindery_kit.process.cluster_wait import ClusterWait, asked_again
from bindery_kit.process.runtime import EXIT_USAGE, Shutdown, run_service, unless_shutdown
from bindery_kit.process.service_life import join_cluster, quietly, until_shutdown, watch_session
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.layout.layout import LedgersLayout
from bindery_recovery.writer_reports import WriterReports

from bindery_broker.broker import Broker, Components
from bindery_broker.http.late_app import LateApp
from bindery_broker.http.protocol import ProblemHttpProtocol
from bindery_broker.ownership.registration import keep_registered
from bindery_broker.settings import BrokerSettings

PROGRAM = "bindery-broker"
DESCRIPTION = "The broker: topics over HTTP, stored in replicated ledgers."
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
        security = settings.client.load()
        server = HttpServer(
            OpsApp(health, metrics, app=late),
            host=settings.host,
            port=settings.port,
            insecure=settings.insecure,
            stop_timeout_s=settings.stop_timeout_s / 2,
            http=ProblemHttpProtocol,
            proxy_headers=False,  # nothing here looks at the client's address
        )
    except (BindRefused, BadRequest) as error:
        log.error("broker_not_started", **error_fields(error))
        return shutdown.give_up(error, exit_code=EXIT_USAGE)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        url = settings.advertised_url or _own_url(server)
        health.progress("loading the HTTP API")
        from bindery_broker.http.app import BrokerApp  # FastAPI takes a while: not before the port, nor in a session

        layout = LedgersLayout(settings.ledgers_root)
        wait = ClusterWait(
            settings.zookeeper, layout, setting="BROKER_ZOOKEEPER", health=health,
            timeout_s=settings.zookeeper_connect_timeout_s, wall_clock_ms=wall_clock_ms,
        )  # fmt: skip
        store = await join_cluster(
            settings.zookeeper, wait=wait, session_timeout_s=settings.zookeeper_session_ms / 1000, shutdown=shutdown
        )
        if store is None:
            return shutdown.exit_code
        stack.push_async_callback(quietly, "zookeeper_session_not_closed", store.close)
        watch_session(store, health)
        health.progress("reading the bookies")
        chance = random.SystemRandom()
        reports = WriterReports(store, layout, randomness=chance, clock_ms=wall_clock_ms)
        stack.push_async_callback(quietly, "writer_reports_not_closed", reports.close)
        reporting = asyncio.create_task(reports.run(), name="writer-reports")
        stack.callback(reporting.cancel)
        asking = asked_again(
            lambda: LedgerClient.connect(
                store, randomness=chance, layout=layout, on_degraded=reports.degraded, security=security
            ),
            event="bookies_not_read",
        )
        client = await unless_shutdown(shutdown, asking)
        if client is None:
            return shutdown.exit_code
        stack.push_async_callback(quietly, "ledger_client_not_closed", client.close)
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
        await until_shutdown(shutdown, tasks, server, health)
        health.block("stopping", shutdown.reason)
        broker.drain()
        await server.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await quietly("broker_not_closed", broker.close, timeout_s=settings.stop_timeout_s / 2)
        log.info("broker_stopped", reason=shutdown.reason)
    return shutdown.exit_code


def _own_url(server: HttpServer) -> str:
    """Where other brokers reach us: the address, or this machine's name when we listen on all of them."""
    if server.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return server.url
    name = socket.getfqdn()
    log.warning("advertising_the_host_name", host=name, hint="--advertised-url says it better")
    return f"http://{name}:{server.port}"


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    settings = load(BrokerSettings, argv, prog=PROGRAM, description=DESCRIPTION)
    try:
        logs.configure(service="broker", level=settings.log_level)
    except ValueError as error:
        last_words.say(PROGRAM, str(error))
        return EXIT_USAGE

    warn_of_unknown_variables("BROKER_", BrokerSettings)
    return run_service(lambda shutdown: serve(settings, shutdown), program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
