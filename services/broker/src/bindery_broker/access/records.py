"""Keep the permissions of the tenants and namespaces in use in memory, and follow their changes.

Each record is read once, and again when the watch of its znode fires. At most RECORDS_MAX records are followed; the
least recently used one is forgotten first, unless a waiting call uses it: those in use are kept beyond the maximum, and
there are at most two for each waiting call. A change through this process is in force at once (`stored`), a change by
another process when the watch has fired.

A missing record grants nothing. It has no watch, because clients can ask for any number of names: that it is missing
is remembered for ABSENT_S seconds, and then read again. Watches cannot be removed from ZooKeeper, but a record has the
same one whenever it is followed again. So there is at most one watch for each tenant and namespace that exists.

A record is confirmed while its watch is set and ZooKeeper is connected. A record that is not confirmed, because the
connection was lost, or because it has changed and cannot be read or decoded, is used for KNOWN_S_MAX seconds. After
that, and for records that were never read, MetadataUnavailable is raised: a permission may have been revoked meanwhile.
That ZooKeeper is connected again confirms nothing: each record is used again when it was read. A record that could
never be decoded grants nothing.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import Corrupt, MetadataUnavailable, NoSuchNode
from bindery_core.sources import MonotonicClock
from bindery_metadata.stores.followers import End, Followers
from bindery_metadata.stores.store import MetadataStore, SessionState, Watch
from bindery_pulsar import znode_layout

from bindery_broker.namespaces import records
from bindery_broker.namespaces.permissions import NONE, Permissions, admins_of, permissions_of
from bindery_broker.namespaces.records import Json

RECORDS_MAX: Final = 2_000
"""Maximum number of followed records of tenants and namespaces that no waiting call uses."""
KNOWN_S_MAX: Final = 300.0
"""Seconds for which a record is used that ZooKeeper does not confirm."""
READ_WAIT_S: Final = 10.0
"""Maximum seconds to wait for the first read of a record."""
ABSENT_S: Final = 1.0
"""Seconds for which it is remembered that there is no record."""
ABSENT_MAX: Final = 2_000
"""Maximum number of missing records that are remembered."""
PATHS_CACHED_MAX: Final = 4_096
"""Maximum number of paths of records that are kept, because each request needs two."""
LIST_RECORDS_MAX: Final = 64
"""Maximum number of records that one list keeps. Names are sorted, so few are in use at a time."""


@functools.lru_cache(PATHS_CACHED_MAX)
def _tenant_path(tenant: str) -> str:
    return znode_layout.tenant_policies(tenant)


@functools.lru_cache(PATHS_CACHED_MAX)
def _namespace_path(tenant: str, namespace: str) -> str:
    return znode_layout.namespace_policies(tenant=tenant, namespace=namespace)


@dataclass(slots=True)
class _Record:
    path: str
    tenant: str
    is_tenant: bool
    admins: frozenset[str] = frozenset()
    permissions: Permissions = NONE
    is_readable: bool = True
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Callable[[], None] = lambda: None
    changed: Callable[[], None] = lambda: None
    """Causes a read, as the watch does."""
    users: int = 0
    """Number of calls that use the record, or wait for its first read, at present."""
    stale_since: float | None = None
    """When the record was last confirmed, in monotonic seconds; None: it is."""


@dataclass(slots=True, frozen=True)
class _Changed:
    """The watch of a record. All watches of a path are equal, so that a store keeps one of them."""

    records: "AccessRecords"
    path: str

    def __call__(self) -> None:
        self.records.look_again(self.path)


class ListReads:
    """Records that a list has read and does not read again. They are not followed."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def get(self, path: str) -> _Record | None:
        return self._records.get(path)

    def put(self, record: _Record) -> None:
        self._records[record.path] = record
        if len(self._records) > LIST_RECORDS_MAX:
            self._records.popitem(last=False)


class AccessRecords:
    """It belongs to one event loop."""

    def __init__(self, store: MetadataStore, *, now: MonotonicClock) -> None:
        self.on_change: Callable[[str], None] = lambda _tenant: None
        """Called with a tenant after its record or that of one of its namespaces has changed."""
        self.changes = 0
        """Number of times that a record has changed, was forgotten, or is not confirmed any more. If it is the same
        before and after a decision, the records are followed from which the decision was made."""
        self._store = store
        self._now = now
        self._followers = Followers()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._stale: set[str] = set()
        """Paths of the followed records that ZooKeeper does not confirm."""
        self._pending: dict[str, _Record] = {}
        """Records that are being read for the first time."""
        self._absent: OrderedDict[str, float] = OrderedDict()
        """Paths without a record, and until when that is not read again; monotonic seconds."""
        self._stores = 0
        """Number of changes of any record through this process."""
        self._lost_at: float | None = None
        if store.session_state is not SessionState.CONNECTED:
            self._lost_at = now()
        self._forget_listener = store.on_session_change(self._session_changed)

    def __len__(self) -> int:
        """Number of followed records."""
        return len(self._records)

    @property
    def has_stale(self) -> bool:
        """Whether ZooKeeper does not confirm some of the records at present."""
        return self._lost_at is not None or bool(self._stale)

    async def admins(self, tenant: str, *, reads: ListReads | None = None) -> frozenset[str]:
        """Return the roles of the tenant's administrators; none if it does not exist.

        `reads`: those of a list, which needs very many records once; None: follow the record. Raises
        MetadataUnavailable, BadRequest for a name that no tenant can have.
        """
        path = _tenant_path(tenant)
        return (await self._read(path, tenant, is_tenant=True, reads=reads)).admins

    async def permissions(self, tenant: str, namespace: str, *, reads: ListReads | None = None) -> Permissions:
        """Return the permissions of a namespace; none if it does not exist. Otherwise as `admins`."""
        path = _namespace_path(tenant, namespace)
        return (await self._read(path, tenant, is_tenant=False, reads=reads)).permissions

    def known_admins(self, tenant: str) -> frozenset[str] | None:
        """Return what `admins` returns, without waiting; None: the record is not followed. Raises as `admins`."""
        record = self._known(_tenant_path(tenant))
        return None if record is None else record.admins

    def known_permissions(self, tenant: str, namespace: str) -> Permissions | None:
        """Return what `permissions` returns, without waiting; None: the record is not followed. Raises as `admins`."""
        record = self._known(_namespace_path(tenant, namespace))
        return None if record is None else record.permissions

    def hold(self, tenant: str, namespace: str | None) -> Callable[[], None]:
        """Follow the records of a tenant and a namespace, if they exist. Return a function that ends this."""
        paths = [(_tenant_path(tenant), True)]
        if namespace is not None:
            paths.append((_namespace_path(tenant, namespace), False))
        held = []
        for path, is_tenant in paths:
            record = self._records.get(path)
            if record is None and not self._is_absent(path):
                record = self._follow(path, tenant, is_tenant=is_tenant)
            if record is not None:
                record.users += 1
                held.append(record)

        def release() -> None:
            for record in held:
                self._release(record)

        return release

    def is_readable(self, path: str) -> bool:
        """Return whether the record in a znode could be decoded when it was read last; also true if it never was."""
        record = self._records.get(path)
        return record is None or record.is_readable

    def stored(self, path: str, value: Json | None) -> None:
        """Take over what this process has stored in a znode; None: it was deleted."""
        self._stores += 1
        self._absent.pop(path, None)
        record = self._records.get(path)
        if record is not None:
            self._apply(record, value)

    def look_again(self, path: str) -> None:
        """The watch of a record has fired."""
        record = self._records.get(path) or self._pending.get(path)
        if record is not None:  # else it was forgotten
            record.changed()

    async def close(self) -> None:
        """End all watching."""
        self._forget_listener()
        await self._followers.close()

    async def _read(self, path: str, tenant: str, *, is_tenant: bool, reads: ListReads | None) -> _Record:
        record = self._known(path)
        if record is not None:
            return record
        if self._is_absent(path):
            return _Record(path, tenant, is_tenant)
        if reads is not None:
            return await self._read_once(_Record(path, tenant, is_tenant), reads)
        record = self._follow(path, tenant, is_tenant=is_tenant)
        await self._first_read(record)
        self._check_confirmed(record)
        return record

    def _known(self, path: str) -> _Record | None:
        record = self._records.get(path)
        if record is not None:
            self._records.move_to_end(path)
            self._check_confirmed(record)
        return record

    def _check_confirmed(self, record: _Record) -> None:
        if record.stale_since is None or (stale_s := self._now() - record.stale_since) <= KNOWN_S_MAX:
            return
        raise MetadataUnavailable(
            "permissions cannot be checked: ZooKeeper has not confirmed for too long what was read last; retry, and "
            "see the log of the broker for the reason (its connection to ZooKeeper, permissions_unreadable)",
            seconds=round(stale_s),
            seconds_max=round(KNOWN_S_MAX),
        )

    async def _read_once(self, record: _Record, reads: ListReads) -> _Record:
        known = reads.get(record.path)
        if known is not None:
            return known
        stores = self._stores
        try:
            node = await self._store.get(record.path)
            self._apply(record, records.decode(node.data, path=record.path))
        except NoSuchNode:
            self._remember_absent(record.path, stores)
        except Corrupt:
            pass  # it grants nothing
        reads.put(record)
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
            self._release(record)

    def _release(self, record: _Record) -> None:
        record.users -= 1
        if not record.users and not record.was_read.is_set():  # nobody waits for the first read any more
            record.stop()
            if self._pending.get(record.path) is record:
                del self._pending[record.path]

    def _follow(self, path: str, tenant: str, *, is_tenant: bool) -> _Record:
        """Return the record that is being read. The caller becomes a user of it at once."""
        pending = self._pending.get(path)
        if pending is not None:
            return pending
        record = self._pending[path] = _Record(path, tenant, is_tenant)

        async def look(changed: Watch) -> None:
            record.changed = changed
            if record.was_read.is_set():
                self._doubt(record, self._now())
            stores = self._stores
            try:
                node = await self._store.get(path, watch=_Changed(self, path))
            except NoSuchNode:
                self._end(record, stores)
                raise End from None
            self._keep(record)
            try:
                self._apply(record, records.decode(node.data, path=path))
            except Corrupt:
                record.is_readable = False
                record.was_read.set()
                raise
            if self._lost_at is None:
                record.stale_since = None
                self._stale.discard(path)
            else:
                self._doubt(record, self._lost_at)

        record.stop = self._followers.follow("permissions", look, path=path)
        return record

    def _keep(self, record: _Record) -> None:
        """The record exists: follow it from now on."""
        if self._pending.get(record.path) is record:
            del self._pending[record.path]
            self._records[record.path] = record
            self._drop()

    def _end(self, record: _Record, stores: int) -> None:
        """The record does not exist, or not any more. `stores`: `_stores` before this was read."""
        self._apply(record, None)
        if self._pending.get(record.path) is record:
            del self._pending[record.path]
        if self._records.get(record.path) is record:
            self._remove(record)
        self._remember_absent(record.path, stores)

    def _remember_absent(self, path: str, stores: int) -> None:
        if self._stores == stores:  # else this process may have created it meanwhile
            self._absent[path] = self._now() + ABSENT_S
            self._absent.move_to_end(path)
            if len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)

    def _is_absent(self, path: str) -> bool:
        until = self._absent.get(path)
        return until is not None and self._now() < until

    def _apply(self, record: _Record, value: Json | None) -> None:
        """Raises Corrupt, with nothing changed."""
        before = (record.admins, record.permissions)
        if record.is_tenant:
            record.admins = admins_of(value, path=record.path)
        else:
            record.permissions = permissions_of(value, path=record.path)
        record.is_readable = True
        record.was_read.set()
        if before != (record.admins, record.permissions) and self._records.get(record.path) is record:
            self.changes += 1
            self.on_change(record.tenant)

    def _drop(self) -> None:
        """Forget the least recently used records above the maximum."""
        for record in list(self._records.values()):
            if len(self._records) <= RECORDS_MAX:
                return
            if not record.users:
                record.stop()
                self._remove(record)

    def _remove(self, record: _Record) -> None:
        del self._records[record.path]
        self._stale.discard(record.path)
        self.changes += 1

    def _doubt(self, record: _Record, since: float) -> None:
        """ZooKeeper has not confirmed the record since then, in monotonic seconds, if not for longer."""
        if record.stale_since is None:
            record.stale_since = since
            self._stale.add(record.path)
            self.changes += 1

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._lost_at = None  # the watches fire now, and confirm the records one by one
        elif self._lost_at is None:
            self._lost_at = self._now()
            for record in self._records.values():
                self._doubt(record, self._lost_at)
