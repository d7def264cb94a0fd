"""BookieDirectory: the registered bookies and their addresses, cached and kept up to date.

The cache is read without waiting. Watches on each list and on each bookie's node trigger the next read; changes within
`debounce_s` are read together, so that a restart of a whole cluster costs a few reads. While the store is unavailable,
the last snapshot remains.

A bookie that is not registered has no address and must not be contacted, even if its id looks like one.
Source: BookKeeper's ZKRegistrationClient and DefaultBookieAddressResolver.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from bindery_core.errors import AlreadyExists, BadRequest, BinderyError, Corrupt, NoSuchNode, NotEnoughBookies
from bindery_core.formats import bookie_service_info
from bindery_core.formats.bookie_service_info import BookieServiceInfo
from bindery_core.ids import BookieId, validate_bookie_id

from bindery_metadata.layout.layout import READONLY, LedgersLayout
from bindery_metadata.stores.store import MetadataStore

DEBOUNCE_S: Final = 0.02
"""Time in seconds in which changes are collected before listeners are called."""
RETRY_S: Final = 0.5
"""Delay in seconds before a failed read is repeated."""
READS_IN_FLIGHT_MAX: Final = 64
"""Maximum number of concurrent reads of bookie registrations."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BookieRecord:
    """One registered bookie."""

    bookie_id: BookieId
    host: str
    port: int
    read_only: bool
    info: BookieServiceInfo = field(default_factory=BookieServiceInfo)


Bookies = Mapping[BookieId, BookieRecord]
"""The registered bookies by id."""


class BookieDirectory:
    """The registered bookies. Invariant: `bookies` is the result of one complete read, never changed in place."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout, *, debounce_s: float = DEBOUNCE_S) -> None:
        self._store = store
        self._layout = layout
        self._debounce_s = debounce_s
        self._bookies: Bookies = MappingProxyType({})
        self._infos: dict[str, BookieServiceInfo] = {}
        """Decoded registrations by path. An item is removed when the watch of its node fires."""
        self._listeners: list[Callable[[Bookies], None]] = []
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._reads = asyncio.Semaphore(READS_IN_FLIGHT_MAX)
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read both lists and follow them. Raises NoSuchNode (cluster not initialized), MetadataUnavailable."""
        assert self._follower is None, "start once"
        await self.refresh()
        self._follower = asyncio.create_task(self._follow())

    @property
    def bookies(self) -> Bookies:
        """The newest snapshot. A bookie that is moving between the lists counts as writable."""
        return self._bookies

    def writable(self) -> frozenset[BookieId]:
        """Return the bookies of the snapshot that are not read-only."""
        return frozenset(bookie_id for bookie_id, record in self._bookies.items() if not record.read_only)

    def address(self, bookie_id: BookieId) -> tuple[str, int] | None:
        """Return (host, port) of a registered bookie. None: not registered; the bookie must not be contacted."""
        record = self._bookies.get(bookie_id)
        return (record.host, record.port) if record else None

    def on_change(self, listener: Callable[[Bookies], None]) -> Callable[[], None]:
        """Call `listener(bookies)` in the event loop after each change. Return a function that removes the listener."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    async def refresh(self) -> Bookies:
        """Read both lists now. After an error (NoSuchNode, MetadataUnavailable) the old snapshot remains."""
        async with self._refreshing:
            writable, read_only = await asyncio.gather(
                self._read_list(self._layout.available, read_only=False),
                self._read_list(self._layout.available_readonly, read_only=True),
            )
            bookies = MappingProxyType({**read_only, **writable})
            if bookies != self._bookies:
                self._bookies = bookies
                self._notify()
        return self._bookies

    async def wait_for_writable(self, count: int, *, timeout_s: float) -> None:
        """Wait until `count` bookies are writable. Raises NotEnoughBookies after `timeout_s`."""
        enough = asyncio.Event()

        def look(_: Bookies) -> None:
            if len(self.writable()) >= count:
                enough.set()

        stop = self.on_change(look)
        try:
            look(self._bookies)
            async with asyncio.timeout(timeout_s):
                await enough.wait()
        except TimeoutError:
            raise NotEnoughBookies(
                "too few writable bookies", wanted=count, writable=sorted(self.writable()), waited_s=timeout_s
            ) from None
        finally:
            stop()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        if self._follower:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._debounce_s)
            self._changed.clear()
            try:
                await self.refresh()
            except BinderyError as error:
                _log.warning("bookie_directory_stale", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _read_list(self, path: str, *, read_only: bool) -> dict[BookieId, BookieRecord]:
        names = await self._children(path, may_make=read_only)
        records = await asyncio.gather(
            *(self._read_bookie(path, name, read_only=read_only) for name in names if name != READONLY)
        )
        return {record.bookie_id: record for record in records if record}

    async def _children(self, path: str, *, may_make: bool) -> list[str]:
        try:
            return await self._store.children(path, watch=self._changed.set)
        except NoSuchNode:
            if not may_make:
                raise
        with contextlib.suppress(AlreadyExists):  # as BookKeeper's clients do
            await self._store.create(path)
        return await self._store.children(path, watch=self._changed.set)

    async def _read_bookie(self, parent: str, name: str, *, read_only: bool) -> BookieRecord | None:
        path = f"{parent}/{name}"
        try:
            bookie_id = validate_bookie_id(name)
            info = self._infos.get(path) or await self._read_info(path, bookie_id)
        except NoSuchNode:
            return None  # deleted since the list was read; the list's watch has fired
        except (BadRequest, Corrupt) as error:
            _log.warning("bookie_ignored", extra={"path": path, "error": str(error)})
            return None
        address = info.rpc_address()
        return BookieRecord(bookie_id, *address, read_only, info) if address else None

    async def _read_info(self, path: str, bookie_id: BookieId) -> BookieServiceInfo:
        def stale() -> None:
            self._infos.pop(path, None)
            self._changed.set()

        async with self._reads:
            node = await self._store.get(path, watch=stale)
        info = bookie_service_info.decode(node.data, bookie_id=bookie_id)
        self._infos[path] = info
        return info

    def _notify(self) -> None:
        for listener in list(self._listeners):
            try:
                listener(self._bookies)
            except Exception:
                _log.exception("directory_listener_failed")
