"""A machine that runs `RecoveryService` like the process of an auditor.

Election, auditor and replication worker share one metadata session and one ledger client. There is no HTTP port.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from bindery_client.client import LedgerClient
from bindery_core.entry import peek_ids
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_recovery.service import RecoveryService

from bindery_simulation.loop import Process
from bindery_simulation.service.healing.plan import HealingPlan
from bindery_simulation.service.machine import Machine
from bindery_simulation.service.site import Site

CLOCKS_APART_MS: Final = 2_000
"""Maximum error in ms of an auditor's wall clock. It is small, because other auditors read the times that it writes."""


class WatchedClient(LedgerClient):
    """A ledger client that reports the replicas that it stores."""

    machine: "AuditorMachine"
    process: Process

    async def store_replicas(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, frames: Sequence[bytes], **others: Any
    ) -> list[int]:
        entry_ids = [peek_ids(frame)[1] for frame in frames]
        self.machine.site.on_copies(self.process, ledger_id, bookie_id, entry_ids)
        return await super().store_replicas(ledger_id, metadata, bookie_id, frames, **others)


class AuditorMachine(Machine):
    """A machine that runs an auditor. A process that ends is started again."""

    def __init__(self, site: Site, name: str, plan: HealingPlan) -> None:
        super().__init__(site, name)
        self.clock_ahead_ms = self.rng.randint(-CLOCKS_APART_MS, CLOCKS_APART_MS)
        self._plan = plan
        self._services: list[RecoveryService] = []
        """Services of all processes of this machine so far."""
        self._stop_wanted: asyncio.Future[str] | None = None

    @property
    def entries_copied(self) -> int:
        return sum(service.worker.stats.entries_copied for service in self._services)

    @property
    def deaths(self) -> list[str]:
        """Names and errors of service tasks that ended although they should run forever."""
        states = [state for service in self._services for state in service.watcher.states.values()]
        return [f"{state.name}: {state.last_error}" for state in states if state.deaths]

    async def _life(self, process: Process) -> None:
        session = self.session = self.site.tree.open_session(process)
        self._stop_wanted = stop_wanted = self.site.loop.create_future()
        try:
            client = await WatchedClient.connect(
                session, randomness=self.rng, layout=self.site.layout, settings=self.site.client_settings
            )
            client.machine, client.process = self, process
            service = RecoveryService(
                session,
                self.site.layout,
                client,
                settings=self._plan.settings,
                limits=self._plan.limits,
                name=self.name,
                randomness=self.rng,
                clock_ms=self.wall_clock_ms,
                ask_exit=lambda reason: self._stop(stop_wanted, reason),
            )
            await service.prepare()
        except BinderyError as error:
            self.ended(process, repr(error))
            return
        self._services.append(service)
        task = self.site.loop.create_task(service.run())
        why = await stop_wanted
        try:
            async with asyncio.timeout(5.0):
                await service.stop()
        except (BinderyError, TimeoutError) as error:
            self.site.trace.add(self.name, "does not stop in order", error=error)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await session.close()
        self.ended(process, why)

    def stop(self) -> None:
        """Send SIGTERM. The machine then starts the auditor again."""
        if self.process is not None and self._stop_wanted is not None:
            self.process.call_soon(self._stop, self._stop_wanted, "SIGTERM")

    @staticmethod
    def _stop(stop_wanted: "asyncio.Future[str]", reason: str) -> None:
        if not stop_wanted.done():
            stop_wanted.set_result(reason)
