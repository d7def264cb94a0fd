"""The cursors of one open topic: load, create, reset and delete them.

A cursor is *damaged* if its stored state exists and cannot be read: its cursor ledger is missing, or the last record in
it cannot be decoded. The older state in the znode does not replace it, because acknowledgements and seeks would be
undone without a report. The topic opens without that cursor; the cursor can be reset or deleted. While there is
a damaged cursor nothing may be trimmed, because its position is unknown.

A cursor is *unsettled* if the metadata store did not answer whether it was created. Nothing is trimmed for a while, so
that a repeated call finds the entries that the cursor needs; then the cursor is deleted.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, Conflict, Corrupt, NoSuchSubscription, TopicFenced
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.caching.entry_cache import TopicCache
from bindery_broker.managed_ledger.cursors.cursor import EntrySource, ManagedCursor
from bindery_broker.managed_ledger.cursors.cursor_store import CursorStore
from bindery_broker.managed_ledger.cursors.transient_cursor import TransientCursor
from bindery_broker.managed_ledger.ledger_list import LedgerList
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import OwnedNode, TopicMetadata

CURSORS_LOADED_AT_ONCE: Final = 16
"""Maximum number of cursors that are read in parallel when a topic opens."""
UNSETTLED_S_MAX: Final = 60.0
"""Seconds during which entries are kept for a cursor that may or may not have been created."""

log = structlog.get_logger()


class CursorTable:
    """Invariant: a name is in at most one of `cursors`, `transient`, `damaged` and the unsettled cursors."""

    def __init__(
        self,
        *,
        source: EntrySource,
        ledgers: LedgerList,
        ledgers_lock: asyncio.Lock,
        metadata: TopicMetadata,
        client: LedgerClient,
        settings: ManagedLedgerSettings,
        clock: Callable[[], int],
        cache: TopicCache,
        ownership: OwnershipProof,
        check_open: Callable[[], None],
        on_moved: Callable[[], None],
        on_fenced: Callable[[TopicFenced], None],
    ) -> None:
        """`ledgers_lock` is held while the list of ledgers is stored. `check_open` raises once the topic is closed,
        fenced or deleted."""
        self.cursors: dict[str, ManagedCursor] = {}
        self.trim_lock = asyncio.Lock()
        """Held while entries are trimmed. Also held while a cursor is created or reset, to keep its entries."""
        self.lock = asyncio.Lock()
        """Held while a cursor is created, reset or deleted."""
        self._source = source
        self._ledgers = ledgers
        self._ledgers_lock = ledgers_lock
        self._metadata = metadata
        self._client = client
        self._settings = settings
        self._clock = clock
        self._cache = cache
        self._ownership = ownership
        self._check_open = check_open
        self._on_moved = on_moved
        self._on_fenced = on_fenced
        self._transient: dict[str, TransientCursor] = {}
        self._stores: dict[str, CursorStore] = {}
        """The stores of `cursors` and of the damaged cursors."""
        self._damaged: dict[str, Corrupt] = {}
        self._unsettled: dict[str, OwnedNode] = {}
        """The znodes of unsettled cursors."""
        self._unsettled_at = 0.0
        """Loop time at which the last unsettled cursor was added, in seconds."""

    @property
    def damaged(self) -> Mapping[str, Corrupt]:
        """Why the state of a cursor cannot be read, by subscription name."""
        return self._damaged

    @property
    def transient(self) -> Mapping[str, TransientCursor]:
        """Cursors that are not stored, by name."""
        return self._transient

    @property
    def has_unsettled(self) -> bool:
        """Whether a cursor may or may not have been created."""
        return bool(self._unsettled)

    @property
    def nodes(self) -> list[OwnedNode]:
        """The znodes of all cursors, damaged and unsettled ones included."""
        return [*(store.node for store in self._stores.values()), *self._unsettled.values()]

    def check_undamaged(self, name: str) -> None:
        """Raise Corrupt if the state of the cursor cannot be read."""
        if name in self._damaged:
            error = self._damaged[name]
            raise Corrupt(error.message, **error.facts)

    async def load(self) -> None:
        """Read the cursors of the topic from metadata. Raises TryAgain if one of them cannot be read now."""
        found = await self._metadata.load_cursors()
        turns = asyncio.Semaphore(CURSORS_LOADED_AT_ONCE)

        async def load(name: str, node: OwnedNode, data: bytes) -> None:
            store = self._stores[name] = self._make_store(name, node)
            try:
                async with turns:
                    state = await store.load(data)
            except Corrupt as error:
                damage = Corrupt(
                    "the stored state of the subscription cannot be read; reset or delete the subscription: "
                    + error.message,
                    **{"cursor": name, **error.facts},
                )
                log.error("cursor_damaged", topic=self._metadata.name, error=str(damage))
                self._damaged[name] = damage
                return
            if state is None:
                state = CursorState(mark_delete=self._ledgers.previous(self._ledgers.first_position))
            self.cursors[name] = self._make_cursor(name, store, state)

        results = await asyncio.gather(
            *(load(name, node, data) for name, (node, data) in found.items()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def open(self, name: str, *, start: Position, properties: Mapping[str, str]) -> ManagedCursor:
        """See `ManagedLedger.open_cursor`."""
        async with self.lock, self.trim_lock:
            self._check_open()
            self.check_undamaged(name)
            if name in self._transient:
                raise Conflict("a non-durable subscription has this name; close its readers first", subscription=name)
            cursor = self.cursors.get(name)
            if cursor is None:
                node = self._unsettled.setdefault(name, OwnedNode(self._metadata.cursor_path(name), None))
                store = self._make_store(name, node)
                state = CursorState(mark_delete=self._ledgers.previous(self._ledgers.clamp(start)))
                try:
                    await store.create(state, properties)
                except TopicFenced as error:
                    self._on_fenced(error)
                    raise
                finally:
                    self._unsettled_at = asyncio.get_running_loop().time()
                    if node.is_absent:
                        del self._unsettled[name]
                self._check_open()
                del self._unsettled[name]
                self._stores[name] = store
                cursor = self.cursors[name] = self._make_cursor(name, store, state)
            return cursor

    async def open_transient(self, name: str, *, start: Position) -> TransientCursor:
        """See `ManagedLedger.open_transient_cursor`."""
        async with self.lock:
            self._check_open()
            if name in self.cursors or name in self._damaged or name in self._unsettled:
                raise Conflict("a durable subscription has this name; choose another one", subscription=name)
            cursor = self._transient.get(name)
            if cursor is None:
                cursor = self._transient[name] = TransientCursor(
                    name,
                    source=self._source,
                    ledgers=self._ledgers,
                    ledgers_lock=self._ledgers_lock,
                    tail_reader=self._cache.reader(),
                    start=self._ledgers.clamp(start),
                    on_closed=lambda: self._transient.__delitem__(name),
                )
            return cursor

    def before_trim(self, first: Position) -> None:
        """The entries before `first` are about to be trimmed: move the cursors that do not prevent it."""
        for cursor in self._transient.values():
            cursor.before_trim(first)

    async def reset(self, name: str, *, start: Position) -> ManagedCursor:
        """See `ManagedLedger.reset_cursor`."""
        async with self.lock, self.trim_lock:
            self._check_open()
            if name in self.cursors:
                raise Conflict("the subscription is not damaged; use seek to move it", subscription=name)
            if name not in self._damaged:
                raise NoSuchSubscription("no such subscription", subscription=name)
            store, damage = self._stores[name], self._damaged[name]
            state = CursorState(mark_delete=self._ledgers.previous(self._ledgers.clamp(start)))
            try:
                await store.replace(state)
            except TopicFenced as error:
                self._on_fenced(error)
                raise
            self._check_open()
            log.warning("cursor_reset", topic=self._metadata.name, cursor=name, error=str(damage))
            del self._damaged[name]
            cursor = self.cursors[name] = self._make_cursor(name, store, state)
            return cursor

    async def delete(self, name: str) -> None:
        """Delete a cursor, durably. Raises NoSuchSubscription if there is none."""
        async with self.lock:
            self._check_open()
            try:
                if name in self.cursors:
                    await self.cursors[name].delete()
                    del self.cursors[name], self._stores[name]
                elif name in self._damaged:
                    await self._stores[name].delete()
                    del self._damaged[name], self._stores[name]
                elif name in self._transient:
                    await self._transient[name].close()
                elif name in self._unsettled:
                    async with self.trim_lock:
                        if name in self._unsettled:
                            await self._delete_unsettled(name)
                else:
                    raise NoSuchSubscription("no such subscription", subscription=name)
            except TopicFenced as error:
                self._on_fenced(error)
                raise

    async def positions_for_trimming(self) -> Mapping[str, Position] | None:
        """Return the durable positions of all cursors by name; None: nothing may be trimmed now.

        Call it under `trim_lock`.
        """
        if self._unsettled and asyncio.get_running_loop().time() < self._unsettled_at + UNSETTLED_S_MAX:
            return None
        try:
            for name in list(self._unsettled):
                await self._delete_unsettled(name)
        except TopicFenced as error:
            self._on_fenced(error)
            raise
        return self.known_positions()

    def known_positions(self) -> Mapping[str, Position] | None:
        """Return the durable positions of all cursors by name; None: that of a cursor is unknown."""
        if self._damaged or self._unsettled:
            return None
        return {name: cursor.durable_mark_delete for name, cursor in self.cursors.items()}

    # --- ending

    def end(self, error: BinderyError) -> None:
        """Refuse every later call to a cursor with `error`."""
        for cursor in [*self.cursors.values(), *self._transient.values()]:
            cursor.end(error)

    async def close(self, error: BinderyError) -> None:
        """Store every cursor, then refuse later calls with `error`."""
        async with self.lock:
            cursors = [*self.cursors.values(), *self._transient.values()]
            await asyncio.gather(*(cursor.close(error) for cursor in cursors))

    async def quiesce(self) -> None:
        """Return once no cursor writes a record."""
        for cursor in list(self.cursors.values()):  # one may be deleted meanwhile
            await cursor.quiesce()

    async def release(self) -> None:
        """Abandon the writers of all cursor ledgers."""
        await self.quiesce()
        for store in self._stores.values():
            await store.abandon()

    async def delete_ledgers(self) -> None:
        """Delete all cursor ledgers. The znodes were deleted with the topic."""
        for store in self._stores.values():
            await store.delete_ledger()

    async def _delete_unsettled(self, name: str) -> None:
        await self._metadata.delete_cursor(self._unsettled[name])
        log.info("subscription_undone", topic=self._metadata.name, subscription=name)
        del self._unsettled[name]

    def _make_store(self, name: str, node: OwnedNode) -> CursorStore:
        return CursorStore(
            name,
            node=node,
            metadata=self._metadata,
            client=self._client,
            settings=self._settings,
            clock=self._clock,
            ownership=self._ownership,
        )

    def _make_cursor(self, name: str, store: CursorStore, state: CursorState) -> ManagedCursor:
        return ManagedCursor(
            name,
            source=self._source,
            ledgers=self._ledgers,
            ledgers_lock=self._ledgers_lock,
            stored=state,
            store=store,
            tail_reader=self._cache.reader(),
            on_moved=self._on_moved,
            on_fenced=self._on_fenced,
        )
