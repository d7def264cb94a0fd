"""EntryTurns: limit the number of single operations that hold an entry at a time.

A fencing read, a LAC or a long poll is a request of a few bytes that is answered with an entry of up to a frame. A
connection may have a thousand of them in progress, so without a limit they would take gigabytes. An operation begins
its turn before it reads the entry, and ends it after the response was written, even if its client has gone meanwhile,
because the storage reads the entry nevertheless. It waits while its client leaves many responses unread; such a client
delays only itself. The operations of all clients of an address have every other turn at most while those of another
address wait.

Invariants: at most ENTRY_TURNS_MAX turns at a time; nobody waits while there are fewer.
"""

import asyncio
from typing import Final

from bindery_kit.limits.turns import Turns

from bindery_bookie.server.peer import Peer

ENTRY_TURNS_MAX: Final = 4
"""Maximum number of single operations that hold an entry at a time."""


class ClientGone(Exception):
    """The client of an operation has gone before its turn: nobody needs its entry."""


class EntryTurns:
    """Shared by all connections of a bookie."""

    def __init__(self) -> None:
        self.count = 0
        """Number of turns now."""
        self._waiting: Turns[EntryTurn] = Turns()

    def turn(self, peer: Peer) -> "EntryTurn":
        return EntryTurn(self, peer)

    async def acquire(self, turn: "EntryTurn") -> None:
        """Wait until there are fewer turns, and count another. Raises ClientGone."""
        if self.count < ENTRY_TURNS_MAX:
            self.count += 1
            return
        group, future = turn.peer.group, asyncio.get_running_loop().create_future()
        turn.passed_on = future
        self._waiting.add(turn, group=group)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._waiting.discard(turn, group=group)
            elif future.exception() is None:
                self.release()  # the turn was passed on to it in the same turn of the loop
            raise

    def release(self) -> None:
        """End a turn: pass it on to the next address that waits."""
        while self._waiting:
            turn = self._waiting.next()
            future = turn.passed_on
            assert future is not None
            if future.done():
                continue  # it was cancelled
            if turn.peer.is_gone:
                future.set_exception(ClientGone())
                continue
            future.set_result(None)
            return
        self.count -= 1


class EntryTurn:
    """The turn of one operation, if it needs one."""

    __slots__ = ("_is_begun", "_turns", "passed_on", "peer")

    def __init__(self, turns: EntryTurns, peer: Peer) -> None:
        self._turns = turns
        self._is_begun = False
        self.peer = peer
        self.passed_on: asyncio.Future[None] | None = None
        """Completed when the turn of another one is passed on to this one, which waits for it."""

    async def begin(self) -> None:
        """Wait for the turn. Raises ClientGone."""
        while True:
            await self.peer.until_read()
            if self.peer.is_gone:
                raise ClientGone
            await self._turns.acquire(self)
            if not self.peer.is_unsent and not self.peer.is_gone:
                self._is_begun = True
                return
            self._turns.release()

    def end(self) -> None:
        """End the turn if it was begun."""
        if self._is_begun:
            self._is_begun = False
            self._turns.release()
