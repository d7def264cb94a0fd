"""Settings of recovery, wherever it runs: in an auditor or inside a bookie."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check

MIB = 2**20
DAY_S = 86_400
WEEK_S = 7 * DAY_S


class RecoverySettings(Settings):
    """When a bookie counts as lost, how often ledgers are checked, and how many resources copying may use."""

    model_config = SettingsConfigDict(env_prefix="RECOVERY_")

    lost_bookie_delay_s: Annotated[int, Ge(0), Le(7 * DAY_S)] = 120
    """Seconds that a bookie may be absent before its entries are copied to other bookies. The value in the metadata,
    BookKeeper's lostBookieRecoveryDelay, takes precedence; if it is not set, this value is written there. Should be
    longer than a restart; BookKeeper's own default is 0."""

    bookie_check_interval_s: Annotated[float, Gt(0)] = DAY_S
    """Seconds between regular audits of all bookies, in addition to those after a change. Source:
    auditorPeriodicBookieCheckInterval."""

    ledger_check_interval_s: Annotated[float, Ge(0)] = WEEK_S
    """Seconds between checks of all ledgers; 0: none. Source: auditorPeriodicCheckInterval."""

    ledger_check_rate: Annotated[float, Gt(0)] = 20.0
    """Maximum number of ledgers checked per second. At the default, a week suffices for twelve million ledgers."""

    ledger_check_percent: Annotated[float, Ge(0), Le(100)] = 0.0
    """Per cent of the entries of each fragment that this check reads, besides the first and the last. Source:
    auditorLedgerVerificationPercentage."""

    placement_check_interval_s: Annotated[float, Ge(0)] = 0.0
    """Seconds between checks whether ensembles follow the placement policy; 0: none. Source:
    auditorPeriodicPlacementPolicyCheckInterval."""

    placement_repair: bool = True
    """Whether ledgers are moved to more racks: replicas of closed ledgers whose write quorums are on fewer racks than
    the registered bookies allow are copied to bookies of other racks. Without racks, nothing is moved. False also for
    workers: they then remove the marks of such ledgers. Source: repairedPlacementPolicyNotAdheringBookieEnable, which
    is off by default."""

    placement_repair_delay_s: Annotated[float, Ge(1), Le(7 * DAY_S)] = 300.0
    """Seconds without a change of the bookies and their racks after which ledgers are moved."""

    replica_check_interval_s: Annotated[float, Ge(0)] = 0.0
    """Seconds between checks that ask each bookie for its list of entries; 0: none. Source:
    auditorReplicasCheckInterval."""

    drain_interval_s: Annotated[float, Gt(0)] = 30.0
    """Seconds between audits of draining bookies."""

    workers: Annotated[int, Ge(0), Le(64)] = 1
    """Number of ledgers that this process repairs at a time; 0: it only detects them."""

    open_ledger_grace_s: Annotated[float, Ge(0), Le(3600)] = 30.0
    """Seconds that the writer of an open ledger has to replace a lost bookie itself before recovery closes the ledger.
    Source: openLedgerRereplicationGracePeriod."""

    bytes_per_s_max: Annotated[int, Ge(1024)] = 64 * MIB
    """Maximum bytes per second that this process copies while bookies respond within the target."""

    bytes_per_s_min: Annotated[int, Ge(1024)] = MIB
    """Minimum bytes per second to which copying is slowed down, so that recovery never stops."""

    foreground_p99_target_ms: Annotated[float, Gt(0)] = 50.0
    """Target response time of bookies in milliseconds (99th percentile). Copying slows down while it is exceeded."""

    entries_in_flight_max: Annotated[int, Ge(1), Le(10_000)] = 100
    """Maximum number of entries in flight."""

    check_depth_percent: Annotated[float, Ge(0), Le(100)] = 0.0
    """Per cent of the entries of a marked ledger that a worker reads before copying, besides the first and the last of
    each fragment. A ledger that a writer reported is read completely."""

    @check
    def _consistent(self) -> None:
        if self.bytes_per_s_min > self.bytes_per_s_max:
            raise ValueError("bytes_per_s_min must not exceed bytes_per_s_max")
