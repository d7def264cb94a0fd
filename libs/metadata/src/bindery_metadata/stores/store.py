"""MetadataStore: the subset of ZooKeeper that the system uses, as an asyncio interface.

Two implementations pass one contract suite: `zookeeper.ZooKeeperStore` (kazoo) and `memory.MemoryStore`.

Contract
- Paths are absolute ("/ledgers/available"). Data is bytes, never None. Versions are ZooKeeper data versions: 0 after
  - Paths are absolute ("/ledgers/available"). Data is bytes, never None. Versions are ZooKeeper data versions: 0 after
    create, one more after each set. `version=None` in set and delete means "any": only for nodes without contention.
    Sequential numbers count every child ever created under the parent.
  - Errors: NoSuchNode, AlreadyExists, VersionConflict, NotEmpty as named; BadRequest for an invalid path, a child of an
    ephemeral node, the deletion of `/`; TooLarge over znode_path.DATA_SIZE_MAX; MetadataUnavailable if the request was
    certainly not applied; MetadataOutcomeUnknown if a write may have been (the connection was lost): `sync`, read again
    and compare. Reads during which the connection is lost raise MetadataUnavailable.
  - Requests of one store are applied in the order in which they were made.
  - A request made without a connection waits for one, for a bounded time, before it raises MetadataUnavailable.
  - Watches fire once, in the event loop, in the order of the store's events, before the response to any later request
    that reflects the change. The same watch set twice on a path counts once. A read that raises sets none. After the
    connection was lost or the session expired, every watch fires once the store is CONNECTED again, so that its owner
    reads again. No watch fires after `close`.
  - Session: CONNECTED -> SUSPENDED (connection lost, ephemeral nodes remain) -> CONNECTED, or -> LOST (all ephemeral
    nodes are deleted) -> CONNECTED with a new session id. Listeners are called in the loop, in order; not by `close`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

SESSION_TIMEOUT_S: Final = 10.0
"""Default session timeout in seconds: how long the ephemeral nodes of a dead process remain.

Source: the default of BookKeeper's zkTimeout.
"""


class SessionState(Enum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Stat:
    version: int
    children_version: int
    ctime_ms: int
    mtime_ms: int
    ephemeral_owner: int
    """Session id, 0 for a persistent node."""
    children_count: int


@dataclass(frozen=True, slots=True)
class Node:
    data: bytes
    stat: Stat


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    data: bytes = b""
    ephemeral: bool = False
    sequential: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    path: str
    data: bytes
    version: int | None


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int


Op = Create | Set | Delete | Check
Watch = Callable[[], None]
"""Called once, in the event loop, when the data read may have changed."""


class MetadataStore(Protocol):
    async def get(self, path: str, *, watch: Watch | None = None) -> Node: ...

    async def exists(self, path: str, *, watch: Watch | None = None) -> Stat | None:
        """Return None if there is no such node; the watch then fires at its creation."""
        ...

    async def children(self, path: str, *, watch: Watch | None = None) -> list[str]:
        """Names (not paths), sorted."""
        ...

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        ephemeral: bool = False,
        sequential: bool = False,
        make_parents: bool = False,
    ) -> str:
        """Create and return the path (with the 10-digit suffix of a sequential node). A missing parent is NoSuchNode,
        unless `make_parents`, which creates parents (persistent, empty) and tolerates their concurrent deletion."""
        ...

    async def set(self, path: str, data: bytes, *, version: int | None) -> Stat: ...

    async def delete(self, path: str, *, version: int | None) -> None: ...

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        """Apply all or nothing. Per op: the path created, the Stat set, else None. Raises the error of the first op."""
        ...

    async def sync(self, path: str) -> None:
        """Return when every write acknowledged to any client before this call is visible to reads of this store."""
        ...

    @property
    def session_state(self) -> SessionState: ...

    @property
    def session_id(self) -> int:
        """0 without a session."""
        ...

    def on_session_change(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        """Add a listener; the returned function removes it."""
        ...

    async def close(self) -> None:
        """End the session: its ephemeral nodes are deleted at once. Idempotent."""
        ...
