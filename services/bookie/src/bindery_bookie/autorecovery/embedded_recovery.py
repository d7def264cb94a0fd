"""EmbeddedRecovery: recovery of the whole cluster inside a bookie, for clusters without auditor processes.

The bookie takes part in the election of the auditor and runs replication workers as an auditor process does, in the
bookie's ZooKeeper session and under its id. This module is imported only with the setting `autorecovery_embedded`.
Recovery has settings of its own (`embedded_settings`), which are read from the environment
(`BOOKIE_RECOVERY_LOST_BOOKIE_DELAY_S` and so on). Source: BookKeeper's autoRecoveryDaemonEnabled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bindery_core.errors import BinderyError, OutcomeUnknown, TryAgain
from bindery_core.ids import BookieId
from bindery_core.sources import RandomSource
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.last_audits import LastAudits
from bindery_metadata.recovery.last_backup import LastBackupStore
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.last_backup_watch import LastBackupWatch
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.service import RecoveryService

from bindery_bookie.autorecovery.embedded_settings import EmbeddedRecoverySettings

RETRY_S: Final = 2.0
"""Seconds between two attempts to prepare recovery."""

log = get_logger(__name__)


class EmbeddedRecovery:
    """Start `run` as a task once the bookie is registered; call `stop` before it unregisters."""

    def __init__(
        self,
        *,
        bookie_id: BookieId,
        randomness: RandomSource,
        clock: Callable[[], float],
        clock_ms: Callable[[], int],
        ask_exit: Callable[[str], None],
    ) -> None:
        """`clock`: monotonic seconds. `clock_ms`, `ask_exit`: see RecoveryService. Raises WrongSettings."""
        self.settings = EmbeddedRecoverySettings()
        self._bookie_id = bookie_id
        self._randomness = randomness
        self._clock_ms = clock_ms
        self._ask_exit = ask_exit
        self._clock = clock
        self._client: Any = None
        self._metrics: RecoveryMetrics | None = None
        self._last: tuple[LastAuditsWatch, LastBackupWatch] | None = None
        """The results of audits and backups; None before `run`."""
        self.service: RecoveryService | None = None
        """None until `run` has connected."""

    async def run(self, metadata: MetadataStore, layout: LedgersLayout, connect: Callable[[], Awaitable[Any]]) -> None:
        """Run until cancelled, even after it requested the end of the process. `connect` returns a LedgerClient that
        only this object uses."""
        audits = LastAuditsWatch(LastAudits(metadata), clock_ms=self._clock_ms)
        backup = LastBackupWatch(LastBackupStore(metadata), clock_ms=self._clock_ms)
        self._last = (audits, backup)
        showing = [
            asyncio.create_task(audits.run(), name="last_audits"),
            asyncio.create_task(backup.run(), name="last_backup"),
        ]
        try:
            try:
                service = await self._prepare(metadata, layout, connect)
                log.info("recovery_embedded", workers=self.settings.workers)
                await service.run()
            except BinderyError as error:
                self._ask_exit(f"recovery of the cluster cannot start in this bookie: {error}")
            await asyncio.Event().wait()
        finally:
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)

    async def _prepare(
        self, metadata: MetadataStore, layout: LedgersLayout, connect: Callable[[], Awaitable[Any]]
    ) -> RecoveryService:
        """Return the prepared service; retry until the metadata store answers.

        Raises BadRequest for settings that cannot be used and for marks in an unknown format.
        """
        while True:
            try:
                if self._client is None:
                    self._client = await connect()
                if self.service is None:
                    self.service = self._make(metadata, layout)
                    self._metrics = RecoveryMetrics(self.service, clock=self._clock)
                await self.service.prepare()
                return self.service
            except (TryAgain, OutcomeUnknown) as error:
                log.warning("recovery_waits", **error_fields(error))
                await asyncio.sleep(RETRY_S)

    def _make(self, metadata: MetadataStore, layout: LedgersLayout) -> RecoveryService:
        return RecoveryService(
            metadata,
            layout,
            self._client,
            settings=self.settings,
            name=str(self._bookie_id),
            randomness=self._randomness,
            clock_ms=self._clock_ms,
            ask_exit=self._ask_exit,
        )

    def render(self) -> bytes:
        """Return the metrics of recovery as text; empty before recovery runs."""
        if self._metrics is None:
            return b""
        page = Page()
        self._metrics.add_to(page)
        for part in self._last or ():
            part.add_to(page)
        return page.render()

    async def stop(self) -> None:
        """Release locks and leadership. The caller then cancels `run`, and calls `close`."""
        if self.service is not None:
            await self.service.stop()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
