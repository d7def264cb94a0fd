"""Keep the permissions of the tenants and namespaces in use in memory, and follow their changes.

Each record is read once, and again when the watch of its znode fires. At most RECORDS_MAX records are followed; the
least recently used one is forgotten first, unless a waiting call uses it. A change through this process is in force at
once (`stored`), a change by another process when the watch has fired.

Without a connection to ZooKeeper the records that were read last are used for KNOWN_S_MAX seconds. After that, and for
records that were never read, MetadataUnavailable is raised: a permission may have been revoked meanwhile. A record that
cannot be decoded does not replace the one that was read before; if there is none, it grants nothing.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import Corrupt, MetadataUnavailable, NoSuchNode
from bindery_core.sources import MonotonicClock
from bindery_metadata.stores.followers import Followers
from bindery_metadata.stores.store import MetadataStore, Node, SessionState, Watch
from bindery_pulsar import znode_layout

from bindery_broker.namespaces import records
from bindery_broker.namespaces.permissions import NONE, Permissions, admins_of, permissions_of
from bindery_broker.namespaces.records import Json

RECORDS_MAX: Final = 2_000
"""Maximum number of followed records of tenants and namespaces, each with a watch in ZooKeeper."""
KNOWN_S_MAX: Final = 300.0
"""Seconds without a connection to ZooKeeper for which the records that were read last are used."""
READ_WAIT_S: Final = 10.0
"""Maximum seconds to wait for the first read of a record."""


@dataclass(slots=True)
class _Record:
    path: str
    tenant: str
    is_tenant: bool
    admins: frozenset[str] = frozenset()
    permissions: Permissions = NONE
    exists: bool = False
    is_readable: bool = True
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Callable[[], None] = lambda: None
    users: int = 0
    """Number of calls that use the record at present."""


class AccessRecords:
    """It belongs to one event loop."""

    def __init__(self, store: MetadataStore, *, now: MonotonicClock) -> None:
        self.on_change: Callable[[str], None] = lambda _tenant: None
        """Called with a tenant after its record or that of one of its namespaces has changed."""
        self._store = store
        self._now = now
        self._followers = Followers()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._lost_at: float | None = None
        if store.session_state is not SessionState.CONNECTED:
            self._lost_at = now()
        self._forget_listener = store.on_session_change(self._session_changed)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def silent_s(self) -> float:
        """Seconds for which there has been no connection to ZooKeeper; 0 with a connection."""
        return 0.0 if self._lost_at is None else self._now() - self._lost_at

    async def admins(self, tenant: str, *, follow: bool = True) -> frozenset[str]:
        """Return the roles of the tenant's administrators; none if it does not exist.

        `follow`: keep the record in memory. Lists, which need very many records once, do not. Raises
        MetadataUnavailable, BadRequest for a name that no tenant can have.
        """
        path = znode_layout.tenant_policies(tenant)
        return (await self._read(path, tenant, is_tenant=True, follow=follow)).admins

    async def permissions(self, tenant: str, namespace: str, *, follow: bool = True) -> Permissions:
        """Return the permissions of a namespace; none if it does not exist. Otherwise as `admins`."""
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        return (await self._read(path, tenant, is_tenant=False, follow=follow)).permissions

    def hold(self, tenant: str, namespace: str | None) -> Callable[[], None]:
        """Keep the records of a tenant and a namespace, if they are followed. Return a function that ends this."""
        paths = [znode_layout.tenant_policies(tenant)]
        if namespace is not None:
            paths.append(znode_layout.namespace_policies(tenant=tenant, namespace=namespace))
        held = [self._records[path] for path in paths if path in self._records]
        for record in held:
            record.users += 1

        def release() -> None:
            for record in held:
                record.users -= 1

        return release

    def is_readable(self, path: str) -> bool:
        """Return whether the record in a znode could be decoded when it was read last; also true if it never was."""
        record = self._records.get(path)
        return record is None or record.is_readable

    def stored(self, path: str, value: Json | None) -> None:
        """Take over what this process has stored in a followed znode; None: it was deleted."""
        record = self._records.get(path)
        if record is not None and record.was_read.is_set():
            self._apply(record, value)

    async def close(self) -> None:
        """End all watching."""
        self._forget_listener()
        await self._followers.close()

    async def _read(self, path: str, tenant: str, *, is_tenant: bool, follow: bool) -> _Record:
        record = self._records.get(path)
        if record is None and not follow:
            return await self._read_once(_Record(path, tenant, is_tenant))
        if record is None:
            record = self._follow(path, tenant, is_tenant=is_tenant)
        else:
            self._records.move_to_end(path)
        if not record.was_read.is_set():
            await self._first_read(record)
        elif self._lost_at is not None and self.silent_s > KNOWN_S_MAX:
            raise MetadataUnavailable(
                "permissions cannot be checked: there has been no connection to ZooKeeper for too long; retry",
                seconds=round(self.silent_s),
                seconds_max=round(KNOWN_S_MAX),
            )
        return record

    async def _read_once(self, record: _Record) -> _Record:
        try:
            node = await self._store.get(record.path)
            self._apply(record, records.decode(node.data, path=record.path))
        except (NoSuchNode, Corrupt):
            pass  # it grants nothing
        return record

    async def _first_read(self, record: _Record) -> None:
        record.users += 1
        try:
            async with asyncio.timeout(READ_WAIT_S):
                await record.was_read.wait()
        except TimeoutError:
            raise MetadataUnavailable(
                "permissions cannot be checked: ZooKeeper does not answer; retry", path=record.path
            ) from None
        finally:
            record.users -= 1

    def _follow(self, path: str, tenant: str, *, is_tenant: bool) -> _Record:
        record = self._records[path] = _Record(path, tenant, is_tenant)

        async def look(changed: Watch) -> None:
            node = await self._get(path, changed)
            try:
                self._apply(record, None if node is None else records.decode(node.data, path=path))
            except Corrupt:
                record.is_readable = False
                record.was_read.set()
                raise

        record.stop = self._followers.follow("permissions", look, path=path)
        self._drop()
        return record

    async def _get(self, path: str, watch: Watch) -> Node | None:
        while True:
            try:
                return await self._store.get(path, watch=watch)
            except NoSuchNode:
                if await self._store.exists(path, watch=watch) is None:
                    return None

    def _apply(self, record: _Record, value: Json | None) -> None:
        """Raises Corrupt, with nothing changed."""
        before = (record.admins, record.permissions)
        if record.is_tenant:
            record.admins = admins_of(value, path=record.path)
        else:
            record.permissions = permissions_of(value, path=record.path)
        record.exists, record.is_readable = value is not None, True
        record.was_read.set()
        if before != (record.admins, record.permissions) and self._records.get(record.path) is record:
            self.on_change(record.tenant)

    def _drop(self) -> None:
        """Forget the least recently used records above the maximum."""
        for path, record in list(self._records.items()):
            if len(self._records) <= RECORDS_MAX:
                return
            if not record.users:
                record.stop()
                del self._records[path]

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = self._now()
