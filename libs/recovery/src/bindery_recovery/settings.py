"""RecoverySettings: what an operator may turn of healing, wherever it runs: in an auditor or inside a bookie."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check

MIB = 2**20
DAY_S = 86_400
WEEK_S = 7 * DAY_S


class RecoverySettings(Settings):
    """Which bookies count as lost and when, what is checked how often, and how much copying may take."""

    model_config = SettingsConfigDict(env_prefix="RECOVERY_")

    lost_bookie_delay_s: Annotated[int, Ge(0), Le(7 * DAY_S)] = 120
    """How long a bookie may be away before others are given what it held. Seconds. What stands in the metadata as
    BookKeeper's lostBookieRecoveryDelay wins; this is written there when nothing does. Longer than a restart takes;
    BookKeeper's own default is 0."""

    bookie_check_interval_s: Annotated[float, Gt(0)] = DAY_S
    """Seconds between looks at all bookies that no change caused. Source: auditorPeriodicBookieCheckInterval."""

    ledger_check_interval_s: Annotated[float, Ge(0)] = WEEK_S
    """Seconds between checks of all ledgers; 0: none. Source: auditorPeriodicCheckInterval."""

    ledger_check_rate: Annotated[float, Gt(0)] = 20.0
    """Ledgers a second that this check takes at most. A week has room for twelve million."""

    ledger_check_percent: Annotated[float, Ge(0), Le(100)] = 0.0
    """Part of each fragment's entries that it reads besides the first and the last. Per cent. Source:
    auditorLedgerVerificationPercentage."""

    placement_check_interval_s: Annotated[float, Ge(0)] = 0.0
    """Seconds between looks at whether ensembles keep to the placement policy; 0: none. Source:
    auditorPeriodicPlacementPolicyCheckInterval."""

    replica_check_interval_s: Annotated[float, Ge(0)] = 0.0
    """Seconds between checks that ask each bookie for the list of entries it has; 0: none. Source:
    auditorReplicasCheckInterval."""

    drain_interval_s: Annotated[float, Gt(0)] = 30.0
    """Seconds between looks at what draining bookies still hold."""

    workers: Annotated[int, Ge(0), Le(64)] = 1
    """Ledgers that this process heals at a time; 0: it only finds what is to be healed."""

    open_ledger_grace_s: Annotated[float, Ge(0), Le(3600)] = 30.0
    """How long the writer of an open ledger may take to replace a lost bookie itself, before the ledger is closed under
    its hands. Seconds. Source: openLedgerRereplicationGracePeriod."""

    bytes_per_s_max: Annotated[int, Ge(1024)] = 64 * MIB
    """Bytes a second that copying may take in this process, while others do not suffer from it."""

    bytes_per_s_min: Annotated[int, Ge(1024)] = MIB
    """Bytes a second that it may take however slow the bookies are: healing goes on."""

    foreground_p99_target_ms: Annotated[float, Gt(0)] = 50.0
    """Copying is slowed down while bookies answer slower than this (99th percentile). Milliseconds."""

    entries_in_flight_max: Annotated[int, Ge(1), Le(10_000)] = 100
    """Entries that are copied at a time."""

    check_depth_percent: Annotated[float, Ge(0), Le(100)] = 0.0
    """Part of a marked ledger's entries that a worker reads besides the first and the last of each fragment, before it
    copies; what a writer marked is read whole. Per cent."""

    @check
    def _consistent(self) -> None:
        if self.bytes_per_s_min > self.bytes_per_s_max:
            raise ValueError("bytes_per_s_min must not exceed bytes_per_s_max")
