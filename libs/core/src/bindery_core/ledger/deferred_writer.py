"""DeferredLedgerWriter: a writer whose bookies acknowledge before they force an entry to disk.

An entry is acknowledged once an ack quorum has written it. Such an entry survives a crash of the bookie processes, but
not a power loss. A force makes it durable: all bookies of the ensemble force the entries that they have written. When
all of them have confirmed the force, the entries that were acknowledged before it become readable (`published_lac`).
Entries above `published_lac` may be lost when the ledger is recovered.

The ensemble cannot change, because a new member cannot force the entries of its predecessor. A bookie that fails
therefore breaks the handle. Source: BookKeeper's WriteFlag.DEFERRED_SYNC and ForceLedgerOp.
"""

from dataclasses import replace
from typing import NamedTuple

from bindery_core.digest import Digester
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import LedgerId
from bindery_core.ledger.ledger_actions import SendLac, WriterAction
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings


class ForceMark(NamedTuple):
    """The last entry that a force covers."""

    entry_id: int
    length: int
    """Payload bytes of the entries up to and including this entry."""


class DeferredLedgerWriter(LedgerWriter):
    """Writes one ledger with deferred sync.

    Invariants: published_lac <= lac (the highest entry acknowledged in order); only `forced` moves published_lac.
    """

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        digester: Digester,
        settings: WriterSettings | None = None,
    ) -> None:
        settings = replace(settings or WriterSettings(), explicit_lac_idle_s=None)  # `lac` must not be published
        super().__init__(ledger_id, metadata, digester=digester, settings=settings)
        self._published = ForceMark(-1, 0)

    @property
    def published_lac(self) -> int:
        return self._published.entry_id

    @property
    def published_length(self) -> int:
        """Payload bytes of entries 0..published_lac."""
        return self._published.length

    def mark(self) -> ForceMark:
        """Return the last entry that a force which starts now covers.

        Call this before the force request is sent, and pass the result to `forced` after all bookies confirmed it.
        """
        return ForceMark(self.lac, self.confirmed_length)

    def forced(self, mark: ForceMark) -> list[WriterAction]:
        """Process a force that every bookie of the ensemble confirmed. Requests SendLac, which informs readers."""
        if mark.entry_id <= self._published.entry_id:
            return []
        self._published = mark
        return [SendLac(self.metadata.last_segment.ensemble, mark.entry_id)]

    def _members_failed(self, members: int, reason: str, now: float) -> list[WriterAction]:
        failed = [
            bookie_id
            for index, bookie_id in enumerate(self.metadata.last_segment.ensemble)
            if members & ~self._silent & 1 << index
        ]
        return self._fail(
            BookieUnavailable(
                "a bookie failed, and a ledger with deferred sync cannot replace it",
                ledger_id=self.ledger_id,
                bookie_id=",".join(failed),
                reason=reason,
            )
        )
