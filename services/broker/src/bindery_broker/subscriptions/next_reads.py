"""NextReads: read due messages into the cache while those before them are delivered.

Delayed messages are read again when they are due, from bookies if the cache does not have them. Without this, bookies
wait while the broker delivers, and the broker waits while they read.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from bindery_core.errors import BinderyError
from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.subscriptions.reading import REPLAY_ENTRIES_MAX, STORED_BYTES_MAX, MessageReader

ENTRIES_MIN: Final = 50
"""Minimum number of entries for which a read begins: fewer take about as long as their request."""


class NextReads:
    """At most one read is in progress. Its bytes are reserved in the budget of what is read ahead."""

    def __init__(self, reader: MessageReader, read_ahead: ReadAhead) -> None:
        self._reader = reader
        self._read_ahead = read_ahead
        self._reading: asyncio.Task[None] | None = None

    def is_useful(self, dispatcher: Dispatcher[Any]) -> bool:
        """Whether `begin` would do anything."""
        return self._reading is not None or dispatcher.due_count >= REPLAY_ENTRIES_MAX + ENTRIES_MIN

    async def begin(self, dispatcher: Dispatcher[Any]) -> None:
        """Wait for the read in progress, of the entries that are delivered next, and begin that of those after them."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
            self._reading = None
        positions = dispatcher.due_next(REPLAY_ENTRIES_MAX, REPLAY_ENTRIES_MAX)
        if len(positions) >= ENTRIES_MIN and self._read_ahead.reserve(STORED_BYTES_MAX):
            self._reading = asyncio.get_running_loop().create_task(self._read(sorted(positions)))
            await asyncio.sleep(0)  # the request is sent before the first entries are decoded

    async def _read(self, positions: Sequence[Position]) -> None:
        try:
            with contextlib.suppress(BinderyError):  # left to the read that needs the entries
                await self._reader.prefetch(positions)
        finally:
            self._read_ahead.release(STORED_BYTES_MAX)
