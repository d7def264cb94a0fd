"""EntryTurns: limit the number of single operations that hold an entry at a time.

A fencing read, a LAC or a long poll is a request of a few bytes that is answered with an entry of up to a frame. A
connection may have a thousand of them in progress, so without a limit they would take gigabytes. An operation begins
its turn before it reads the entry, and ends it after the response was written. It waits while its client leaves many
responses unread; such a client delays only itself.

Invariant: at most ENTRY_TURNS_MAX turns at a time.
"""

import asyncio
from typing import Final

from bindery_bookie.server.peer import Peer

ENTRY_TURNS_MAX: Final = 4
"""Maximum number of single operations that hold an entry at a time."""


class EntryTurns:
    """Shared by all connections of a bookie."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(ENTRY_TURNS_MAX)

    def turn(self, peer: Peer) -> "EntryTurn":
        return EntryTurn(self._free, peer)


class EntryTurn:
    """The turn of one operation, if it needs one."""

    __slots__ = ("_free", "_is_begun", "_peer")

    def __init__(self, free: asyncio.Semaphore, peer: Peer) -> None:
        self._free = free
        self._peer = peer
        self._is_begun = False

    async def begin(self) -> None:
        """Wait for the turn."""
        while True:
            await self._peer.until_read()
            await self._free.acquire()
            if not self._peer.is_unsent:
                self._is_begun = True
                return
            self._free.release()

    def end(self) -> None:
        """End the turn if it was begun."""
        if self._is_begun:
            self._is_begun = False
            self._free.release()
