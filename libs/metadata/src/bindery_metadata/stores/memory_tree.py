"""The znodes of a MemoryTree and the operations on them, without sessions or time.

Invariants: the parent of each node but `/` exists; `children` of a node are exactly the names below it; an ephemeral
node has no children; `creates` never decreases, so no sequential name is used twice while the parent exists.

`apply` applies all operations or none, and returns the events in the order in which ZooKeeper fires them.

Source: ZooKeeper's DataTree and PrepRequestProcessor (version numbers, names of sequential nodes, order of events).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bindery_core.errors import AlreadyExists, BadRequest, NoSuchNode, NotEmpty, VersionConflict

from bindery_metadata.layout.znode_path import name_of, parent_of
from bindery_metadata.stores.store import Check, Create, Delete, Node, Op, Set, Stat

_SEQUENCE_DIGITS: Final = 10


class Kind(Enum):
    """Kind of the watches on a path that an event fires."""

    DATA = "data"
    CHILDREN = "children"


Event = tuple[Kind, str]
"""(kind of watch, path)."""
OpResult = str | Stat | None
"""Path of a created node, Stat of a changed node, or None for Delete and Check."""


@dataclass(slots=True)
class _Znode:
    data: bytes
    ctime_ms: int
    mtime_ms: int
    owner: int
    version: int = 0
    creates: int = 0
    """Number of children ever created, which is the number of the next sequential child."""
    children: set[str] = field(default_factory=set)

    def stat(self) -> Stat:
        return Stat(
            version=self.version,
            children_version=2 * self.creates - len(self.children),
            ctime_ms=self.ctime_ms,
            mtime_ms=self.mtime_ms,
            ephemeral_owner=self.owner,
            children_count=len(self.children),
        )


class Znodes:
    """The nodes. All paths must be valid."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Znode] = {"/": _Znode(b"", 0, 0, 0)}

    def get(self, path: str) -> Node:
        node = self._require(path)
        return Node(node.data, node.stat())

    def exists(self, path: str) -> Stat | None:
        node = self._nodes.get(path)
        return node.stat() if node else None

    def children(self, path: str) -> list[str]:
        return sorted(self._require(path).children)

    def owned_by(self, owner: int) -> list[str]:
        """Return the paths of the ephemeral nodes of a session."""
        return [path for path, node in self._nodes.items() if node.owner == owner and owner != 0]

    def apply(self, ops: Sequence[Op], *, owner: int, now_ms: int) -> tuple[list[OpResult], list[Event]]:
        """Apply all `ops` for session `owner`, or raise the first error and change nothing."""
        results: list[OpResult] = []
        events: list[Event] = []
        undo: list[Callable[[], None]] = []
        try:
            for op in ops:
                results.append(self._apply_one(op, owner, now_ms, events, undo))
        except Exception:
            for step in reversed(undo):
                step()
            raise
        return results, events

    def _apply_one(
        self, op: Op, owner: int, now_ms: int, events: list[Event], undo: list[Callable[[], None]]
    ) -> OpResult:
        match op:
            case Create():
                return self._create(op, owner, now_ms, events, undo)
            case Set(path, data, version):
                node = self._require(path, version)
                undo.append(_restore(node))
                node.data, node.version, node.mtime_ms = data, node.version + 1, now_ms
                events.append((Kind.DATA, path))
                return node.stat()
            case Delete(path, version):
                self._delete(path, version, events, undo)
            case Check(path, version):
                self._require(path, version)
        return None

    def _create(self, op: Create, owner: int, now_ms: int, events: list[Event], undo: list[Callable[[], None]]) -> str:
        parent_path = parent_of(op.path)
        parent = self._nodes.get(parent_path)
        if parent is None:
            raise NoSuchNode("no such parent", path=op.path)
        path = f"{op.path}{parent.creates:0{_SEQUENCE_DIGITS}d}" if op.sequential else op.path
        if path in self._nodes:
            raise AlreadyExists("the node exists already", path=path)
        if parent.owner:
            raise BadRequest("an ephemeral node cannot have children", path=path)
        name = name_of(path)
        parent.creates += 1
        parent.children.add(name)
        self._nodes[path] = _Znode(op.data, now_ms, now_ms, owner if op.ephemeral else 0)

        def take_back() -> None:
            del self._nodes[path]
            parent.children.discard(name)
            parent.creates -= 1

        undo.append(take_back)
        events.extend([(Kind.DATA, path), (Kind.CHILDREN, parent_path)])
        return path

    def _delete(self, path: str, version: int | None, events: list[Event], undo: list[Callable[[], None]]) -> None:
        if path == "/":
            raise BadRequest("the root cannot be deleted", path=path)
        node = self._require(path, version)
        if node.children:
            raise NotEmpty("the node has children", path=path, children_count=len(node.children))
        parent_path = parent_of(path)
        parent = self._nodes[parent_path]
        name = name_of(path)
        del self._nodes[path]
        parent.children.discard(name)

        def put_back() -> None:
            self._nodes[path] = node
            parent.children.add(name)

        undo.append(put_back)
        events.extend([(Kind.DATA, path), (Kind.CHILDREN, path), (Kind.CHILDREN, parent_path)])

    def _require(self, path: str, version: int | None = None) -> _Znode:
        node = self._nodes.get(path)
        if node is None:
            raise NoSuchNode("no such node", path=path)
        if version is not None and node.version != version:
            raise VersionConflict("the version of the node differs", path=path, expected=version, found=node.version)
        return node


def _restore(node: _Znode) -> Callable[[], None]:
    data, version, mtime_ms = node.data, node.version, node.mtime_ms

    def restore() -> None:
        node.data, node.version, node.mtime_ms = data, version, mtime_ms

    return restore
