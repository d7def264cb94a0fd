"""LedgerManager: ledger metadata in the tree, each change a compare-and-set."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from bindery_core.ids import LedgerId
from bindery_core.ledger_metadata import LedgerMetadata

from bindery_metadata.layout import LedgersLayout
from bindery_metadata.store import MetadataStore
from bindery_metadata.versioned import Versioned


class RandomBits(Protocol):
    """`random.SystemRandom()` in processes, `random.Random(seed)` in simulations."""

    def getrandbits(self, k: int, /) -> int: ...


MetadataListener = Callable[[Versioned[LedgerMetadata] | None], None]
"""Gets the newest metadata after a change; None once the ledger was deleted. Called in the loop."""


class LedgerManager:
    def __init__(self, store: MetadataStore, layout: LedgersLayout, *, randomness: RandomBits) -> None: ...

    async def create(self, metadata: LedgerMetadata) -> tuple[LedgerId, Versioned[LedgerMetadata]]:
        """Write `metadata` under a new id. Raises MetadataUnavailable, MetadataOutcomeUnknown."""
        raise NotImplementedError

    async def create_with_id(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> Versioned[LedgerMetadata]:
        """As `create` with an id of the caller's. Raises AlreadyExists when it is taken."""
        raise NotImplementedError

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        """Raises NoSuchLedger, Corrupt (data that is no ledger metadata), MetadataUnavailable."""
        raise NotImplementedError

    async def write(self, ledger_id: LedgerId, metadata: LedgerMetadata, *, version: int) -> Versioned[LedgerMetadata]:
        """Compare-and-set. Raises VersionConflict, NoSuchLedger, MetadataUnavailable, MetadataOutcomeUnknown."""
        raise NotImplementedError

    async def update(
        self,
        ledger_id: LedgerId,
        transform: Callable[[LedgerMetadata], LedgerMetadata | None],
        *,
        known: Versioned[LedgerMetadata] | None = None,
    ) -> Versioned[LedgerMetadata]:
        """The one loop that changes a ledger: read, decide purely, compare-and-set, on conflict start again.

        `transform` gets the current metadata and answers the new one, or None when nothing needs to change; it may raise
        to give up, and may be called many times. `known` saves the first read. Returns what stands at the end.
        """
        raise NotImplementedError

    async def delete(self, ledger_id: LedgerId) -> None:
        """Remove the metadata and parents that became empty. A missing ledger is success."""
        raise NotImplementedError

    def list(self) -> AsyncIterator[LedgerId]:
        """Every ledger id, ascending. An error of the store ends the iteration with that error, never quietly."""
        raise NotImplementedError

    def watch(self, ledger_id: LedgerId, listener: MetadataListener) -> Callable[[], None]:
        """Call `listener` with the present metadata and after each change, until deletion. The result stops it."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all watches. The store stays open."""
        raise NotImplementedError
