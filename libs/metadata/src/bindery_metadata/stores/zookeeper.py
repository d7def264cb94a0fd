"""ZooKeeperStore: the metadata store over kazoo. Only this module and `zookeeper_connections` import kazoo.

kazoo owns one thread, which communicates with the server. Responses, watch events and connection states enter the event
loop through one queue, `Crossing`, in the order in which they occurred. No callback of a caller runs on kazoo's thread,
and kazoo never blocks the loop.

kazoo's retries are used only to connect. A request is sent once, because only its caller can decide to repeat it.

| kazoo reports                                  | a read raises       | a write raises         |
|------------------------------------------------|---------------------|------------------------|
| ConnectionLoss, no response in time            | MetadataUnavailable | MetadataOutcomeUnknown |
| SessionExpired, SessionMoved, ConnectionClosed | MetadataUnavailable | MetadataUnavailable    |

While the session is SUSPENDED or LOST, a request waits unsent for at most `operation_timeout_s`. A request that was
passed to kazoo just as the connection broke may be sent after reconnection, possibly after its caller received
MetadataOutcomeUnknown. Requests of one store stay in order, so a later read through the same store (after a `sync`)
sees the final outcome.

kazoo drops watches when the connection breaks. All of them therefore fire once the store is CONNECTED again, so that no
change is missed.

kazoo presents the credentials (`zookeeper_access`) on each connection before it sends any request, also in a new
session.

With a chroot (`zookeeper_servers`), all paths of callers are below it: kazoo adds it to requests and removes it from
responses and events.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    MetadataUnreachable,
    NoSuchNode,
    NotEmpty,
    Unauthorized,
    VersionConflict,
)
from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    ConnectionClosedError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    NotReadOnlyCallError,
    RolledBackError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.exceptions import RuntimeInconsistency as RuntimeInconsistencyError
from kazoo.protocol.states import EventType, KazooState, WatchedEvent, ZnodeStat
from kazoo.retry import KazooRetry
from kazoo.security import ACL, Id

from bindery_metadata.layout.znode_path import ancestors, validate_path, validate_size
from bindery_metadata.stores.access_lists import AccessList, Credential, Entry, NewNodes, NodeAccess
from bindery_metadata.stores.parents import create_with_parents
from bindery_metadata.stores.store import (
    SESSION_TIMEOUT_S,
    Check,
    Create,
    Delete,
    Node,
    Op,
    SessionState,
    Set,
    Stat,
    Watch,
)
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, ConnectionRefused, ZooKeeperAccess
from bindery_metadata.stores.zookeeper_connections import Connections, Crossing, LoopHandler
from bindery_metadata.stores.zookeeper_servers import ZooKeeperServers

OPERATION_TIMEOUT_S: Final = 10.0
"""Maximum time in seconds of one operation, including the wait for a connection."""
CONNECT_TIMEOUT_S: Final = 15.0
"""Default time in seconds to wait for the first connection."""
IN_FLIGHT_MAX: Final = 1_024
"""Maximum number of unanswered requests in kazoo. Further requests wait in the event loop."""

_ANY_VERSION: Final = -1
_RECONNECT_DELAY_S: Final = 0.1
_RECONNECT_DELAY_S_MAX: Final = 1.0
_REVIVE_DELAY_S: Final = 0.5

_log = logging.getLogger(__name__)
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)  # lower levels repeat what errors and session states report

_STATES: Final = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}

_NAMED_ERRORS: Final[dict[type[KazooException], tuple[type[BinderyError], str]]] = {
    NoNodeError: (NoSuchNode, "no such node"),
    NodeExistsError: (AlreadyExists, "the node exists already"),
    BadVersionError: (VersionConflict, "the version of the node differs"),
    NotEmptyError: (NotEmpty, "the node has children"),
    NoChildrenForEphemeralsError: (BadRequest, "an ephemeral node cannot have children"),
    BadArgumentsError: (BadRequest, "zookeeper refuses the arguments"),
    InvalidACLError: (BadRequest, "zookeeper refuses the access list"),
    NoAuthError: (
        Unauthorized,
        "the access list of the zookeeper node does not allow this to the credentials of this process; present those "
        "of the cluster (zookeeper_access.credentials_file, or BINDERY_ZOOKEEPER_CREDENTIALS_FILE for commands)",
    ),
    AuthFailedError: (Unauthorized, "zookeeper refuses the credentials"),
    SessionExpiredError: (MetadataUnavailable, "the zookeeper session expired"),
    SessionMovedError: (MetadataUnavailable, "the zookeeper session moved to another connection"),
    ConnectionClosedError: (MetadataUnavailable, "the zookeeper connection was closed"),
    NotReadOnlyCallError: (MetadataUnavailable, "this zookeeper server takes no writes now"),
}


class _KazooWatch:
    """A watch as kazoo stores it. Two of them are equal if their watches are, so that a watch set twice on a path fires
    once."""

    __slots__ = ("_fire", "_watch")

    def __init__(self, watch: Watch, fire: Callable[[Watch, WatchedEvent], None]) -> None:
        self._watch = watch
        self._fire = fire

    def __call__(self, event: WatchedEvent) -> None:
        self._fire(self._watch, event)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KazooWatch) and self._watch == other._watch

    def __hash__(self) -> int:
        return hash(self._watch)


class ZooKeeperStore:
    """A `MetadataStore` over one ZooKeeper session at a time. Created by `connect`; belongs to one event loop."""

    def __init__(
        self,
        servers: ZooKeeperServers,
        *,
        session_timeout_s: float,
        operation_timeout_s: float,
        access: ZooKeeperAccess,
    ) -> None:
        self._operation_timeout_s = operation_timeout_s
        self._access = access
        self._servers = servers
        self._connections = Connections(access, servers=len(servers.servers), present=self._present)
        self._state = SessionState.LOST
        self._session_id = 0
        self._closed = False
        self._reviving: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._in_flight = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._listeners: list[Callable[[SessionState], None]] = []
        self._dropped_watches: list[Watch] = []
        self._crossing = Crossing(asyncio.get_running_loop())
        self._client = KazooClient(
            hosts=str(servers),
            timeout=session_timeout_s,
            handler=LoopHandler(self._crossing, self._on_thread_ended, self._connections.open),
            connection_retry=KazooRetry(
                max_tries=-1,
                delay=_RECONNECT_DELAY_S,
                max_delay=_RECONNECT_DELAY_S_MAX,
                sleep_func=LoopHandler.sleep_func,
            ),
            command_retry=KazooRetry(max_tries=0, sleep_func=LoopHandler.sleep_func),
            logger=_kazoo_log,
        )
        self._client.add_listener(self._on_kazoo_state)

    @classmethod
    async def connect(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        access: ZooKeeperAccess | None = None,
    ) -> "ZooKeeperStore":
        """Connect to `hosts` ("a:2181,b:2181", with a chroot "a:2181,b:2181/path").

        `access`: TLS, credentials, the access list of new nodes; None: none. The chroot need not exist, and nothing can
        be created below it until it does (`make_chroot`).

        Raises MetadataUnreachable with the hosts if no server responds within `connect_timeout_s`; ConnectionRefused
        if TLS refuses all servers until then; BadRequest for an invalid list.
        """
        store = cls(
            ZooKeeperServers.parse(hosts),
            session_timeout_s=session_timeout_s,
            operation_timeout_s=operation_timeout_s,
            access=access or NO_ACCESS.load(),
        )
        store._client.start_async()
        try:
            async with asyncio.timeout(connect_timeout_s):
                await store._connected.wait()
        except TimeoutError:
            await store.close()
            if (refusal := store._connections.refusal) is not None:
                raise ConnectionRefused(f"cannot connect to zookeeper: {refusal}", hosts=hosts) from None
            raise MetadataUnreachable("no zookeeper server responds", hosts=hosts, waited_s=connect_timeout_s) from None
        except BaseException:
            await store.close()
            raise
        return store

    # --- MetadataStore --------------------------------------------------------------------------------------------

    async def get(self, path: str, *, watch: Watch | None = None) -> Node:
        data, stat = await self._call(path, lambda: self._client.get_async(path, watch=self._wrap(watch)), write=False)
        return Node(data or b"", _stat(stat))

    async def exists(self, path: str, *, watch: Watch | None = None) -> Stat | None:
        stat = await self._call(path, lambda: self._client.exists_async(path, watch=self._wrap(watch)), write=False)
        return _stat(stat) if stat else None

    async def children(self, path: str, *, watch: Watch | None = None) -> list[str]:
        names = await self._call(
            path, lambda: self._client.get_children_async(path, watch=self._wrap(watch)), write=False
        )
        return sorted(names)

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        ephemeral: bool = False,
        sequential: bool = False,
        make_parents: bool = False,
    ) -> str:
        if make_parents:
            return await create_with_parents(self, path, data, ephemeral=ephemeral, sequential=sequential)
        validate_size(len(data), path)
        created = await self._call(
            path,
            lambda: self._client.create_async(
                path, data, acl=self._new_list(), ephemeral=ephemeral, sequence=sequential
            ),
            write=True,
        )
        assert isinstance(created, str)
        return created

    async def set(self, path: str, data: bytes, *, version: int | None) -> Stat:
        validate_size(len(data), path)
        return _stat(
            await self._call(path, lambda: self._client.set_async(path, data, version=_version(version)), write=True)
        )

    async def delete(self, path: str, *, version: int | None) -> None:
        if path == "/":
            raise BadRequest("the root cannot be deleted", path=path)
        await self._call(path, lambda: self._client.delete_async(path, version=_version(version)), write=True)

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        if not ops:
            return []
        for op in ops:
            validate_path(op.path)
        validate_size(sum(len(op.data) for op in ops if isinstance(op, Create | Set)), ops[0].path)
        results = await self._call(ops[0].path, lambda: self._transaction(ops).commit_async(), write=True)
        for op, result in zip(ops, results, strict=True):
            if isinstance(result, KazooException) and not isinstance(
                result, RolledBackError | RuntimeInconsistencyError
            ):
                raise _translate(result, op.path, write=True) from result
        return [_multi_result(result, op.path) for op, result in zip(ops, results, strict=True)]

    async def sync(self, path: str) -> None:
        await self._call(path, lambda: self._client.sync_async(path), write=False)

    @property
    def session_state(self) -> SessionState:
        return self._state

    @property
    def session_id(self) -> int:
        return self._session_id

    def on_session_change(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connected.set()  # requests that wait for a connection must fail now
        self._state, self._session_id = SessionState.LOST, 0
        self._dropped_watches.clear()
        if self._reviving:
            await asyncio.wait([self._reviving])
        await asyncio.to_thread(self._stop_client)

    @property
    def chroot(self) -> str:
        """Path of the node that is this store's `/`; empty: ZooKeeper's own."""
        return self._servers.chroot

    # --- access lists ---------------------------------------------------------------------------------------------

    @property
    def access(self) -> ZooKeeperAccess:
        return self._access

    async def access_list(self, path: str) -> NodeAccess:
        """Return the access list of a node. Raises NoSuchNode, and Unauthorized without permission to read it."""
        found, stat = await self._call(path, lambda: self._client.get_acls_async(path), write=False)
        entries = tuple(Entry(entry.id.scheme, entry.id.id or "", entry.perms) for entry in found)
        return NodeAccess(entries, stat.aversion, bool(stat.ephemeralOwner), stat.numChildren)

    async def set_access_list(self, path: str, entries: AccessList, *, version: int | None) -> None:
        """Replace the access list of a node. `version`: expected version of the list; None: any.

        Raises NoSuchNode, VersionConflict, Unauthorized, MetadataOutcomeUnknown.
        """
        await self._call(
            path,
            lambda: self._client.set_acls_async(path, _kazoo_list(entries), version=_version(version)),
            write=True,
        )

    def _new_list(self) -> list[ACL] | None:
        """Return the list of a new node; None: kazoo's default, which is open."""
        if self._access.new_nodes is NewNodes.OPEN:
            return None
        return _kazoo_list(self._access.list_of_new_nodes(self._connections.presented))

    def _present(self, credentials: Sequence[Credential]) -> None:
        """Have kazoo present these on the next connection, before it sends requests. Runs on kazoo's thread."""
        self._client.auth_data = {("digest", credential.secret) for credential in credentials}

    # --- requests -------------------------------------------------------------------------------------------------

    async def _call(self, path: str, start: Callable[[], Any], *, write: bool) -> Any:
        """Pass one request to kazoo and wait for its response. `start` returns kazoo's async result."""
        validate_path(path)
        sent = False
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._operation_timeout_s), self._in_flight:
                await self._wait_until_connected(path)
                sent = True
                start().rawlink(partial(_land, answer))
                return await answer
        except TimeoutError:
            if not sent:
                raise MetadataUnavailable("no connection to zookeeper", path=path) from None
            raise _unanswered(path, write=write) from None
        except KazooException as error:
            raise _translate(error, path, write=write) from error

    async def _wait_until_connected(self, path: str) -> None:
        while not self._closed:
            if self._connected.is_set():
                if self._client.connected:
                    return
                # kazoo's state is newer than the last event here; its next CONNECTED is still to come
                self._connected.clear()
            await self._connected.wait()
        raise MetadataUnavailable("the metadata store was closed", path=path)

    def _transaction(self, ops: Sequence[Op]) -> Any:
        transaction = self._client.transaction()
        for op in ops:
            match op:
                case Create(path, data, ephemeral, sequential):
                    transaction.create(path, data, acl=self._new_list(), ephemeral=ephemeral, sequence=sequential)
                case Set(path, data, version):
                    transaction.set_data(path, data, version=_version(version))
                case Delete(path, version):
                    transaction.delete(path, version=_version(version))
                case Check(path, version):
                    transaction.check(path, version)
        return transaction

    # --- session and watches --------------------------------------------------------------------------------------

    def _on_kazoo_state(self, state: KazooState) -> None:
        """Pass the state and the session id, read on kazoo's thread, to the event loop."""
        identity = self._client.client_id
        self._crossing.put(partial(self._change_state, _STATES[state], identity[0] if identity else None))

    def _change_state(self, state: SessionState, session_id: int | None) -> None:
        if self._closed:
            return
        self._state = state
        if state is SessionState.CONNECTED:
            self._session_id = session_id or 0
            self._connected.set()
        else:
            self._connected.clear()
            if state is SessionState.LOST:
                self._session_id = 0
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception:
                _log.exception("session_listener_failed")
        if state is SessionState.CONNECTED:
            dropped, self._dropped_watches = self._dropped_watches, []
            for watch in dropped:
                self._crossing.put(watch)

    def _on_thread_ended(self) -> None:
        """Start another thread of kazoo: a malformed response ends the thread, and the store would stay LOST."""
        if not self._closed:
            self._reviving = asyncio.get_running_loop().create_task(self._revive())

    async def _revive(self) -> None:
        await asyncio.sleep(_REVIVE_DELAY_S)
        if not self._closed:
            await asyncio.to_thread(self._client.start_async)

    def _wrap(self, watch: Watch | None) -> _KazooWatch | None:
        return _KazooWatch(watch, self._fire) if watch else None

    def _fire(self, watch: Watch, event: WatchedEvent) -> None:
        if self._closed:
            return
        if event.type == EventType.NONE and self._state is not SessionState.CONNECTED:
            self._dropped_watches.append(watch)
        else:
            watch()

    def _stop_client(self) -> None:
        """Close kazoo's client. Runs on a helper thread, because kazoo waits for its own thread."""
        try:
            self._client.stop()
            self._client.close()
        except Exception:
            _log.warning("zookeeper_close_failed", exc_info=True)


async def make_chroot(hosts: str, *, access: ZooKeeperAccess | None = None) -> bool:
    """Create the chroot of `hosts` with the access list of new nodes. Return whether it was missing.

    Missing nodes above it are open to all clients, as the root of ZooKeeper is: other clusters may use them, too.
    Existing nodes are not changed. Raises as `connect` does, and Unauthorized if the nodes above do not allow it.
    """
    servers = ZooKeeperServers.parse(hosts)
    if not servers.chroot:
        return False
    access = access or NO_ACCESS.load()
    for nodes, new_nodes in (([*ancestors(servers.chroot)], NewNodes.OPEN), ([servers.chroot], access.new_nodes)):
        store = await ZooKeeperStore.connect(servers.above, access=access.with_new_nodes(new_nodes))
        try:
            # `exists` needs no permission; `create` needs that of the parent also for a node that exists
            if await store.exists(servers.chroot) is not None:
                return False
            made = [await _create_missing(store, node) for node in nodes]
        finally:
            await store.close()
    return made[-1]


async def _create_missing(store: ZooKeeperStore, path: str) -> bool:
    """Return whether this call created the node."""
    if await store.exists(path) is not None:
        return False
    try:
        await store.create(path)
    except AlreadyExists:
        return False
    return True


def _land(answer: "asyncio.Future[Any]", result: Any) -> None:
    """Pass kazoo's result to the caller, unless the caller was cancelled. Runs in the event loop."""
    if answer.done():
        return
    if result.exception is not None:
        answer.set_exception(result.exception)
    else:
        answer.set_result(result.value)


def _translate(error: KazooException, path: str, *, write: bool) -> BinderyError:
    for kind in type(error).__mro__:
        if kind in _NAMED_ERRORS:
            wrapped, message = _NAMED_ERRORS[kind]
            return wrapped(message, path=path)
    return _unanswered(path, write=write, cause=type(error).__name__)


def _unanswered(path: str, *, write: bool, cause: str = "no answer in time") -> BinderyError:
    """Return the error of a request without a known outcome: a write may have been applied."""
    if write:
        return MetadataOutcomeUnknown("zookeeper may have applied the change", path=path, cause=cause)
    return MetadataUnavailable("zookeeper did not respond", path=path, cause=cause)


def _multi_result(result: object, path: str) -> str | Stat | None:
    if isinstance(result, KazooException):
        raise _translate(result, path, write=True) from result
    if isinstance(result, ZnodeStat):
        return _stat(result)
    return result if isinstance(result, str) else None


def _kazoo_list(entries: AccessList) -> list[ACL]:
    return [ACL(entry.permissions, Id(entry.scheme, entry.id)) for entry in entries]


def _version(version: int | None) -> int:
    return _ANY_VERSION if version is None else version


def _stat(stat: ZnodeStat) -> Stat:
    return Stat(
        version=stat.version,
        children_version=stat.cversion,
        ctime_ms=stat.ctime,
        mtime_ms=stat.mtime,
        ephemeral_owner=stat.ephemeralOwner or 0,
        children_count=stat.numChildren,
    )
