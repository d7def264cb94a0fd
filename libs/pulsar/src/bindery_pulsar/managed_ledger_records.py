"""Records in topic metadata: positions, and the ledgers of a topic."""

from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """An entry of a topic. Compares by ledger, then entry."""

    ledger_id: int
    entry_id: int
    """-1: before the first entry of the ledger."""

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRecord:
    """One ledger of a topic."""

    ledger_id: int
    entries: int = 0
    size: int = 0
    """Payload bytes."""
    closed_ms: int = 0
    """Time at which the ledger was closed, ms since 1970; 0: not known to be closed."""
    extension: bytes = b""
    """Metadata fields that are not interpreted here (offload, properties), as protobuf; they are kept unchanged."""
