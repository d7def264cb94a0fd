"""LedgerManager: read, change and watch ledger metadata in the store. Each change is a compare-and-set.

A lost response (MetadataOutcomeUnknown) is resolved here: sync, read again, compare. Callers see the error only if this
fails too. A creation recognizes its own node by the random token in it (`c_token`). Every later write drops the token,
as in BookKeeper.

Source: BookKeeper's AbstractZkLedgerManager, HierarchicalLedgerManager and MetadataUpdateLoop.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.formats import ledger_metadata_codec as codec
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import LedgerId
from bindery_core.sources import RandomBits

from bindery_metadata.layout.layout import LONG_DEPTH, SHORT_DEPTH, LedgersLayout, is_long_top, is_short_top
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.ledgers.id_generator import LedgerIdGenerator
from bindery_metadata.stores.followers import End, Followers
from bindery_metadata.stores.parents import prune_empty_parents
from bindery_metadata.stores.store import MetadataStore, Node, Watch
from bindery_metadata.stores.versioned import Versioned

ID_ATTEMPTS_MAX: Final = 1_000
"""Maximum number of ids that one creation tries. Ids may already be in use after a reset of the counter."""
CONFLICTS_MAX: Final = 100
"""Maximum number of compare-and-set attempts of one update."""
UNKNOWN_MAX: Final = 5
"""Maximum consecutive lost responses that one call resolves itself."""
C_TOKEN_BITS: Final = 63
"""Size of a creation token in bits."""
NO_TOKEN: Final = 0
"""Value of `c_token` in metadata without a creation token."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _DidNotArrive(MetadataUnavailable):
    """A write whose response was lost, and that is known not to have been applied."""


MetadataListener = Callable[[Versioned[LedgerMetadata] | None], None]
"""Called in the event loop with the newest metadata after a change; None once the ledger was deleted."""


class LedgerManager:
    """Reads and changes ledger metadata. Owns its watches and its id generator, not the store."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout, *, randomness: RandomBits) -> None:
        self._store = store
        self._layout = layout
        self._randomness = randomness
        self._ids = LedgerIdGenerator(store, layout)
        self._notes = ClosingRecords(store)
        self._followers = Followers()

    # --- one ledger -----------------------------------------------------------------------------------------------

    async def create(self, metadata: LedgerMetadata) -> tuple[LedgerId, Versioned[LedgerMetadata]]:
        """Write `metadata` under a new id.

        Raises MetadataUnavailable, MetadataOutcomeUnknown (a ledger without entries may then remain, whose id no client
        uses), Conflict if ID_ATTEMPTS_MAX new ids are in use.
        """
        for _ in range(ID_ATTEMPTS_MAX):
            ledger_id = await self._ids.next_id()
            try:
                return ledger_id, await self.create_with_id(ledger_id, metadata)
            except AlreadyExists:
                continue
        raise Conflict("every new ledger id is taken", last_id=ledger_id, attempts=ID_ATTEMPTS_MAX)

    async def create_with_id(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> Versioned[LedgerMetadata]:
        """Like `create`, with an id that the caller chooses. Raises AlreadyExists if another ledger has this id."""
        path = self._layout.ledger(ledger_id)
        metadata = metadata.with_changes(c_token=self._randomness.getrandbits(C_TOKEN_BITS))
        data = codec.encode(metadata)
        for attempt in range(UNKNOWN_MAX):
            try:
                await self._store.create(path, data, make_parents=True)
                return Versioned(metadata, 0)
            except AlreadyExists:
                created = await self._created_by_us(ledger_id, data) if attempt else None
                if created is None:
                    raise AlreadyExists("the ledger id is taken", ledger_id=ledger_id) from None
                return created
            except MetadataOutcomeUnknown as lost:
                created = await self._settled(self._created_by_us(ledger_id, data), lost)
                if created is not None:
                    return created
        raise MetadataOutcomeUnknown("the responses to a creation were lost", ledger_id=ledger_id, attempts=UNKNOWN_MAX)

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        """Return the metadata. Raises NoSuchLedger, Corrupt, BadVersion (unsupported format), MetadataUnavailable."""
        return self._decode(ledger_id, await self._node(ledger_id))

    async def read_newest(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        """Like `read`, but after a sync, so that all writes that completed before this call are visible."""
        await self._store.sync(self._layout.ledger(ledger_id))
        return await self.read(ledger_id)

    async def write(self, ledger_id: LedgerId, metadata: LedgerMetadata, *, version: int) -> Versioned[LedgerMetadata]:
        """Replace the metadata if it has this `version`. Return the stored metadata with its new version.

        Raises VersionConflict, NoSuchLedger, MetadataUnavailable (nothing was written), MetadataOutcomeUnknown (the
        outcome could not be determined).
        """
        metadata = metadata.with_changes(c_token=NO_TOKEN)
        data = codec.encode(metadata)
        try:
            stat = await self._store.set(self._layout.ledger(ledger_id), data, version=version)
            return Versioned(metadata, stat.version, stat.ctime_ms)
        except NoSuchNode:
            raise NoSuchLedger(ledger_id=ledger_id) from None
        except VersionConflict as conflict:
            raise VersionConflict(
                "the ledger's metadata has changed", ledger_id=ledger_id, expected=version
            ) from conflict
        except MetadataOutcomeUnknown as lost:
            await self._settled(self._store.sync(self._layout.ledger(ledger_id)), lost)
            node = await self._settled(self._node(ledger_id), lost)
            if node.stat.version == version + 1 and node.data == data:
                return Versioned(metadata, node.stat.version, node.stat.ctime_ms)
            if node.stat.version == version:
                raise _DidNotArrive("the write did not arrive", ledger_id=ledger_id) from lost
            raise VersionConflict(
                "the ledger's metadata has changed", ledger_id=ledger_id, expected=version, found=node.stat.version
            ) from lost

    async def update(
        self,
        ledger_id: LedgerId,
        transform: Callable[[LedgerMetadata], LedgerMetadata | None],
        *,
        known: Versioned[LedgerMetadata] | None = None,
    ) -> Versioned[LedgerMetadata]:
        """Change a ledger in a loop: read, decide, compare-and-set, start again on conflict.

        `transform` takes the current metadata and returns the new metadata, or None if nothing needs to change. It may
        raise an error to end the update. It may be called many times, even after its own change was stored, if the
        response was lost and another client has changed the metadata since. `known` saves the first read. Returns the
        stored metadata.
        Raises NoSuchLedger, VersionConflict after CONFLICTS_MAX attempts, MetadataUnavailable, MetadataOutcomeUnknown,
        and the errors of `transform`.
        """
        current = known or await self.read(ledger_id)
        lost_count = 0
        for _ in range(CONFLICTS_MAX):
            changed = transform(current.value)
            if changed is None:
                return current
            try:
                return await self.write(ledger_id, changed, version=current.version)
            except VersionConflict:
                current = await self.read(ledger_id)
            except _DidNotArrive:
                lost_count += 1
                if lost_count == UNKNOWN_MAX:
                    raise
        raise VersionConflict("the ledger's metadata keeps changing", ledger_id=ledger_id, attempts=CONFLICTS_MAX)

    async def delete(self, ledger_id: LedgerId, *, version: int | None = None) -> None:
        """Delete the metadata, empty parents, and the closing record. Succeeds if the ledger does not exist.

        Raises VersionConflict if the metadata does not have the given `version`; None: any version.
        """
        path = self._layout.ledger(ledger_id)
        for attempt in range(UNKNOWN_MAX):
            try:
                await self._store.delete(path, version=version)
            except NoSuchNode:
                pass
            except MetadataOutcomeUnknown:
                if attempt == UNKNOWN_MAX - 1:
                    raise
                continue  # deleting again is harmless: ids are never reused
            break
        try:
            await prune_empty_parents(self._store, path, up_to=self._layout.root)
        except BinderyError as error:  # the ledger is deleted; an empty directory is harmless
            _log.info("parents_left", extra={"ledger_id": ledger_id, "error": str(error)})
        await self._notes.forget(ledger_id)

    # --- all ledgers ----------------------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[LedgerId]:
        """Yield every ledger id, ascending.

        An error of the store is raised and never ends the iteration silently, because garbage collection uses this list
        and must not mistake an outage for an empty list. Ledgers created or deleted meanwhile may or may not be
        included.
        """
        tops = await self._store.children(self._layout.root)
        for is_top, depth in ((is_short_top, SHORT_DEPTH), (is_long_top, LONG_DEPTH)):
            for top in sorted(filter(is_top, tops)):
                async for ledger_id in self._below(f"{self._layout.root}/{top}", directories=depth - 1):
                    yield ledger_id

    async def _below(self, path: str, *, directories: int) -> AsyncIterator[LedgerId]:
        try:
            names = await self._store.children(path)
        except NoSuchNode:
            return  # deleted since its parent was listed, because its last ledger was deleted
        for name in names:
            if directories:
                async for ledger_id in self._below(f"{path}/{name}", directories=directories - 1):
                    yield ledger_id
            else:
                found = self._layout.ledger_id(f"{path}/{name}")
                if found is not None:
                    yield found

    # --- watches --------------------------------------------------------------------------------------------------

    def watch(self, ledger_id: LedgerId, listener: MetadataListener) -> Callable[[], None]:
        """Call `listener` with the current metadata and after each change, until the ledger is deleted.

        Return a function that ends the watch. Changes in quick succession may be reported as one. The watch continues
        after outages and session losses.
        """
        seen: int | None = None

        async def look(watch: Watch) -> None:
            nonlocal seen
            try:
                current = self._decode(ledger_id, await self._node(ledger_id, watch=watch))
            except NoSuchLedger:
                _tell(listener, None)
                raise End from None
            if current.version != seen:
                seen = current.version
                _tell(listener, current)

        return self._followers.follow("ledger_metadata", look, ledger_id=ledger_id)

    async def close(self) -> None:
        """End all watches. The store stays open."""
        await self._followers.close()
        await self._ids.close()

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _node(self, ledger_id: LedgerId, *, watch: Watch | None = None) -> Node:
        try:
            return await self._store.get(self._layout.ledger(ledger_id), watch=watch)
        except NoSuchNode:
            raise NoSuchLedger(ledger_id=ledger_id) from None

    def _decode(self, ledger_id: LedgerId, node: Node) -> Versioned[LedgerMetadata]:
        try:
            return Versioned(codec.decode(node.data), node.stat.version, node.stat.ctime_ms)
        except Corrupt as error:
            raise Corrupt("ledger metadata cannot be read", ledger_id=ledger_id, cause=str(error)) from error

    async def _created_by_us(self, ledger_id: LedgerId, data: bytes) -> Versioned[LedgerMetadata] | None:
        """Return what a creation with a lost response created; None: there is no node.

        Raises AlreadyExists if another client created the node.
        """
        await self._store.sync(self._layout.ledger(ledger_id))
        try:
            node = await self._node(ledger_id)
        except NoSuchLedger:
            return None
        if node.data != data:  # the token distinguishes it from any other creation
            raise AlreadyExists("the ledger id is taken", ledger_id=ledger_id)
        return self._decode(ledger_id, node)

    async def _settled(self, question: Awaitable[T], lost: MetadataOutcomeUnknown) -> T:
        """Determine the outcome of a write by `question`. Raise `lost` if the outcome cannot be determined."""
        try:
            return await question
        except MetadataUnavailable as error:
            raise lost from error


def _tell(listener: MetadataListener, metadata: Versioned[LedgerMetadata] | None) -> None:
    try:
        listener(metadata)
    except Exception:
        _log.exception("ledger_listener_failed")
