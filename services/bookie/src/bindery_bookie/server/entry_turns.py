"""EntryTurns: limit the number of single operations that hold an entry at a time.

A fencing read, a LAC or a long poll is a request of a few bytes that is answered with an entry of up to a frame. A
connection may have a thousand of them in progress, so without a limit they would take gigabytes. An operation begins
its turn before it reads the entry, and ends it after the response was written. It waits while its client leaves many
responses unread; such a client delays only itself. The operations of all clients of an address have every other turn
at most while those of another address wait.

Invariants: at most ENTRY_TURNS_MAX turns at a time; nobody waits while there are fewer.
"""

import asyncio
from typing import Final

from bindery_kit.limits.turns import Turns

from bindery_bookie.server.peer import Peer

ENTRY_TURNS_MAX: Final = 4
"""Maximum number of single operations that hold an entry at a time."""


class EntryTurns:
    """Shared by all connections of a bookie."""

    def __init__(self) -> None:
        self.count = 0
        """Number of turns now."""
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    def turn(self, peer: Peer) -> "EntryTurn":
        return EntryTurn(self, peer)

    async def acquire(self, group: str) -> None:
        """Wait until there are fewer turns, and count another."""
        if self.count < ENTRY_TURNS_MAX:
            self.count += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future, group=group)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._waiting.discard(future, group=group)
            else:
                self.release()  # the turn was passed on to it in the same turn of the loop
            raise

    def release(self) -> None:
        """End a turn: pass it on to the next address that waits."""
        while self._waiting:
            future = self._waiting.next()
            if not future.done():  # otherwise it was cancelled
                future.set_result(None)
                return
        self.count -= 1


class EntryTurn:
    """The turn of one operation, if it needs one."""

    __slots__ = ("_is_begun", "_peer", "_turns")

    def __init__(self, turns: EntryTurns, peer: Peer) -> None:
        self._turns = turns
        self._peer = peer
        self._is_begun = False

    async def begin(self) -> None:
        """Wait for the turn."""
        while True:
            await self._peer.until_read()
            await self._turns.acquire(self._peer.group)
            if not self._peer.is_unsent:
                self._is_begun = True
                return
            self._turns.release()

    def end(self) -> None:
        """End the turn if it was begun."""
        if self._is_begun:
            self._is_begun = False
            self._turns.release()
