"""PositionMap: values of entries, from which everything up to a position is removed often. Pure.

Setting, getting and deleting a value take constant time; `remove_upto` takes O(log n) per removed value, whatever is
left. An iteration is in the order of positions. `weight` is the sum of the weights of all values, if they have any.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from bindery_pulsar.managed_ledger_records import Position

V = TypeVar("V")

_STALE_MIN: Final = 64
"""Number of deleted entries that a heap may hold in addition to as many as it has present ones."""


class _Ledger(Generic[V]):
    """The values of one ledger, and a heap of their entry ids, in which deleted ones may be left."""

    __slots__ = ("heap", "values")

    def __init__(self) -> None:
        self.values: dict[int, V] = {}
        self.heap: list[int] = []


class PositionMap(MutableMapping[Position, V]):
    """A mapping of positions to values."""

    __slots__ = ("_count", "_ids", "_ledgers", "_weight_of", "weight")

    def __init__(
        self, items: Mapping[Position, V] | None = None, *, weight_of: Callable[[V], int] | None = None
    ) -> None:
        """`weight_of`: the weight of a value, which must not change; None: 0."""
        self._ledgers: dict[int, _Ledger[V]] = {}
        self._ids: list[int] = []
        """The keys of `_ledgers` in ascending order."""
        self._count = 0
        self._weight_of = weight_of
        self.weight = 0
        if items:
            self.update(items)

    def __getitem__(self, position: Position) -> V:
        ledger = self._ledgers.get(position[0])
        if ledger is None:
            raise KeyError(position)
        return ledger.values[position[1]]

    def __setitem__(self, position: Position, value: V) -> None:
        ledger_id, entry_id = position
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = self._ledgers[ledger_id] = _Ledger()
            insort(self._ids, ledger_id)
        if entry_id not in ledger.values:
            heappush(ledger.heap, entry_id)
            self._count += 1
        elif self._weight_of is not None:
            self.weight -= self._weight_of(ledger.values[entry_id])
        if self._weight_of is not None:
            self.weight += self._weight_of(value)
        ledger.values[entry_id] = value

    def __delitem__(self, position: Position) -> None:
        ledger_id, entry_id = position
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise KeyError(position)
        value = ledger.values.pop(entry_id)
        self._count -= 1
        if self._weight_of is not None:
            self.weight -= self._weight_of(value)
        if not ledger.values:
            self._drop(ledger_id)
        elif len(ledger.heap) > 2 * len(ledger.values) + _STALE_MIN:
            ledger.heap = list(ledger.values)
            heapify(ledger.heap)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in self._ids:
            for entry_id in sorted(self._ledgers[ledger_id].values):
                yield Position(ledger_id, entry_id)

    def remove_upto(self, position: Position) -> None:
        """Remove the values of all entries <= `position`."""
        ledger_id, entry_id = position
        if not self._ids or self._ids[0] > ledger_id:
            return
        for old in self._ids[: bisect_left(self._ids, ledger_id)]:
            self._count -= len(self._ledgers[old].values)
            if self._weight_of is not None:
                self.weight -= sum(map(self._weight_of, self._ledgers[old].values.values()))
            self._drop(old)
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            return
        values, heap = ledger.values, ledger.heap
        while heap and heap[0] <= entry_id:
            value = values.pop(heappop(heap), None)
            if value is not None:
                self._count -= 1
                if self._weight_of is not None:
                    self.weight -= self._weight_of(value)
        if not values:
            self._drop(ledger_id)

    def clear(self) -> None:
        self._ledgers.clear()
        self._ids.clear()
        self._count = self.weight = 0

    def copy(self) -> "PositionMap[V]":
        twin = PositionMap[V](weight_of=self._weight_of)
        for ledger_id, ledger in self._ledgers.items():
            copied = twin._ledgers[ledger_id] = _Ledger()
            copied.values, copied.heap = ledger.values.copy(), ledger.heap.copy()
        twin._ids = self._ids.copy()
        twin._count, twin.weight = self._count, self.weight
        return twin

    def _drop(self, ledger_id: int) -> None:
        del self._ledgers[ledger_id]
        del self._ids[bisect_left(self._ids, ledger_id)]
