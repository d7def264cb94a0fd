"""LedgerClient: ledgers over bookies and the metadata store.

One client serves a whole process: its handles share the connections, the directory of bookies and the budget of bytes.
The store belongs to the caller, and stays open when the client is closed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

from bindery_core.digest import Digester
from bindery_core.errors import (
    BookieUnavailable,
    MetadataUnavailable,
    NoSuchLedger,
    NotEnoughBookies,
    Unauthorized,
    VersionConflict,
)
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_plans import fence_targets
from bindery_core.sources import RandomSource
from bindery_metadata.bookies.racks import RackFollower
from bindery_metadata.bookies.registration import BookieDirectory
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned

from bindery_client.connection.in_flight_budget import InFlightBudget
from bindery_client.connection.pool import BookiePool
from bindery_client.connection.security import NO_SECURITY, ClientSecurity
from bindery_client.ledger.bookie_requests import DiskSpaces, EntryList, ForceAll, FreeSpace
from bindery_client.ledger.new_ledger import LedgerOptions, NewLedger
from bindery_client.ledger.reader import ReadHandle
from bindery_client.ledger.recovery import recover as run_recovery
from bindery_client.ledger.replica import FenceAll, ReplicaBatch, ReplicaRead, ReplicaRequest
from bindery_client.ledger.replica_store import ReplicaStore
from bindery_client.ledger.requests import LedgerRequests, OnDegraded
from bindery_client.ledger.writer import WriteHandle
from bindery_client.settings import ClientSettings

T = TypeVar("T")

DIGEST_TYPE_UNTOLD = DigestType.CRC32
"""Digest type of ledgers whose old metadata names none. Source: the default of BookKeeper's client."""

DELETE_ATTEMPTS_MAX = 10
"""Maximum attempts of a delete if the ledger changes meanwhile. A fenced writer changes nothing more, so one or two
attempts are usual."""


class LedgerClient:
    """`api.LedgerClient` over bookies. Created by `connect`, used from one event loop."""

    def __init__(
        self,
        manager: LedgerManager,
        directory: BookieDirectory,
        closing_records: ClosingRecords,
        *,
        randomness: RandomSource,
        settings: ClientSettings,
        on_degraded: OnDegraded | None = None,
        security: ClientSecurity = NO_SECURITY,
        racks: RackFollower | None = None,
    ) -> None:
        """Called by `connect`; the client owns `manager`, `directory` and `racks`, which are already started."""
        self.settings = settings
        self._manager = manager
        self._closing_records = closing_records
        self._directory = directory
        self._racks = racks
        self._pool = BookiePool(directory, settings=settings, randomness=randomness, security=security, racks=racks)
        self._free_space = FreeSpace(self._pool)
        self._budget = InFlightBudget(settings.client_bytes_max)
        self._on_degraded = on_degraded
        self._writers: WeakSet[WriteHandle] = WeakSet()
        self._readers: WeakSet[ReadHandle] = WeakSet()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        store: MetadataStore,
        *,
        randomness: RandomSource,
        layout: LedgersLayout | None = None,
        settings: ClientSettings | None = None,
        on_degraded: OnDegraded | None = None,
        security: ClientSecurity = NO_SECURITY,
    ) -> Self:
        """Return a client on `store`. `security`: TLS and credentials of its connections to bookies. `on_degraded` is
        called for bookies on which entries are missing and that no spare replaced.

        Raises MetadataUnavailable.
        """
        layout = layout or LedgersLayout()
        directory = BookieDirectory(store, layout)
        await directory.start()
        racks = RackFollower(store)
        await racks.start()
        return cls(
            LedgerManager(store, layout, randomness=randomness),
            directory,
            ClosingRecords(store),
            randomness=randomness,
            settings=settings or ClientSettings(),
            on_degraded=on_degraded,
            security=security,
            racks=racks,
        )

    async def create(self, **options: Unpack[LedgerOptions]) -> WriteHandle:
        """See `api.LedgerClient`. No bookie is contacted.

        Raises BadRequest for impossible quorums, NotEnoughBookies with the facts asked, usable, known and refused.
        """
        self._check_open()
        self._free_space.refresh_if_due()
        new = NewLedger(**options)
        if len(self._directory.writable()) < new.ensemble_size:
            await self._directory.refresh()  # a bookie may have registered just now
        metadata = new.metadata(await self._choose_ensemble(new))
        ledger_id, created = await self._manager.create(metadata)
        handle = WriteHandle(
            created,
            requests=self._requests(ledger_id, metadata),
            manager=self._manager,
            closing_records=self._closing_records,
            budget=self._budget,
            settings=self.settings,
            on_degraded=self._on_degraded,
            deferred_sync=new.deferred_sync,
        )
        self._writers.add(handle)
        return handle

    async def _choose_ensemble(self, new: NewLedger) -> tuple[BookieId, ...]:
        """Choose bookies; if there are too few, check first whether unreachable ones can be reached again."""
        choose = partial(
            self._pool.choose_ensemble,
            ensemble_size=new.ensemble_size,
            write_quorum=new.write_quorum,
            ack_quorum=new.ack_quorum,
        )
        try:
            return choose()
        except NotEnoughBookies:
            if not await self._pool.revisit():
                raise
            return choose()

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> ReadHandle:
        """See `api.LedgerClient`. The digest type is the one in the metadata."""
        self._check_open()
        found = await self._manager.read(ledger_id)
        if found.value.password is not None and found.value.password != password:
            raise Unauthorized("wrong ledger password", ledger_id=ledger_id)
        requests = self._requests(ledger_id, found.value)
        if recover and found.value.state is not LedgerState.CLOSED:
            found = await run_recovery(
                found,
                requests=requests,
                manager=self._manager,
                closing_records=self._closing_records,
                settings=self.settings,
                on_degraded=self._on_degraded,
            )
        reader = ReadHandle(found, requests=requests, manager=self._manager, settings=self.settings)
        self._readers.add(reader)
        try:
            await reader.read_last_confirmed()
        except BaseException:
            await reader.release()
            raise
        return reader

    async def delete(self, ledger_id: LedgerId) -> None:
        """See `api.LedgerClient`. Besides the metadata requests, each attempt takes at most `fence_timeout_s`.

        The compare-and-set deletes the metadata that was read before fencing. Otherwise, if the ensemble had changed
        meanwhile, the writer could continue to confirm entries of a deleted ledger on bookies that were not fenced.
        """
        self._check_open()
        for _ in range(DELETE_ATTEMPTS_MAX):
            try:
                found = await self._manager.read(ledger_id)
            except NoSuchLedger:
                await self._closing_records.forget(ledger_id)  # a process that failed may have left it
                return
            targets = fence_targets(found.value)
            if targets:
                requests = self._requests(ledger_id, found.value)
                await FenceAll(requests, targets).run(timeout_s=self.settings.fence_timeout_s)
            try:
                await self._manager.delete(ledger_id, version=found.version)
            except VersionConflict:
                continue
            return
        raise MetadataUnavailable("the ledger keeps changing while it is deleted", ledger_id=ledger_id)

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        return (await self.metadata_versioned(ledger_id)).value

    async def metadata_versioned(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        """Return the metadata with the znode's version and creation time."""
        self._check_open()
        return await self._manager.read(ledger_id)

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        return self._manager.list()

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        self._check_open()
        return {b: not record.read_only for b, record in (await self._directory.refresh()).items()}

    async def disk_spaces(self) -> Mapping[BookieId, tuple[int, int]]:
        """Return (total, free) bytes of every writable bookie that responds. Raises MetadataUnavailable."""
        self._check_open()
        bookies = [b for b, record in (await self._directory.refresh()).items() if not record.read_only]
        return await DiskSpaces(self._pool).run(bookies, timeout_s=self.settings.read_timeout_s)

    async def read_from_bookie(self, ledger_id: LedgerId, entry_id: EntryId, bookie_id: BookieId) -> ReplicaRead:
        """Read one entry from one bookie, whether or not it should hold it; return the raw response and its verdict.

        Raises NoSuchLedger, BookieUnavailable.
        """
        self._check_open()
        found = await self._manager.read(ledger_id)
        requests = self._requests(ledger_id, found.value)
        return await ReplicaRequest(requests, bookie_id, entry_id).run(timeout_s=self.settings.read_timeout_s)

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]:
        """See `api.LedgerClient`. Like `read_from_bookie` for many entries, in one request."""
        self._check_open()
        batch = ReplicaBatch(self._requests(ledger_id, metadata), bookie_id, entry_ids, take)
        return await batch.run(timeout_s=self.settings.read_timeout_s)

    async def store_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        frames: Sequence[bytes],
        *,
        timeout_s: float | None = None,
    ) -> list[int]:
        """See `api.LedgerClient`. Sends recovery adds with the ledger's own master key."""
        self._check_open()
        store = ReplicaStore(self._requests(ledger_id, metadata), bookie_id, frames)
        settings = self.settings
        return await store.run(
            attempt_timeout_s=settings.add_timeout_s,
            timeout_s=settings.add_quorum_timeout_s if timeout_s is None else timeout_s,
        )

    async def choose_replacements(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        *,
        write_quorum: int,
        exclude: Mapping[BookieId, str] | None = None,
    ) -> dict[int, BookieId]:
        """See `api.LedgerClient`. Bookies that failed recently are chosen if there are no others."""
        self._check_open()
        self._free_space.refresh_if_due()
        try:
            return self._pool.choose_replacements(ensemble, failed, write_quorum=write_quorum, exclude=exclude)
        except NotEnoughBookies:
            await self._directory.refresh()  # a bookie may have registered just now
            await self._pool.revisit()
            return self._pool.choose_replacements(ensemble, failed, write_quorum=write_quorum, exclude=exclude)

    def racks(self) -> Mapping[BookieId, str]:
        """See `api.LedgerClient`."""
        return self._pool.racks()

    def choose_move(
        self, ensemble: tuple[BookieId, ...], *, write_quorum: int, exclude: Mapping[BookieId, str] | None = None
    ) -> tuple[int, BookieId] | None:
        """See `api.LedgerClient`. Bookies that failed recently are not chosen."""
        self._check_open()
        self._free_space.refresh_if_due()
        return self._pool.choose_move(ensemble, write_quorum=write_quorum, exclude=exclude)

    async def update_metadata(
        self, ledger_id: LedgerId, transform: Callable[[LedgerMetadata], LedgerMetadata | None]
    ) -> LedgerMetadata:
        """See `api.LedgerClient`."""
        self._check_open()
        return (await self._manager.update(ledger_id, transform)).value

    async def entries_on(
        self, ledger_id: LedgerId, bookie_id: BookieId, *, durable: bool = False
    ) -> Sequence[tuple[int, int]]:
        """See `api.LedgerClient`. The bookie need not be in an ensemble of the ledger."""
        self._check_open()
        found = await self._manager.read(ledger_id)
        requests = self._requests(ledger_id, found.value)
        runs = await EntryList(requests, bookie_id).run(timeout_s=self.settings.read_timeout_s)
        if durable:  # after the list: entries that arrived since are forced too, but not listed
            await ForceAll(requests, (bookie_id,)).run(timeout_s=self.settings.add_timeout_s)
        return runs

    async def close(self) -> None:
        """Abandon ledgers being written, release readers, close all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(writer.abandon() for writer in list(self._writers)))
        await asyncio.gather(*(reader.release() for reader in list(self._readers)))
        await self._pool.close()
        with contextlib.suppress(Exception):  # closing must not fail: the session may have ended already
            await self._directory.close()
        if self._racks is not None:
            await self._racks.close()
        await self._manager.close()

    def _requests(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> LedgerRequests:
        digester = Digester(metadata.digest_type or DIGEST_TYPE_UNTOLD, metadata.password or b"")
        return LedgerRequests(ledger_id, digester, self._pool)

    def _check_open(self) -> None:
        if self._closed:
            raise BookieUnavailable("ledger client was closed")
