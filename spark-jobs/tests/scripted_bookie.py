"""A bookie in memory that answers reads and requests for lists, or is silent, busy, or not registered."""

import asyncio
from collections.abc import Sequence
from typing import Any

from bindery_core.errors import BookieUnavailable, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.wire import v2, v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    BatchReadRequest,
    BatchReadResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadRequest,
    ReadResponse,
    Status,
)


class FakeBookie:
    """Pool, directory and connection in one object, without sockets, in the time of the event loop."""

    def __init__(self) -> None:
        self.frames: dict[tuple[int, int], bytes] = {}
        self.statuses: dict[tuple[int, int], int] = {}
        """Statuses that are returned instead of frames."""
        self.known_ledgers: set[int] = set()
        self.busy_answers = 0
        """Number of requests that are rejected as busy."""
        self.is_silent = False
        self.refusals_left = 0
        """Number of requests that fail because the bookie cannot be reached."""
        self.is_registered = True
        self.supports_batch_reads = True
        self.batch_entries_max = 1_000
        self.list_status = int(Status.OK)
        """Status of responses to requests for lists of entries."""
        self.requests: list[Any] = []
        self.without_batch_reads: set[BookieId] = set()
        self.directory = self
        self._txn_id = 0

    # the directory
    def address(self, bookie_id: BookieId) -> tuple[str, int] | None:
        return ("here", 1) if self.is_registered else None

    # the pool
    def txn_id(self) -> int:
        self._txn_id += 1
        return self._txn_id

    def connection(self, bookie_id: BookieId, wire_version: int) -> Any:
        return self if wire_version == v2.VERSION else _Version3(self)

    # the connection
    def send(self, frames: bytes, keys: Sequence[Any], sink: Any, *, timeout_s: float) -> None:
        self.take([v2.decode_request(message) for message in FrameDecoder().feed(frames)], sink, timeout_s)

    def take(self, requests: list[Any], sink: Any, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.requests += requests
        bookie_id = BookieId("b")
        is_batch = isinstance(requests[0], BatchReadRequest)
        if not self.is_registered or self.refusals_left > 0:
            self.refusals_left -= 1
            loop.call_soon(sink.failed, bookie_id, BookieUnavailable("bookie cannot be reached", cause="refused"))
        elif is_batch and not self.supports_batch_reads:
            loop.call_soon(sink.failed, bookie_id, BookieUnavailable("connection was lost", cause="closed by peer"))
        elif self.is_silent:
            loop.call_later(timeout_s, sink.expired, bookie_id, BookieUnavailable("no answer in time"))
        else:
            loop.call_soon(sink.answered, bookie_id, [self._answer(each) for each in requests])

    def _answer(self, request: Any) -> Any:
        if isinstance(request, ListEntriesRequest):
            return self._list(request)
        is_batch = isinstance(request, BatchReadRequest)
        if self.busy_answers > 0:
            self.busy_answers -= 1
            status, bodies = int(Status.TOO_MANY_REQUESTS), []
        else:
            count = request.count_max if is_batch else 1
            status, bodies = self._read(request.ledger_id, request.entry_id, min(count, self.batch_entries_max))
        if is_batch:
            return BatchReadResponse(2, status, request.ledger_id, request.entry_id, request.request_id, tuple(bodies))
        assert isinstance(request, ReadRequest)
        return ReadResponse(2, status, request.ledger_id, request.entry_id, bodies[0] if bodies else None)

    def _list(self, request: ListEntriesRequest) -> ListEntriesResponse:
        if self.busy_answers > 0:
            self.busy_answers -= 1
            return ListEntriesResponse(request.txn_id, int(Status.TOO_MANY_REQUESTS), request.ledger_id)
        if request.ledger_id not in self.known_ledgers:
            return ListEntriesResponse(request.txn_id, int(Status.NO_LEDGER), request.ledger_id)
        held = sorted(entry_id for ledger_id, entry_id in self.frames if ledger_id == request.ledger_id)
        runs: list[tuple[int, int]] = []
        for entry_id in held:
            if runs and sum(runs[-1]) == entry_id:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((entry_id, 1))
        return ListEntriesResponse(request.txn_id, self.list_status, request.ledger_id, availability.encode(runs))

    def _read(self, ledger_id: int, first: int, count: int) -> tuple[int, list[bytes]]:
        if ledger_id not in self.known_ledgers:
            return int(Status.NO_LEDGER), []
        bodies: list[bytes] = []
        for entry_id in range(first, first + count):
            status = self.statuses.get((ledger_id, entry_id))
            if status is None and (ledger_id, entry_id) in self.frames:
                bodies.append(self.frames[ledger_id, entry_id])
                continue
            if bodies:
                break
            return status or int(Status.NO_ENTRY), []
        return int(Status.OK), bodies


class _Version3:
    """The connection with wire version 3."""

    def __init__(self, bookie: FakeBookie) -> None:
        self._bookie = bookie

    def send(self, frames: bytes, keys: Sequence[Any], sink: Any, *, timeout_s: float) -> None:
        self._bookie.take([v3.decode_request(message) for message in FrameDecoder().feed(frames)], sink, timeout_s)


class FakeMetadata:
    """The current metadata of ledgers."""

    def __init__(self) -> None:
        self.ledgers: dict[int, LedgerMetadata] = {}
        self.reads = 0

    async def read(self, ledger_id: LedgerId) -> LedgerMetadata:
        self.reads += 1
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(ledger_id=ledger_id)
        return self.ledgers[ledger_id]
