"""MetadataStore: the subset of ZooKeeper that the system uses, as an asyncio interface.

Two implementations pass the same contract tests: `zookeeper.ZooKeeperStore` (kazoo) and `memory.MemoryStore`.

Contract:

- Paths are absolute ("/ledgers/available"). Data is bytes, never None. Versions are ZooKeeper data versions: 0 after
  create, one more after each set. `version=None` in set and delete means any version; it is only for nodes without
  contention. Sequential numbers count every child ever created under the parent.
- Errors: NoSuchNode, AlreadyExists, VersionConflict, NotEmpty as named; BadRequest for an invalid path, a child of an
  ephemeral node, and the deletion of `/`; TooLarge over znode_path.DATA_SIZE_MAX; MetadataUnavailable if the request
  was certainly not applied; MetadataOutcomeUnknown if a write may have been applied, because the connection was lost:
  callers then `sync`, read again and compare. Reads during which the connection is lost raise MetadataUnavailable.
- Requests of one store are applied in the order in which they were made.
- A request made without a connection waits for one, for a bounded time, before it raises MetadataUnavailable.
- Watches fire once, in the event loop, in the order of the store's events, before the response to any later request
  that reflects the change. The same watch set twice on a path counts once. A read that raises sets no watch. If the
  connection is lost or the session expires, every watch fires once the store is CONNECTED again, so that its owner
  reads again. No watch fires after `close`.
- Session: CONNECTED -> SUSPENDED (connection lost, ephemeral nodes remain) -> CONNECTED, or -> LOST (all ephemeral
  nodes are deleted) -> CONNECTED with a new session id. Listeners are called in the loop, in order; not by `close`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

SESSION_TIMEOUT_S: Final = 10.0
"""Default session timeout in seconds, for which the ephemeral nodes of a killed process remain.

Source: the default of BookKeeper's zkTimeout.
"""


class SessionState(Enum):
    """State of the session; the contract in the module docstring describes the transitions."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Stat:
    """Properties of a node. Times are in ms since 1970 by the server's clock."""

    version: int
    children_version: int
    ctime_ms: int
    mtime_ms: int
    ephemeral_owner: int
    """Session id; 0 for a persistent node."""
    children_count: int

    @property
    def creates(self) -> int:
        """Number of children ever created, modulo 2^31. It is the number of the next sequential child.

        ZooKeeper reports `children_version` as twice that number minus `children_count`, in 32 bits
        (DataNode.copyStat).
        """
        return (self.children_version + self.children_count & 0xFFFF_FFFF) >> 1


@dataclass(frozen=True, slots=True)
class Node:
    data: bytes
    stat: Stat


@dataclass(frozen=True, slots=True)
class Create:
    """Creation of a node."""

    path: str
    data: bytes = b""
    ephemeral: bool = False
    sequential: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Replacement of a node's data."""

    path: str
    data: bytes
    version: int | None
    """Expected version; None: any."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of a node."""

    path: str
    version: int | None
    """Expected version; None: any."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check that a node exists with this version, as a condition of a transaction."""

    path: str
    version: int


Op = Create | Set | Delete | Check
"""One operation of a transaction (`multi`)."""
Watch = Callable[[], None]
"""Called once, in the event loop, when the data read may have changed."""


class MetadataStore(Protocol):
    """One session with the store. The module docstring is the contract."""

    async def get(self, path: str, *, watch: Watch | None = None) -> Node: ...

    async def exists(self, path: str, *, watch: Watch | None = None) -> Stat | None:
        """Return the node's Stat, or None if there is no such node; the watch then fires at its creation."""
        ...

    async def children(self, path: str, *, watch: Watch | None = None) -> list[str]:
        """Return the names (not paths) of the children, sorted."""
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
        """Create a node and return its path, which for a sequential node includes the 10-digit suffix.

        Raises NoSuchNode if the parent is missing. `make_parents` creates missing parents as persistent, empty nodes,
        and again if other clients delete them meanwhile.
        """
        ...

    async def set(self, path: str, data: bytes, *, version: int | None) -> Stat: ...

    async def delete(self, path: str, *, version: int | None) -> None: ...

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        """Apply all operations or none. Raises the error of the first operation that fails.

        Return one result per operation: the path of Create, the Stat of Set, None for the others.
        """
        ...

    async def sync(self, path: str) -> None:
        """Return when every write acknowledged to any client before this call is visible to reads of this store."""
        ...

    @property
    def session_state(self) -> SessionState: ...

    @property
    def session_id(self) -> int:
        """Id of the session; 0 without a session."""
        ...

    def on_session_change(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        """Call `listener` after each change of the session's state. Return a function that removes the listener."""
        ...

    async def close(self) -> None:
        """End the session: its ephemeral nodes are deleted at once. Idempotent."""
        ...
