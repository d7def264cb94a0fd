"""Nodes that only hold other nodes: created on demand, removed when they are empty.

Two clients may do both at once, so each step expects that the other client was faster.
"""

from typing import Final

from bindery_core.errors import AlreadyExists, MetadataUnavailable, NoSuchNode, NotEmpty

from bindery_metadata.layout.znode_path import ancestors, parent_of
from bindery_metadata.stores.store import MetadataStore

ATTEMPTS_MAX: Final = 20
"""Maximum attempts to create a node whose parents other clients delete meanwhile."""


async def make_path(store: MetadataStore, path: str) -> None:
    """Create `path` and its ancestors, persistent and empty, where missing."""
    for node in (*ancestors(path), path):
        try:
            await store.create(node)
        except AlreadyExists:
            continue
        except NoSuchNode:
            return  # an ancestor was deleted again; the caller's own create fails then and is repeated


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
    """Remove the empty parents of `path`, bottom up, but not `up_to` (an ancestor)."""
    node = parent_of(path)
    while node != up_to and node.startswith(up_to.rstrip("/") + "/"):
        try:
            await store.delete(node, version=None)
        except NoSuchNode:
            pass
        except NotEmpty:
            return
        node = parent_of(node)
