"""Find the first entry of a topic that was published at a time or later. Pure: it asks for the times of entries.

The search is binary over the entries. The close times in the list of ledgers only say where to begin: in the first
ledger that was closed at the given time or later. The first and the last entry of that ledger, or the nearest entry of
its neighbour, prove that guess or refute it, so clocks that differ cost reads, and change no result.

| answer to a request for a time       | what it changes                                                        |
|--------------------------------------|------------------------------------------------------------------------|
| older than the given time            | the result is behind the entry                                         |
| the given time or later              | the result is the entry, or before it                                  |
| the entry is damaged or lost         | the next one is requested, then those 2, 4, 8, ... entries after it     |
| its ledger is lost                   | the first entry of the next ledger is requested                        |
| nothing behind it can be read either | the result is the entry, or before it: it may have the given time      |

Times that are not in order: producers may have different clocks, and so may brokers that owned the topic one after
another. The entry before the result is then older than the given time, and the result is not, but an earlier entry
may have the given time too. Therefore the caller also checks the last entries `before` the result, and takes the first
of them that is not older: an entry is left out only if more than BEFORE_ENTRIES_MAX later ones have times before the
given one. If the times are in order, none is left out.
Source: Pulsar's PersistentMessageFinder for the order; the checks are Bindery's.
"""

from typing import Final

from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.ledger_list import LedgerList

BEFORE_ENTRIES_MAX: Final = 100
"""Maximum number of entries before the result that are checked."""
BEFORE_BYTES_MAX: Final = 2**20
"""Maximum bytes of them, by the mean size of the entries of their ledger."""


class TimeSearch:
    """Call `wanted` and answer with `found`, `unreadable` or `lost_ledger`, until it returns None; then see `position`.

    The list of ledgers may grow and lose its first ledgers meanwhile. Entries that are added after the begin are not
    searched: if all others are older, the result is the position of the first of them.
    """

    def __init__(self, ledgers: LedgerList, at_ms: int) -> None:
        """`at_ms`: in ms since 1970."""
        self._ledgers = ledgers
        self._at_ms = at_ms
        self._low = ledgers.first_position
        """All entries before it are older, as far as they can be read."""
        self._high = ledgers.end
        """The result is this position or before it."""
        self._hints = _hints(ledgers, at_ms)
        self._unread: set[Position] = set()
        self._lost: set[int] = set()
        self._step: tuple[Position, int] | None = None
        """An entry that cannot be read, and the distance of the next one to request."""

    @property
    def position(self) -> Position:
        """The result."""
        return self._low

    def wanted(self) -> Position | None:
        """Return the entry whose publish time must be known next; None: the search is complete."""
        ledgers = self._ledgers
        self._low = ledgers.clamp(self._low)  # its ledger may have been deleted
        for hint in self._hints:
            if self._low <= hint < self._high and ledgers.contains(hint) and not self._is_unread(hint):
                return hint
        while self._low < self._high:
            if self._step is None:
                position = ledgers.forward(self._low, self._count // 2)
            else:
                position = ledgers.clamp(self._after(*self._step))
                if position >= self._high:
                    self._high = self._step[0]
                    self._step = None
                    continue
            if not self._is_unread(position):
                return position
            self._miss(position)
        return None

    def found(self, position: Position, time_ms: int) -> None:
        """`time_ms`: the publish time of the entry."""
        self._step = None
        if time_ms < self._at_ms:
            self._low = max(self._low, self._ledgers.next(position))
        else:
            self._high = min(self._high, position)

    def unreadable(self, position: Position) -> None:
        """The entry is damaged or lost."""
        self._unread.add(position)
        self._miss(position)

    def lost_ledger(self, position: Position) -> None:
        """The ledger of the entry is lost."""
        self._lost.add(position.ledger_id)
        self._miss(position)

    def before(self) -> list[Position]:
        """Return the last entries before the result, in order, which the caller checks."""
        ledgers = self._ledgers
        last = ledgers.previous(self.position)
        record = ledgers.get(last.ledger_id)
        if record is None or last.entry_id < 0:
            return []
        count = min(BEFORE_ENTRIES_MAX, max(1, BEFORE_BYTES_MAX * record.entries // max(record.size, 1)))
        positions: list[Position] = []
        while len(positions) < count and ledgers.contains(last):
            positions.append(last)
            last = ledgers.previous(last)
        return positions[::-1]

    @property
    def _count(self) -> int:
        low, high = self._low, self._high
        return self._ledgers.entries_between(
            after=Position(low.ledger_id, low.entry_id - 1), upto=Position(high.ledger_id, high.entry_id - 1)
        )

    def _is_unread(self, position: Position) -> bool:
        return position.ledger_id in self._lost or position in self._unread

    def _miss(self, position: Position) -> None:
        if position in self._hints:
            self._hints.remove(position)
            return
        first, distance = self._step or (position, 0)
        self._step = first, max(1, 2 * distance)

    def _after(self, first: Position, distance: int) -> Position:
        position = self._ledgers.forward(first, distance)
        if position.ledger_id in self._lost:
            return Position(position.ledger_id + 1, 0)
        return position


def _hints(ledgers: LedgerList, at_ms: int) -> list[Position]:
    """Return the entries to request first, by the close times. One is requested only if it may change the result."""
    records = [record for record in ledgers if record.entries]
    if not records:
        return []
    # The last ledger may be open, and then has no close time.
    index = next((i for i, record in enumerate(records) if record.closed_ms >= at_ms), len(records) - 1)
    chosen = records[index]
    hints = [Position(chosen.ledger_id, 0), Position(chosen.ledger_id, chosen.entries - 1)]
    if index + 1 < len(records):
        hints.append(Position(records[index + 1].ledger_id, 0))
    if index:
        hints.append(Position(records[index - 1].ledger_id, records[index - 1].entries - 1))
    return list(dict.fromkeys(hints))
