"""Requests about a whole ledger or a whole bookie: force a ledger, list its entries, read disk spaces."""

import asyncio
from collections.abc import Sequence
from typing import Any

from bindery_core.errors import BinderyError, BookieUnavailable, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.ids import BookieId
from bindery_core.wire import v3
from bindery_core.wire.messages import BookieInfoRequest, BookieInfoResponse, ListEntriesResponse, Status

from bindery_client.connection.pool import BookiePool
from bindery_client.ledger.requests import LedgerRequests

TOTAL_SPACE = 1
FREE_SPACE = 2
"""Bits of a bookie info request."""


class ForceAll:
    """Requests every bookie of an ensemble to force its entries of a ledger to disk."""

    def __init__(self, requests: LedgerRequests, ensemble: Sequence[BookieId]) -> None:
        self._requests = requests
        self._waiting = set(ensemble)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, *, timeout_s: float) -> None:
        """Return when all bookies have forced their entries. Raises BookieUnavailable for the first that failed."""
        for bookie_id in list(self._waiting):
            self._requests.send_force(bookie_id, self, timeout_s=timeout_s)
        await self._done

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        for response in responses:
            if response.status != Status.OK:
                self.failed(
                    bookie_id,
                    BookieUnavailable(
                        "the bookie failed to force entries to disk", bookie_id=bookie_id, status=int(response.status)
                    ),
                )
                return
        self._waiting.discard(bookie_id)
        if not self._waiting and not self._done.done():
            self._done.set_result(None)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    expired = failed


class EntryList:
    """Lists the entries of a ledger that one bookie holds."""

    def __init__(self, requests: LedgerRequests, bookie_id: BookieId) -> None:
        self._requests = requests
        self._bookie_id = bookie_id
        self._done: asyncio.Future[list[tuple[int, int]]] = asyncio.get_running_loop().create_future()

    async def run(self, *, timeout_s: float) -> list[tuple[int, int]]:
        """Return runs (first, count), ascending. Raises NoSuchLedger, BookieUnavailable, Corrupt."""
        self._requests.send_list_entries(self._bookie_id, self, timeout_s=timeout_s)
        return await self._done

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if self._done.done():
            return
        response: ListEntriesResponse = responses[0]
        try:
            self._done.set_result(self._decode(response))
        except BinderyError as error:
            self._done.set_exception(error)

    def _decode(self, response: ListEntriesResponse) -> list[tuple[int, int]]:
        facts = {"ledger_id": self._requests.ledger_id, "bookie_id": self._bookie_id}
        if response.status == Status.NO_LEDGER:
            raise NoSuchLedger("the bookie stores no entries of this ledger", **facts)
        if response.status != Status.OK or response.availability is None:
            raise BookieUnavailable("the bookie cannot list its entries", **facts, status=int(response.status))
        return availability.decode(response.availability)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    expired = failed


class DiskSpaces:
    """Reads the disk spaces that bookies report."""

    def __init__(self, pool: BookiePool) -> None:
        self._pool = pool
        self._waiting: set[BookieId] = set()
        self._found: dict[BookieId, tuple[int, int]] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, bookies: Sequence[BookieId], *, timeout_s: float) -> dict[BookieId, tuple[int, int]]:
        """Return (total, free) bytes by bookie; bookies that do not respond are left out."""
        self._waiting = set(bookies)
        if not self._waiting:
            return {}
        for bookie_id in bookies:
            request = BookieInfoRequest(self._pool.txn_id(), TOTAL_SPACE | FREE_SPACE)
            self._pool.connection(bookie_id).send(
                v3.encode_request(request), (request.txn_id,), self, timeout_s=timeout_s
            )
        await self._done
        return self._found

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        response: BookieInfoResponse = responses[-1]
        total, free = response.total_disk_capacity, response.free_disk_space
        if response.status == Status.OK and total is not None and free is not None:
            self._found[bookie_id] = total, free
        self._finish_one(bookie_id)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._finish_one(bookie_id)

    expired = failed

    def _finish_one(self, bookie_id: BookieId) -> None:
        self._waiting.discard(bookie_id)
        if not self._waiting and not self._done.done():
            self._done.set_result(None)


class FreeSpace:
    """Refreshes `pool.free_bytes` every `bookie_info_interval_s`. It has no task: `refresh_if_due` sends the
    requests."""

    def __init__(self, pool: BookiePool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._due_at = 0.0

    def refresh_if_due(self) -> None:
        """If the interval is over, poll all writable bookies; the free space of those that fail becomes unknown."""
        settings = self._pool.settings
        now = self._loop.time()
        if not settings.bookie_info_interval_s or now < self._due_at:
            return
        self._due_at = now + settings.bookie_info_interval_s
        for bookie_id, record in self._pool.directory.bookies.items():
            if not record.read_only:
                request = BookieInfoRequest(self._pool.txn_id(), FREE_SPACE)
                self._pool.connection(bookie_id).send(
                    v3.encode_request(request), (request.txn_id,), self, timeout_s=settings.read_timeout_s
                )

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        response: BookieInfoResponse = responses[-1]
        if response.status == Status.OK and response.free_disk_space is not None:
            self._pool.free_bytes[bookie_id] = response.free_disk_space

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._pool.free_bytes.pop(bookie_id, None)

    expired = failed
