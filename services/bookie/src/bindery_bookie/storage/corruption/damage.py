"""DamageRegister: the known damage of a bookie's storage, and its listeners.

Cold reads, the scrub, compaction and the opening report damage here. The repair then fetches the entry from other
bookies, stores it again, and calls `healed`. The register is not stored on disk, because damage that remains after a
restart is found again.

Invariants: one item per entry, or per offset in a file if the entry is unknown; at most `items_max` items: further
reports are only counted, because that damage is found again later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

log = structlog.get_logger(__name__)

ITEMS_MAX: Final = 10_000
"""Default maximum number of items in the register."""
_LINES_MAX: Final = 20
"""Maximum number of log lines until the register is empty again. The register itself has all items."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged or missing entry, or a damaged region of a file."""

    path: str
    """The file."""
    offset: int
    """Offset in bytes."""
    reason: str
    """What was expected and found, in a few words."""
    ledger_id: int | None = None
    entry_id: int | None = None
    """The damaged entry; None: unknown, so everything in this file from `offset` on may be damaged."""

    @property
    def key(self) -> tuple[object, object]:
        """Key of the damage. Reports with the same key report the same damage."""
        if self.ledger_id is not None and self.entry_id is not None:
            return self.ledger_id, self.entry_id
        return self.path, self.offset


@dataclass(frozen=True, slots=True)
class Healed:
    """Data that is no longer damaged: an entry; a whole ledger, because it was deleted; or a file from an offset on."""

    ledger_id: int | None = None
    entry_id: int | None = None
    """None: the whole ledger."""
    path: str = ""
    offset: int = 0


class DamageRegister:
    """The known damage. Event loop only."""

    def __init__(self, *, items_max: int = ITEMS_MAX) -> None:
        self._items_max = items_max
        self._items: dict[tuple[object, object], Damage] = {}
        self._listeners: list[Callable[[Damage], None]] = []
        self._healed_listeners: list[Callable[[Healed], None]] = []
        self._lines_left = _LINES_MAX
        self.found_count = 0
        """Number of distinct reports since the start."""
        self.healed_count = 0
        self.overflow_count = 0
        """Number of reports dropped because the register was full. A later read or scrub reports the damage again."""

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> Sequence[Damage]:
        """Return the damage that is not repaired yet, oldest first."""
        return tuple(self._items.values())

    def report(self, damage: Damage) -> bool:
        """Add the damage and call the listeners, unless it is known already; return True if it was added."""
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
        """Record that the entry is readable again."""
        self._remove((ledger_id, entry_id), is_healed=True)
        self._notify_healed(Healed(ledger_id, entry_id))

    def healed_region(self, path: str, offset: int) -> None:
        """Record that all entries that were in `path` from `offset` on are readable again, there or elsewhere."""
        self._remove((path, offset), is_healed=True)
        self._notify_healed(Healed(path=path, offset=offset))

    def ledger_deleted(self, ledger_id: int) -> None:
        """Record that the ledger was deleted, so its entries need no repair."""
        for key in [key for key, damage in self._items.items() if damage.ledger_id == ledger_id]:
            self._remove(key, is_healed=False)
        self._notify_healed(Healed(ledger_id))

    def on_report(self, listener: Callable[[Damage], None]) -> None:
        """Call `listener` with each new damage. It must not raise."""
        self._listeners.append(listener)

    def on_healed(self, listener: Callable[[Healed], None]) -> None:
        """Call `listener` whenever something is healed, whether its damage was known or not. It must not raise."""
        self._healed_listeners.append(listener)

    def _notify_healed(self, healed: Healed) -> None:
        for listener in tuple(self._healed_listeners):
            listener(healed)

    def _remove(self, key: tuple[object, object], *, is_healed: bool) -> None:
        if self._items.pop(key, None) is None:
            return
        self.healed_count += is_healed
        if not self._items:
            self._lines_left = _LINES_MAX
