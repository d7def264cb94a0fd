"""CopiesSeen: which ledgers were given copies of entries lately, so that nobody collects what is just being brought.

Whoever heals a ledger stores its entries first and names the bookie in the metadata last; in between the metadata say
that the bookie has no business with the ledger. Copies are recovery adds; a client's own recovery makes them too.

What was before the start, or fell out because there is too much of it, is not known and counts as seen.
"""

from collections.abc import Iterable
from typing import Final

KEPT_MAX: Final = 50_000
"""Ledgers."""


class CopiesSeen:
    """Times in seconds of one clock that only goes on. Event loop only."""

    def __init__(self, now_s: float, *, kept_max: int = KEPT_MAX) -> None:
        self._known_since_s = now_s
        self._kept_max = kept_max
        self._at_s: dict[int, float] = {}
        """The longest ago first."""

    def note(self, ledger_ids: Iterable[int], now_s: float) -> None:
        """They are given copies now."""
        for ledger_id in ledger_ids:
            self._at_s.pop(ledger_id, None)
            self._at_s[ledger_id] = now_s
        while len(self._at_s) > self._kept_max:
            oldest = next(iter(self._at_s))
            self._known_since_s = self._at_s.pop(oldest)

    def since(self, ledger_id: int, at_s: float) -> bool:
        """Whether the ledger was given copies at `at_s` or later, as far as that can be ruled out."""
        return at_s <= self._known_since_s or self._at_s.get(ledger_id, at_s - 1) >= at_s
