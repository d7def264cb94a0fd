"""BookieProcess: one bookie from start to stop (`bindery_kit.process.service_life` has the life cycle).

Start: bind the port, so that a port in use is reported first -> wait for ZooKeeper and its cluster -> check the
identity, and that no operator removed this bookie -> open storage, replaying its journal -> if storage was lost, list
the ledgers that were here (limbo) -> serve the ledger port -> register -> start repair and garbage collection in the
background, and recovery of the cluster if it is enabled. The HTTP stack is imported only after that, or after
HTTP_EARLY_S if the start takes longer: /startupz then reports the current step, and the progress of a long replay.
Stop: stop recovery -> unregister -> finish the requests in progress and close the connections -> flush and close
storage -> stop HTTP -> close the clients of the admin API -> close the ZooKeeper session.
"""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from bindery_core.errors import BadRequest
from bindery_core.formats import bookie_service_info
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.http.listening import bind_tcp
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import get_logger
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_kit.process.cluster_wait import ClusterWait, retry_while_unavailable
from bindery_kit.process.followed_files import PART, FileFollower
from bindery_kit.process.late_imports import in_thread
from bindery_kit.process.runtime import EXIT_ERROR, Shutdown
from bindery_kit.process.service_life import ServiceLife, join_cluster
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import refuse_if_suspected
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.security import admin_access, load_security
from bindery_bookie.maintenance.deleted_ledgers import GarbageCollector
from bindery_bookie.maintenance.limbo_listing import LimboListing
from bindery_bookie.maintenance.refill_history import refill_recorder
from bindery_bookie.maintenance.repair import Repairer
from bindery_bookie.maintenance.repair_client import connector, own_certificate, repair_token
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.maintenance.storage_watch import StorageWatch
from bindery_bookie.membership.advertised import AdvertisedName
from bindery_bookie.membership.directory_lock import DirectoryLock
from bindery_bookie.membership.identity import Claim, any_ledger, cluster_options, establish_identity
from bindery_bookie.membership.own_membership import OwnMembership
from bindery_bookie.membership.own_rack import OwnRack
from bindery_bookie.membership.presence import Presence
from bindery_bookie.membership.readiness import ReadinessNotes
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.metrics.parts import add_parts
from bindery_bookie.server.server import BookieServer
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.shards import ShardedStorage
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.stats import StorageStats

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient

    from bindery_bookie.admin.server import AdminServer
    from bindery_bookie.autorecovery.embedded_recovery import EmbeddedRecovery

HTTP_EARLY_S: Final = 1.0
"""Duration of a start, in seconds, after which the HTTP port is opened although the ledger port does not serve yet."""
UNREGISTER_TIMEOUT_S: Final = 2.0
"""Time limit in seconds for the removal of the registration during a stop."""
RECOVERY_STOP_TIMEOUT_S: Final = 3.0
"""Time limit in seconds for the stop of the embedded recovery."""

AUTHENTICATE: Final = "authenticate clients (--auth-provider)"
"""How a bookie can listen where other machines can connect, for errors."""

Connect = Callable[[], Awaitable[MetadataStore]]
"""Connects to the metadata store. Raises MetadataUnavailable."""

log = get_logger(__name__)


class BookieProcess:
    """`connect` returns the metadata store, `clock` monotonic seconds, `wall_clock_ms` milliseconds since 1970.

    Call `start`, then `stop`, also after a failed start. `clock` is not the loop's clock, because uvloop's clock has a
    resolution of milliseconds, too coarse for latencies.
    """

    def __init__(
        self,
        settings: BookieSettings,
        shutdown: Shutdown,
        *,
        connect: Connect,
        clock: Callable[[], float],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._randomness = random.SystemRandom()  # noqa: TID251 - this class is a composition root
        self._settings = settings
        self._shutdown = shutdown
        self._connect = connect
        self._clock = clock
        self._wall_clock_ms = wall_clock_ms
        self._started_at = clock()
        self._layout = LedgersLayout(settings.ledgers_root)
        self.health = Health()
        self.life = ServiceLife("bookie", shutdown, self.health, part_died_event="bookie_part_died")
        self.state = BookieState()
        self.drills: DrillControl | None = None
        """Faults that an operator injects; None unless the settings allow fault injection."""
        if settings.storage.drills:
            self.drills = DrillControl(sleep=time.sleep)  # noqa: TID251 - in the threads that use the disk
            log.warning("drills_enabled", setting="storage.drills")
        self.damage = DamageRegister()
        self.repairer: Repairer | None = None
        """None until the bookie is registered."""
        self.garbage: GarbageCollector | None = None
        self.guard: RollbackGuard | None = None
        """None until the bookie's identity is established."""
        """None until the bookie is registered."""
        self.recovery: EmbeddedRecovery | None = None
        """Recovery of the cluster inside this bookie; None without the setting."""
        self.shards = [
            StorageEngine.on_real_disk(
                storage, wall_clock_ms=wall_clock_ms, stats=StorageStats(), damage=self.damage, drills=self.drills
            )
            for storage in settings.resolved_storages()
        ]
        self._store = self.shards[0] if len(self.shards) == 1 else ShardedStorage(self.shards)
        self._notes = ReadinessNotes(self.health, self.state, self.shards)
        self._metrics = BookieMetrics(clock=clock, storage=[shard.stats for shard in self.shards])
        self._files = FileFollower()
        security = load_security(settings.auth, settings.tls, now_s=self._now_s, follow=self._files.follow)
        if security.sessions is not None:
            self._files.on_replaced = security.sessions.check_again
        self._admin_access = admin_access(
            settings.auth,
            settings.admin,
            host=settings.host,
            now_s=self._now_s,
            tokens=security.tokens,
            follow=self._files.follow,
        )
        self._roles = security.roles
        if not (self._roles.admin.is_everybody or settings.http_port_authenticates):
            raise BadRequest(
                "auth.admin_roles names clients, but the HTTP port authenticates no client: set admin.keys_file or "
                "auth.provider, or auth.admin_roles=*"
            )
        self._http_tls = settings.http.tls.load(now_s=self._now_s)
        self._tls = TlsMetrics()
        self._tls.add("http", self._http_tls)
        self._tls.add("ledger", security.tls_files)
        self._tls.add("bookies", own_certificate(settings, now_s=self._now_s))
        self._tls.add("zookeeper", settings.zookeeper_access.certificate(now_s=self._now_s))
        own_token = repair_token(settings)
        if own_token is not None:
            self._files.follow(own_token)
            self._tls.add_token("bookies", lambda: own_token.value)
        for files in self._tls.files:
            self._files.follow(files)
        self._audit_log = settings.audit_log.open(service="bookie", clock=clock, wall_clock_ms=wall_clock_ms)
        self._server = BookieServer(
            self._store,
            state=self.state,
            metrics=self._metrics,
            settings=settings.server,
            security=security,
            clock=clock,
        )
        self.watch = StorageWatch(
            self.shards,
            RealDisk(),
            self.state,
            self.health,
            settings,
            wall_clock_ms=wall_clock_ms,
            on_journal_failed=self._journal_failed,
            on_pressure=self._reclaim_space,
            start_worker=lambda: ThreadWorker("bookie-watch", asyncio.get_running_loop()),
        )
        self._port = 0
        self._http_port = 0
        self._lock = DirectoryLock()
        self._metadata: MetadataStore | None = None
        self._store_is_open = False
        self._admin: AdminServer | None = None
        add_parts(
            self._metrics,
            self.shards,
            state=self.state,
            is_open=lambda: self._store_is_open,
            directories=self.watch.directories,
            damage=self.damage,
            repair=lambda: None if self.repairer is None else self.repairer.state,
            guard=lambda: self.guard,
        )
        self._metrics.reads_blocked = lambda: self._server.operations.pending_reads

    @property
    def port(self) -> int:
        return self._port

    @property
    def http_port(self) -> int:
        return self._http_port

    async def start(self) -> None:
        """Return once the bookie serves, is registered, and its HTTP server runs. Raises BinderyError, or OSError."""
        settings = self._settings
        if self._audit_log is not None:
            self.life.on_stop(self._audit_log.close, event="audit_log_not_closed")
        self.life.start_part(PART, self._files.run())  # at once: a replay of the journal may be long
        sock = bind_tcp(
            settings.host,
            settings.port,
            insecure=settings.insecure or settings.ledger_port_authenticates,
            remedy=AUTHENTICATE,
        )
        self._port = sock.getsockname()[1]
        self.life.on_stop(partial(_close_socket, sock))
        http_sock = bind_tcp(
            settings.host,
            settings.http_port,
            insecure=settings.insecure or settings.http_port_authenticates,
            remedy=AUTHENTICATE,
        )
        self._http_port = http_sock.getsockname()[1]
        self.life.on_stop(partial(_close_socket, http_sock))
        serving = asyncio.create_task(self._start_serving(sock))
        try:
            await asyncio.wait({serving}, timeout=HTTP_EARLY_S)
            if not serving.done() or serving.exception() is None:
                await self._start_admin(http_sock)
            await serving
        finally:
            if not serving.done():
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        self.health.started()
        log.info(
            "bookie_started",
            port=self._port,
            http_port=self._http_port,
            seconds=round(self._clock() - self._started_at, 3),
        )

    async def stop(self) -> None:
        """Stop in the order of the module's docstring. Safe after a start that failed half way. Idempotent."""
        self.state.shutting_down = True
        self.health.block("shutdown", "stopping")
        await self.life.stop()
        log.info("bookie_stopped", reason=self._shutdown.reason)

    # --- the steps of the start -----------------------------------------------------------------------------------

    async def _start_serving(self, sock: socket.socket) -> None:
        settings, life = self._settings, self.life
        bookie_id = settings.resolved_bookie_id(port=self._port)
        wait = ClusterWait(
            settings.zookeeper,
            self._layout,
            setting="BOOKIE_ZOOKEEPER",
            health=self.health,
            timeout_s=settings.zookeeper_connect_timeout_s,
            wall_clock_ms=self._wall_clock_ms,
            access=settings.zookeeper_access.load,
        )
        try:
            metadata = self._metadata = await join_cluster(life, self._connect, wait=wait)
        finally:  # also if there is no session: HTTP may run by then
            life.on_stop(self._stop_admin)
        membership, instance_id = await self._establish_identity(metadata, bookie_id)
        self.health.progress("opening the storage")
        await self._store.open(on_progress=self._notes.replayed)
        self._store_is_open = True
        life.on_stop(self._close_store)
        life.on_stop(self._close_recovery)
        await self.watch.check()
        life.on_stop(life.cancel_parts)
        life.start_part("storage-watch", self.watch.run())
        if any(shard.limbo is not None for shard in self.shards):
            await self._list_limbo(metadata, bookie_id)
        life.on_stop(self._server.close)
        await self._server.start(sock)
        life.start_part("memory-release", self._server.limits.release_memory())
        log.info("bookie_serves", bookie_id=bookie_id, port=self._port)
        guard = self.guard = RollbackGuard(
            self.shards,
            metadata,
            self._layout,
            instance_id=instance_id,
            bookie_id=bookie_id,
            health=self.health,
            wall_clock_ms=self._wall_clock_ms,
        )
        await self._register(metadata, bookie_id, guard)
        life.start_part("metadata-rollback", guard.run())
        life.start_part("advertised-name", AdvertisedName(settings.resolved_host(), self.health).run())
        await membership.serves()
        life.start_part("membership", membership.run())
        connect = self._client_connector(metadata, bookie_id)
        self._start_garbage_collection(metadata, bookie_id, instance_id, guard, connect)
        self._start_repair(metadata, bookie_id, connect)
        if settings.autorecovery_embedded:
            await self._start_recovery(metadata, bookie_id, connect)

    async def _establish_identity(self, metadata: MetadataStore, bookie_id: BookieId) -> tuple[OwnMembership, str]:
        """Check that the disks are this bookie's and that it may start, and lock the directories.

        Return the bookie's membership, and the instance id of the cluster.
        """
        settings = self._settings
        self.health.progress("checking the bookie's identity")
        options = cluster_options(zookeeper=settings.zookeeper, ledgers_root=settings.ledgers_root)
        membership = OwnMembership(
            metadata,
            bookie_id,
            self.state,
            self.health,
            wall_clock_ms=self._wall_clock_ms,
            cluster_options=options,
        )
        await retry_while_unavailable(membership.check_start, event="membership_not_read")
        claim = Claim(
            bookie_id=bookie_id,
            journal_dirs=settings.journal_dirs,
            ledger_dirs=settings.ledger_dirs,
            cluster_options=options,
        )
        establish = partial(
            establish_identity,
            CookieStore(metadata, self._layout),
            RealDisk(),
            claim,
            has_ledgers=lambda: any_ledger(self._ledger_ids(metadata)),
            now_ms=self._wall_clock_ms(),
            on_lost_storage=str(settings.storage.on_lost_storage),
        )
        identity = await retry_while_unavailable(establish, event="identity_not_established")
        if identity.is_new:
            await membership.join()
        self.life.on_stop(self._unlock)
        self._lock.take(claim.directories)
        assert identity.cookie.instance_id is not None  # the cookie of a bookie that may start has one
        return membership, identity.cookie.instance_id

    def _ledger_ids(self, metadata: MetadataStore) -> AsyncIterator[LedgerId]:
        from bindery_metadata.ledgers.ledger_manager import LedgerManager  # few starts need it, and it loads slowly

        return LedgerManager(metadata, self._layout, randomness=self._randomness).list()

    async def _list_limbo(self, metadata: MetadataStore, bookie_id: BookieId) -> None:
        """Determine which ledgers may have missing entries on this bookie, before any client can read.

        Raises MetadataRollbackSuspected: the bookie would deny its entries of ledgers that the metadata lacks now.
        """
        from bindery_metadata.ledgers.ledger_manager import LedgerManager  # as in `_ledger_ids`

        self._notes.ledgers_checked(0)
        await LimboListing(
            self.shards,
            LedgerManager(metadata, self._layout, randomness=self._randomness),
            bookie_id,
            sync=partial(
                refuse_if_suspected, metadata, self._layout, "cannot list the ledgers that were on the lost storage"
            ),
            progress=self._notes.ledgers_checked,
        ).run()
        self._notes.limbo()

    async def _register(self, metadata: MetadataStore, bookie_id: BookieId, guard: RollbackGuard) -> None:
        settings = self._settings
        rack = OwnRack(settings.rack, settings.rack_file, host=settings.resolved_host(), health=self.health)
        # before the registration, so that no client places a ledger on this bookie without knowing its rack
        await retry_while_unavailable(partial(rack.announce, metadata, bookie_id), event="rack_not_announced_yet")
        self.health.progress("registering")
        info = bookie_service_info.of_bookie(
            host=self._settings.resolved_host(),
            port=self._port,
            http_port=self._http_port,
            http_is_secure=self._http_tls is not None,
        )
        registration = BookieRegistration(
            metadata,
            self._layout,
            bookie_id,
            bookie_service_info.encode(info),
            session_timeout_s=self._settings.zookeeper_session_timeout_s,
            before=guard.before_registration,
        )
        self.life.on_stop(registration.close, event="bookie_not_unregistered", timeout_s=UNREGISTER_TIMEOUT_S)
        presence = Presence(registration, self.state, self.health)
        registration.on_change(presence.registration_changed)
        register = partial(registration.register, read_only=self.state.read_only)
        await retry_while_unavailable(register, event="bookie_not_registered_yet")
        self.life.start_part("presence", presence.run())

    def _client_connector(
        self, metadata: MetadataStore, bookie_id: BookieId
    ) -> "Callable[[], Awaitable[LedgerClient]]":
        return connector(self._settings, bookie_id, metadata, self._layout, randomness=self._randomness)

    def _start_garbage_collection(
        self,
        metadata: MetadataStore,
        bookie_id: BookieId,
        instance_id: str,
        guard: RollbackGuard,
        connect: "Callable[[], Awaitable[LedgerClient]]",
    ) -> None:
        storage = self._settings.storage
        self.garbage = GarbageCollector(
            self.shards,
            metadata,
            self._layout,
            instance_id=instance_id,
            bookie_id=bookie_id,
            guard=guard,
            connect=connect,
            wait_s=storage.gc_wait_time_s,
            wait_min_s=storage.gc_wait_time_min_s,
            written_max=storage.dead_size_min // 4,
            over_replicated_wait_s=storage.gc_over_replicated_wait_time_s,
            op_rate=storage.gc_metadata_op_rate,
            clock=self._clock,
            wall_clock_ms=self._wall_clock_ms,
            randomness=self._randomness,
        )
        for shard in self.shards:
            shard.compactor.on_forced = self.garbage.request
        self.life.start_part("garbage-collection", self.garbage.run())

    def _start_repair(
        self, metadata: MetadataStore, bookie_id: BookieId, connect: "Callable[[], Awaitable[LedgerClient]]"
    ) -> None:
        assert self.garbage is not None  # it confirms that a ledger was deleted
        self.repairer = Repairer(
            self.shards,
            self.damage,
            bookie_id,
            connect=connect,
            is_gone=self.garbage.is_gone,
            rate=self._settings.storage.repair_rate,
            clock=self._clock,
            accepts=lambda: self.state.accepts_add(priority=1),
            changed=self._notes.limbo,
            refilled=refill_recorder(metadata, bookie_id, wall_clock_ms=self._wall_clock_ms),
        )
        self.life.start_part("repair", self.repairer.run())

    async def _start_recovery(
        self, metadata: MetadataStore, bookie_id: BookieId, connect: "Callable[[], Awaitable[LedgerClient]]"
    ) -> None:
        def import_recovery() -> "type[EmbeddedRecovery]":
            from bindery_bookie.autorecovery.embedded_recovery import EmbeddedRecovery

            return EmbeddedRecovery

        embedded_recovery = await in_thread(import_recovery)
        recovery = self.recovery = embedded_recovery(
            bookie_id=bookie_id,
            randomness=self._randomness,
            clock=self._clock,
            clock_ms=self._wall_clock_ms,
            ask_exit=lambda reason: self.life.fail("recovery", reason),
        )
        self.life.on_stop(recovery.stop, event="recovery_not_stopped", timeout_s=RECOVERY_STOP_TIMEOUT_S)
        self.life.start_part("recovery", recovery.run(metadata, self._layout, connect))

    async def _start_admin(self, sock: socket.socket) -> None:
        def import_admin() -> "type[AdminServer]":
            import bindery_core.wire.v3_generated  # noqa: F401 - here, so that no request waits for this import

            from bindery_bookie.admin.server import AdminServer

            return AdminServer

        admin_server = await in_thread(import_admin)
        self._admin = admin_server(
            self._settings,
            sock=sock,
            access=self._admin_access,
            tls=self._http_tls,
            tls_metrics=self._tls,
            roles=self._roles,
            audit_log=self._audit_log,
            bookie_id=self._settings.resolved_bookie_id(port=self._port),
            health=self.health,
            state=self.state,
            store=self._store,
            shards=self.shards,
            metrics=self._metrics,
            damage=self.damage,
            drills=self.drills,
            is_open=lambda: self._store_is_open,
            directories=self.watch.directories,
            metadata=lambda: self._metadata,
            repair=lambda: None if self.repairer is None else self.repairer.state,
            guard=lambda: self.guard,
            recovery_page=lambda: b"" if self.recovery is None else self.recovery.render(),
            files_page=self._files.render,
            connect_client=self._connect_client,
            randomness=self._randomness,
            wall_clock_ms=self._wall_clock_ms,
        )
        await self._admin.start()
        self.life.start_part("http", self._admin.wait())

    def _connect_client(self) -> "Awaitable[LedgerClient] | None":
        """Connect a ledger client for the admin API; None before there is a metadata store."""
        if self._metadata is None:
            return None
        return self._client_connector(self._metadata, self._settings.resolved_bookie_id(port=self._port))()

    # --- the steps of the stop ------------------------------------------------------------------------------------

    async def _close_recovery(self) -> None:
        if self.recovery is not None:
            await self.recovery.close()

    async def _close_store(self) -> None:
        self._store_is_open = False
        await self._store.close()

    async def _unlock(self) -> None:
        self._lock.release()

    async def _stop_admin(self) -> None:
        if self._admin is not None:
            await self._admin.stop()

    def _now_s(self) -> float:
        return self._wall_clock_ms() / 1000

    # --- what parts report ----------------------------------------------------------------------------------------

    def _reclaim_space(self) -> None:
        """Run garbage collection and compaction now, because a disk is filling up."""
        if self.garbage is not None:
            self.garbage.request(compact=True)
        elif self._store_is_open:
            for shard in self.shards:
                shard.compactor.request(minor=True, major=True)

    def _journal_failed(self, reason: str) -> None:
        self._shutdown.request(reason, exit_code=EXIT_ERROR)


async def _close_socket(sock: socket.socket) -> None:
    sock.close()
