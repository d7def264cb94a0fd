"""A cursor that is stored nowhere: Pulsar calls it non-durable. Readers use it.

It does not keep entries from being trimmed. If entries before its position are trimmed, it continues with the first one
that still exists, and `skipped_entries` counts those that it had not acknowledged.
Source: Pulsar NonDurableCursorImpl.
"""

import asyncio
import math
from collections.abc import Callable, Mapping

from bindery_core.errors import BinderyError, NoSuchSubscription
from bindery_pulsar.managed_ledger_codec import NO_LEDGER, CursorState
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.caching.tail import TailReader
from bindery_broker.managed_ledger.cursors.ack_state import AckState
from bindery_broker.managed_ledger.cursors.cursor import EntrySource, ManagedCursor
from bindery_broker.managed_ledger.cursors.cursor_store import Unstored
from bindery_broker.managed_ledger.ledger_list import LedgerList


class NoStore:
    """Stores nothing: every state counts as stored."""

    ledger_id = NO_LEDGER
    last_record = -1
    is_too_old = False
    is_unused = False
    unused_in_s = math.inf
    may_be_stored = False
    state_size_max = math.inf

    def __init__(self) -> None:
        self.cursor_properties: Mapping[str, str] = {}

    async def write(self, unstored: Callable[[], Unstored]) -> None:
        unstored()

    async def close(self, state: AckState) -> None: ...

    async def delete(self) -> None: ...

    async def abandon(self) -> None: ...


class TransientCursor(ManagedCursor):
    """A cursor in memory. Created by `ManagedLedger.open_transient_cursor`, ended by `close`."""

    def __init__(
        self,
        name: str,
        *,
        source: EntrySource,
        ledgers: LedgerList,
        ledgers_lock: asyncio.Lock,
        start: Position,
        tail_reader: TailReader,
        on_closed: Callable[[], None],
    ) -> None:
        """`start`: the next entry, clamped. `on_closed` is called once, at the end of the cursor."""
        super().__init__(
            name,
            source=source,
            ledgers=ledgers,
            ledgers_lock=ledgers_lock,
            stored=CursorState(mark_delete=ledgers.previous(start)),
            store=NoStore(),
            tail_reader=tail_reader,
            on_moved=lambda: None,
            on_fenced=lambda error: None,
        )
        self.skipped_entries = 0
        """Number of entries that were trimmed before they were acknowledged."""
        self._on_closed = on_closed

    def before_trim(self, first: Position) -> None:
        """The entries before `first` are about to be trimmed. Called while the list of ledgers still has them."""
        last = self._ledgers.previous(first)
        if self.mark_delete < last:
            self.skipped_entries += self._state.unacked_upto(last)
            self._state.ack_upto(last)
            self._version += 1

    def end(self, error: BinderyError) -> None:
        if self._end is None:
            self._on_closed()
        super().end(error)

    async def close(self, error: BinderyError | None = None) -> None:
        """End the cursor: later calls fail with `error`. Idempotent."""
        self.end(error or NoSuchSubscription("the reader is closed", subscription=self.name))
