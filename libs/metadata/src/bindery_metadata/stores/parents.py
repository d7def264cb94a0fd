"""Nodes that exist only to hold others: made on demand, removed when they became empty.

Two clients do both at once, so each step expects that the other was faster.
"""

from typing import Final

from bindery_core.errors import AlreadyExists, MetadataUnavailable, NoSuchNode, NotEmpty

from bindery_metadata.layout.znode_path import ancestors, parent_of
from bindery_metadata.stores.store import MetadataStore

ATTEMPTS_MAX: Final = 20
"""How often somebody else may prune the parents between making them and using them before we give up."""


async def make_path(store: MetadataStore, path: str) -> None:
    """Create `path` and everything above it, persistent and empty, where missing."""
    for node in (*ancestors(path), path):
        try:
            await store.create(node)
        except AlreadyExists:
            continue
        except NoSuchNode:
            return  # pruned behind us; the caller's own create will tell and start again


async def create_with_parents(
    store: MetadataStore, path: str, data: bytes, *, ephemeral: bool = False, sequential: bool = False
) -> str:
    """Create `path`, making missing parents. Raises MetadataUnavailable when they vanish again ATTEMPTS_MAX times."""
    for _ in range(ATTEMPTS_MAX):
        try:
            return await store.create(path, data, ephemeral=ephemeral, sequential=sequential)
        except NoSuchNode:
            await make_path(store, parent_of(path))
    raise MetadataUnavailable("the parents of a new node are deleted repeatedly", path=path, attempts=ATTEMPTS_MAX)


async def prune_empty_parents(store: MetadataStore, path: str, *, up_to: str) -> None:
    """Remove the parents of `path` that are empty, bottom up, `up_to` (an ancestor) left standing."""
    node = parent_of(path)
    while node != up_to and node.startswith(up_to.rstrip("/") + "/"):
        try:
            await store.delete(node, version=None)
        except NoSuchNode:
            pass
        except NotEmpty:
            return
        node = parent_of(node)
