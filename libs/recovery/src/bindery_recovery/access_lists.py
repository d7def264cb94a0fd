"""Survey and replace the access lists of all nodes of a cluster, while the cluster runs.

`survey` reads the list of every node and counts the kinds (`bindery_metadata.stores.access_lists.kind_of`).

`apply` replaces the lists of these kinds, parents before children, and leaves equal lists as they are:

| kind of the list             | apply creator or shared | apply open |
|------------------------------|-------------------------|------------|
| OPEN                         | replaced                | kept       |
| CREATOR, SHARED              | replaced if different   | replaced   |
| PREVIOUS                     | replaced                | replaced   |
| OTHER                        | kept                    | kept       |
| cannot be read               | kept                    | kept       |

OTHER lists name identities that are not in the file of credentials, perhaps those of another program that needs the
node. Each list is replaced only at the version that was read. `apply` can be interrupted anywhere and run again. It
makes passes over the tree until one replaces nothing, at most PASSES_MAX, because services create nodes meanwhile.

Services that present the credentials can use the nodes before, during and after the change, whatever list they give to
their own new nodes. Services without credentials lose access. `survey` therefore reports open nodes of live sessions:
the process of such a session may have no credentials.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from bindery_core.errors import BadRequest, NoSuchNode, Unauthorized, VersionConflict
from bindery_metadata.layout.layout import BINDERY_ROOT, LedgersLayout
from bindery_metadata.layout.znode_path import ancestors, parent_of
from bindery_metadata.stores.access_lists import AccessList, Credential, Kind, NewNodes, NodeAccess, kind_of, list_of
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout

from bindery_recovery.backup.backup import roots_of

BATCH_NODES: Final = 64
"""Maximum number of nodes that are read or changed at a time."""
PASSES_MAX: Final = 4
"""Maximum number of passes of `apply`."""
EXAMPLES_MAX: Final = 10
"""Maximum number of paths that are kept as examples of a kind."""
UNREADABLE: Final = "unreadable"
"""Name, among kinds, of nodes whose list this process may not read."""

Progress = Callable[[int], None]
"""Called with the number of nodes visited so far."""


class AccessStore(MetadataStore, Protocol):
    """A store with access lists, which only ZooKeeper has."""

    @property
    def chroot(self) -> str: ...

    async def access_list(self, path: str) -> NodeAccess: ...

    async def set_access_list(self, path: str, entries: AccessList, *, version: int | None) -> None: ...


@dataclass(slots=True)
class Survey:
    """The access lists of a cluster."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of nodes by root and kind (`Kind`, or UNREADABLE)."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Some paths by kind, at most EXAMPLES_MAX."""
    open_sessions: list[str] = field(default_factory=list)
    """Open ephemeral nodes, at most EXAMPLES_MAX: their processes may have no credentials."""
    open_sessions_count: int = 0

    @property
    def nodes(self) -> int:
        return sum(counter.total() for counter in self.counts.values())

    def count(self, kind: str) -> int:
        """Return the number of nodes of a kind."""
        return sum(counter[kind] for counter in self.counts.values())

    def add(self, root: str, path: str, kind: str, *, is_ephemeral: bool) -> None:
        self.counts.setdefault(root, Counter())[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES_MAX:
            examples.append(path)
        if kind == Kind.OPEN and is_ephemeral:
            self.open_sessions_count += 1
            if len(self.open_sessions) < EXAMPLES_MAX:
                self.open_sessions.append(path)


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of `apply`."""

    replaced: int
    passes: int
    is_settled: bool
    """Whether the last pass found nothing to replace."""
    survey: Survey
    """The lists that the last pass read, before it replaced them."""


def access_roots(layout: LedgersLayout, *, chroot: str = "") -> tuple[str, ...]:
    """Return the roots of all trees of a cluster. `/` is one of them only with a chroot: otherwise, it is shared with
    other programs."""
    above = ["/"] if chroot else []
    above += [path for path in ancestors(layout.root) if path != "/"]
    return (*above, *roots_of(layout), parent_of(znode_layout.BROKERS_ROOT))


class Pace:
    """Keeps the number of visited nodes below `rate` per second. 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next_s = 0.0

    async def wait(self, nodes: int) -> None:
        """Wait until `nodes` more nodes may be visited."""
        if not self._rate:
            return
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_s)
        self._next_s = start_s + nodes / self._rate
        await asyncio.sleep(start_s - now_s)


async def survey(
    store: AccessStore,
    layout: LedgersLayout,
    credentials: Sequence[Credential],
    *,
    rate: float = 0.0,
    progress: Progress = lambda _: None,
) -> Survey:
    """Read all lists. `rate`: maximum number of nodes per second; 0: no limit. Raises MetadataUnavailable."""
    found = Survey()
    pace = Pace(rate)
    for root, members in _trees(layout, store.chroot):
        async for path, node in _walk(store, root, pace, has_children=members):
            kind = kind_of(node.entries, credentials) if node is not None else UNREADABLE
            found.add(root, path, kind, is_ephemeral=node is not None and node.is_ephemeral)
            progress(found.nodes)
    return found


async def apply(
    store: AccessStore,
    layout: LedgersLayout,
    credentials: Sequence[Credential],
    new_nodes: NewNodes,
    *,
    rate: float = 0.0,
    progress: Progress = lambda _: None,
) -> Applied:
    """Give all nodes the list of `new_nodes`, as in the table of the module.

    Raises BadRequest if there are no credentials, or if the servers do not compute identities as expected; nothing is
    changed then. Raises MetadataUnavailable and MetadataOutcomeUnknown; run it again then.
    """
    if not credentials:
        raise BadRequest("access lists cannot be changed without credentials for ZooKeeper")
    target = list_of(new_nodes, credentials)
    await _prove(store, target)
    pace = Pace(rate)
    replaced, passes = 0, 0
    while True:
        passes += 1
        found = Survey()
        before = replaced
        for root, members in _trees(layout, store.chroot):
            batch: list[tuple[str, NodeAccess]] = []
            async for path, node in _walk(store, root, pace, has_children=members):
                kind = kind_of(node.entries, credentials) if node is not None else UNREADABLE
                found.add(root, path, kind, is_ephemeral=node is not None and node.is_ephemeral)
                if node is not None and kind != Kind.OTHER and set(node.entries) != set(target):
                    batch.append((path, node))
                if len(batch) >= BATCH_NODES:
                    replaced += await _replace(store, batch, target)
                    batch = []
                progress(found.nodes)
            replaced += await _replace(store, batch, target)
        if replaced == before or passes == PASSES_MAX:
            return Applied(replaced, passes, replaced == before, found)


def _trees(layout: LedgersLayout, chroot: str) -> list[tuple[str, bool]]:
    """Return the roots, and whether all nodes below the root belong to the cluster."""
    above = ("/", *ancestors(layout.root))
    return [(root, root not in above) for root in access_roots(layout, chroot=chroot)]


async def _replace(store: AccessStore, batch: Sequence[tuple[str, NodeAccess]], target: AccessList) -> int:
    return sum(await asyncio.gather(*(_replace_one(store, path, node, target) for path, node in batch)))


async def _replace_one(store: AccessStore, path: str, node: NodeAccess, target: AccessList) -> bool:
    """Return whether the list was replaced; not if the node was deleted, or another process changed its list."""
    try:
        await store.set_access_list(path, target, version=node.version)
    except (NoSuchNode, VersionConflict, Unauthorized):
        return False
    return True


async def _walk(
    store: AccessStore, root: str, pace: Pace, *, has_children: bool
) -> AsyncIterator[tuple[str, NodeAccess | None]]:
    """Yield every node at and below `root`, parents first; None for a node whose list may not be read."""
    waiting = [root]
    while waiting:
        batch, waiting = waiting[-BATCH_NODES:], waiting[:-BATCH_NODES]
        await pace.wait(len(batch))
        for path, is_there, node, names in await asyncio.gather(*(_read(store, path) for path in batch)):
            if not is_there:
                continue
            yield path, node
            if has_children:
                waiting += [f"{path}/{name}" for name in reversed(names)]


async def _read(store: AccessStore, path: str) -> tuple[str, bool, NodeAccess | None, list[str]]:
    """Return the path, whether there is such a node, its list, and the names of its children."""
    try:
        node = await store.access_list(path)
        names = [] if node.is_ephemeral or not node.children_count else await store.children(path)
    except NoSuchNode:
        return path, False, None, []
    except Unauthorized:
        return path, True, None, []
    return path, True, node, names


async def _prove(store: AccessStore, target: AccessList) -> None:
    """Give the list to a node of our own and use that node. Raises BadRequest if that fails.

    A server that computes identities by another algorithm would lock everybody out of nodes with this list.
    """
    path = await store.create(f"{BINDERY_ROOT}/access-probe-", ephemeral=True, sequential=True, make_parents=True)
    try:
        await store.set_access_list(path, target, version=None)
        usable = set((await store.access_list(path)).entries) == set(target)
        await store.set(path, b"used", version=None)
    except Unauthorized:
        usable = False
    finally:
        await store.delete(path, version=None)
    if not usable:
        raise BadRequest(
            "nothing was changed: the ZooKeeper servers do not accept these credentials for their own access list. "
            "The servers must use the default digestAlg (SHA1) of their DigestAuthenticationProvider"
        )
