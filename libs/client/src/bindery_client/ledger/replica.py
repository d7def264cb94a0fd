"""Asking bookies outright: replicas of entries, one by one or many of one bookie, and fences that need not succeed."""

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
"""How often in a row a bookie may answer a whole batch with "too many requests"."""
BUSY_PAUSE_S: Final = 0.2
"""Before such a bookie is asked again."""


class Verdict(Enum):
    """What a replica is worth."""

    GOOD = "good"
    ABSENT = "absent"
    """The bookie denies to have it."""
    CORRUPT = "corrupt"
    """What it sent contradicts its digest, or is another entry."""
    ERROR = "error"
    """The bookie could not say: see `status`."""


@dataclass(frozen=True, slots=True)
class ReplicaRead:
    """One bookie's answer for one entry."""

    ledger_id: LedgerId
    entry_id: EntryId
    bookie_id: BookieId
    status: int
    """A `Status`, or a number that is none."""
    frame: bytes | None
    """The entry frame as the bookie sent it, unverified."""
    verdict: Verdict
    payload: bytes | None = None
    """Only when GOOD."""
    lac: int | None = None
    length: int | None = None
    reason: str = ""
    """Why it is CORRUPT or an ERROR, in a few words."""


def judge(
    digester: Digester, response: ReadResponse, *, bookie_id: BookieId, ledger_id: LedgerId, entry_id: EntryId
) -> ReplicaRead:
    """What `response` to a plain read of `entry_id` is worth."""
    status, frame = response.status, response.body
    if status in (Status.NO_ENTRY, Status.NO_LEDGER):
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, None, Verdict.ABSENT)
    if status != Status.OK or frame is None:
        reason = "answer without an entry" if status == Status.OK else f"bookie answers {status_name(status)}"
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.ERROR, reason=reason)
    try:
        entry = unpack(digester, frame, ledger_id=ledger_id, entry_id=entry_id)
    except DigestMismatch as error:
        return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.CORRUPT, reason=error.message)
    return ReplicaRead(
        ledger_id, entry_id, bookie_id, status, frame, Verdict.GOOD, entry.payload, entry.lac, entry.length
    )


def status_name(status: int) -> str:
    """`IO_ERROR`; the number itself when it has no name."""
    try:
        return Status(status).name
    except ValueError:
        return str(status)


class ReplicaRequest:
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
                self._requests.digester, response,
                bookie_id=bookie_id, ledger_id=self._requests.ledger_id, entry_id=self._entry_id,
            )  # fmt: skip
            self._done.set_result(replica)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    expired = failed


class ReplicaBatch(Generic[T]):
    """Many entries of one bookie, asked for at once.

    What was not answered is asked for again as long as something else was, so that one slow batch is no verdict; a
    bookie that says that it is busy is asked again after a pause. Then the rest are ERRORs: nothing is raised.
    """

    def __init__(
        self, requests: LedgerRequests, bookie_id: BookieId, entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> None:  # fmt: skip
        """`take` makes of each replica what the caller keeps, as it arrives: whole frames need not pile up."""
        self._requests = requests
        self._bookie_id = bookie_id
        self._entry_ids = tuple(entry_ids)
        self._take = take
        self._missing = dict.fromkeys(self._entry_ids)
        self._found: dict[int, T] = {}
        assert len(self._missing) == len(self._entry_ids), "an answer tells by its entry id whose it is"

    async def run(self, *, timeout_s: float) -> list[T]:
        busy_attempts = 0
        is_patient = False
        while self._missing:
            before = len(self._missing)
            attempt = _Attempt(self)
            actions = SendReads(self._bookie_id, tuple(self._missing))
            self._requests.send_reads(actions, attempt, timeout_s=timeout_s)
            reason = await attempt.done
            if len(self._missing) < before:
                busy_attempts = 0
                is_patient = True
            elif reason is not None and is_patient:
                is_patient = False  # after a deadline the connection may be made anew, and our request fell in between
            elif not attempt.is_busy or busy_attempts == BUSY_ATTEMPTS_MAX:
                self._give_up(reason or ("bookie is too busy" if attempt.is_busy else "bookie answers something else"))
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
            self._requests.digester, response,
            bookie_id=self._bookie_id, ledger_id=self._requests.ledger_id, entry_id=entry_id,
        )  # fmt: skip
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
    """One request of a batch for what is missing; `done` gives why it ended early, None when all was answered."""

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
    """Fences a ledger at each of `targets`, and does not insist."""

    def __init__(self, requests: LedgerRequests, targets: tuple[BookieId, ...]) -> None:
        self._requests = requests
        self._waiting = dict.fromkeys(targets)  # not a set: they are asked in the ensemble's order
        self._fenced: set[BookieId] = set()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, *, timeout_s: float) -> frozenset[BookieId]:
        """Returns the bookies that answered, after all did or failed, or at the time limit."""
        for bookie_id in list(self._waiting):
            self._requests.send_reads(SendReads(bookie_id, (-1,), fence=True), self, timeout_s=timeout_s)
        await asyncio.wait([self._done], timeout=timeout_s)
        return frozenset(self._fenced)

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        self._fenced.add(bookie_id)
        self._over(bookie_id)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._over(bookie_id)

    expired = failed

    def _over(self, bookie_id: BookieId) -> None:
        self._waiting.pop(bookie_id, None)
        if not self._waiting and not self._done.done():
            self._done.set_result(None)
