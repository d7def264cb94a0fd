"""MemoryLedgerClient: ledgers in the memory of this process, for tests of code that uses `api.LedgerClient`.

Several clients share one `MemoryLedgers`, as several brokers share one cluster. The same contract suite tests this and
the real client. The network is left out: an add reaches all its bookies at once, and is confirmed in a later turn of
the event loop. `memory_replicas` records which bookie holds which entry; readers ignore lost copies.

Invariants: entries of a ledger are dense from 0; confirmed <= stored; a fenced writer confirms nothing more; a CLOSED
ledger never changes.

Tests inject faults: `fail_next` makes calls fail, `hold_adds` keeps adds in flight, `bookies` sets the bookies that
`create` can use, `MemoryWriteHandle.abandon` and `MemoryLedgerClient.close` simulate a crash of a writer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Literal, TypeVar, Unpack

from bindery_core.errors import (
    BadRequest,
    BinderyError,
    BookieUnavailable,
    LedgerClosed,
    LedgerFenced,
    NoSuchLedger,
    NotEnoughBookies,
    Unauthorized,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.placement import DEFAULT_RACK, Candidate, choose_move, choose_replacements
from bindery_core.wire.messages import Status

from bindery_client.ledger.api import Entry
from bindery_client.ledger.new_ledger import LedgerOptions, NewLedger
from bindery_client.ledger.read_operation import check_ids, check_range
from bindery_client.ledger.replica import ReplicaRead
from bindery_client.memory.memory_replicas import MemoryReplicas

T = TypeVar("T")

TAIL_BATCH_ENTRIES_MAX: Final = 1000
"""Maximum number of entries that `tail` yields at a time."""
_TAIL_WAIT_S: Final = 3600.0

Operation = Literal["create", "open", "add", "force", "read", "close", "delete", "metadata"]


class _AlwaysZero:
    def random(self) -> float:
        return 0.0


_ALWAYS_ZERO: Final = _AlwaysZero()
"""Random source with which placement always chooses the first suitable bookie."""


class _Fault:
    """`count` calls of one operation that will fail."""

    __slots__ = ("count", "error", "stored")

    def __init__(self, error: BinderyError, count: int, stored: bool) -> None:
        self.error = error
        self.count = count
        self.stored = stored


class _Ledger:
    """One ledger, shared by all clients."""

    def __init__(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
        self.ledger_id = ledger_id
        self.metadata = metadata
        self.entries: list[Entry] = []
        self.copies = MemoryReplicas(ledger_id)
        self.confirmed = -1
        self.deleted = False
        self.writer: MemoryWriteHandle | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_closed(self) -> bool:
        return self.metadata.state is LedgerState.CLOSED

    @property
    def length_confirmed(self) -> int:
        return self.entries[self.confirmed].length if self.confirmed >= 0 else 0

    def store(self, payloads: Sequence[bytes]) -> None:
        length = self.entries[-1].length if self.entries else 0
        for payload in payloads:
            length += len(payload)
            self.copies.add(self.metadata, len(self.entries))
            self.entries.append(Entry(EntryId(len(self.entries)), bytes(payload), length))

    def confirm(self, entry_id: int) -> None:
        assert self.confirmed <= entry_id < len(self.entries)
        self.confirmed = entry_id
        self.wake()

    def seal(self) -> None:
        """Close at the last confirmed entry."""
        del self.entries[self.confirmed + 1 :]
        self.copies.cut(len(self.entries))
        self.metadata = self.metadata.with_changes(
            state=LedgerState.CLOSED, last_entry_id=EntryId(self.confirmed), length=self.length_confirmed
        )
        self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self) -> None:
        """Return at the next confirm, close or deletion."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def slice(self, first: int, last: int, limit: int) -> list[Entry]:
        check_range(first, last, ledger_id=self.ledger_id, last_add_confirmed=limit)
        return self.some(range(first, last + 1), limit)

    def some(self, entry_ids: Sequence[int], limit: int) -> list[Entry]:
        if self.deleted:
            raise NoSuchLedger("no such ledger", ledger_id=self.ledger_id)
        check_ids(entry_ids, ledger_id=self.ledger_id, last_add_confirmed=limit)
        return [self.entries[entry_id] for entry_id in entry_ids]


class MemoryLedgers:
    """State that the clients share: ledgers, bookies, and the faults that a test injected."""

    def __init__(
        self,
        *,
        bookies: Sequence[str] = ("bookie-0:3181", "bookie-1:3182", "bookie-2:3183", "bookie-3:3184"),
        add_delay_s: float = 0.0,
    ) -> None:
        """`add_delay_s`: time that an add is in flight; 0: until the next turn of the event loop."""
        self.bookies: dict[BookieId, bool] = {BookieId(bookie): True for bookie in bookies}
        self.racks: dict[BookieId, str] = {}
        """Racks of bookies; the others are in DEFAULT_RACK. `create` does not use them."""
        """Bookie id -> writable. A test may change it at any time; open writers ignore it."""
        self.read_answers: dict[BookieId, Status] = {}
        """Status with which a bookie answers every read of a replica, instead of the entry."""
        self.store_answers: dict[BookieId, Status] = {}
        """Status with which a bookie answers every replica to store, instead of storing it."""
        self.add_delay_s = add_delay_s
        self.ledgers: dict[LedgerId, _Ledger] = {}
        self._next_ledger_id = 0
        self._faults: dict[str, deque[_Fault]] = {}
        self._held: list[Callable[[], None]] | None = None

    def fail_next(self, operation: Operation, error: BinderyError, *, count: int = 1, stored: bool = False) -> None:
        """Make the next `count` calls of `operation` fail with `error` (for adds: calls of `add_many`).

        `stored`: the failed add is stored, unconfirmed, and a recovery finds it (an unknown outcome).
        """
        self._faults.setdefault(operation, deque()).append(_Fault(error, count, stored))

    def hold_adds(self) -> None:
        """Keep every later add in flight until `release_adds`."""
        if self._held is None:
            self._held = []

    def release_adds(self) -> None:
        """Complete held adds, in order, in the next turn of the event loop."""
        held, self._held = self._held, None
        loop = asyncio.get_running_loop()
        for complete in held or ():
            loop.call_soon(complete)

    def deliver(self, complete: Callable[[], None]) -> None:
        """Complete an add later, as the responses of its bookies would."""
        if self._held is not None:
            self._held.append(complete)
        elif self.add_delay_s:
            asyncio.get_running_loop().call_later(self.add_delay_s, complete)
        else:
            asyncio.get_running_loop().call_soon(complete)

    def take_fault(self, operation: Operation) -> _Fault | None:
        faults = self._faults.get(operation)
        if not faults:
            return None
        fault = faults[0]
        fault.count -= 1
        if fault.count <= 0:
            faults.popleft()
        return fault

    def raise_fault(self, operation: Operation) -> None:
        fault = self.take_fault(operation)
        if fault is not None:
            raise fault.error

    def find(self, ledger_id: LedgerId) -> _Ledger:
        ledger = self.ledgers.get(ledger_id)
        if ledger is None:
            raise NoSuchLedger("no such ledger", ledger_id=ledger_id)
        return ledger

    def create(self, metadata: LedgerMetadata) -> _Ledger:
        ledger_id = LedgerId(self._next_ledger_id)
        self._next_ledger_id += 1
        ledger = self.ledgers[ledger_id] = _Ledger(ledger_id, metadata)
        return ledger

    def choose_ensemble(self, ensemble_size: int) -> tuple[BookieId, ...]:
        writable = [bookie for bookie, is_writable in self.bookies.items() if is_writable]
        if len(writable) < ensemble_size:
            raise NotEnoughBookies(
                "not enough writable bookies", asked=ensemble_size, writable=len(writable), known=len(self.bookies)
            )
        start = self._next_ledger_id % len(writable)
        return tuple((writable + writable)[start : start + ensemble_size])


class MemoryReadHandle:
    """`api.ReadHandle` in memory. Its last_add_confirmed changes only when it is read, or when the ledger is closed."""

    def __init__(self, ledgers: MemoryLedgers, ledger: _Ledger) -> None:
        self.ledger_id: LedgerId = ledger.ledger_id
        self._ledgers = ledgers
        self._ledger = ledger
        self._last_add_confirmed = ledger.confirmed

    @property
    def metadata(self) -> LedgerMetadata:
        return self._ledger.metadata

    @property
    def last_add_confirmed(self) -> int:
        if self._ledger.is_closed:
            self._last_add_confirmed = self._ledger.confirmed
        return self._last_add_confirmed

    @property
    def is_closed(self) -> bool:
        return self._ledger.is_closed

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        await asyncio.sleep(0)
        self._ledgers.raise_fault("read")
        return self._ledger.slice(first, last, self.last_add_confirmed)

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]:
        await asyncio.sleep(0)
        self._ledgers.raise_fault("read")
        return self._ledger.some(entry_ids, self.last_add_confirmed)

    async def read_last_confirmed(self) -> int:
        await asyncio.sleep(0)
        self._last_add_confirmed = self._ledger.confirmed
        return self._last_add_confirmed

    async def wait_for_entry(self, entry_id: EntryId, *, timeout_s: float) -> bool:
        ledger = self._ledger
        try:
            async with asyncio.timeout(timeout_s):
                while ledger.confirmed < entry_id and not ledger.is_closed and not ledger.deleted:
                    await ledger.changed()
        except TimeoutError:
            pass
        self._last_add_confirmed = ledger.confirmed
        return ledger.confirmed >= entry_id

    async def tail(self, first: EntryId) -> AsyncIterator[list[Entry]]:
        next_entry_id = first
        while True:
            found = await self.wait_for_entry(next_entry_id, timeout_s=_TAIL_WAIT_S)
            if found:
                last = min(self.last_add_confirmed, next_entry_id + TAIL_BATCH_ENTRIES_MAX - 1)
                batch = await self.read(next_entry_id, EntryId(last))
                next_entry_id = EntryId(last + 1)
                yield batch
            elif self.is_closed or self._ledger.deleted:
                return

    async def release(self) -> None:
        pass


class MemoryWriteHandle:
    """`api.WriteHandle` in memory."""

    def __init__(self, ledgers: MemoryLedgers, ledger: _Ledger, *, deferred_sync: bool) -> None:
        self.ledger_id: LedgerId = ledger.ledger_id
        self._ledgers = ledgers
        self._ledger = ledger
        self._deferred_sync = deferred_sync
        self._in_flight: deque[tuple[list[bytes], EntryId, asyncio.Future[EntryId]]] = deque()
        self._last_add_pushed = -1
        self._length = 0
        self._error: BinderyError | None = None

    @property
    def metadata(self) -> LedgerMetadata:
        return self._ledger.metadata

    @property
    def last_add_confirmed(self) -> int:
        return self._ledger.confirmed

    @property
    def last_add_pushed(self) -> int:
        return self._last_add_pushed

    @property
    def length(self) -> int:
        return self._length

    @property
    def is_closed(self) -> bool:
        return isinstance(self._error, LedgerClosed)

    async def add(self, payload: bytes) -> EntryId:
        return await self.add_many([payload])

    async def add_many(self, payloads: Sequence[bytes]) -> EntryId:
        if not payloads:
            raise BadRequest("nothing to add", ledger_id=self.ledger_id)
        if self._error is not None:
            raise self._error
        first = EntryId(self._last_add_pushed + 1)
        self._last_add_pushed += len(payloads)
        self._length += sum(map(len, payloads))
        future: asyncio.Future[EntryId] = asyncio.get_running_loop().create_future()
        self._in_flight.append((list(payloads), first, future))
        self._ledgers.deliver(self._complete_first)
        return await future

    def _complete_first(self) -> None:
        if not self._in_flight:
            return  # the handle broke meanwhile and every add was answered
        payloads, first, future = self._in_flight[0]
        fault = self._ledgers.take_fault("add")
        if fault is not None:
            if fault.stored:
                self._ledger.store(payloads)
            self.break_with(fault.error)
            return
        self._in_flight.popleft()
        self._ledger.store(payloads)
        if not self._deferred_sync:
            self._ledger.confirm(first + len(payloads) - 1)
        if not future.done():
            future.set_result(first)

    def break_with(self, error: BinderyError) -> None:
        """Fail every add in flight and every later one."""
        if self._error is None:
            self._error = error
        in_flight, self._in_flight = self._in_flight, deque()
        for _payloads, _first, future in in_flight:
            if not future.done():
                future.set_exception(error)
                future.exception()  # no warning if the caller was cancelled or is absent

    async def force(self) -> int:
        await asyncio.sleep(0)
        if self._error is not None and not self._ledger.is_closed:
            raise self._error
        self._ledgers.raise_fault("force")
        self._ledger.confirm(len(self._ledger.entries) - 1)
        return self._ledger.confirmed

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        await asyncio.sleep(0)
        self._ledgers.raise_fault("read")
        return self._ledger.slice(first, last, self._ledger.confirmed)

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]:
        await asyncio.sleep(0)
        self._ledgers.raise_fault("read")
        return self._ledger.some(entry_ids, self._ledger.confirmed)

    async def close(self) -> LedgerMetadata:
        await asyncio.sleep(0)
        if isinstance(self._error, LedgerFenced):
            raise self._error
        if self.is_closed:
            return self._ledger.metadata
        self._ledgers.raise_fault("close")
        while self._in_flight:
            await asyncio.wait([future for _payloads, _first, future in self._in_flight])
            await asyncio.sleep(0)
        if self._ledger.deleted:
            raise NoSuchLedger("no such ledger", ledger_id=self.ledger_id)
        if isinstance(self._error, LedgerFenced):
            raise self._error
        if self._deferred_sync and self._error is None:
            await self.force()
        if not self._ledger.is_closed:
            self._ledger.seal()
        self._error = LedgerClosed("ledger is closed", ledger_id=self.ledger_id)
        return self._ledger.metadata

    async def abandon(self) -> None:
        self.break_with(LedgerClosed("write handle was abandoned", ledger_id=self.ledger_id))


class MemoryLedgerClient:
    """`api.LedgerClient` over a shared `MemoryLedgers`."""

    def __init__(self, ledgers: MemoryLedgers | None = None) -> None:
        self.ledgers = ledgers if ledgers is not None else MemoryLedgers()
        self._writers: list[MemoryWriteHandle] = []

    async def create(self, **options: Unpack[LedgerOptions]) -> MemoryWriteHandle:
        new = NewLedger(**options)
        await asyncio.sleep(0)
        self.ledgers.raise_fault("create")
        ledger = self.ledgers.create(new.metadata(self.ledgers.choose_ensemble(new.ensemble_size)))
        ledger.writer = MemoryWriteHandle(self.ledgers, ledger, deferred_sync=new.deferred_sync)
        self._writers.append(ledger.writer)
        return ledger.writer

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> MemoryReadHandle:
        await asyncio.sleep(0)
        self.ledgers.raise_fault("open")
        ledger = self.ledgers.find(ledger_id)
        if ledger.metadata.password != password:
            raise Unauthorized("wrong ledger password", ledger_id=ledger_id)
        if recover and not ledger.is_closed:
            self._fence(ledger)
            if ledger.entries:
                ledger.confirm(len(ledger.entries) - 1)
            ledger.seal()
        return MemoryReadHandle(self.ledgers, ledger)

    def _fence(self, ledger: _Ledger) -> None:
        if ledger.writer is not None:
            ledger.writer.break_with(LedgerFenced("ledger was fenced", ledger_id=ledger.ledger_id))

    async def delete(self, ledger_id: LedgerId) -> None:
        await asyncio.sleep(0)
        self.ledgers.raise_fault("delete")
        ledger = self.ledgers.ledgers.pop(ledger_id, None)
        if ledger is not None:
            self._fence(ledger)
            ledger.deleted = True
            ledger.wake()

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        await asyncio.sleep(0)
        self.ledgers.raise_fault("metadata")
        return self.ledgers.find(ledger_id).metadata

    async def list_ledgers(self) -> AsyncIterator[LedgerId]:
        for ledger_id in sorted(self.ledgers.ledgers):
            yield ledger_id

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        await asyncio.sleep(0)
        return dict(self.ledgers.bookies)

    async def entries_on(
        self, ledger_id: LedgerId, bookie_id: BookieId, *, durable: bool = False
    ) -> Sequence[tuple[int, int]]:
        await asyncio.sleep(0)
        ledger = self.ledgers.find(ledger_id)
        self._check_registered(bookie_id)
        runs = ledger.copies.runs(bookie_id)
        if not runs:
            raise NoSuchLedger("the bookie stores no entries of this ledger", ledger_id=ledger_id, bookie_id=bookie_id)
        return runs

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]:
        await asyncio.sleep(0)
        ledger = self.ledgers.ledgers.get(ledger_id)
        copies, entries = (ledger.copies, ledger.entries) if ledger is not None else (MemoryReplicas(ledger_id), [])
        status = self.ledgers.read_answers.get(bookie_id)
        return [
            take(copies.read(metadata, entries, bookie_id, entry_id, bookies=self.ledgers.bookies, status=status))
            for entry_id in entry_ids
        ]

    async def store_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        frames: Sequence[bytes],
        *,
        timeout_s: float | None = None,
    ) -> list[int]:
        await asyncio.sleep(0)
        ledger = self.ledgers.find(ledger_id)
        self._check_registered(bookie_id)
        answer = self.ledgers.store_answers.get(bookie_id, Status.OK)
        if metadata.password != ledger.metadata.password:
            answer = Status.UNAUTHORIZED
        if answer == Status.OK:
            ledger.copies.store(bookie_id, frames)
        return [int(answer)] * len(frames)

    async def choose_replacements(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        *,
        write_quorum: int,
        exclude: Mapping[BookieId, str] | None = None,
    ) -> dict[int, BookieId]:
        await asyncio.sleep(0)
        return choose_replacements(
            self._candidates(),
            ensemble=ensemble,
            failed=failed,
            write_quorum=write_quorum,
            rng=_ALWAYS_ZERO,
            exclude=exclude,
            absent=self.ledgers.racks,
        )

    def _candidates(self) -> list[Candidate]:
        racks = self.racks()
        return [
            Candidate(bookie_id, rack=racks[bookie_id], refusal=None if is_writable else "read-only")
            for bookie_id, is_writable in self.ledgers.bookies.items()
        ]

    def racks(self) -> Mapping[BookieId, str]:
        return {bookie_id: self.ledgers.racks.get(bookie_id, DEFAULT_RACK) for bookie_id in self.ledgers.bookies}

    def choose_move(
        self, ensemble: tuple[BookieId, ...], *, write_quorum: int, exclude: Mapping[BookieId, str] | None = None
    ) -> tuple[int, BookieId] | None:
        return choose_move(
            self._candidates(),
            ensemble=ensemble,
            write_quorum=write_quorum,
            rng=_ALWAYS_ZERO,
            exclude=exclude,
            absent=self.ledgers.racks,
        )

    async def update_metadata(
        self, ledger_id: LedgerId, transform: Callable[[LedgerMetadata], LedgerMetadata | None]
    ) -> LedgerMetadata:
        await asyncio.sleep(0)
        self.ledgers.raise_fault("metadata")
        ledger = self.ledgers.find(ledger_id)
        changed = transform(ledger.metadata)
        if changed is not None:
            ledger.metadata = changed
            ledger.wake()
        return ledger.metadata

    def _check_registered(self, bookie_id: BookieId) -> None:
        if bookie_id not in self.ledgers.bookies:
            raise BookieUnavailable("bookie is not registered", bookie_id=bookie_id)

    async def close(self) -> None:
        """Abandon every ledger that this client writes, as the end of its process would."""
        for writer in self._writers:
            await writer.abandon()
