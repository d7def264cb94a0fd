"""CopiesSeen: the ledgers that recently received copies of entries.

Garbage collection must not delete these ledgers. A replication worker copies entries before it adds the bookie to the
ledger's ensemble; until then the metadata does not name the bookie for this ledger. Copies are recovery adds, which a
client's ledger recovery sends too.

Copies before the start, and copies whose record was dropped because there were too many, are unknown and count as
seen.
"""

from collections.abc import Iterable
from typing import Final

KEPT_MAX: Final = 50_000
"""Maximum number of ledgers recorded."""


class CopiesSeen:
    """Times are seconds of one monotonic clock. Event loop only."""

    def __init__(self, now_s: float, *, kept_max: int = KEPT_MAX) -> None:
        self._known_since_s = now_s
        self._kept_max = kept_max
        self._at_s: dict[int, float] = {}
        """Time of the last copy by ledger, the oldest first."""

    def record(self, ledger_ids: Iterable[int], now_s: float) -> None:
        """Record that these ledgers receive copies now."""
        for ledger_id in ledger_ids:
            self._at_s.pop(ledger_id, None)
            self._at_s[ledger_id] = now_s
        while len(self._at_s) > self._kept_max:
            oldest = next(iter(self._at_s))
            self._known_since_s = self._at_s.pop(oldest)

    def since(self, ledger_id: int, at_s: float) -> bool:
        """Return True unless it is certain that the ledger received no copies at `at_s` or later."""
        return at_s <= self._known_since_s or self._at_s.get(ledger_id, at_s - 1) >= at_s
