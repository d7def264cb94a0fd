"""Read replicas of entries from given bookies, one at a time or many from one bookie, and fence ledgers at bookies."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from bindery_core.digest import Digester
from bindery_core.entry import unpack
from bindery_core.errors import BinderyError, DigestMismatch
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire.messages import ReadResponse, Status

from bindery_client.ledger.requests import LedgerRequests, reason_of

T = TypeVar("T")

BUSY_ATTEMPTS_MAX: Final = 25
"""Maximum number of consecutive "too many requests" responses to a whole batch."""
BUSY_PAUSE_S: Final = 0.2
"""Delay in seconds before a busy bookie is read again."""


class Verdict(Enum):
    """State of a replica."""

    GOOD = "good"
    ABSENT = "absent"
    """The bookie answered "no such entry" or "no such ledger"."""
    CORRUPT = "corrupt"
    """The response contradicts its digest, or contains a different entry."""
    ERROR = "error"
    """The bookie returned neither an entry nor a denial: see `status`."""


@dataclass(frozen=True, slots=True)
class ReplicaRead:
    """One bookie's response for one entry."""

    ledger_id: LedgerId
    entry_id: EntryId
    bookie_id: BookieId
    status: int
    """A `Status`, or an unknown number."""
    frame: bytes | None
    """The entry frame as the bookie sent it, unverified."""
    verdict: Verdict
    payload: bytes | None = None
    """Payload of a GOOD replica; otherwise None."""
    lac: int | None = None
    length: int | None = None
    reason: str = ""
    """Short reason for CORRUPT or ERROR."""


def judge(
    digester: Digester, response: ReadResponse, *, bookie_id: BookieId, ledger_id: LedgerId, entry_id: EntryId
) -> ReplicaRead:
    """Return the state of the replica in `response`, the response to a plain read of `entry_id`."""
    status, frame = response.status, response.body
    if status in (Status.NO_ENTRY, Status.NO_LEDGER):
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, None, Verdict.ABSENT)
    if status != Status.OK or frame is None:
        reason = "response without an entry" if status == Status.OK else f"bookie answers {status_name(status)}"
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.ERROR, reason=reason)
    try:
        entry = unpack(digester, frame, ledger_id=ledger_id, entry_id=entry_id)
    except DigestMismatch as error:
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.CORRUPT, reason=error.message)
    return ReplicaRead(
        ledger_id, entry_id, bookie_id, status, frame, Verdict.GOOD, entry.payload, entry.lac, entry.length
    )


def status_name(status: int) -> str:
    """Return the name, such as `IO_ERROR`; the number itself if it has no name."""
    try:
        return Status(status).name
    except ValueError:
        return str(status)


class ReplicaRequest:
    """Reads one entry from one bookie."""

    def __init__(self, requests: LedgerRequests, bookie_id: BookieId, entry_id: EntryId) -> None:
        self._requests = requests
        self._bookie_id = bookie_id
        self._entry_id = entry_id
        self._done: asyncio.Future[ReplicaRead] = asyncio.get_running_loop().create_future()

    async def run(self, *, timeout_s: float) -> ReplicaRead:
        self._requests.send_reads(SendReads(self._bookie_id, (self._entry_id,)), self, timeout_s=timeout_s)
        return await self._done

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        (response,) = responses
        if not self._done.done():
            replica = judge(
                self._requests.digester,
                response,
                bookie_id=bookie_id,
                ledger_id=self._requests.ledger_id,
                entry_id=self._entry_id,
            )
            self._done.set_result(replica)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    expired = failed


class ReplicaBatch(Generic[T]):
    """Reads many entries from one bookie in one request.

    Entries without a response are requested again as long as other entries arrive, so that one slow batch is no error.
    If the bookie is busy, the request is repeated after a delay. After that, the remaining entries are ERRORs; nothing
    is raised.
    """

    def __init__(
        self,
        requests: LedgerRequests,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> None:
        """`take` converts each replica on arrival to what the caller keeps, so that whole frames do not accumulate."""
        self._requests = requests
        self._bookie_id = bookie_id
        self._entry_ids = tuple(entry_ids)
        self._take = take
        self._missing = dict.fromkeys(self._entry_ids)
        self._found: dict[int, T] = {}
        assert len(self._missing) == len(self._entry_ids), "responses are matched by entry id: ids must be unique"

    async def run(self, *, timeout_s: float) -> list[T]:
        busy_attempts = 0
        may_retry = False
        while self._missing:
            before = len(self._missing)
            attempt = _Attempt(self)
            actions = SendReads(self._bookie_id, tuple(self._missing))
            self._requests.send_reads(actions, attempt, timeout_s=timeout_s)
            reason = await attempt.done
            if len(self._missing) < before:
                busy_attempts = 0
                may_retry = True
            elif reason is not None and may_retry:
                # The connection may have been replaced after a timeout, which failed this request.
                may_retry = False
            elif not attempt.is_busy or busy_attempts == BUSY_ATTEMPTS_MAX:
                self._give_up(
                    reason
                    or ("bookie is too busy" if attempt.is_busy else "the bookie's response does not match the request")
                )
            if self._missing and attempt.is_busy:
                busy_attempts += 1
                await asyncio.sleep(BUSY_PAUSE_S)
        return [self._found[entry_id] for entry_id in self._entry_ids]

    def accept(self, response: ReadResponse) -> None:
        entry_id = EntryId(response.entry_id)
        if entry_id not in self._missing:
            return
        del self._missing[entry_id]
        replica = judge(
            self._requests.digester,
            response,
            bookie_id=self._bookie_id,
            ledger_id=self._requests.ledger_id,
            entry_id=entry_id,
        )
        self._found[entry_id] = self._take(replica)

    def _give_up(self, reason: str) -> None:
        for entry_id in self._missing:
            status = int(Status.IO_ERROR)
            self._found[entry_id] = self._take(
                ReplicaRead(
                    self._requests.ledger_id, entry_id, self._bookie_id, status, None, Verdict.ERROR, reason=reason
                )
            )
        self._missing.clear()

    @property
    def missing_count(self) -> int:
        return len(self._missing)


class _Attempt:
    """One request of a batch. `done` returns the reason for an early end; None if all entries were answered."""

    def __init__(self, batch: ReplicaBatch[Any]) -> None:
        self._batch = batch
        self._answers_left = batch.missing_count
        self.is_busy = False
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if self.done.done():
            return
        self._answers_left -= len(responses)
        for response in responses:
            if not isinstance(response, ReadResponse):
                continue
            if response.status == Status.TOO_MANY_REQUESTS:
                self.is_busy = True
            else:
                self._batch.accept(response)
        if not self._answers_left:
            self.done.set_result(None)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self.done.done():
            self.done.set_result(reason_of(error))

    expired = failed


class FenceAll:
    """Sends a fence request for a ledger to each of `targets`; failures are accepted."""

    def __init__(self, requests: LedgerRequests, targets: tuple[BookieId, ...]) -> None:
        self._requests = requests
        self._waiting = dict.fromkeys(targets)  # not a set: requests are sent in the ensemble's order
        self._fenced: set[BookieId] = set()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, *, timeout_s: float) -> frozenset[BookieId]:
        """Return the bookies that responded, once all have responded or failed, or at the timeout."""
        for bookie_id in list(self._waiting):
            self._requests.send_reads(SendReads(bookie_id, (-1,), fence=True), self, timeout_s=timeout_s)
        await asyncio.wait([self._done], timeout=timeout_s)
        return frozenset(self._fenced)

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        self._fenced.add(bookie_id)
        self._finish_one(bookie_id)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._finish_one(bookie_id)

    expired = failed

    def _finish_one(self, bookie_id: BookieId) -> None:
        self._waiting.pop(bookie_id, None)
        if not self._waiting and not self._done.done():
            self._done.set_result(None)
