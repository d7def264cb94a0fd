"""Register a bookie in `available` with an ephemeral node, and register it again after session losses.

States of a registration:

    (new) --register--> registered --session LOST--> not registered --new session--> registered

A bookie may accept writes only while it is registered: if its node is missing, the auditor counts it as lost.

The node of a killed process remains until its session times out, so a restarted bookie first waits for that. A move
between writable and read-only creates the new node before it deletes the old one, so that no watcher finds the bookie
in neither list and counts it as lost.
Source: BookKeeper's ZKRegistrationManager.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    MetadataOutcomeUnknown,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.ids import BookieId

from bindery_metadata.bookies.directory import BookieDirectory, BookieRecord
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import SESSION_TIMEOUT_S, MetadataStore, SessionState

__all__ = ["BookieDirectory", "BookieRecord", "BookieRegistration"]

STALE_MARGIN_S: Final = 2.0
"""Time in seconds to wait beyond the session timeout, because servers expire sessions in steps of a tick."""
RETRY_S: Final = 0.5
"""Delay in seconds before a failed registration is repeated."""

_log = logging.getLogger(__name__)


class BookieRegistration:
    """Keeps the registration node of one bookie in place.

    Invariant: `is_registered` is true only while a node of the current session is known to exist.

    `service_info`: encoded BookieServiceInfo (`bindery_core.formats.bookie_service_info.encode`).
    """

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        bookie_id: BookieId,
        service_info: bytes = b"",
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`before` is called before the first registration of each session, and may raise BinderyError. A registration
        in a session that began after the call is removed at once, and `before` is called again."""
        self._before = before
        self._store = store
        self._layout = layout
        self._bookie_id = bookie_id
        self._service_info = service_info
        self._stale_wait_s = session_timeout_s + STALE_MARGIN_S
        self._wanted: bool | None = None
        """True: read-only, False: writable, None: not registered."""
        self._registered_session = 0
        self._closed = False
        self._listeners: list[Callable[[bool], None]] = []
        self._lock = asyncio.Lock()
        self._look_again = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._forget_session: Callable[[], None] | None = None

    async def register(self, *, read_only: bool = False) -> None:
        """Register the bookie, and keep it registered until `close`.

        Waits up to the session timeout plus STALE_MARGIN_S for the end of a former session. Raises AlreadyExists if the
        node of another session then still exists, because another process uses this id. Raises MetadataUnavailable, or
        MetadataOutcomeUnknown if the node is deleted repeatedly.
        """
        assert self._keeper is None, "register once"
        async with self._lock:
            self._wanted = read_only
            await self._put_in_place()
        self._forget_session = self._store.on_session_change(self._on_session)
        self._keeper = asyncio.create_task(self._keep())

    async def set_read_only(self, read_only: bool) -> None:
        """Move the bookie between the lists. After an error, the move is retried as soon as the store is available.

        Has no effect after `close`, which may be called while this call waits.
        """
        assert self._wanted is not None or self._closed, "register first"
        async with self._lock:
            if self._closed or (self._wanted == read_only and self.is_registered):
                return
            self._wanted = read_only
            try:
                await self._put_in_place()
            except BinderyError:
                self._look_again.set()
                raise

    @property
    def is_registered(self) -> bool:
        """False before `register`, from the loss of the session until the node exists again, and after `close`."""
        return self._registered_session != 0 and self._registered_session == self._store.session_id

    @property
    def is_read_only(self) -> bool:
        """Whether the bookie is, or will be, in the read-only list."""
        return self._wanted is True

    def on_change(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener(is_registered)` in the event loop after each change. Return a function that removes it."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    async def close(self) -> None:
        """Delete the node if the store is available, and stop. Idempotent."""
        self._closed = True
        if self._forget_session:
            self._forget_session()
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        async with self._lock:
            was_registered, self._wanted = self.is_registered, None
            self._registered_session = 0
            if was_registered:
                for read_only in (False, True):
                    with contextlib.suppress(BinderyError):
                        await self._remove_own(read_only=read_only)
                self._notify(False)

    # --- keeping the node in place --------------------------------------------------------------------------------

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            if self._registered_session:
                self._registered_session = 0
                self._notify(False)
        elif state is SessionState.CONNECTED:
            self._look_again.set()

    async def _keep(self) -> None:
        """Check that the node exists after each event that may have deleted it."""
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            try:
                async with self._lock:
                    await self._put_in_place()
            except BinderyError as error:
                _log.warning("bookie_registration_failed", extra={"bookie_id": self._bookie_id, "error": str(error)})
                await asyncio.sleep(RETRY_S)
                self._look_again.set()

    async def _put_in_place(self) -> None:
        assert self._wanted is not None
        while True:
            checked_session = await self._checked_session()
            session_id = await self._create_or_adopt(self._layout.bookie(self._bookie_id, read_only=self._wanted))
            if self._before is None or session_id == checked_session:
                break
            await self._remove_own(read_only=self._wanted)
        await self._remove_own(read_only=not self._wanted)
        if session_id != self._registered_session:
            self._registered_session = session_id
            if self.is_registered:
                self._notify(True)

    async def _checked_session(self) -> int:
        """Return the session for which `before` is complete: it is called unless the bookie is registered in it."""
        while True:
            session_id = self._store.session_id
            if self._before is None or self.is_registered:
                return session_id
            await self._before()
            if session_id and session_id == self._store.session_id:
                return session_id

    async def _create_or_adopt(self, path: str) -> int:
        """Make `path` exist with our data under the current session, watched. Return the session."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stale_wait_s
        while True:
            with contextlib.suppress(AlreadyExists, MetadataOutcomeUnknown):
                await self._store.create(path, self._service_info, ephemeral=True)
            changed = asyncio.Event()
            stat = await self._store.exists(path, watch=lambda seen=changed: self._node_changed(seen))  # type: ignore[misc]
            if stat is not None and stat.ephemeral_owner == self._store.session_id:
                await self._correct_data(path)
                return stat.ephemeral_owner
            if stat is None:
                if loop.time() >= deadline:
                    raise MetadataOutcomeUnknown("the registration of the bookie is deleted repeatedly", path=path)
                continue
            _log.info("bookie_waits_for_old_session", extra={"path": path, "owner": f"{stat.ephemeral_owner:#x}"})
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                raise AlreadyExists(
                    "another process is registered under this bookie id",
                    bookie_id=self._bookie_id,
                    owner=f"{stat.ephemeral_owner:#x}",
                    waited_s=self._stale_wait_s,
                ) from None

    async def _correct_data(self, path: str) -> None:
        """Update a node adopted after a lost response, which may have older data."""
        with contextlib.suppress(NoSuchNode, VersionConflict):
            node = await self._store.get(path)
            if node.data != self._service_info:
                await self._store.set(path, self._service_info, version=node.stat.version)

    async def _remove_own(self, *, read_only: bool) -> None:
        """Delete our node from a list, but not a node of another session."""
        path = self._layout.bookie(self._bookie_id, read_only=read_only)
        stat = await self._store.exists(path)
        if stat is not None and stat.ephemeral_owner == self._store.session_id:
            with contextlib.suppress(NoSuchNode, VersionConflict):
                await self._store.delete(path, version=stat.version)

    def _node_changed(self, seen: asyncio.Event) -> None:
        seen.set()
        self._look_again.set()

    def _notify(self, registered: bool) -> None:
        for listener in list(self._listeners):
            try:
                listener(registered)
            except Exception:
                _log.exception("registration_listener_failed")
