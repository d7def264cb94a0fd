"""LongPolls: the long polls that wait until the LAC of their ledger exceeds the one that the client knows.

Each client that follows a ledger has one, and waits most of the time. Therefore a waiting long poll is not a task,
which would take several times the memory, but a watch of the ledger and a timer. Whichever comes first begins the
answer.

| event                                              | effect                                                   |
|----------------------------------------------------|----------------------------------------------------------|
| the LAC advances, or the ledger is fenced          | it is answered                                           |
| its timeout, or the maximum of the bookie, is over | it is answered with the LAC                              |
| another one needs its place                        | the one that has waited longest is answered with the LAC |
| its connection closes, or the server stops         | it ends without an answer                                |

Invariant: while a long poll waits, its peer and the ledger refer to it, and its timer runs; afterwards nothing does.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from bindery_core.wire.messages import ReadRequest

from bindery_bookie.server.peer import Peer
from bindery_bookie.storage.store import EntryStore


class LongPoll:
    """One that waits. `started_s`: when it arrived, monotonic."""

    __slots__ = ("_polls", "_timer", "_unwatch", "peer", "request", "started_s")

    def __init__(self, polls: "LongPolls", peer: Peer, request: ReadRequest, started_s: float) -> None:
        self._polls = polls
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], None] | None = None
        self.peer = peer
        self.request = request
        self.started_s = started_s

    def begin(self, timer: asyncio.TimerHandle, unwatch: Callable[[], None]) -> None:
        self._timer, self._unwatch = timer, unwatch
        self.peer.hold_poll(self)

    def end(self) -> bool:
        """End the wait without an answer. Return False if it has ended before."""
        if self._timer is None or self._unwatch is None:
            return False
        self._timer.cancel()
        self._unwatch()
        self._timer = self._unwatch = None
        self.peer.drop_poll(self)
        self._polls.ended(self)
        return True


class LongPolls:
    """Shared by all connections of a bookie. `answer` is called when a wait is over, and its answer is due."""

    def __init__(self, store: EntryStore, answer: Callable[[LongPoll], None], *, timeout_max_s: float) -> None:
        self._store = store
        self._answer = answer
        self._timeout_max_s = timeout_max_s
        self._waiting: dict[LongPoll, None] = {}
        """The oldest first."""

    def __len__(self) -> int:
        """Number of long polls that wait."""
        return len(self._waiting)

    def wait(self, peer: Peer, request: ReadRequest, *, started_s: float) -> None:
        """Begin a long poll. It is answered at once if its ledger is unknown, its LAC advanced, or its timeout is 0."""
        poll = LongPoll(self, peer, request, started_s)
        timeout_ms = request.timeout_ms or 0
        if timeout_ms <= 0 or self._has_advanced(request):
            self._answer(poll)
            return
        wake = partial(self._wake, poll)
        unwatch = self._store.watch_lac(request.ledger_id, wake)
        if self._has_advanced(request):  # before the watch was set
            unwatch()
            self._answer(poll)
            return
        timeout_s = min(timeout_ms / 1000, self._timeout_max_s)
        self._waiting[poll] = None
        poll.begin(asyncio.get_running_loop().call_later(timeout_s, wake), unwatch)

    def answer_oldest(self) -> bool:
        """Answer the one that has waited longest now. Return False if none waits."""
        if not self._waiting:
            return False
        self._wake(next(iter(self._waiting)))
        return True

    def ended(self, poll: LongPoll) -> None:
        """Forget a long poll whose wait has ended."""
        del self._waiting[poll]

    def _wake(self, poll: LongPoll) -> None:
        if poll.end():
            self._answer(poll)

    def _has_advanced(self, request: ReadRequest) -> bool:
        """Whether the answer need not wait."""
        assert request.previous_lac is not None
        try:
            return self._store.last_add_confirmed(request.ledger_id) > request.previous_lac
        except Exception:
            return True  # the answer reports it
