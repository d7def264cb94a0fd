"""LedgerRecovery: fence a ledger's writer, find its last entry, and close it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bindery_core.digest import Digester
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger_actions import RecoveryAction
from bindery_core.ledger_metadata import LedgerMetadata
from bindery_core.wire.messages import AddResponse, ReadResponse


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    read_timeout_s: float = 5.0
    """A bookie that leaves a recovery read unanswered for so long counts as failed for that read. Seconds."""
    add_timeout_s: float = 10.0
    reads_in_flight_max: int = 16
    """Entries read ahead."""


class LedgerRecovery:
    """Recovers one ledger. Ends with Recovered or Fail; a failed recovery may be started again by anybody."""

    metadata: LedgerMetadata
    """As read, with ensembles changed in memory."""
    is_finished: bool

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        digester: Digester,
        settings: RecoverySettings | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self, *, now: float) -> list[RecoveryAction]:
        raise NotImplementedError

    def recovery_begun(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        """BeginRecovery is done; `metadata` as it stands now."""
        raise NotImplementedError

    def receive_reads(
        self, bookie_id: BookieId, responses: Sequence[ReadResponse], *, now: float
    ) -> list[RecoveryAction]:
        raise NotImplementedError

    def receive_adds(
        self, bookie_id: BookieId, responses: Sequence[AddResponse], *, now: float
    ) -> list[RecoveryAction]:
        raise NotImplementedError

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[RecoveryAction]:
        raise NotImplementedError

    def ensemble_changed(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        raise NotImplementedError

    def ensemble_change_failed(self, error: BinderyError, *, now: float) -> list[RecoveryAction]:
        raise NotImplementedError

    def recovery_closed(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        """CloseRecovered is done; `metadata` as it stands now, whoever closed it."""
        raise NotImplementedError

    def metadata_failed(self, error: BinderyError, *, now: float) -> list[RecoveryAction]:
        """BeginRecovery or CloseRecovered failed for good."""
        raise NotImplementedError

    def tick(self, *, now: float) -> list[RecoveryAction]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        raise NotImplementedError
