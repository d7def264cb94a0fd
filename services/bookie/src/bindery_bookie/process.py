"""BookieProcess: one bookie from start to end.

Start: bind the port (so that a taken one is told first) -> wait for ZooKeeper and its cluster -> identity, and that no
operator removed this bookie -> open storage, replaying its journal -> if storage was lost, list the ledgers that were
here (limbo) -> serve the ledger port -> register -> repair in the background, and heal the cluster if asked to. The
HTTP stack is imported only after that, or after HTTP_EARLY_S when the start takes longer: probes can then see what it
waits for, and the progress of a long replay.
End: stop healing -> unregister -> answer what is under way -> close connections -> flush and close storage -> HTTP ->
ZooKeeper.
"""

import asyncio
import contextlib
import importlib
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bindery_core.errors import BinderyError
from bindery_core.formats import bookie_service_info
from bindery_core.ids import BookieId
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.last_words import sentence_of_end
from bindery_kit.observability.logs import get_logger
from bindery_kit.process.cluster_wait import ClusterWait, asked_again
from bindery_kit.process.runtime import EXIT_ERROR, Shutdown
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.security import admin_access, load_security
from bindery_bookie.maintenance.garbage import GarbageCollector
from bindery_bookie.maintenance.limbo_listing import LimboListing
from bindery_bookie.maintenance.repair import Repairer
from bindery_bookie.maintenance.repair_client import connector
from bindery_bookie.maintenance.storage_watch import StorageWatch
from bindery_bookie.membership.advertised import AdvertisedName
from bindery_bookie.membership.directory_lock import DirectoryLock
from bindery_bookie.membership.identity import Claim, any_ledger, cluster_options, establish_identity
from bindery_bookie.membership.own_membership import OwnMembership
from bindery_bookie.membership.presence import Presence
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.metrics.bookie import DirectoryUsage
from bindery_bookie.metrics.parts import add_parts
from bindery_bookie.server.server import BookieServer, bind
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import READ_ONLY_DRAINING, READ_ONLY_REMOVED, READ_ONLY_SESSION, BookieState
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.shards import ShardedStorage
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import ReplayProgress

if TYPE_CHECKING:
    from bindery_bookie.admin.context import AdminContext
    from bindery_bookie.embedded_recovery import EmbeddedRecovery

HTTP_EARLY_S: Final = 1.0
UNREGISTER_TIMEOUT_S: Final = 2.0
RECOVERY_STOP_TIMEOUT_S: Final = 3.0
METADATA_CLOSE_TIMEOUT_S: Final = 3.0

Connect = Callable[[BookieSettings], Awaitable[MetadataStore]]
"""Raises MetadataUnavailable."""

NOTED_ELSEWHERE: Final = frozenset({READ_ONLY_SESSION, READ_ONLY_DRAINING, READ_ONLY_REMOVED})
_KINDS: Final = {"journal": "journal", "ledgers": "ledger"}

log = get_logger(__name__)


class BookieProcess:
    """`connect` gives the metadata store, `clock` monotonic seconds, `wall_clock_ms` the time of day.

    Use: `start`, then `stop`, whatever came. The loop's own clock is no good for latencies: uvloop's ticks in ms.
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
        self._randomness = random.SystemRandom()  # noqa: TID251 - the process is put together here
        self._settings = settings
        self._shutdown = shutdown
        self._connect = connect
        self._clock = clock
        self._wall_clock_ms = wall_clock_ms
        self._started_at = clock()
        self.health = Health()
        self.state = BookieState()
        self.state.on_change(self._note_read_only)
        self.drills: DrillControl | None = None
        """What is slow or fails on purpose; None unless the operator allowed that at the start."""
        if settings.storage.drills:
            self.drills = DrillControl(sleep=time.sleep)  # noqa: TID251 - in the threads that use the disk
            log.warning("drills_enabled", setting="storage.drills")
        self.damage = DamageRegister()
        self.repairer: Repairer | None = None
        """From the registration on."""
        self.garbage: GarbageCollector | None = None
        """As `repairer`."""
        self.shards = [
            StorageEngine.on_real_disk(
                storage, wall_clock_ms=wall_clock_ms, stats=StorageStats(), damage=self.damage, drills=self.drills
            )
            for storage in settings.resolved_storages()
        ]
        self._store = self.shards[0] if len(self.shards) == 1 else ShardedStorage(self.shards)
        self._metrics = BookieMetrics(clock=clock, storage=[shard.stats for shard in self.shards])
        self._server = BookieServer(
            self._store,
            state=self.state,
            metrics=self._metrics,
            settings=settings.server,
            security=load_security(settings.auth, settings.tls, now_s=lambda: wall_clock_ms() / 1000),
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
            on_pressure=self._win_space,
            start_worker=lambda: ThreadWorker("bookie-watch", asyncio.get_running_loop()),
        )
        self._sock: socket.socket | None = None
        self._port = 0
        self._http_port = 0
        self._lock = DirectoryLock()
        self._metadata: MetadataStore | None = None
        self._registration: BookieRegistration | None = None
        self._store_is_open = False
        self._http: Any = None
        self._admin_client: Any = None
        self._admin_recovery: Any = None
        self.recovery: EmbeddedRecovery | None = None
        """The cluster's healing, if this bookie takes part in it."""
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics.gauge("bookie_SERVER_STATUS", "1 writable, 0 read-only, -1 not registered.", self._server_status)
        self._metrics.figure("bookie_ledgers_count", "gauge", "Ledgers here.", self._ledger_counts)
        add_parts(
            self._metrics,
            self.shards,
            is_open=lambda: self._store_is_open,
            directories=self.watch.directories,
            damage=self.damage,
            repair=lambda: None if self.repairer is None else self.repairer.state,
        )
        self._metrics.directories = self._directory_usages
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
        self._sock = bind(settings.host, settings.port, insecure=settings.insecure)
        self._port = self._sock.getsockname()[1]
        with contextlib.closing(bind(settings.host, settings.http_port, insecure=settings.insecure)) as http_sock:
            self._http_port = http_sock.getsockname()[1]  # it is free, and, if 0 was asked, now we know which
        serving = asyncio.create_task(self._start_serving())
        try:
            await asyncio.wait({serving}, timeout=HTTP_EARLY_S)
            if not serving.done() or serving.exception() is None:
                await self._start_http()
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

    async def _start_serving(self) -> None:
        settings = self._settings
        bookie_id = settings.resolved_bookie_id(port=self._port)
        layout = LedgersLayout(settings.ledgers_root)
        wait = ClusterWait(
            settings.zookeeper,
            layout,
            setting="BOOKIE_ZOOKEEPER",
            health=self.health,
            timeout_s=settings.zookeeper_connect_timeout_s,
            wall_clock_ms=self._wall_clock_ms,
        )
        metadata = self._metadata = await wait.for_zookeeper(self._connect(settings))
        await wait.for_cluster(metadata)
        self.health.progress("checking the bookie's identity")
        options = cluster_options(zookeeper=settings.zookeeper, ledgers_root=settings.ledgers_root)
        membership = OwnMembership(
            self._metadata,
            bookie_id,
            self.state,
            self.health,
            wall_clock_ms=self._wall_clock_ms,
            cluster_options=options,
        )
        await asked_again(membership.check_start, event="membership_not_read")
        claim = Claim(
            bookie_id=bookie_id,
            journal_dirs=settings.journal_dirs,
            ledger_dirs=settings.ledger_dirs,
            cluster_options=options,
        )
        establish = partial(
            establish_identity,
            CookieStore(self._metadata, layout),
            RealDisk(),
            claim,
            has_ledgers=lambda: any_ledger(self._ledger_manager(layout).list()),
            now_ms=self._wall_clock_ms(),
            on_lost_storage=str(settings.storage.on_lost_storage),
        )
        identity = await asked_again(establish, event="identity_not_established")
        if identity.is_new:
            await membership.join()
        self._lock.take(claim.directories)
        self.health.progress("opening the storage")
        await self._store.open(on_progress=self._replayed)
        self._store_is_open = True
        await self.watch.check()
        self._tasks.append(asyncio.create_task(self.watch.run(), name="storage-watch"))
        if any(shard.limbo is not None for shard in self.shards):
            await self._list_limbo(self._metadata, layout, bookie_id)
        assert self._sock is not None
        await self._server.start(self._sock)
        log.info("bookie_serves", bookie_id=bookie_id, port=self._port)
        await self._register(self._metadata, layout, bookie_id)
        name = AdvertisedName(settings.resolved_host(), self.health)
        self._tasks.append(asyncio.create_task(name.run(), name="advertised-name"))
        await membership.serves()
        self._tasks.append(asyncio.create_task(membership.run(), name="membership"))
        self._start_garbage_collection(self._metadata, layout, bookie_id, identity.cookie.instance_id)
        self._start_repair(self._metadata, layout, bookie_id)
        if settings.autorecovery_embedded:
            await self._start_recovery(self._metadata, layout, bookie_id)

    def _ledger_manager(self, layout: LedgersLayout) -> Any:
        """A `LedgerManager`. Few starts need one, and importing it takes time."""
        assert self._metadata is not None
        module = importlib.import_module("bindery_metadata.ledgers.ledger_manager")
        return module.LedgerManager(self._metadata, layout, randomness=self._randomness)

    async def _list_limbo(self, metadata: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> None:
        """Before anybody can ask: which ledgers may lack entries here."""
        self._limbo_listed(0)
        await LimboListing(
            self.shards,
            self._ledger_manager(layout),
            bookie_id,
            sync=partial(metadata.sync, layout.root),
            progress=self._limbo_listed,
        ).run()
        self._note_limbo()

    def _start_repair(self, metadata: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> None:
        assert self.garbage is not None  # it knows for certain what was deleted
        self.repairer = Repairer(
            self.shards,
            self.damage,
            bookie_id,
            connect=connector(self._settings, bookie_id, metadata, layout, randomness=self._randomness),
            is_gone=self.garbage.is_gone,
            rate=self._settings.storage.repair_rate,
            clock=self._clock,
            accepts=lambda: self.state.accepts_add(priority=1),
            changed=self._note_limbo,
        )
        self._tasks.append(asyncio.create_task(self.repairer.run(), name="repair"))

    def _start_garbage_collection(
        self, metadata: MetadataStore, layout: LedgersLayout, bookie_id: BookieId, instance_id: str | None
    ) -> None:
        assert instance_id is not None  # of a cookie in force
        storage = self._settings.storage
        self.garbage = GarbageCollector(
            self.shards,
            metadata,
            layout,
            instance_id=instance_id,
            bookie_id=bookie_id,
            connect=connector(self._settings, bookie_id, metadata, layout, randomness=self._randomness),
            wait_s=storage.gc_wait_time_s,
            over_replicated_wait_s=storage.gc_over_replicated_wait_time_s,
            op_rate=storage.gc_metadata_op_rate,
            clock=self._clock,
            wall_clock_ms=self._wall_clock_ms,
            randomness=self._randomness,
        )
        for shard in self.shards:
            shard.compactor.on_forced = self.garbage.request
        self._tasks.append(asyncio.create_task(self.garbage.run(), name="garbage-collection"))

    async def _start_recovery(self, metadata: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> None:
        loop = asyncio.get_running_loop()
        module = await loop.run_in_executor(None, importlib.import_module, "bindery_bookie.embedded_recovery")
        recovery: EmbeddedRecovery = module.EmbeddedRecovery(
            bookie_id=bookie_id,
            randomness=self._randomness,
            clock=self._clock,
            clock_ms=self._wall_clock_ms,
            ask_exit=self._recovery_failed,
        )
        self.recovery = recovery
        connect = connector(self._settings, bookie_id, metadata, layout, randomness=self._randomness)
        self._tasks.append(asyncio.create_task(recovery.run(metadata, layout, connect), name="recovery"))

    def _recovery_page(self) -> bytes:
        return b"" if self.recovery is None else self.recovery.render()

    def _recovery_failed(self, reason: str) -> None:
        self.health.fail("recovery", reason)
        self._shutdown.request(reason, exit_code=EXIT_ERROR)

    async def _register(self, metadata: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> None:
        self.health.progress("registering")
        info = bookie_service_info.of_bookie(
            host=self._settings.resolved_host(), port=self._port, http_port=self._http_port
        )
        self._registration = BookieRegistration(
            metadata,
            layout,
            bookie_id,
            bookie_service_info.encode(info),
            session_timeout_s=self._settings.zookeeper_session_timeout_s,
        )
        presence = Presence(self._registration, self.state, self.health)
        self._registration.on_change(presence.registration_changed)
        register = partial(self._registration.register, read_only=self.state.read_only)
        await asked_again(register, event="bookie_not_registered_yet")
        self._tasks.append(asyncio.create_task(presence.run(), name="presence"))

    async def _start_http(self) -> None:
        loop = asyncio.get_running_loop()
        # In a thread: importing protobuf, for rare requests, and uvicorn takes longer than an add may.
        await loop.run_in_executor(None, importlib.import_module, "bindery_core.wire.v3_generated")
        http_server = await loop.run_in_executor(None, importlib.import_module, "bindery_kit.http.http_server")
        admin = await loop.run_in_executor(None, importlib.import_module, "bindery_bookie.admin.app")
        page = await loop.run_in_executor(None, importlib.import_module, "bindery_bookie.metrics.process_page")
        app = OpsApp(
            self.health,
            page.ProcessPage(self._metrics, more=self._recovery_page),
            app=admin.AdminApp(self._admin_context(admin)),
        )
        settings = self._settings
        self._http = http_server.HttpServer(app, host=settings.host, port=self._http_port, insecure=settings.insecure)
        await self._http.start()
        self._tasks.append(asyncio.create_task(self._http.wait(), name="http"))

    def _admin_context(self, admin: Any) -> "AdminContext":
        """`admin`: the module `admin.app`."""
        settings = self._settings
        shards = [
            admin.EngineShard(
                shard,
                wall_clock_ms=self._wall_clock_ms,
                collector=lambda shard=shard: shard.compactor if shard.is_open else None,
                scrubber=lambda shard=shard: shard.scrubber if shard.is_open else None,
            )
            for shard in self.shards
        ]
        self._admin_client = admin.SharedClient(self._connect_client)
        bookie_id = str(settings.resolved_bookie_id(port=self._port))
        self._admin_recovery = admin.SharedRecovery(
            lambda: self._metadata,
            LedgersLayout(settings.ledgers_root),
            by=bookie_id,
            ledgers=self._admin_client.get,
            randomness=self._randomness,
            clock_ms=self._wall_clock_ms,
        )
        made: AdminContext = admin.AdminContext(
            bookie_id=bookie_id,
            store=self._store,
            state=self.state,
            health=self.health,
            settings=self._effective_settings,
            is_open=lambda: self._store_is_open,
            disk=RealDisk(),
            layout=LedgersLayout(settings.ledgers_root),
            randomness=self._randomness,
            metadata=lambda: self._metadata,
            damage=self.damage,
            repair=lambda: None if self.repairer is None else self.repairer.state,
            ledger_client=self._admin_client.get,
            access=admin_access(settings.auth, now_s=lambda: self._wall_clock_ms() / 1000),
            shards=lambda: shards,
            directories=self.watch.directories,
            drills=self.drills,
            recovery=self._admin_recovery.get,
        )
        return made

    def _connect_client(self) -> Awaitable[Any] | None:
        """A ledger client of this process's own; None before there is a metadata store."""
        if self._metadata is None:
            return None
        settings = self._settings
        bookie_id = settings.resolved_bookie_id(port=self._port)
        layout = LedgersLayout(settings.ledgers_root)
        return connector(settings, bookie_id, self._metadata, layout, randomness=self._randomness)()

    async def run(self) -> None:
        """Return when the shutdown is asked for, or a part that must not end ended."""
        stop = asyncio.create_task(self._shutdown.wait())
        try:
            done, _ = await asyncio.wait({stop, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for task in done - {stop}:
            error = None if task.cancelled() else task.exception()
            log.error("bookie_part_died", part=task.get_name(), exc_info=error)
            self._shutdown.request(sentence_of_end(task.get_name(), error), exit_code=EXIT_ERROR)

    async def stop(self) -> None:
        """End in order; each step has its limit. Safe after a start that failed half way."""
        self.state.shutting_down = True
        self.health.block("shutdown", "stopping")
        if self.recovery is not None:
            with contextlib.suppress(TimeoutError, BinderyError):
                async with asyncio.timeout(RECOVERY_STOP_TIMEOUT_S):
                    await self.recovery.stop()
        if self._registration is not None:
            with contextlib.suppress(TimeoutError, BinderyError):
                async with asyncio.timeout(UNREGISTER_TIMEOUT_S):
                    await self._registration.close()
        await self._server.close()
        if self._sock is not None:
            self._sock.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.recovery is not None:
            await self.recovery.close()
        if self._store_is_open:
            self._store_is_open = False
            await self._store.close()
        self._lock.release()
        if self._http is not None:
            await self._http.stop()
            await self._admin_recovery.close()
            await self._admin_client.close()
        if self._metadata is not None:
            with contextlib.suppress(TimeoutError, BinderyError):
                async with asyncio.timeout(METADATA_CLOSE_TIMEOUT_S):
                    await self._metadata.close()
        log.info("bookie_stopped", reason=self._shutdown.reason)

    # --- small things ---------------------------------------------------------------------------------------------

    def _limbo_listed(self, ledgers: int) -> None:
        self.health.progress("storage was lost: finding out which ledgers were here", done=ledgers, unit="ledgers")

    def _replayed(self, progress: ReplayProgress) -> None:
        percent = 100 * progress.bytes_done // progress.bytes_total if progress.bytes_total else 100
        self.health.progress(
            f"replaying the journal ({percent} %, {progress.entries} entries)",
            done=progress.bytes_done,
            total=progress.bytes_total,
            unit="bytes",
        )

    def _note_read_only(self) -> None:
        """For /readyz: reads are served, so it is no reason not to be ready. Membership has a note of its own."""
        reasons = [why for part, why in self.state.reasons.items() if part not in NOTED_ELSEWHERE]
        self.health.note("read_only", f"no adds are taken: {'; '.join(reasons)}" if reasons else None)

    def _note_limbo(self) -> None:
        """For /readyz, as above: what is here is served."""
        states = [shard.limbo for shard in self.shards if shard.limbo is not None]
        if not states:
            self.health.note("limbo", None)
            return
        reasons = "; ".join(dict.fromkeys(state.reason for state in states))
        left = sum(state.left for state in states)  # 0: not counted since the start
        counted = f" (ledgers left: {left})" if left else ""
        self.health.note("limbo", f"storage is incomplete and refilled from the other bookies{counted}: {reasons}")

    def _win_space(self) -> None:
        """A disk fills up: do not wait for the hour of garbage collection and compaction."""
        if self.garbage is not None:
            self.garbage.request(compact=True)
        elif self._store_is_open:
            for shard in self.shards:
                shard.compactor.request(minor=True, major=True)

    def _journal_failed(self, reason: str) -> None:
        self._shutdown.request(reason, exit_code=EXIT_ERROR)

    def _ledger_counts(self) -> list[tuple[dict[str, str], float]]:
        counts = [shard.ledgers_count for shard in self.shards]
        return [({}, float(sum(count for count in counts if count is not None)))] if None not in counts else []

    def _directory_usages(self) -> list[DirectoryUsage]:
        return [
            DirectoryUsage(state.path, _KINDS[what], state.usage, not state.is_writable)
            for state in self.watch.directories()
            for what in state.holds
        ]

    def _server_status(self) -> float:
        if not self.state.registered:
            return -1
        return 0 if self.state.read_only else 1

    def _effective_settings(self) -> Mapping[str, str]:
        return {setting.name: str(setting.value) for setting in self._settings.effective()}
