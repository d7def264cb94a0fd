"""ReadHandle: reads one ledger, and follows its writer while it is open.

Flow: the handle watches the metadata for ensemble changes and for the closing of the ledger. While a caller waits for
an entry, each bookie of the last ensemble holds one long poll; the first response with a higher last add confirmed
wakes the callers.

Invariants: last_add_confirmed never decreases, and is final once the ledger is closed; at most one long poll per
bookie; no long poll is sent while no caller waits.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import structlog
from bindery_core.entry import unpack
from bindery_core.errors import (
    BinderyError,
    BookieUnavailable,
    Corrupt,
    MetadataUnavailable,
    NoSuchEntry,
    NoSuchLedger,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_reader import LacRead
from bindery_core.wire.messages import ReadLacResponse, ReadResponse, Status
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_client.ledger.api import Entry
from bindery_client.ledger.read_operation import check_ids, check_range, read_entries
from bindery_client.ledger.requests import LedgerRequests, reason_of
from bindery_client.settings import ClientSettings

log = structlog.get_logger()

FIRST_READ_SIZE_GUESS: Final = 64 * 1024
"""Assumed size of an entry in bytes before any was read, which keeps the first step of a read small."""

PIGGYBACKED_ENTRIES_MAX: Final = 8
"""Maximum number of entries from long-poll responses that are kept until they are read."""


class ReadHandle:
    """`api.ReadHandle` over bookies. Created by `LedgerClient.open`."""

    def __init__(
        self,
        found: Versioned[LedgerMetadata],
        *,
        requests: LedgerRequests,
        manager: LedgerManager,
        settings: ClientSettings,
    ) -> None:
        self.ledger_id: LedgerId = requests.ledger_id
        self._found = found
        self._requests = requests
        self._manager = manager
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._last_add_confirmed = -1
        self._deleted = False
        self._released = False
        self._average_size = FIRST_READ_SIZE_GUESS
        self._waiters: dict[asyncio.Future[None], EntryId] = {}
        self._polls: dict[BookieId, _LongPoll] = {}
        self._piggybacked: OrderedDict[int, Entry] = OrderedDict()
        self._unwatch: Callable[[], None] | None = None
        self._take_metadata(found)
        if not self.is_closed:
            self._unwatch = manager.watch(self.ledger_id, self._metadata_changed)

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> LedgerMetadata:
        return self._found.value

    @property
    def last_add_confirmed(self) -> int:
        return self._last_add_confirmed

    @property
    def is_closed(self) -> bool:
        return self._found.value.state is LedgerState.CLOSED

    # -- reading ------------------------------------------------------------------------------------------------------

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        check_range(first, last, ledger_id=self.ledger_id, last_add_confirmed=self._last_add_confirmed)
        if first == last and first in self._piggybacked:
            return [self._piggybacked.pop(first)]
        return await self.read_some(range(first, last + 1))

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]:
        check_ids(entry_ids, ledger_id=self.ledger_id, last_add_confirmed=self._last_add_confirmed)
        try:
            entries = await self._read(entry_ids)
        except (NoSuchEntry, BookieUnavailable, Corrupt):
            # Re-replication may have moved copies since the metadata was read: read it again before giving up.
            segments = self.metadata.segments
            await self._refresh()
            if self.metadata.segments == segments:
                raise
            entries = await self._read(entry_ids)
        self._average_size = sum(len(entry.payload) for entry in entries) // len(entries)
        return entries

    async def _read(self, entry_ids: Sequence[int]) -> list[Entry]:
        return await read_entries(
            self._requests,
            lambda: self.metadata,
            entry_ids=entry_ids,
            average_size=self._average_size,
            settings=self._settings,
            on_lac=self._raise_lac,
        )

    # -- last add confirmed -------------------------------------------------------------------------------------------

    async def read_last_confirmed(self) -> int:
        if not self.is_closed:
            self._raise_lac(await _LacQuery(self._requests, self.metadata, self._settings).run())
        return self._last_add_confirmed

    async def wait_for_entry(self, entry_id: EntryId, *, timeout_s: float) -> bool:
        if self._last_add_confirmed >= entry_id or self._is_over:
            return self._last_add_confirmed >= entry_id
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters[waiter] = entry_id
        self._poll_all()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            del self._waiters[waiter]
        return self._last_add_confirmed >= entry_id

    async def tail(self, first: EntryId) -> AsyncIterator[list[Entry]]:
        next_entry_id = first
        while True:
            if await self.wait_for_entry(next_entry_id, timeout_s=self._settings.long_poll_s):
                last = min(self._last_add_confirmed, next_entry_id + self._settings.read_batch_entries_max - 1)
                entries = await self.read(next_entry_id, EntryId(last))
                next_entry_id = EntryId(last + 1)
                yield entries
            elif self._is_over:
                return

    async def release(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._released = True
        for poll in self._polls.values():
            poll.stop()
        self._polls.clear()
        self._wake()

    @property
    def _is_over(self) -> bool:
        return self.is_closed or self._deleted or self._released

    def _raise_lac(self, lac: int) -> None:
        if lac > self._last_add_confirmed and not self.is_closed:
            self._last_add_confirmed = lac
            self._wake()

    def _wake(self) -> None:
        for waiter, entry_id in self._waiters.items():
            if not waiter.done() and (self._last_add_confirmed >= entry_id or self._is_over):
                waiter.set_result(None)

    # -- long polls ---------------------------------------------------------------------------------------------------

    @property
    def _is_awaited(self) -> bool:
        return any(not waiter.done() for waiter in self._waiters)

    def _poll_all(self) -> None:
        ensemble = self.metadata.last_segment.ensemble
        for bookie_id in [b for b in self._polls if b not in ensemble]:
            self._polls.pop(bookie_id).stop()
        for bookie_id in ensemble:
            poll = self._polls.get(bookie_id)
            if poll is None:
                poll = self._polls[bookie_id] = _LongPoll(self, bookie_id)
            poll.send()

    def polled(self, response: ReadResponse) -> None:
        """Process the response to a long poll."""
        if response.body is not None:
            try:
                entry = unpack(
                    self._requests.digester, response.body, ledger_id=self.ledger_id, entry_id=response.entry_id
                )
            except Corrupt:
                pass  # a later read uses a good replica
            else:
                self._piggybacked[entry.entry_id] = Entry(EntryId(entry.entry_id), entry.payload, entry.length)
                while len(self._piggybacked) > PIGGYBACKED_ENTRIES_MAX:
                    self._piggybacked.popitem(last=False)
        if response.max_lac is not None:
            self._raise_lac(response.max_lac)

    # -- metadata -----------------------------------------------------------------------------------------------------

    def _metadata_changed(self, found: Versioned[LedgerMetadata] | None) -> None:
        if self._released:
            return
        if found is None:
            self._deleted = True
            self._wake()
        elif found.version >= self._found.version:
            self._take_metadata(found)

    def _take_metadata(self, found: Versioned[LedgerMetadata]) -> None:
        self._found = found
        if self.is_closed:
            self._last_add_confirmed = found.value.last_entry_id
            self._wake()
        elif self._is_awaited:
            self._poll_all()

    async def _refresh(self) -> None:
        try:
            found = await self._manager.read(self.ledger_id)
        except (MetadataUnavailable, NoSuchLedger):
            return
        self._metadata_changed(found)


class _LongPoll:
    """The one long poll of a reader at one bookie. It is repeated while a caller waits, with a delay after failures."""

    def __init__(self, reader: ReadHandle, bookie_id: BookieId) -> None:
        self._reader = reader
        self._bookie_id = bookie_id
        self._sent = False
        self._pause: asyncio.TimerHandle | None = None
        self._stopped = False

    def send(self) -> None:
        if self._sent or self._stopped or self._pause is not None:
            return
        reader = self._reader
        self._sent = True
        wait_s = reader._settings.long_poll_s
        reader._requests.send_long_poll(
            self._bookie_id,
            self,
            previous_lac=reader.last_add_confirmed,
            wait_s=wait_s,
            timeout_s=wait_s + reader._settings.read_timeout_s,
        )

    def stop(self) -> None:
        self._stopped = True
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        self._sent = False
        if self._stopped:
            return
        (response,) = responses
        if isinstance(response, ReadResponse) and response.status == Status.OK:
            self._reader.polled(response)
            self._again()
        else:
            self._later()  # NO_LEDGER until the bookie has the first entry

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._sent = False
        self._later()

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._sent = False
        self._later()

    def _later(self) -> None:
        if not self._stopped and self._pause is None:
            self._pause = self._reader._loop.call_later(self._reader._settings.lac_refresh_s, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._again()

    def _again(self) -> None:
        if self._reader._is_awaited:
            self.send()


class _LacQuery:
    """Runs one `LacRead`."""

    def __init__(self, requests: LedgerRequests, metadata: LedgerMetadata, settings: ClientSettings) -> None:
        self._requests = requests
        self._settings = settings
        self._machine = LacRead(requests.ledger_id, metadata, digester=requests.digester)
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        for bookie_id in self._machine.targets:
            self._requests.send_lac_read(bookie_id, self, timeout_s=self._settings.read_timeout_s)
        return await self._done

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        for response in responses:
            if isinstance(response, ReadLacResponse):
                self._machine.receive(bookie_id, response)
            else:
                self._machine.bookie_failed(bookie_id, "not an answer to READ_LAC")
        self._complete_if_over()

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._machine.bookie_failed(bookie_id, reason_of(error))
        self._complete_if_over()

    expired = failed

    def _complete_if_over(self) -> None:
        if self._done.done():
            return
        if self._machine.result is not None:
            self._done.set_result(self._machine.result)
        elif self._machine.error is not None:
            self._done.set_exception(self._machine.error)
