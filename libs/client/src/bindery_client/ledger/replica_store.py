"""ReplicaStore: store entry frames at one bookie unchanged, as recovery adds.

Storing an entry again is harmless, so an interrupted call may be repeated.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from bindery_core.entry import peek_ids
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.ids import BookieId
from bindery_core.ledger.ledger_actions import SendAdds
from bindery_core.wire.messages import AddResponse, Status

from bindery_client.ledger.requests import LedgerRequests

BUSY_PAUSE_S: Final = 0.2
"""Delay in seconds before a request to a busy bookie is repeated."""


class ReplicaStore:
    """Invariant: only entries that the bookie rejected as busy are sent again."""

    def __init__(self, requests: LedgerRequests, bookie_id: BookieId, frames: Sequence[bytes]) -> None:
        """`frames`: of different entries of the ledger of `requests`."""
        self._requests = requests
        self._bookie_id = bookie_id
        self._frames: dict[int, bytes] = {}
        for frame in frames:
            ledger_id, entry_id = peek_ids(frame)
            assert ledger_id == requests.ledger_id, "a frame of another ledger"
            assert entry_id not in self._frames, "responses are matched by entry id: ids must be unique"
            self._frames[entry_id] = frame
        self._statuses: dict[int, int] = {}

    async def run(self, *, attempt_timeout_s: float, timeout_s: float) -> list[int]:
        """Return a `Status`, or an unknown number, for each frame, in their order; OK: it is on the bookie's disk.

        A request to a busy bookie is repeated until `timeout_s`, and then counts as TOO_MANY_REQUESTS.
        Raises BookieUnavailable if the bookie cannot be reached or does not answer a request.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        left = list(self._frames)
        while left:
            attempt = _Attempt(len(left))
            action = SendAdds(self._bookie_id, left, [self._frames[entry_id] for entry_id in left], recovery=True)
            self._requests.send_adds([action], attempt, timeout_s=attempt_timeout_s)
            self._statuses.update(await attempt.done)
            unanswered = [entry_id for entry_id in left if entry_id not in self._statuses]
            if unanswered:
                raise BookieUnavailable(
                    "the bookie's response does not match the request",
                    bookie_id=self._bookie_id,
                    entry_id=unanswered[0],
                )
            left = [entry_id for entry_id in left if self._statuses[entry_id] == Status.TOO_MANY_REQUESTS]
            if left and loop.time() + BUSY_PAUSE_S >= deadline:
                break
            if left:
                await asyncio.sleep(BUSY_PAUSE_S)
        return [self._statuses[entry_id] for entry_id in self._frames]


class _Attempt:
    """One request; `done` returns the status of each entry."""

    def __init__(self, answers_left: int) -> None:
        self._answers_left = answers_left
        self._statuses: dict[int, int] = {}
        self.done: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if self.done.done():
            return
        self._answers_left -= len(responses)
        for response in responses:
            if isinstance(response, AddResponse):
                self._statuses[response.entry_id] = response.status
        if not self._answers_left:
            self.done.set_result(self._statuses)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self.done.done():
            if not isinstance(error, BookieUnavailable):
                error = BookieUnavailable(str(error), bookie_id=bookie_id)
            self.done.set_exception(error)

    expired = failed
