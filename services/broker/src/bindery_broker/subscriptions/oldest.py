"""Find out when the oldest unacknowledged message of a subscription was published.

Its entry is read only when somebody asks, and again only when another entry is the oldest: at most one read of one
entry per question, limited in time. An entry that cannot be read in time has no known time, and is read again
when somebody asks; a damaged one is not, so that those of other subscriptions have their turn.
"""

import asyncio
from typing import Final

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import publish_time_ms
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger

READ_TIME_S_MAX: Final = 1.0
"""Maximum seconds of the read of one entry."""


class OldestMessage:
    """The oldest unacknowledged message of one subscription."""

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger) -> None:
        self._cursor = cursor
        self._ledger = ledger
        self._position: Position | None = None
        self._time_ms: int | None = None
        self._is_reading = False

    @property
    def publish_time_ms(self) -> int | None:
        """Publish time in ms since 1970, as far as it was read; None: unknown, or everything is acknowledged."""
        return self._time_ms if self._position == self._cursor.next_unacked(self._cursor.mark_delete) else None

    @property
    def must_read(self) -> bool:
        """Whether there is an unacknowledged entry whose time is not known."""
        position = self._cursor.next_unacked(self._cursor.mark_delete)
        return not self._is_reading and position != self._position and self._ledger.contains(position)

    async def read(self) -> None:
        """Read the time if it is not known. Raises nothing: after an error it stays unknown."""
        if not self.must_read:
            return
        position = self._cursor.next_unacked(self._cursor.mark_delete)
        self._is_reading = True
        try:
            async with asyncio.timeout(READ_TIME_S_MAX):
                found = await self._ledger.read(position, entries_max=1, size_max=1)
            if found and found[0][0] == position:
                self._position, self._time_ms = position, None
                self._time_ms = publish_time_ms(found[0][1])
        except (BinderyError, TimeoutError):
            pass
        finally:
            self._is_reading = False
