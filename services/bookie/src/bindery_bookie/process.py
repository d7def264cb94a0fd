"""BookieProcess: one bookie from start to end.

Start: bind the port (so that a taken one is told first) -> ZooKeeper -> identity -> open storage, replaying its journal
-> serve the ledger port -> register. The HTTP stack is imported only after that, or after HTTP_EARLY_S when the start
takes longer, so that probes can see the progress of a long replay.
End: unregister -> answer what is under way -> close connections -> flush and close storage -> HTTP -> ZooKeeper.
"""

import asyncio
import contextlib
import importlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from bindery_core import bookie_service_info
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId
from bindery_kit.health import Health, OpsApp
from bindery_kit.logs import get_logger
from bindery_kit.metrics import Metrics
from bindery_kit.runtime import EXIT_ERROR, Shutdown
from bindery_metadata.cookies import CookieStore
from bindery_metadata.layout import LedgersLayout
from bindery_metadata.registration import BookieRegistration
from bindery_metadata.store import MetadataStore

from bindery_bookie.admin import AdminApp
from bindery_bookie.identity import establish_identity
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.presence import Presence
from bindery_bookie.security import load_security
from bindery_bookie.server import BookieServer, bind
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.disk import RealDisk
from bindery_bookie.storage.engine import StorageEngine
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage_watch import StorageWatch
from bindery_bookie.store import ReplayProgress

HTTP_EARLY_S: Final = 1.0
UNREGISTER_TIMEOUT_S: Final = 2.0
METADATA_CLOSE_TIMEOUT_S: Final = 3.0

Connect = Callable[[BookieSettings], Any]
"""Awaitable of a MetadataStore; raises MetadataUnavailable."""

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
        self._settings = settings
        self._shutdown = shutdown
        self._connect = connect
        self._clock = clock
        self._started_at = clock()
        self.health = Health()
        self.state = BookieState()
        self._stats = StorageStats()
        self._metrics = BookieMetrics(clock=clock, storage=self._stats)
        self._registry = Metrics("bookie")
        self._registry.registry.register(self._metrics)
        storage = settings.resolved_storage()
        self._journal_dir, self._ledger_dir = storage.journal_directory, storage.ledger_directory
        self._store = StorageEngine.on_real_disk(storage, wall_clock_ms=wall_clock_ms, stats=self._stats)
        self._server = BookieServer(
            self._store,
            state=self.state,
            metrics=self._metrics,
            settings=settings.server,
            security=load_security(settings.auth, settings.tls, now_s=lambda: wall_clock_ms() / 1000),
            clock=clock,
        )
        self._watch = StorageWatch(
            self._store, self._stats, self.state, self.health, settings, on_journal_failed=self._journal_failed
        )
        self._sock: socket.socket | None = None
        self._port = 0
        self._http_port = 0
        self._metadata: MetadataStore | None = None
        self._registration: BookieRegistration | None = None
        self._store_is_open = False
        self._http: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics.gauge("bookie_SERVER_STATUS", "1 writable, 0 read-only, -1 not registered.", self._server_status)
        self._metrics.gauge("bookie_ledger_dir_usage", "Per cent in use.", lambda: 100 * self._watch.usage)

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
        self.health.progress("connecting to ZooKeeper")
        self._metadata = await self._connect(settings)
        layout = LedgersLayout(settings.ledgers_root)
        self.health.progress("checking the bookie's identity")
        await establish_identity(
            CookieStore(self._metadata, layout),
            RealDisk(),
            bookie_id=bookie_id,
            journal_dir=self._journal_dir,
            ledger_dir=self._ledger_dir,
        )
        self.health.progress("opening the storage")
        await self._store.open(on_progress=self._replayed)
        self._store_is_open = True
        self._watch.check_disk()
        self._tasks.append(asyncio.create_task(self._watch.run(), name="storage-watch"))
        assert self._sock is not None
        await self._server.start(self._sock)
        log.info("bookie_serves", bookie_id=bookie_id, port=self._port)
        await self._register(self._metadata, layout, bookie_id)

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
        await self._registration.register(read_only=self.state.read_only)
        self._tasks.append(asyncio.create_task(presence.run(), name="presence"))

    async def _start_http(self) -> None:
        loop = asyncio.get_running_loop()
        # In a thread: importing uvicorn takes longer than an add may.
        http_server = await loop.run_in_executor(None, importlib.import_module, "bindery_kit.http_server")
        admin = AdminApp(self._store, self.state, self.health, self._effective_settings)
        app = OpsApp(self.health, self._registry, app=admin)
        settings = self._settings
        self._http = http_server.HttpServer(app, host=settings.host, port=self._http_port, insecure=settings.insecure)
        await self._http.start()
        self._tasks.append(asyncio.create_task(self._http.wait(), name="http"))

    async def run(self) -> None:
        """Return when the shutdown is asked for, or a part that must not end ended."""
        stop = asyncio.create_task(self._shutdown.wait())
        try:
            done, _ = await asyncio.wait({stop, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for task in done - {stop}:
            error = task.exception()
            log.error("bookie_part_died", part=task.get_name(), error=repr(error))
            self._shutdown.request(f"{task.get_name()} died", exit_code=EXIT_ERROR)

    async def stop(self) -> None:
        """End in order; each step has its limit. Safe after a start that failed half way."""
        self.state.shutting_down = True
        self.health.block("shutdown", "stopping")
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
        if self._store_is_open:
            self._store_is_open = False
            await self._store.close()
        if self._http is not None:
            await self._http.stop()
        if self._metadata is not None:
            with contextlib.suppress(TimeoutError, BinderyError):
                async with asyncio.timeout(METADATA_CLOSE_TIMEOUT_S):
                    await self._metadata.close()
        log.info("bookie_stopped", reason=self._shutdown.reason)

    # --- small things ---------------------------------------------------------------------------------------------

    def _replayed(self, progress: ReplayProgress) -> None:
        percent = 100 * progress.bytes_done // progress.bytes_total if progress.bytes_total else 100
        self.health.progress(
            f"replaying the journal ({percent} %, {progress.entries} entries)",
            done=progress.bytes_done,
            total=progress.bytes_total,
            unit="bytes",
        )

    def _journal_failed(self, reason: str) -> None:
        self._shutdown.request(reason, exit_code=EXIT_ERROR)

    def _server_status(self) -> float:
        if not self.state.registered:
            return -1
        return 0 if self.state.read_only else 1

    def _effective_settings(self) -> Mapping[str, str]:
        return {setting.name: str(setting.value) for setting in self._settings.effective()}
