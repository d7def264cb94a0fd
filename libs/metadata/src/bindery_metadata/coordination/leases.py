"""Leases: ephemeral nodes that name the owner of a resource while the owner's session exists.

A lease directs clients to its owner; it does not protect data. An owner without a connection may not have noticed that
its lease has expired, so writes under a lease need another protection: fencing, or a compare-and-set.

    acquire --> held --connection lost--> held, not certain --reconnected in time--> held
                 |                             `--session LOST--> lost
                 |--node deleted, or of another session--> lost
                 `--release--> released
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import AlreadyExists, BinderyError, MetadataOutcomeUnknown, NoSuchNode, VersionConflict

from bindery_metadata.stores.ephemerals import delete_own
from bindery_metadata.stores.store import MetadataStore, SessionState

ATTEMPTS_MAX: Final = 5
"""Maximum number of attempts of one acquisition if the owner changes meanwhile."""
RETRY_S: Final = 0.5
"""Delay in seconds before a failed request is repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The owner of a lease at the time of the read."""

    value: bytes
    """Data that the owner passed to `acquire`."""
    session_id: int
    mine: bool
    """Whether the current session of this store owns the lease."""


class Lease:
    """A lease that was acquired. Created by `Leases.acquire`."""

    def __init__(self, store: MetadataStore, path: str, session_id: int) -> None:
        self.path = path
        self.session_id = session_id
        self._store = store
        self._held = True
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_held(self) -> bool:
        """Whether the lease is not known to be lost or released. It remains true while the store is disconnected."""
        return self._held

    @property
    def is_certain(self) -> bool:
        """Whether the lease is held and the store is connected in the session that holds it."""
        return (
            self._held
            and self._store.session_state is SessionState.CONNECTED
            and self._store.session_id == self.session_id
        )

    def on_lost(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` once, in the event loop, when the lease is lost, but not after `release`.

        Return a function that removes the listener.
        """
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    async def verify(self) -> bool:
        """Read whether the node still belongs to the session of the lease. Raises MetadataUnavailable."""
        await self._store.sync(self.path)
        stat = await self._store.exists(self.path)
        if stat is None or stat.ephemeral_owner != self.session_id:
            self._lose()
        return self._held

    async def replace(self, value: bytes) -> None:
        """Replace the data of the node. The lease remains held.

        Raises NoSuchNode or VersionConflict if the node was deleted or changed by others, MetadataUnavailable,
        MetadataOutcomeUnknown.
        """
        stat = await self._store.exists(self.path)
        if stat is None or stat.ephemeral_owner != self.session_id:
            self._lose()
            raise NoSuchNode("the lease was lost", path=self.path)
        await self._store.set(self.path, value, version=stat.version)

    async def release(self) -> None:
        """Give up the lease and delete its node, unless another session has created the node since (see `ephemerals`).

        Errors of the store are ignored.
        """
        self._held = False
        self._listeners.clear()
        await delete_own(self._store, self.path, self.session_id)

    def _lose(self) -> None:
        if not self._held:
            return
        self._held = False
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                listener()
            except Exception:
                _log.exception("lease_listener_failed")


class Leases:
    """Acquires and watches the leases of one process. Owns the watches, not the store."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._leases: dict[str, Lease] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._forget_session = store.on_session_change(self._on_session)

    async def acquire(self, path: str, value: bytes) -> Lease | None:
        """Return the lease, or None if another session holds it (see `owner`). Missing parents are created.

        A lease that this process already holds is returned as it is. Raises MetadataUnavailable, MetadataOutcomeUnknown
        (the node may then exist until the session ends, and acquiring again adopts it).
        """
        held = self._leases.get(path)
        if held and held.is_held:
            return held
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._store.create(path, value, ephemeral=True, make_parents=True)
            except AlreadyExists:
                pass
            except MetadataOutcomeUnknown:
                await self._store.sync(path)
            try:
                node = await self._store.get(path)
            except NoSuchNode:
                continue  # the node of the former owner was deleted after the attempt to create the node
            if node.stat.ephemeral_owner != self._store.session_id:
                return None
            with contextlib.suppress(VersionConflict, NoSuchNode):
                if node.data != value:
                    await self._store.set(path, value, version=node.stat.version)
                lease = Lease(self._store, path, node.stat.ephemeral_owner)
                self._leases[path] = lease
                await self._check_once(lease)
                return lease if lease.is_held else None
        return None

    async def owner(self, path: str, *, on_change: Callable[[], None] | None = None) -> LeaseOwner | None:
        """Return the owner of the lease, or None. `on_change` is called once when the owner may have changed.

        Raises MetadataUnavailable if the owner cannot be read.
        """
        while True:
            try:
                node = await self._store.get(path, watch=on_change)
            except NoSuchNode:
                if on_change is not None and await self._store.exists(path, watch=on_change) is not None:
                    continue  # it was acquired between the two reads
                return None
            owner = node.stat.ephemeral_owner
            return LeaseOwner(node.data, owner, owner != 0 and owner == self._store.session_id)

    async def close(self) -> None:
        """Stop watching. Nodes remain until released, or until the session ends."""
        self._forget_session()
        self._leases.clear()
        checks = list(self._checks)
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            lost, self._leases = self._leases, {}
            for lease in lost.values():
                lease._lose()

    def _check_later(self, lease: Lease) -> None:
        if self._leases.get(lease.path) is not lease:
            return
        if not lease.is_held:
            del self._leases[lease.path]  # the lease was released, and its node has been deleted
        else:
            task = asyncio.create_task(self._check(lease))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, lease: Lease) -> None:
        while lease.is_held:
            try:
                await self._check_once(lease)
                return
            except BinderyError as error:
                _log.warning("lease_not_checked", extra={"path": lease.path, "error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _check_once(self, lease: Lease) -> None:
        """Check that the node still belongs to the session of the lease, and watch the node."""
        stat = await self._store.exists(lease.path, watch=lambda: self._check_later(lease))
        if stat is None or stat.ephemeral_owner != lease.session_id:
            if self._leases.get(lease.path) is lease:
                del self._leases[lease.path]
            lease._lose()
