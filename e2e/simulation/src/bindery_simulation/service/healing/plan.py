"""Healing in a simulated cluster: the plan of a world that heals, and the machines that do it.

An `AuditorMachine` runs `RecoveryService` as an auditor's process does: election, auditor and replication worker over
one metadata session and one ledger client; HTTP alone is left out. A part of the worlds have one or two of them:

| kind     | what happens                                                                | full check |
|----------|-----------------------------------------------------------------------------|------------|
| restarts | bookies are away, never for as long as the delay: only what they missed may | none       |
|          | be copied, and all of it is, by the notes of who closed the ledgers         |            |
| returns  | bookies come back after they were lost, while slow copies are being made    | whole      |
| storm    | everything: disks lost, drains, leases, stale leaders, and all other faults | whole      |

Disks are lost once in a world at most, and every ledger of such a world has Qa of 2 or more: more than that no healing
can bear.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bindery_client.client import LedgerClient
from bindery_core.entry import peek_ids
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.configuration.settings import SettingsConfigDict
from bindery_recovery.cluster.bookie_watch import AuditorLimits
from bindery_recovery.service import RecoveryService
from bindery_recovery.settings import RecoverySettings

from bindery_simulation.loop import Process
from bindery_simulation.service.machine import Machine

if TYPE_CHECKING:
    from bindery_simulation.service.world import World

SHARE: Final = 0.3
"""Of the worlds that have auditors, when the kind is chosen at random."""
CLOCKS_APART_MS: Final = 2_000
"""An auditor's wall clock is off by so much at most: what it writes about the future is read by others."""
DELAY_OF_RESTARTS_S: Final = 9
"""Longer than any absence in a world of restarts."""


class HealingKind(StrEnum):
    RESTARTS = "restarts"
    RETURNS = "returns"
    STORM = "storm"


@dataclass(frozen=True, slots=True)
class HealingPlan:
    """What a world with auditors is about. Invariant: drawn from the seed alone."""

    kind: HealingKind
    auditors: int
    delay_s: int
    bytes_per_s: int
    loses_disk: bool
    """A disk may be lost, once."""
    drains: bool
    traffic_s: float
    """Healing is under way, and may be disturbed, for so long before everything is undone."""
    workers: int

    @property
    def spares(self) -> int:
        """Bookies without which every ensemble must find its place."""
        return 1 if self.kind is not HealingKind.STORM else self.loses_disk + self.drains

    @property
    def settings(self) -> RecoverySettings:
        checks_all = self.kind is not HealingKind.RESTARTS
        return _Settings(
            lost_bookie_delay_s=self.delay_s, bookie_check_interval_s=20.0,
            ledger_check_interval_s=8.0 if checks_all else 0.0, ledger_check_percent=100.0,
            drain_interval_s=3.0, workers=self.workers, open_ledger_grace_s=3.0,
            bytes_per_s_max=self.bytes_per_s, bytes_per_s_min=self.bytes_per_s // 2, entries_in_flight_max=100,
        )  # fmt: skip

    @property
    def limits(self) -> AuditorLimits:
        return AuditorLimits(
            settle_s=5.0, debounce_s=0.2, look_interval_s=2.0, save_interval_s=2.0, retry_s=1.0, check_poll_s=4.0
        )


class _Settings(RecoverySettings):
    """Not from the environment of whoever runs a simulation."""

    model_config = SettingsConfigDict(env_prefix="BINDERY_SIMULATED_RECOVERY_")


def draw_plan(seed: int, kind: HealingKind | None = None, *, is_wanted: bool = False) -> HealingPlan | None:
    """Draw the plan of a seed, or None for a world without auditors; `is_wanted`: never None.

    Uses a random generator of its own, so that worlds without auditors stay the same. `kind`: drawn too if None.
    """
    rng = random.Random(f"healing of {seed}")
    is_drawn = rng.random() < SHARE
    drawn = rng.choice((HealingKind.RESTARTS, HealingKind.RETURNS, *[HealingKind.STORM] * 4))
    if kind is None and not is_wanted and not is_drawn:
        return None
    kind = kind or drawn
    is_storm = kind is HealingKind.STORM
    return HealingPlan(
        kind=kind, auditors=rng.choice((1, 2, 2)),
        delay_s=rng.choice((2, 4)) if kind is not HealingKind.RESTARTS else DELAY_OF_RESTARTS_S,
        bytes_per_s=rng.choice((64, 256, 1024)) * 1024 if is_storm else rng.choice((16, 32)) * 1024,
        loses_disk=is_storm and rng.random() < 0.7, drains=is_storm and rng.random() < 0.4,
        traffic_s=rng.choice((12.0, 18.0)) if is_storm else 20.0, workers=rng.choice((1, 1, 3)),
    )  # fmt: skip


class WatchedClient(LedgerClient):
    """The ledger client, whose copies are seen from outside."""

    machine: "AuditorMachine"
    process: Process

    async def store_replicas(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, frames: Sequence[bytes], **others: Any
    ) -> list[int]:
        entry_ids = [peek_ids(frame)[1] for frame in frames]
        self.machine.world.healing_verdict.copying(self.process, ledger_id, bookie_id, entry_ids)
        return await super().store_replicas(ledger_id, metadata, bookie_id, frames, **others)


class AuditorMachine(Machine):
    """One auditor's process after the other."""

    def __init__(self, world: "World", name: str, plan: HealingPlan) -> None:
        super().__init__(world, name)
        self.clock_ahead_ms = self.rng.randint(-CLOCKS_APART_MS, CLOCKS_APART_MS)
        self._plan = plan
        self._services: list[RecoveryService] = []
        """Of all its processes."""
        self._stop_wanted: asyncio.Future[str] | None = None

    @property
    def entries_copied(self) -> int:
        return sum(service.worker.stats.entries_copied for service in self._services)

    @property
    def deaths(self) -> list[str]:
        """Parts of a service that should have run for ever, and why they did not."""
        states = [state for service in self._services for state in service.watcher.states.values()]
        return [f"{state.name}: {state.last_error}" for state in states if state.deaths]

    async def _life(self, process: Process) -> None:
        session = self.session = self.world.tree.open_session(process)
        self._stop_wanted = stop_wanted = self.world.loop.create_future()
        try:
            client = await WatchedClient.connect(
                session, randomness=self.rng, layout=self.world.layout, settings=self.world.client_settings
            )
            client.machine, client.process = self, process
            service = RecoveryService(
                session, self.world.layout, client,
                settings=self._plan.settings, limits=self._plan.limits, name=self.name, randomness=self.rng,
                clock_ms=self.wall_clock_ms, ask_exit=lambda reason: self._stop(stop_wanted, reason),
            )  # fmt: skip
            await service.prepare()
        except BinderyError as error:
            self.ended(process, repr(error))
            return
        self._services.append(service)
        task = self.world.loop.create_task(service.run())
        why = await stop_wanted
        try:
            async with asyncio.timeout(5.0):
                await service.stop()
        except (BinderyError, TimeoutError) as error:
            self.world.trace.add(self.name, "does not stop in order", error=error)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await session.close()
        self.ended(process, why)

    def stop(self) -> None:
        """SIGTERM: end in order, then start again."""
        if self.process is not None and self._stop_wanted is not None:
            self.process.call_soon(self._stop, self._stop_wanted, "SIGTERM")

    @staticmethod
    def _stop(stop_wanted: "asyncio.Future[str]", reason: str) -> None:
        if not stop_wanted.done():
            stop_wanted.set_result(reason)
