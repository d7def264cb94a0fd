"""AdminServer: the bookie's HTTP port: probes, metrics and the admin API.

Importing this module takes a tenth of a second (uvicorn, prometheus_client). `process` imports it in a thread, once the
ledger port serves or the start takes long.
"""

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bindery_core.ids import BookieId
from bindery_core.sources import RandomBits
from bindery_identity.tls import TlsFiles
from bindery_kit.access.audit_log import AuditLog
from bindery_kit.access.audit_trail import trail
from bindery_kit.admin.access import AdminAccess
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.process_page import ProcessPage
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.roles import Roles
from bindery_bookie.admin.app import AdminApp
from bindery_bookie.admin.context import AdminContext
from bindery_bookie.admin.shard import EngineShard
from bindery_bookie.admin.shared_client import SharedClient
from bindery_bookie.admin.shared_recovery import SharedRecovery
from bindery_bookie.maintenance.repair import RepairState
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.maintenance.storage_watch import DirectoryState
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.store import EntryStore

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient


class AdminServer:
    """Call `start`, then `stop` before the metadata store is closed. `stop` is idempotent."""

    def __init__(
        self,
        settings: BookieSettings,
        *,
        sock: socket.socket,
        access: AdminAccess,
        tls: TlsFiles | None,
        tls_metrics: TlsMetrics,
        roles: Roles,
        audit_log: AuditLog | None,
        bookie_id: BookieId,
        health: Health,
        state: BookieState,
        store: EntryStore,
        shards: Sequence[StorageEngine],
        metrics: BookieMetrics,
        damage: DamageRegister,
        drills: DrillControl | None,
        is_open: Callable[[], bool],
        directories: Callable[[], Sequence[DirectoryState]],
        metadata: Callable[[], MetadataStore | None],
        repair: Callable[[], RepairState | None],
        guard: Callable[[], RollbackGuard | None],
        recovery_page: Callable[[], bytes],
        files_page: Callable[[], bytes] = bytes,
        connect_client: "Callable[[], Awaitable[LedgerClient] | None]",
        randomness: RandomBits,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`sock`: bound, not listening yet; `start` listens on it, and `stop` closes it. `tls`: of this port; None: no
        TLS. `tls_metrics`: of all ports. `audit_log`: its owner closes it. `metadata`, `connect_client`, `repair` and
        `guard` return None until the start has created these parts. `recovery_page`: metrics of recovery inside this
        bookie, as text, and `files_page` those of followed files."""
        layout = LedgersLayout(settings.ledgers_root)
        self._client = SharedClient(connect_client)
        self._recovery = SharedRecovery(
            metadata,
            layout,
            by=str(bookie_id),
            ledgers=self._client.get,
            randomness=randomness,
            clock_ms=wall_clock_ms,
        )
        views = [_view(shard, wall_clock_ms) for shard in shards]

        def effective_settings() -> Mapping[str, str]:
            return {setting.name: str(setting.value) for setting in settings.effective()}

        context = AdminContext(
            bookie_id=str(bookie_id),
            store=store,
            state=state,
            health=health,
            settings=effective_settings,
            is_open=is_open,
            disk=RealDisk(),
            layout=layout,
            randomness=randomness,
            metadata=metadata,
            damage=damage,
            repair=repair,
            guard=guard,
            ledger_client=self._client.get,
            access=access,
            roles=roles,
            shards=lambda: views,
            directories=directories,
            drills=drills,
            recovery=self._recovery.get,
        )
        stats = HttpStats()
        page = ProcessPage("bookie", metrics.render, recovery_page, files_page)
        parts = [stats.render, tls_metrics.render, *([] if audit_log is None else [audit_log.render])]
        app = OpsApp(health, page, app=AdminApp(context), parts=parts)
        self._http = HttpServer(
            app,
            host=settings.host,
            sock=sock,
            settings=settings.http,
            stats=stats,
            tls=tls,
            own_names=[settings.advertised_host],
            outermost=trail(audit_log),
        )

    async def start(self) -> None:
        """Return once requests are accepted."""
        await self._http.start()

    async def wait(self) -> None:
        """Return when the HTTP server ends."""
        await self._http.wait()

    async def stop(self) -> None:
        """Stop HTTP, then close the clients that its requests use."""
        await self._http.stop()
        await self._recovery.close()
        await self._client.close()


def _view(shard: StorageEngine, wall_clock_ms: Callable[[], int]) -> EngineShard:
    return EngineShard(
        shard,
        wall_clock_ms=wall_clock_ms,
        collector=lambda: shard.compactor if shard.is_open else None,
        scrubber=lambda: shard.scrubber if shard.is_open else None,
    )
