"""ReplacementBackoff: limit how often a bookie that failed in a ledger returns to the ensemble of that ledger.

When no other bookie is available, a replacement is chosen among the bookies that failed before. A bookie that failed
only for a moment must be usable again, otherwise the ledger stays under-replicated. But two bookies that refuse adds
and stay registered would replace each other for ever, and each replacement costs a write to the metadata and a segment.

A bookie that failed may therefore return at once only the first time. Each return starts a delay during which it may
not be chosen again: `first_s` seconds, doubled at each further return, up to DELAY_S_MAX. A bookie that served longer
than its delay without a failure starts again at `first_s`.

    failed --chosen again--> excluded --delay is over--> may be chosen again; the next delay is longer
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bindery_core.backoff import Backoff
from bindery_core.ids import BookieId

DELAY_S_MAX: Final = 300.0
"""Maximum delay in seconds, unless the first delay is longer. A bookie that is not chosen for this time after its delay
starts again at the first delay."""


@dataclass(slots=True)
class _Return:
    """The last return of a bookie to the ensemble."""

    backoff: Backoff
    until: float
    """When the bookie may be chosen again."""
    has_failed: bool = False
    """The bookie failed again after this return."""


class ReplacementBackoff:
    """The failed bookies of one ledger. `now`: monotonic, in seconds."""

    def __init__(self, *, first_s: float) -> None:
        assert first_s > 0
        self._first_s = first_s
        self._failed: set[BookieId] = set()
        self._returns: dict[BookieId, _Return] = {}

    def add_failures(self, bookies: Iterable[BookieId], *, now: float) -> None:
        """Record that these bookies failed and are to be replaced."""
        for bookie_id in bookies:
            self._failed.add(bookie_id)
            last = self._returns.get(bookie_id)
            if last is None or last.has_failed:
                continue
            if now > last.until:
                del self._returns[bookie_id]  # it served longer than its delay: this is a new failure, not the old one
            else:
                last.has_failed = True

    def add_choices(self, bookies: Iterable[BookieId], *, now: float) -> None:
        """Record that these bookies were put into the ensemble."""
        for bookie_id in self._failed.intersection(bookies):
            last = self._returns.get(bookie_id)
            if last is None or now >= last.until + DELAY_S_MAX:
                backoff = Backoff(self._first_s, max(DELAY_S_MAX, self._first_s))
            else:
                backoff = last.backoff
            self._returns[bookie_id] = _Return(backoff, now + backoff.next_delay_s())

    def excluded(self, *, now: float) -> dict[BookieId, str]:
        """Return the bookies that may not be chosen yet, each with the reason."""
        return {
            bookie_id: f"failed repeatedly in this ledger; may be chosen again in {last.until - now:.0f} s"
            for bookie_id, last in self._returns.items()
            if last.until > now
        }

    def next_s(self, *, now: float) -> float | None:
        """Return the seconds until the first excluded bookie may be chosen again; None if no bookie is excluded."""
        return min((last.until - now for last in self._returns.values() if last.until > now), default=None)
