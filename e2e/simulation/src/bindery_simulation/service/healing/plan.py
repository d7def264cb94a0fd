"""Determine the plan of a simulated cluster with auditors from its seed.

Some of the clusters have one or two auditors:

| kind     | events                                                                       | full check |
|----------|------------------------------------------------------------------------------|------------|
| restarts | bookies are down for less than the delay: only the entries that they missed  | no         |
|          | are copied, all of them, found through closing records                       |            |
| returns  | bookies return after they were declared lost, while slow copying is going on | yes        |
| storm    | everything: disk loss, draining, maintenance, stale leaders, all other faults | yes        |

At most one disk is lost per cluster, and every ledger of such a cluster has a Qa of 2 or more, because recovery cannot
repair greater losses.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bindery_kit.configuration.settings import SettingsConfigDict
from bindery_recovery.cluster.bookie_watch import AuditorLimits
from bindery_recovery.settings import RecoverySettings

SHARE: Final = 0.3
"""Share of clusters with auditors, unless the kind is given."""
DELAY_OF_RESTARTS_S: Final = 9
"""Lost-bookie delay in seconds in clusters of kind RESTARTS. It is longer than any bookie is down there."""


class HealingKind(StrEnum):
    """Kind of a cluster with auditors; see the table of the module."""

    RESTARTS = "restarts"
    RETURNS = "returns"
    STORM = "storm"


@dataclass(frozen=True, slots=True)
class HealingPlan:
    """Properties of a cluster with auditors. They depend only on the seed and the requested kind."""

    kind: HealingKind
    auditors: int
    """Number of auditors."""
    delay_s: int
    """Lost-bookie delay in seconds."""
    bytes_per_s: int
    """Maximum copy rate in bytes per second."""
    loses_disk: bool
    """Whether one disk is lost."""
    drains: bool
    """Whether the operator drains a bookie."""
    traffic_s: float
    """Time in seconds of traffic and faults before all faults are undone."""
    workers: int
    """Value of `RecoverySettings.workers`."""

    @property
    def spares(self) -> int:
        """Number of bookies beyond the size of the largest ensemble."""
        return 1 if self.kind is not HealingKind.STORM else self.loses_disk + self.drains

    @property
    def settings(self) -> RecoverySettings:
        checks_all = self.kind is not HealingKind.RESTARTS
        return _Settings(
            lost_bookie_delay_s=self.delay_s,
            bookie_check_interval_s=20.0,
            ledger_check_interval_s=8.0 if checks_all else 0.0,
            ledger_check_percent=100.0,
            drain_interval_s=3.0,
            workers=self.workers,
            open_ledger_grace_s=3.0,
            bytes_per_s_max=self.bytes_per_s,
            bytes_per_s_min=self.bytes_per_s // 2,
            entries_in_flight_max=100,
        )

    @property
    def limits(self) -> AuditorLimits:
        return AuditorLimits(
            settle_s=5.0, debounce_s=0.2, poll_interval_s=2.0, save_interval_s=2.0, retry_s=1.0, check_poll_s=4.0
        )


class _Settings(RecoverySettings):
    """Settings that ignore the environment of the simulation."""

    model_config = SettingsConfigDict(env_prefix="BINDERY_SIMULATED_RECOVERY_")


def draw_plan(seed: int, kind: HealingKind | None = None, *, is_wanted: bool = False) -> HealingPlan | None:
    """Return the plan of a seed, or None for a cluster without auditors.

    `kind`: None for a random kind. `is_wanted`: never return None. The function has its own random generator, so that
    it does not influence clusters without auditors.
    """
    rng = random.Random(f"healing of {seed}")
    is_drawn = rng.random() < SHARE
    drawn = rng.choice((HealingKind.RESTARTS, HealingKind.RETURNS, *[HealingKind.STORM] * 4))
    if kind is None and not is_wanted and not is_drawn:
        return None
    kind = kind or drawn
    is_storm = kind is HealingKind.STORM
    return HealingPlan(
        kind=kind,
        auditors=rng.choice((1, 2, 2)),
        delay_s=rng.choice((2, 4)) if kind is not HealingKind.RESTARTS else DELAY_OF_RESTARTS_S,
        bytes_per_s=rng.choice((64, 256, 1024)) * 1024 if is_storm else rng.choice((16, 32)) * 1024,
        loses_disk=is_storm and rng.random() < 0.7,
        drains=is_storm and rng.random() < 0.4,
        traffic_s=rng.choice((12.0, 18.0)) if is_storm else 20.0,
        workers=rng.choice((1, 1, 3)),
    )
