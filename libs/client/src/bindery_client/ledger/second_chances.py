"""SecondChances: how often a bookie that failed in a ledger is taken into its ensemble again, for want of others.

A spare that was unwell for a moment must be had again, or the writer does without a copy. But two bookies that refuse
adds and stay registered would replace each other for ever: a write to the metadata and one more segment for each add.
So one that failed is taken back at once only the first time. After that it rests for `pause_s`, twice as long each
time, up to PAUSE_S_MAX; who did well for longer than that begins anew.

    failed --taken again--> rests --pause is over--> may be taken again, and rests for longer
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bindery_core.ids import BookieId

PAUSE_S_MAX: Final = 300.0


@dataclass(slots=True)
class _Rest:
    until: float
    pause_s: float
    is_over: bool = False
    """It failed again since it was taken."""


class SecondChances:
    """Of one ledger. `now`: monotonic, in seconds."""

    def __init__(self, *, pause_s: float) -> None:
        assert pause_s > 0
        self._pause_s = pause_s
        self._failed: set[BookieId] = set()
        self._rests: dict[BookieId, _Rest] = {}

    def failed(self, bookies: Iterable[BookieId], *, now: float) -> None:
        """They are to be replaced. One that served for longer than it would have rested had another trouble before."""
        for bookie_id in bookies:
            self._failed.add(bookie_id)
            rest = self._rests.get(bookie_id)
            if rest is None or rest.is_over:
                continue
            if now > rest.until:
                del self._rests[bookie_id]
            else:
                rest.is_over = True

    def taken(self, bookies: Iterable[BookieId], *, now: float) -> None:
        """They were put into the ensemble."""
        for bookie_id in self._failed.intersection(bookies):
            before = self._rests.get(bookie_id)
            if before is None or now >= before.until + PAUSE_S_MAX:
                pause_s = self._pause_s
            else:
                pause_s = min(2 * before.pause_s, max(PAUSE_S_MAX, self._pause_s))
            self._rests[bookie_id] = _Rest(now + pause_s, pause_s)

    def resting(self, *, now: float) -> dict[BookieId, str]:
        """Bookies that may not be taken yet, and why."""
        return {
            bookie_id: f"failed in this ledger again and again; is tried in {rest.until - now:.0f} s"
            for bookie_id, rest in self._rests.items()
            if rest.until > now
        }

    def next_s(self, *, now: float) -> float | None:
        """Seconds until the first of these may be taken again; None: there are none."""
        return min((rest.until - now for rest in self._rests.values() if rest.until > now), default=None)
