"""`bindery-auditor`: the process of one auditor (`bindery_kit.process.service_life` has the life cycle).

    start: bind the port -> ZooKeeper -> ledger client -> take part in the election, run replication workers
    stop:  not ready -> workers stop and release their locks -> leadership is released -> client and session are closed

The port is bound first, so that a second auditor on the same port fails at once. Until ZooKeeper answers, /startupz
reports what the start waits for. A standby is ready too: it copies entries and can become leader.
"""

import bindery_kit.process.early_end  # noqa: F401 - first

# isort: split
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from bindery_client.client import LedgerClient
from bindery_core.errors import BadRequest
from bindery_kit.access.audit_trail import trail
from bindery_kit.admin.access import Access, Follow, once
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.listening import BindRefused, check_bind, is_loopback
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.logs import get_logger
from bindery_kit.observability.process_page import ProcessPage
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_kit.process.cluster_wait import ClusterWait, retry_while_unavailable
from bindery_kit.process.followed_files import PART, FileFollower
from bindery_kit.process.program import run_program
from bindery_kit.process.runtime import Shutdown
from bindery_kit.process.service_life import ServiceLife, join_cluster, run_life, watch_session, zookeeper_connector
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.last_audits import LastAudits
from bindery_metadata.recovery.last_backup import LastBackupStore
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.last_backup_watch import LastBackupWatch
from bindery_recovery.admin.recovery_admin import RecoveryAdmin
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.service import RecoveryService

from bindery_auditor.app import ROUTES, AuditorApp, AuditorContext
from bindery_auditor.metrics import AuditorMetrics
from bindery_auditor.roles import role_rules
from bindery_auditor.settings import AuditorSettings

PROGRAM = "bindery-auditor"
DESCRIPTION = AuditorSettings.__doc__ or ""

AUTHENTICATE: Final = "configure tokens (--admin-token-file)"
"""How an auditor can listen where other machines can connect, for errors."""
NO_TOKENS_HINT: Final = "set admin.token_file (--admin-token-file, AUDITOR_ADMIN_TOKEN_FILE) of this auditor"
PAGES = ("/",)
"""Pages for people, to which other sites may link."""

log = get_logger(__name__)


def wall_clock_ms() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _now_s() -> float:
    return wall_clock_ms() / 1000


class AuditorProcess:
    """One auditor. The constructor binds the port; it raises BindRefused, and BadRequest for files of tokens and
    certificates that cannot be used."""

    def __init__(self, settings: AuditorSettings, shutdown: Shutdown) -> None:
        self._settings = settings
        self._health = Health()
        self._metrics = AuditorMetrics()
        self._context = AuditorContext()
        self.life = ServiceLife("auditor", shutdown, self._health)
        self._security = settings.client.load(now_s=_now_s)
        may_be_reached = settings.insecure or settings.admin.is_set
        check_bind(settings.host, insecure=may_be_reached, remedy=AUTHENTICATE)
        rules = role_rules(settings.admin, ROUTES)
        self._audit_log = settings.audit_log.open(service="auditor", clock=time.monotonic, wall_clock_ms=wall_clock_ms)
        stats = HttpStats()
        self._files = FileFollower()
        tls = settings.http.tls.load(now_s=_now_s)
        self._tls = TlsMetrics()
        self._tls.add("http", tls)
        self._tls.add("bookies", self._security.tls_files)
        self._tls.add("zookeeper", settings.zookeeper_access.certificate(now_s=_now_s))
        self._tls.add_token("bookies", lambda: self._security.current_token)
        for files in (*self._tls.files, *self._security.files):
            self._files.follow(files)
        self._server = HttpServer(
            OpsApp(
                self._health,
                ProcessPage("auditor", self._metrics.render),
                app=AuditorApp(self._context, access=admin_access(settings, follow=self._files.follow), rules=rules),
                parts=[
                    stats.render,
                    self._files.render,
                    self._tls.render,
                    *([] if self._audit_log is None else [self._audit_log.render]),
                ],
            ),
            host=settings.host,
            port=settings.port,
            insecure=may_be_reached,
            settings=settings.http,
            stats=stats,
            tls=tls,
            pages=PAGES,
            outermost=trail(self._audit_log),
        )

    async def start(self) -> None:
        """Return once the auditor serves and takes part in the election."""
        settings, life, health = self._settings, self.life, self._health
        if self._audit_log is not None:
            life.on_stop(self._audit_log.close, event="audit_log_not_closed")
        life.start_part(PART, self._files.run())  # at once: the port serves, and the wait for ZooKeeper may be long
        life.on_stop(self._server.stop)
        await self._server.start()
        name = settings.resolved_name(port=self._server.port)
        layout = LedgersLayout(settings.ledgers_root)
        wait = ClusterWait(
            settings.zookeeper,
            layout,
            setting="AUDITOR_ZOOKEEPER",
            health=health,
            timeout_s=settings.zookeeper_connect_timeout_s,
            wall_clock_ms=wall_clock_ms,
            access=settings.zookeeper_access.load,
        )
        connect = zookeeper_connector(
            settings.zookeeper,
            session_timeout_s=settings.zookeeper_session_timeout_s,
            connect_timeout_s=settings.zookeeper_connect_timeout_s,
            access=settings.zookeeper_access,
        )
        store = await join_cluster(life, connect, wait=wait)
        watch_session(store, health)
        health.progress("reading the bookies")
        randomness = random.SystemRandom()
        client = await retry_while_unavailable(
            lambda: LedgerClient.connect(
                store,
                randomness=randomness,
                layout=layout,
                settings=settings.client.settings(),
                security=self._security,
            ),
            event="bookies_not_read",
        )
        life.on_stop(client.close, event="ledger_client_not_closed")
        service = RecoveryService(
            store,
            layout,
            client,
            settings=settings,
            name=name,
            randomness=randomness,
            clock_ms=wall_clock_ms,
            ask_exit=lambda reason: life.fail("recovery", reason),
        )
        admin = RecoveryAdmin(
            store, layout, by=name, ledgers=_always(client), randomness=randomness, clock_ms=wall_clock_ms
        )
        life.on_stop(admin.close)
        await retry_while_unavailable(service.prepare, event="recovery_not_prepared")
        last_audits = LastAuditsWatch(LastAudits(store), clock_ms=wall_clock_ms)
        self._context.open(admin, service, last_audits, clock_ms=wall_clock_ms)
        self._metrics.recovery = RecoveryMetrics(service, clock=time.monotonic)
        self._metrics.last_audits = last_audits
        self._metrics.last_backup = LastBackupWatch(LastBackupStore(store), clock_ms=wall_clock_ms)
        health.started()
        log.info(
            "auditor_serves",
            name=name,
            url=self._server.url,
            zookeeper=settings.zookeeper,
            workers=settings.workers,
        )
        life.on_stop(life.cancel_parts)
        life.on_stop(service.stop, event="recovery_not_stopped", timeout_s=settings.stop_timeout_s)
        life.start_part("http", self._server.wait())
        life.start_part("recovery", service.run())
        life.start_part("last_audits", last_audits.run())
        life.start_part("last_backup", self._metrics.last_backup.run())

    async def stop(self) -> None:
        """Release locks and leadership, then close the connections."""
        self._health.block("stopping", self.life.shutdown.reason)
        await self.life.stop()
        log.info("auditor_stopped", reason=self.life.shutdown.reason)


async def serve(settings: AuditorSettings, shutdown: Shutdown) -> int:
    """Run the auditor until `shutdown`. Return the exit code."""
    return await run_life(
        lambda: AuditorProcess(settings, shutdown),
        shutdown,
        not_started_event="auditor_not_started",
        usage_errors=(BindRefused, BadRequest),
    )


def admin_access(settings: AuditorSettings, *, follow: Follow = once) -> Access | None:
    """Return the check of requests that change something; None: no token is needed, because only this machine can
    connect.

    On an address that other machines can reach, requests that change something need a token. If none is configured,
    all of them are refused. Raises BadRequest for settings that contradict each other and for unusable files.
    """
    access = settings.admin.access(now_s=_now_s, follow=follow)
    if access is not None or is_loopback(settings.host):
        return access
    return Access(None, now_s=_now_s, hint=NO_TOKENS_HINT)


def _always(client: LedgerClient) -> Callable[[], Awaitable[LedgerClient]]:
    async def get() -> LedgerClient:
        return client

    return get


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return run_program(PROGRAM, AuditorSettings, serve, argv, service="auditor", description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(main())
