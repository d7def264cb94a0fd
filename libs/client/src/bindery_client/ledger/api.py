"""What a ledger client offers, as interfaces.

`client.LedgerClient` implements them over bookies and ZooKeeper; `memory.MemoryLedgerClient` is the in-memory form,
under the same contract suite. Payloads are bytes; entry ids are dense from 0.

| call                    | errors                                                                            |
|-------------------------|-----------------------------------------------------------------------------------|
| create                  | BadRequest, NotEnoughBookies, MetadataUnavailable, MetadataOutcomeUnknown          |
| open                    | NoSuchLedger, Unauthorized, TryAgain (recovery impossible now; nothing changed)    |
| force                   | BookieUnavailable (a bookie did not; may be called again), as add_many             |
| entries_on              | NoSuchLedger, BookieUnavailable, Corrupt                                           |
| add_many                | LedgerFenced, LedgerClosed (a later add too), NotEnoughBookies, AddTimeout,        |
|                         | MetadataUnavailable (a failed bookie could not be replaced); all break the handle  |
|                         | BadRequest (no payloads), TooLarge: nothing happened, the handle lives on          |
| read                    | NoSuchEntry (only when every replica denies it), DigestMismatch, BookieUnavailable |
| store_replicas          | BookieUnavailable (some may be stored; may be repeated)                            |
| choose_replacements     | NotEnoughBookies, MetadataUnavailable                                              |
| update_metadata         | NoSuchLedger, MetadataUnavailable, MetadataOutcomeUnknown, what `transform` raises |
| close, delete           | MetadataUnavailable, MetadataOutcomeUnknown, LedgerFenced                          |

After an add failed, whatever the error says of itself, its entries may or may not exist until the ledger is closed: by
`close` of the same handle (then they do not, beyond last_entry_id) or by a recovery (which may keep them).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId

from bindery_client.ledger.replica import ReplicaRead

T = TypeVar("T")


class Entry(NamedTuple):
    """One entry as read and verified."""

    entry_id: EntryId
    payload: bytes
    length: int
    """Payload bytes of the ledger up to and including this entry."""


class ReadHandle(Protocol):
    ledger_id: LedgerId

    @property
    def metadata(self) -> LedgerMetadata: ...

    @property
    def last_add_confirmed(self) -> int:
        """Highest entry id known to be readable; -1: none. Final once the ledger is closed."""
        ...

    @property
    def is_closed(self) -> bool: ...

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        """Entries first..last (inclusive), in order, 0 <= first <= last <= last_add_confirmed, else BadRequest."""
        ...

    async def read_last_confirmed(self) -> int:
        """Ask the bookies for the newest last_add_confirmed, remember and return it."""
        ...

    async def wait_for_entry(self, entry_id: EntryId, *, timeout_s: float) -> bool:
        """Long poll: True once last_add_confirmed >= entry_id, False at the timeout or when the ledger ended before."""
        ...

    def tail(self, first: EntryId) -> AsyncIterator[list[Entry]]:
        """Batches of entries from `first` on, following the writer; ends when the ledger is closed and all given."""
        ...

    async def release(self) -> None:
        """Stop watching. The ledger is not touched."""
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
        """Append all, in order, and return the first one's id once *all* are confirmed (Qa fsyncs each, and everything
        before them confirmed). Calls may overlap: they are pipelined, and complete in the order they were made.

        Cancelling the caller does not take the entries back. After any error the handle is broken: every later add
        fails with the same error; which of the entries in flight exist is decided when the ledger is recovered.
        """
        ...

    async def force(self) -> int:
        """Have every bookie of the ensemble force what it took to disk; return the last_add_confirmed after it.

        Of a ledger with deferred sync, entries acknowledged before the call are readable and durable from here on.
        """
        ...

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]: ...

    async def close(self) -> LedgerMetadata:
        """Confirm or fail what is in flight, then seal the ledger at last_add_confirmed. Idempotent.

        With deferred sync it forces first; what cannot be forced because the handle broke is lost.
        Raises LedgerClosed when the handle is abandoned meanwhile.
        """
        ...

    async def abandon(self) -> None:
        """Drop the handle without touching metadata, as a crash would. Adds in flight fail."""
        ...


class LedgerClient(Protocol):
    async def create(
        self,
        *,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest_type: DigestType = DigestType.CRC32C,
        password: bytes = b"",
        custom: Mapping[str, bytes] | None = None,
        deferred_sync: bool = False,
    ) -> WriteHandle:
        """`deferred_sync`: adds are acknowledged once bookies wrote them, and confirmed, durable, by `force` only.

        Such a ledger keeps its ensemble: a bookie that fails breaks the handle with BookieUnavailable.
        """
        ...

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> ReadHandle:
        """Open for reading. `recover=True` fences the writer and closes the ledger first; False only looks on."""
        ...

    async def delete(self, ledger_id: LedgerId) -> None:
        """Fence (best effort: a dead bookie must not block it), then remove the metadata. Missing ledger: success."""
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
        """Runs (first, count) of the entries of a ledger that one bookie says it holds, ascending.

        It lists what it has in memory alone, too; with `durable` this returns once all of that is on its disk.
        """
        ...

    # -- replicas, for whoever looks after them -----------------------------------------------------------------------

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]:
        """What one bookie answers for many entries, each once and judged; what `take` makes of each, in their order.

        `metadata`: the ledger's, for its digest. A bookie that cannot be asked is the verdict ERROR of all its entries;
        nothing is raised for it.
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
        """Store entry frames at one bookie as they are, whether or not it is one of the ledger's; fenced or not.

        The caller has verified them, and they are of different entries. Returns a `Status` for each, in their order;
        OK: it is on that bookie's disk. A bookie that is busy is asked again until `timeout_s` (None: the client's
        `add_quorum_timeout_s`), and then counts as TOO_MANY_REQUESTS.
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
        """Writable bookies by ensemble index for the members `failed`, by the placement policy; perhaps fewer.

        Members of `ensemble` are never chosen, nor those in `exclude` (bookie -> why not, for the error's text).
        """
        ...

    async def update_metadata(
        self, ledger_id: LedgerId, transform: Callable[[LedgerMetadata], LedgerMetadata | None]
    ) -> LedgerMetadata:
        """Read, `transform`, compare-and-set, from the start on conflict; returns what stands at the end.

        `transform` answers None when nothing needs to change, and may be called many times.
        """
        ...

    async def close(self) -> None: ...
