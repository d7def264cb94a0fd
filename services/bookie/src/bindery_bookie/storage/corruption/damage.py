"""DamageRegister: the damage that is known of now, and who wants to hear of it.

Whatever finds damage (a cold read, the scrub, a compaction, the opening) reports it here; the repairer fetches the
entry from other bookies, stores it again, and says `healed`. Nothing is kept on disk: damage that is still there after
a restart is found again.

Invariants: one item per entry, or per place in a file when no entry is known there; at most `items_max` items, what
comes beyond is counted and found again later; answering damage as absence is nobody's right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

log = structlog.get_logger(__name__)

ITEMS_MAX: Final = 10_000
_LINES_MAX: Final = 20
"""Lines logged for damage in a row; the register itself tells the rest."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One place that does not hold what it should."""

    path: str
    """The file."""
    offset: int
    """Bytes from its start."""
    reason: str
    """What was expected and found, in a few words."""
    ledger_id: int | None = None
    entry_id: int | None = None
    """The entry that lies there; None when that is not known: everything of this file from `offset` on is suspect."""

    @property
    def key(self) -> tuple[object, object]:
        """Two reports with one key are the same damage."""
        if self.ledger_id is not None and self.entry_id is not None:
            return self.ledger_id, self.entry_id
        return self.path, self.offset


@dataclass(frozen=True, slots=True)
class Healed:
    """What is in order again: an entry; a whole ledger, because it was deleted; or a file from an offset on."""

    ledger_id: int | None = None
    entry_id: int | None = None
    """None: the whole ledger."""
    path: str = ""
    offset: int = 0


class DamageRegister:
    """Event loop only."""

    def __init__(self, *, items_max: int = ITEMS_MAX) -> None:
        self._items_max = items_max
        self._items: dict[tuple[object, object], Damage] = {}
        self._listeners: list[Callable[[Damage], None]] = []
        self._healed_listeners: list[Callable[[Healed], None]] = []
        self._lines_left = _LINES_MAX
        self.found_count = 0
        """Distinct reports since the start."""
        self.healed_count = 0
        self.overflow_count = 0
        """Reports that found no room. A later read or scrub reports them again."""

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> Sequence[Damage]:
        """Damage not healed yet, oldest first."""
        return tuple(self._items.values())

    def report(self, damage: Damage) -> bool:
        """Keep it and tell the listeners, unless it is known. Whether it is news."""
        if damage.key in self._items:
            return False
        if len(self._items) >= self._items_max:
            self.overflow_count += 1
            return False
        self._items[damage.key] = damage
        self.found_count += 1
        if self._lines_left:
            self._lines_left -= 1
            log.error(
                "damage_found",
                path=damage.path,
                offset=damage.offset,
                reason=damage.reason,
                ledger_id=damage.ledger_id,
                entry_id=damage.entry_id,
                more_lines=bool(self._lines_left),
            )
        for listener in tuple(self._listeners):
            listener(damage)
        return True

    def healed(self, ledger_id: int, entry_id: int) -> None:
        """The entry is readable again."""
        self._remove((ledger_id, entry_id), is_healed=True)
        self._tell_healed(Healed(ledger_id, entry_id))

    def healed_place(self, path: str, offset: int) -> None:
        """All entries that the index places in `path` from `offset` on are readable again, or belong elsewhere now."""
        self._remove((path, offset), is_healed=True)
        self._tell_healed(Healed(path=path, offset=offset))

    def ledger_gone(self, ledger_id: int) -> None:
        """The ledger was deleted: nobody misses its entries."""
        for key in [key for key, damage in self._items.items() if damage.ledger_id == ledger_id]:
            self._remove(key, is_healed=False)
        self._tell_healed(Healed(ledger_id))

    def on_report(self, listener: Callable[[Damage], None]) -> None:
        """Call `listener` with each new damage. It must not raise."""
        self._listeners.append(listener)

    def on_healed(self, listener: Callable[[Healed], None]) -> None:
        """Call `listener` whenever something is in order again, known damage or not. It must not raise."""
        self._healed_listeners.append(listener)

    def _tell_healed(self, healed: Healed) -> None:
        for listener in tuple(self._healed_listeners):
            listener(healed)

    def _remove(self, key: tuple[object, object], *, is_healed: bool) -> None:
        if self._items.pop(key, None) is None:
            return
        self.healed_count += is_healed
        if not self._items:
            self._lines_left = _LINES_MAX
