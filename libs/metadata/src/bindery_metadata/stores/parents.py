"""Create parent nodes on demand, and delete them when they are empty.

Two clients may do so concurrently, so each step accepts that the other client has already done it or undone it.
"""

from typing import Final

from bindery_core.errors import AlreadyExists, MetadataUnavailable, NoSuchNode, NotEmpty

from bindery_metadata.layout.znode_path import ancestors, parent_of
from bindery_metadata.stores.store import MetadataStore

ATTEMPTS_MAX: Final = 20
"""Maximum number of attempts to create a node whose parents other clients delete meanwhile."""


async def make_path(store: MetadataStore, path: str) -> None:
    """Create `path` and its ancestors, if missing, as persistent and empty nodes."""
    for node in (*ancestors(path), path):
        try:
            await store.create(node)
        except AlreadyExists:
            continue
        except NoSuchNode:
            return  # an ancestor was deleted again; the caller's own create then fails and is repeated


async def create_with_parents(
    store: MetadataStore, path: str, data: bytes, *, ephemeral: bool = False, sequential: bool = False
) -> str:
    """Create `path` and missing parents. Raises MetadataUnavailable if they are deleted again ATTEMPTS_MAX times."""
    for _ in range(ATTEMPTS_MAX):
        try:
            return await store.create(path, data, ephemeral=ephemeral, sequential=sequential)
        except NoSuchNode:
            await make_path(store, parent_of(path))
    raise MetadataUnavailable("the parents of a new node are deleted repeatedly", path=path, attempts=ATTEMPTS_MAX)


async def prune_empty_parents(store: MetadataStore, path: str, *, up_to: str) -> None:
    """Delete the empty parents of `path`, bottom up, below the ancestor `up_to`."""
    node = parent_of(path)
    while node != up_to and node.startswith(up_to.rstrip("/") + "/"):
        try:
            await store.delete(node, version=None)
        except NoSuchNode:
            pass
        except NotEmpty:
            return
        node = parent_of(node)
