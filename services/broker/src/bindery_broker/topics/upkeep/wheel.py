"""When each topic is due for a kind of work, so that a round of it costs nothing for all others. Pure.

Times are divided into slots. An item is in one slot, or due in the next round, or not scheduled. A round takes the
slots that are over, however many items there are. An item is never due before its time, and at most a slot late.

Invariants: an item is in one place at most; a slot that exists has an item, or is empty because its items were moved.
"""

import heapq
import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SLOT_S: Final = 1.0
"""Seconds of a slot."""
_NEXT: Final = -1
"""Slot of the items that are due in the next round."""


class Wheel(Generic[K]):
    """Items by the time at which they are due; monotonic seconds."""

    __slots__ = ("_order", "_places", "_slots")

    def __init__(self) -> None:
        self._places: dict[K, int] = {}
        """The slot of each scheduled item."""
        self._slots: dict[int, dict[K, None]] = {_NEXT: {}}
        """The items of a slot, in the order in which they were scheduled."""
        self._order: list[int] = []
        """The slots but `_NEXT`, as a heap."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def soon(self, item: K) -> None:
        """Schedule an item for the next round, whatever it was scheduled for."""
        self._put(item, _NEXT)

    def put(self, item: K, at: float) -> None:
        """Schedule an item for the first round at or after `at`, whatever it was scheduled for."""
        self._put(item, max(0, math.ceil(at / SLOT_S)))

    def discard(self, item: K) -> None:
        """Schedule an item for no round. Idempotent."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._slots[place][item]

    def take_due(self, now: float) -> list[K]:
        """Return the items that are due, and forget their times."""
        due = list(self._slots[_NEXT])
        self._slots[_NEXT].clear()
        present = math.floor(now / SLOT_S)
        while self._order and self._order[0] <= present:
            due += self._slots.pop(heapq.heappop(self._order))
        for item in due:
            del self._places[item]
        return due

    def _put(self, item: K, place: int) -> None:
        before = self._places.get(item)
        if before == place:
            return
        if before is not None:
            del self._slots[before][item]
        self._places[item] = place
        slot = self._slots.get(place)
        if slot is None:
            slot = self._slots[place] = {}
            heapq.heappush(self._order, place)
        slot[item] = None
