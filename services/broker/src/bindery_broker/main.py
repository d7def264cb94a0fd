"""`bindery-broker`: the process of one broker (`bindery_kit.process.service_life` has the life cycle).

    start: bind the port -> ZooKeeper -> ledger client -> serve -> register
    stop:  not ready -> hand the bundles over to other brokers, and pass on requests for them
           -> end waiting calls, end connections with their next response, finish requests, stop listening
           -> close the topics that are left (cursors stored, ledgers closed), release their bundles and the
           registration -> mark under-replicated ledgers -> close the session

The port is bound first, so that a second broker on the same port fails at once. Until ZooKeeper answers, /startupz
reports what the start waits for.
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
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bindery_client.client import LedgerClient
from bindery_core.errors import BadRequest
from bindery_kit.access.audit_trail import trail
from bindery_kit.access.authenticate import Authenticate
from bindery_kit.access.own_token import OwnToken
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.listening import BindRefused, check_bind
from bindery_kit.limits.large_blocks import return_large_blocks
from bindery_kit.multiplex.peers import STREAMS_MAX
from bindery_kit.multiplex.served import Multiplexing
from bindery_kit.observability.health import AsgiApp, Health, OpsApp
from bindery_kit.observability.logs import get_logger
from bindery_kit.observability.metrics import Metrics
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_kit.process.cluster_wait import ClusterWait, retry_while_unavailable
from bindery_kit.process.followed_files import PART, FileFollower
from bindery_kit.process.program import run_program
from bindery_kit.process.runtime import Shutdown
from bindery_kit.process.service_life import ServiceLife, join_cluster, run_life, watch_session, zookeeper_connector
from bindery_metadata.cluster import record_cluster
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.writer_reports import WriterReports

from bindery_broker.access.openid_keys import OpenIdKeys
from bindery_broker.broker import Broker, Components
from bindery_broker.http.charging.passed_on import PassedOn, fetch_key
from bindery_broker.http.late_app import LateApp, refuse_unknown
from bindery_broker.http.protocol import ProblemHttpProtocol
from bindery_broker.http.stats import BrokerHttpStats
from bindery_broker.ownership.listeners import hosts_of
from bindery_broker.settings import BrokerSettings
from bindery_broker.topic_metrics import TopicMetrics

if TYPE_CHECKING:
    from bindery_broker.http.peers.drains import Drain

PROGRAM = "bindery-broker"
DESCRIPTION = "The broker: topics over HTTP, stored in replicated ledgers."
AUTHENTICATE = "configure authentication (--auth-tokens-keys-file)"
"""How a broker can listen where other machines can connect, for errors."""
PAGES = ("/docs",)
"""Pages for people, to which other sites may link."""
HAND_OVER_SHARE, FINISH_SHARE, CLOSE_SHARE = 0.6, 0.2, 0.2
"""Parts of `stop_timeout_s`: for handing over bundles, for requests in progress, for closing topics that are left."""
LEAVE_S = 3.0
"""Maximum seconds between the end of the hand-over and the end of listening. If there are other brokers, clients that
use their connections meanwhile learn from `Connection: close` that they must open the next one elsewhere. A connection
that is closed later was not used for that long, so that its client hardly sends a request at that moment."""
GC_THRESHOLD = 50_000
"""Number of allocations between two collections of the youngest generation. The default of 700 causes thousands of
collections per second here that free nothing."""

log = get_logger(__name__)


def wall_clock_ms() -> int:
    """Return the wall time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _now_s() -> float:
    return wall_clock_ms() / 1000


class BrokerProcess:
    """One broker. The constructor binds the port.

    The constructor raises BindRefused, and BadRequest for files of certificates, keys, passwords and tokens that cannot
    be used.
    """

    def __init__(self, settings: BrokerSettings, shutdown: Shutdown) -> None:
        self._settings = settings
        self._health, self._metrics = Health(), Metrics("broker")
        self._late = LateApp()
        self.life = ServiceLife("broker", shutdown, self._health)
        self._security = settings.client.load(now_s=_now_s)
        self._audit_log = settings.audit_log.open(service="broker", clock=time.monotonic, wall_clock_ms=wall_clock_ms)
        self._stats = BrokerHttpStats()
        tls, self._peers_tls = settings.http.tls.load(now_s=_now_s), settings.peers.load(now_s=_now_s)
        self._tls = TlsMetrics()
        self._tls.add("http", tls)
        self._tls.add("peers", self._peers_tls)
        self._tls.add("bookies", self._security.tls_files)
        self._tls.add("zookeeper", settings.zookeeper_access.certificate(now_s=_now_s))
        self._tls.add_token("bookies", lambda: self._security.current_token)
        self._tls.add_token("peers", lambda: None if self._own_token is None else self._own_token.text)
        self._topic_metrics = TopicMetrics(topics_max=settings.metrics_topics_max)
        self._files = FileFollower()
        self._overrides = settings.limits.overrides()
        if self._overrides is not None:
            self._files.follow(self._overrides)
        issuers = settings.auth.openid(follow=self._files.follow)
        self._openid: OpenIdKeys | None = None
        if issuers:
            issuers_tls = settings.auth.openid_tls()
            self._tls.add("openid", issuers_tls)
            self._openid = OpenIdKeys(
                issuers, tls=issuers_tls.context, now_s=_now_s, refresh_s=settings.auth.openid_refresh_s
            )
        for files in (*self._tls.files, *self._security.files):
            self._files.follow(files)
        self._own_token: OwnToken | None = None
        self._authenticator = settings.auth.authenticator(
            now_s=_now_s,
            follow=self._files.follow,
            issuers=issuers,
            own_role=lambda: None if self._own_token is None else self._own_token.role,
        )
        self._own_token = settings.auth.own_token(
            authenticator=self._authenticator,
            follow=self._files.follow,
            super_users=settings.authorization.super_users if settings.authorization.enabled else None,
        )
        may_be_reached = settings.insecure or not settings.auth.admits_everybody
        check_bind(settings.host, insecure=may_be_reached, remedy=AUTHENTICATE)
        multiplexing = Multiplexing(requests_max=settings.peers.requests_max, of_connection_max=STREAMS_MAX)
        self._served = multiplexing.requests
        self._server = HttpServer(
            self._app(),
            host=settings.host,
            port=settings.port,
            insecure=may_be_reached,
            stop_timeout_s=settings.stop_timeout_s * FINISH_SHARE,
            http=ProblemHttpProtocol,
            settings=settings.http,
            stats=self._stats,
            tls=tls,
            own_names=[urlsplit(settings.advertised_url).hostname or "", *hosts_of(settings.listeners)],
            pages=PAGES,
            outermost=trail(self._audit_log),
            upgrade=multiplexing,
        )

    def _app(self) -> AsgiApp:
        """Return the application of the port."""
        parts = [self._stats.render, self._topic_metrics.render, self._files.render, self._tls.render]
        if self._audit_log is not None:
            parts.append(self._audit_log.render)
        if self._openid is not None:
            parts.append(self._openid.render)
        prepare = [self._topic_metrics.collect]
        if self._authenticator is None:
            return OpsApp(self._health, self._metrics, app=self._late, parts=parts, prepare=prepare)
        if self._own_token is None:
            log.warning(
                "broker_without_token",
                hint="other brokers refuse the requests of this one; set auth.broker_token_file if there are any",
            )
        ops = OpsApp(
            self._health,
            self._metrics,
            app=self._late,
            parts=[*parts, lambda: guard.render()],
            prepare=prepare,
        )
        guard = Authenticate(
            ops,
            self._authenticator,
            refuse=refuse_unknown,
            clock=time.monotonic,
            guards_metrics=self._settings.auth.metrics,
        )
        self._files.on_replaced = guard.check_again
        if self._openid is not None:
            self._openid.on_replaced = guard.check_again
        return guard

    async def start(self) -> None:
        """Return once the broker serves."""
        settings, life, health = self._settings, self.life, self._health
        if self._audit_log is not None:
            life.on_stop(self._audit_log.close, event="audit_log_not_closed")
        life.start_part(PART, self._files.run())  # at once: the port serves, and the wait for ZooKeeper may be long
        if self._openid is not None:
            life.start_part("openid_keys", self._openid.run())
        life.on_stop(self._server.stop)
        await self._server.start()
        url = settings.advertised_url or _own_url(self._server)
        health.progress("loading the HTTP API")
        # Importing FastAPI takes long, so it happens after the port is bound and before a session exists that could
        # expire.
        from bindery_broker.http.app import BrokerApp
        from bindery_broker.http.proxy import Proxy

        layout = LedgersLayout(settings.ledgers_root)
        wait = ClusterWait(
            settings.zookeeper,
            layout,
            setting="BROKER_ZOOKEEPER",
            health=health,
            timeout_s=settings.zookeeper_connect_timeout_s,
            wall_clock_ms=wall_clock_ms,
            access=settings.zookeeper_access.load,
        )
        connect = zookeeper_connector(
            settings.zookeeper,
            session_timeout_s=settings.zookeeper_session_ms / 1000,
            connect_timeout_s=settings.zookeeper_connect_timeout_s,
            access=settings.zookeeper_access,
        )
        store = await join_cluster(life, connect, wait=wait)
        watch_session(store, health)
        await retry_while_unavailable(
            lambda: record_cluster(store, settings.cluster_name), event="cluster_not_recorded"
        )
        health.progress("reading the bookies")
        client = await self._connect_client(store, layout)
        leases = Leases(store)
        life.on_stop(leases.close)
        loop = asyncio.get_running_loop()
        components = Components(
            client=client, store=store, leases=leases, clock=wall_clock_ms, now=loop.time, metrics=self._metrics
        )
        accounts = settings.limits.accounts(self._overrides)
        broker = Broker(settings, components, url=url, accounts=accounts)
        self._stats.watch_read_ahead(broker.topics.read_ahead)
        self._topic_metrics.watch(broker)
        proxy = Proxy(
            own_token=self._own_token,
            tls=self._peers_tls.context,
            links_max=settings.peers.connections_max,
            unread_size_max=settings.http.unread_size_max,
        )
        app = BrokerApp(broker, proxy=proxy, arriving=self._server.bodies, served=self._served)
        if self._overrides is not None or not accounts.is_off or self._authenticator is not None:
            key = await retry_while_unavailable(
                lambda: fetch_key(store, randomness=random.SystemRandom()), event="passed_on_key_not_read"
            )
            app.limiter.passed_on = PassedOn(key)
        life.on_stop(app.close)
        self._late.put(app)
        if self._openid is not None:
            health.progress("reading the keys of OpenID issuers")
            await self._openid.tried()
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        health.started()
        log.info("broker_serving", url=url, zookeeper=settings.zookeeper)
        life.on_stop(broker.close, event="broker_not_closed", timeout_s=settings.stop_timeout_s * CLOSE_SHARE)
        life.on_stop(life.cancel_parts)
        app.drain.on_change = self._on_drain
        life.on_stop(partial(self._drain, broker, app.drain))
        life.start_part("http", self._server.wait())
        life.start_part("maintenance", broker.maintain_forever())
        life.start_part("balancing", broker.balancing.run())

    async def _connect_client(self, store: MetadataStore, layout: LedgersLayout) -> LedgerClient:
        randomness = random.SystemRandom()
        reports = WriterReports(store, layout, randomness=randomness, clock_ms=wall_clock_ms)
        self.life.on_stop(reports.close, event="writer_reports_not_closed")
        reporting = asyncio.create_task(reports.run(), name="writer-reports")
        self.life.on_stop(partial(_cancel, reporting))
        client = await retry_while_unavailable(
            lambda: LedgerClient.connect(
                store,
                randomness=randomness,
                layout=layout,
                settings=self._settings.client.settings(),
                on_degraded=reports.degraded,
                security=self._security,
            ),
            event="bookies_not_read",
        )
        self.life.on_stop(client.close, event="ledger_client_not_closed")
        return client

    def _on_drain(self, draining: bool) -> None:
        if draining:
            self._health.block("draining", "the broker hands its bundles over; `bindery brokers undrain` cancels that")
        else:
            self._health.clear("draining")

    async def _drain(self, broker: Broker, drain: "Drain") -> None:
        """Hand the bundles over, end the calls that wait for messages, and finish the requests in progress."""
        await drain.run(timeout_s=self._settings.stop_timeout_s * HAND_OVER_SHARE)
        self._server.end_connections()
        broker.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await (self._server.quiet() if drain.status.blocked else self._server.left())
        await self._server.stop()

    async def stop(self) -> None:
        """Finish requests, close topics, release bundles, then close the connections."""
        self._health.block("stopping", self.life.shutdown.reason)
        await self.life.stop()
        log.info("broker_stopped", reason=self.life.shutdown.reason)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()


async def serve(settings: BrokerSettings, shutdown: Shutdown) -> int:
    """Run the broker until `shutdown`. Returns the exit code."""
    return await run_life(
        lambda: BrokerProcess(settings, shutdown),
        shutdown,
        not_started_event="broker_not_started",
        usage_errors=(BindRefused, BadRequest),
    )


def _own_url(server: HttpServer) -> str:
    """Return the URL at which other brokers reach this one; with the host name if it listens on all addresses."""
    if server.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return server.url
    name = socket.getfqdn()
    log.warning(
        "advertising_the_host_name",
        host=name,
        hint="set --advertised-url to the URL at which other brokers reach this one",
    )
    return f"{urlsplit(server.url).scheme}://{name}:{server.port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script. Returns the exit code."""
    return_large_blocks()
    return run_program(PROGRAM, BrokerSettings, serve, argv, service="broker", description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(main())
