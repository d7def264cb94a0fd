"""Asking bookies outright: one replica of one entry, and fences that need not succeed."""

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bindery_core.entry import unpack
from bindery_core.errors import BinderyError, DigestMismatch
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger_actions import SendReads
from bindery_core.wire.messages import ReadResponse, Status

from bindery_client.requests import LedgerRequests


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
            self._done.set_result(self._judge(response))

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    expired = failed

    def _judge(self, response: ReadResponse) -> ReplicaRead:
        ledger_id, entry_id, bookie_id = self._requests.ledger_id, self._entry_id, self._bookie_id
        status, frame = response.status, response.body
        if status in (Status.NO_ENTRY, Status.NO_LEDGER):
            return ReplicaRead(ledger_id, entry_id, bookie_id, status, None, Verdict.ABSENT)
        if status != Status.OK or frame is None:
            return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.ERROR)
        try:
            entry = unpack(self._requests.digester, frame, ledger_id=ledger_id, entry_id=entry_id)
        except DigestMismatch:
            return ReplicaRead(ledger_id, entry_id, bookie_id, status, frame, Verdict.CORRUPT)
        return ReplicaRead(
            ledger_id, entry_id, bookie_id, status, frame, Verdict.GOOD, entry.payload, entry.lac, entry.length
        )


class FenceAll:
    """Fences a ledger at each of `targets`, and does not insist."""

    def __init__(self, requests: LedgerRequests, targets: tuple[BookieId, ...]) -> None:
        self._requests = requests
        self._waiting = set(targets)
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
        self._waiting.discard(bookie_id)
        if not self._waiting and not self._done.done():
            self._done.set_result(None)
