"""Compare the ledgers' metadata between the three times at which a run reads it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownLedger:
    """The columns of LEDGERS that the rules need. There are few, because the driver holds all ledgers of a cluster at
    once."""

    ledger_id: int
    state: str
    metadata_version: int
    write_quorum: int
    last_entry_id: int | None
    length: int | None
    problem: str | None


LedgerRows = Mapping[int, KnownLedger]
"""Ledgers by id."""


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """All ledgers at the three times. Without a second pass `last` is `after`."""

    before: LedgerRows
    after: LedgerRows
    last: LedgerRows

    def is_steady_before(self, ledger_id: int) -> bool:
        """Whether the ledger is steady from `before` to `after`."""
        return is_steady(self.before.get(ledger_id), self.after.get(ledger_id))

    def is_steady_after(self, ledger_id: int) -> bool:
        """Whether the ledger is steady from `after` to `last`."""
        return is_steady(self.after.get(ledger_id), self.last.get(ledger_id))


def is_steady(was: KnownLedger | None, now: KnownLedger | None) -> bool:
    """Whether the ledger is closed at both times with the same metadata version. None: the ledger did not exist."""
    if was is None or now is None:
        return False
    return was.state == now.state == "closed" and was.metadata_version == now.metadata_version
