"""`bindery-auditor`: the process. Settings, connections, HTTP, and an orderly end.

    start: bind the port -> ZooKeeper -> ledger client -> stand for election, work
    SIGTERM: not ready -> workers stop, their locks are released -> the office is given up -> client and session closed

The port is bound before anything else, so that a second auditor on it fails at once; until ZooKeeper answers /startupz
says what the start waits for. A candidate that does not lead is ready too: it copies, and waits.
"""

import bindery_kit.process.early_end  # noqa: F401 - first

# isort: split
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bindery_client.client import LedgerClient
from bindery_core.auth_token import SharedSecrets
from bindery_core.errors import BadRequest
from bindery_kit.admin.access import Access
from bindery_kit.configuration.settings import load, warn_of_unknown_variables
from bindery_kit.http.http_server import BindRefused, HttpServer, is_loopback
from bindery_kit.observability import last_words, logs
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.cluster_wait import ClusterWait, asked_again
from bindery_kit.process.runtime import EXIT_USAGE, Shutdown, run_service, unless_shutdown
from bindery_kit.process.service_life import ask_exit, join_cluster, quietly, until_shutdown, watch_session
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.last_audits import LastAudits
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.recovery_admin import RecoveryAdmin
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.service import RecoveryService

from bindery_auditor.app import AuditorApp, AuditorContext
from bindery_auditor.metrics import AuditorPage
from bindery_auditor.settings import AuditorSettings

PROGRAM = "bindery-auditor"
DESCRIPTION = AuditorSettings.__doc__ or ""

log = get_logger(__name__)


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


async def serve(settings: AuditorSettings, shutdown: Shutdown) -> int:
    """Run the auditor until `shutdown`; the exit code."""
    health, page, context = Health(), AuditorPage(), AuditorContext()
    try:
        access = admin_access(settings)
        security = settings.client.load()
        server = HttpServer(
            OpsApp(health, page, app=AuditorApp(context, access=access)),
            host=settings.host,
            port=settings.port,
            insecure=settings.insecure,
            proxy_headers=False,  # nothing here looks at the client's address
        )
    except (BindRefused, BadRequest) as error:
        log.error("auditor_not_started", **error_fields(error))
        return shutdown.give_up(error, exit_code=EXIT_USAGE)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        name = settings.resolved_name(port=server.port)
        layout = LedgersLayout(settings.ledgers_root)
        wait = ClusterWait(
            settings.zookeeper, layout, setting="AUDITOR_ZOOKEEPER", health=health,
            timeout_s=settings.zookeeper_connect_timeout_s, wall_clock_ms=wall_clock_ms,
        )  # fmt: skip
        store = await join_cluster(
            settings.zookeeper, wait=wait, session_timeout_s=settings.zookeeper_session_timeout_s, shutdown=shutdown
        )
        if store is None:
            return shutdown.exit_code
        stack.push_async_callback(quietly, "zookeeper_session_not_closed", store.close)
        watch_session(store, health)
        health.progress("reading the bookies")
        randomness = random.SystemRandom()
        asking = asked_again(
            lambda: LedgerClient.connect(store, randomness=randomness, layout=layout, security=security),
            event="bookies_not_read",
        )
        client = await unless_shutdown(shutdown, asking)
        if client is None:
            return shutdown.exit_code
        stack.push_async_callback(quietly, "ledger_client_not_closed", client.close)
        service = RecoveryService(
            store,
            layout,
            client,
            settings=settings,
            name=name,
            randomness=randomness,
            clock_ms=wall_clock_ms,
            ask_exit=lambda reason: ask_exit(health, shutdown, "recovery", reason),
        )
        admin = RecoveryAdmin(
            store, layout, by=name, ledgers=_always(client), randomness=randomness, clock_ms=wall_clock_ms
        )
        stack.push_async_callback(admin.close)
        await unless_shutdown(shutdown, asked_again(service.prepare, event="recovery_not_prepared"))
        if shutdown.is_set:
            return shutdown.exit_code
        last_audits = LastAuditsWatch(LastAudits(store), clock_ms=wall_clock_ms)
        context.open(admin, service, last_audits, clock_ms=wall_clock_ms)
        page.recovery, page.last_audits = RecoveryMetrics(service, clock=time.monotonic), last_audits
        health.started()
        log.info("auditor_serves", name=name, url=server.url, zookeeper=settings.zookeeper, workers=settings.workers)
        tasks = [
            asyncio.create_task(service.run(), name="recovery"),
            asyncio.create_task(last_audits.run(), name="last_audits"),
        ]
        await until_shutdown(shutdown, tasks, server, health)
        health.block("stopping", shutdown.reason)
        await quietly("recovery_not_stopped", service.stop, timeout_s=settings.stop_timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        log.info("auditor_stopped", reason=shutdown.reason)
    return shutdown.exit_code


def admin_access(settings: AuditorSettings) -> Access | None:
    """What requests that change something must show. Where others can connect and no token was agreed on, nobody
    changes anything. Raises BadRequest."""

    def now_s() -> float:
        return wall_clock_ms() / 1000

    if settings.admin_token_file:
        try:
            text = Path(settings.admin_token_file).read_bytes()
        except OSError as error:
            raise BadRequest(
                f"cannot read the file of admin tokens: {error.strerror}", path=settings.admin_token_file
            ) from error
        return Access(SharedSecrets([line.strip() for line in text.splitlines() if line.strip()]), now_s=now_s)
    if is_loopback(settings.host):
        return None
    return Access(None, now_s=now_s, hint="start the auditor with --admin-token-file")


def _always(client: LedgerClient) -> Callable[[], Awaitable[LedgerClient]]:
    async def get() -> LedgerClient:
        return client

    return get


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    settings = load(AuditorSettings, argv, prog=PROGRAM, description=DESCRIPTION)
    try:
        logs.configure(service="auditor", level=settings.log_level)
    except ValueError as error:
        last_words.say(PROGRAM, str(error))
        return EXIT_USAGE

    warn_of_unknown_variables("AUDITOR_", AuditorSettings)
    return run_service(lambda shutdown: serve(settings, shutdown), program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
