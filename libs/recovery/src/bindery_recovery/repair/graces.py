"""Grace periods of open ledgers that miss a bookie of their last ensemble.

The writer of an open ledger replaces a lost bookie itself at its next add. Recovery closes the ledger only if the same
absence lasts for a grace period. The period starts again if the absence is a different one: the ensemble changed, other
bookies are missing, or the ledger was marked again (another worker may have seen the earlier absence end).
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from bindery_core.ids import BookieId, LedgerId

from bindery_recovery.checks.checker import OpenTail


@dataclass(frozen=True, slots=True)
class _Absence:
    """Bookies that are missing from the last ensemble of an open ledger."""

    marked_ms: int
    """Time of the mark."""
    segment_first: int
    ensemble: tuple[BookieId, ...]
    missing: frozenset[BookieId]

    def continues_in(self, later: "_Absence") -> bool:
        """Return True if `later` is the same absence, perhaps with more or fewer bookies."""
        place = (self.marked_ms, self.segment_first, self.ensemble)
        return place == (later.marked_ms, later.segment_first, later.ensemble) and bool(self.missing & later.missing)


class Graces:
    """The grace periods of one worker, by ledger. They are measured by the event loop's clock."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: dict[LedgerId, tuple[_Absence, float]] = {}

    def left_s(self, ledger_id: LedgerId, tail: OpenTail, *, missing: Collection[BookieId], marked_ms: int) -> float:
        """Return the seconds that are left of the grace period; 0 if it has passed."""
        now = asyncio.get_running_loop().time()
        absence = _Absence(marked_ms, tail.segment_first, tail.ensemble, frozenset(missing))
        known = self._since.get(ledger_id)
        since = known[1] if known is not None and known[0].continues_in(absence) else now
        self._since[ledger_id] = (absence, since)
        return max(0.0, since + self._grace_s - now)

    def forget(self, ledger_id: LedgerId) -> None:
        self._since.pop(ledger_id, None)
