"""Interfaces of the ledger client.

`client.LedgerClient` implements them over bookies and ZooKeeper, `memory.MemoryLedgerClient` in memory; both pass the
same contract suite. Payloads are bytes; entry ids are dense from 0.

| call                | errors                                                                             |
|---------------------|------------------------------------------------------------------------------------|
| create              | BadRequest, NotEnoughBookies, MetadataUnavailable, MetadataOutcomeUnknown          |
| open                | NoSuchLedger, Unauthorized, TryAgain (recovery is impossible now)                  |
| force               | BookieUnavailable (a bookie failed; may be repeated), and those of add_many        |
| entries_on          | NoSuchLedger, BookieUnavailable, Corrupt                                           |
| add_many            | LedgerFenced, LedgerClosed (also after `close`), NotEnoughBookies, AddTimeout,     |
|                     | MetadataUnavailable (a failed bookie could not be replaced); all break the handle  |
|                     | BadRequest (no payloads), TooLarge: nothing was added, the handle stays usable     |
| read, read_some     | NoSuchEntry (every bookie denies the entry), DigestMismatch, BookieUnavailable     |
| store_replicas      | BookieUnavailable (some may be stored; may be repeated)                            |
| choose_replacements | NotEnoughBookies, MetadataUnavailable                                              |
| update_metadata     | NoSuchLedger, MetadataUnavailable, MetadataOutcomeUnknown, what `transform` raises |
| close, delete       | MetadataUnavailable, MetadataOutcomeUnknown, LedgerFenced                          |

After an add failed with an error that breaks the handle, its entries may or may not exist until the ledger is closed,
either by `close` of the same handle (entries beyond last_entry_id then do not exist) or by a recovery (which may keep
them).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, Unpack

from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId

from bindery_client.ledger.new_ledger import LedgerOptions
from bindery_client.ledger.replica import ReplicaRead

T = TypeVar("T")


class Entry(NamedTuple):
    """One verified entry."""

    entry_id: EntryId
    payload: bytes
    length: int
    """Payload bytes of the ledger up to and including this entry."""


class ReadHandle(Protocol):
    """Reads one ledger."""

    ledger_id: LedgerId

    @property
    def metadata(self) -> LedgerMetadata: ...

    @property
    def last_add_confirmed(self) -> int:
        """Highest readable entry id known; -1: none. Final once the ledger is closed."""
        ...

    @property
    def is_closed(self) -> bool: ...

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        """Return entries first..last (inclusive). 0 <= first <= last <= last_add_confirmed, else BadRequest."""
        ...

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]:
        """Return the entries `entry_ids`, at least one. They ascend from 0 to last_add_confirmed, else BadRequest.

        Each bookie gets one request for all that are read from it. An error of one of them is that of the call.
        """
        ...

    async def read_last_confirmed(self) -> int:
        """Read the newest last_add_confirmed from the bookies, keep and return it."""
        ...

    async def wait_for_entry(self, entry_id: EntryId, *, timeout_s: float) -> bool:
        """Long poll: True once last_add_confirmed >= entry_id, False at the timeout or if the ledger ends before."""
        ...

    def tail(self, first: EntryId) -> AsyncIterator[list[Entry]]:
        """Yield batches of entries from `first` on as they are written, up to the last entry of the closed ledger."""
        ...

    async def release(self) -> None:
        """Stop watching the ledger, which is not changed."""
        ...


class WriteHandle(Protocol):
    """The single writer of a ledger it created."""

    ledger_id: LedgerId

    @property
    def metadata(self) -> LedgerMetadata: ...

    @property
    def last_add_confirmed(self) -> int: ...

    @property
    def last_add_pushed(self) -> int: ...

    @property
    def length(self) -> int:
        """Payload bytes of all entries pushed."""
        ...

    @property
    def is_closed(self) -> bool: ...

    async def add(self, payload: bytes) -> EntryId: ...

    async def add_many(self, payloads: Sequence[bytes]) -> EntryId:
        """Append all, in order, and return the id of the first once *all* are confirmed: each is on disk on Qa bookies,
        and all earlier entries are confirmed. Calls may overlap: they are pipelined, and complete in the order in which
        they were made.

        Cancelling the caller does not remove the entries. After any error the handle is broken and every later add
        fails with the same error; recovery of the ledger decides which of the entries in flight exist.
        """
        ...

    async def force(self) -> int:
        """Make every bookie of the ensemble force its entries to disk; return the last_add_confirmed after it.

        In a ledger with deferred sync, entries acknowledged before the call are readable and durable from now on.
        """
        ...

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]: ...

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]: ...

    async def close(self) -> LedgerMetadata:
        """Confirm or fail adds in flight, then seal the ledger at last_add_confirmed. Idempotent.

        With deferred sync it forces first; entries that cannot be forced because the handle is broken are lost.
        Raises LedgerClosed if the handle is abandoned meanwhile.
        """
        ...

    async def abandon(self) -> None:
        """Drop the handle without changing the metadata, as a crash would. Adds in flight fail."""
        ...


class LedgerClient(Protocol):
    """Creates, opens and deletes ledgers, and accesses their replicas and metadata."""

    async def create(self, **options: Unpack[LedgerOptions]) -> WriteHandle:
        """Create a ledger; `NewLedger` has the options and their defaults.

        `deferred_sync`: adds are acknowledged once bookies wrote them; only `force` makes them durable and readable.
        The ensemble of such a ledger cannot change: a bookie that fails breaks the handle with BookieUnavailable.
        """
        ...

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> ReadHandle:
        """Open for reading. `recover=True` fences the writer and closes the ledger first; False leaves it as it is."""
        ...

    async def delete(self, ledger_id: LedgerId) -> None:
        """Fence (best effort: a dead bookie must not block it), then remove the metadata, if it exists."""
        ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        """Every ledger id of the cluster, ascending."""
        ...

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        """Registered bookies; True: writable, False: read-only."""
        ...

    async def entries_on(
        self, ledger_id: LedgerId, bookie_id: BookieId, *, durable: bool = False
    ) -> Sequence[tuple[int, int]]:
        """Return runs (first, count) of the entries of a ledger that one bookie reports, ascending.

        The bookie also lists entries that are only in its memory; with `durable`, this returns once they are on disk.
        """
        ...

    # -- replicas, for checks and re-replication ----------------------------------------------------------------------

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]:
        """Read many entries from one bookie and verify each; return the result of `take` for each, in this order.

        `metadata`: of the ledger, for its digest. If the bookie cannot be reached, all its entries have the verdict
        ERROR; nothing is raised.
        """
        ...

    async def store_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        frames: Sequence[bytes],
        *,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Store entry frames at one bookie unchanged, also if no ensemble names the bookie or the ledger is fenced.

        The caller must have verified the frames, which are of different entries. Returns a `Status` for each, in this
        order; OK: the entry is on the bookie's disk. A request to a busy bookie is repeated until `timeout_s` (None:
        the client's `add_quorum_timeout_s`), and then counts as TOO_MANY_REQUESTS.
        """
        ...

    async def choose_replacements(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        *,
        write_quorum: int,
        exclude: Mapping[BookieId, str] | None = None,
    ) -> dict[int, BookieId]:
        """Choose writable bookies for the members `failed`, and return them by ensemble index. There may be fewer than
        failed members.

        Members of `ensemble` and of `exclude` (bookie -> reason, for the error's text) are never chosen.
        """
        ...

    def racks(self) -> Mapping[BookieId, str]:
        """Return the rack of each registered bookie, as last read; DEFAULT_RACK if it is unknown."""
        ...

    def choose_move(
        self, ensemble: tuple[BookieId, ...], *, write_quorum: int, exclude: Mapping[BookieId, str] | None = None
    ) -> tuple[int, BookieId] | None:
        """Choose a member of `ensemble` and a writable bookie of another rack that replaces it, so that write quorums
        are on more racks and none on fewer. Return (ensemble index, new bookie); None: there is no such move.

        Members of `ensemble` and of `exclude` (bookie -> reason) are never chosen.
        """
        ...

    async def update_metadata(
        self, ledger_id: LedgerId, transform: Callable[[LedgerMetadata], LedgerMetadata | None]
    ) -> LedgerMetadata:
        """Read, `transform`, compare-and-set, and repeat this on conflict; return the stored metadata.

        `transform` returns None if nothing needs to change, and may be called many times.
        """
        ...

    async def close(self) -> None: ...
