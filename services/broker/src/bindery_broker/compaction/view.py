"""A compacted topic as one sequence: the compacted ledger up to the horizon, then the topic.

The horizon is the last entry that was compacted. Entries after it are never trimmed before they are compacted, so the
sequence has no gap: whenever a reader continues, also after a compaction and after trimming, every key that it has not
seen at its last position follows. A deletion does not follow once it is compacted.

A compaction may end between a call and its reads. The entries that were read then still hold, unless they are entries
of the topic: some between them may have been trimmed, so they are read again.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from bindery_core.errors import Corrupt, NoSuchEntry, NoSuchLedger, NotThere, TryAgain
from bindery_pulsar.message_id import Position

from bindery_broker.compaction.compacted_ledger import CompactedLedger
from bindery_broker.managed_ledger import ManagedLedger

ATTEMPTS_MAX: Final = 5
"""Maximum number of compactions that may end during one read."""


class Compacted(NamedTuple):
    """The state of a topic that was compacted."""

    ledger: CompactedLedger
    horizon: Position
    """Last entry of the topic that was compacted."""


class CompactedView:
    """Reads one topic. Positions between two entries are allowed: each stands for the first entry after it."""

    def __init__(self, ledger: ManagedLedger, current: Callable[[], Compacted | None]) -> None:
        """`current`: returns the present state; None: the topic was never compacted."""
        self._ledger = ledger
        self._current = current

    async def clamp(self, position: Position) -> Position:
        """Return a position that stands for the same entry, or for the next add. One that is after the horizon is an
        entry of the topic or the position of the next add."""
        for _ in range(ATTEMPTS_MAX):
            state = self._current()
            if state is None or position > state.horizon:
                return self._ledger.clamp(position)
            try:
                found = await state.ledger.find(position)
            except (NoSuchLedger, NoSuchEntry) as error:
                self._check_replaced(state, error)
                continue
            return position if found is not None else self._ledger.next_position(state.horizon)
        raise _too_often()

    def contains(self, position: Position) -> bool:
        """Return whether there is an entry at a position that `clamp` has just returned."""
        state = self._current()
        return (state is not None and position <= state.horizon) or self._ledger.contains(position)

    async def read(self, position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        """Return entries from `position` on, as `ManagedLedger.read`. Continue at `next_position` of the last one.

        Raises also Corrupt if the compacted ledger is lost.
        """
        for _ in range(ATTEMPTS_MAX):
            state = self._current()
            if state is not None and position <= state.horizon:
                try:
                    first = await state.ledger.find(position)
                    if first is not None:
                        return await state.ledger.read(first, entries_max=entries_max, size_max=size_max)
                except (NoSuchLedger, NoSuchEntry) as error:
                    self._check_replaced(state, error)
                    continue
                if self._current() != state:
                    continue
                start = self._ledger.next_position(state.horizon)
            else:
                start = position
            try:
                entries = await self._ledger.read(start, entries_max=entries_max, size_max=size_max)
            except NotThere:
                if self._current() != state:
                    continue
                raise
            if self._current() == state:
                return entries
        raise _too_often()

    @staticmethod
    def next_position(position: Position) -> Position:
        """Return the position after an entry. It need not be an entry."""
        return Position(position.ledger_id, position.entry_id + 1)

    def _check_replaced(self, state: Compacted, error: NotThere) -> None:
        """Raise Corrupt if the compacted ledger that could not be read is still in use."""
        if self._current() == state:
            raise Corrupt(
                "the compacted ledger of the topic is lost; delete the subscription __compaction to compact what the "
                "topic still has",
                ledger_id=state.ledger.ledger_id,
                cause=str(error),
            ) from error


def _too_often() -> TryAgain:
    return TryAgain("the topic was compacted several times while it was read; retry")
