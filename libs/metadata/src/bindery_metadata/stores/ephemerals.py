"""Removing one's own ephemeral node, and never that of a session which took the same path in between.

A version does not tell two nodes of one path apart: each begins at 0. Nor does writing before deleting: the write would
already hit the other's node. But ZooKeeper counts the children ever made under a parent, and names sequential nodes by
that count. So one transaction makes a sequential node, deletes it *by the name that it has if no child was made since
the count was read*, and deletes ours:

    count := creates of the parent;  ours := the node's owner is our session
    multi: create sequential P, delete P<count>, delete the node under its version

If anybody made a node there since (ours taken by another among them), P has another name and nothing happens. Whoever
makes nodes there takes part without knowing it, BookKeeper's workers too. Nothing of it is ever seen to stand.
"""

from collections.abc import Sequence
from typing import Final

from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable, NoSuchNode, VersionConflict

from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Op, Stat

ATTEMPTS_MAX: Final = 50
"""Nodes in a row that others may make under the same parent meanwhile."""
PROBE_PREFIX: Final = "release-"


async def delete_own(store: MetadataStore, path: str, session_id: int, *, together_with: Sequence[Op] = ()) -> bool:
    """Delete the ephemeral node `path` if it is of session `session_id`, atomically with the other operations.

    False: it is not (any more), and nothing was done. Raises the error of an operation of `together_with` (nothing was
    done); MetadataUnavailable, also when others are faster ATTEMPTS_MAX times; MetadataOutcomeUnknown when an answer
    was lost and the node is gone since, but operations went with it whose outcome the caller must look up.
    """
    probe = f"{parent_of(path)}/{PROBE_PREFIX}"
    lost: MetadataOutcomeUnknown | None = None
    for _ in range(ATTEMPTS_MAX):
        parent = await store.exists(parent_of(path))
        stat = await store.exists(path)
        if parent is None or stat is None or stat.ephemeral_owner != session_id:
            if lost and together_with:
                raise lost
            return lost is not None
        expected = f"{probe}{_creates(parent):010d}"
        try:
            await store.multi(
                [Create(probe, sequential=True), Delete(expected, 0), Delete(path, stat.version), *together_with]
            )
            return True
        except (NoSuchNode, VersionConflict) as error:
            if error.facts.get("path") not in (path, probe, expected):
                raise
        except MetadataOutcomeUnknown as error:
            lost = error
            await store.sync(path)
    raise MetadataUnavailable("other clients change the parent node repeatedly", path=path, attempts=ATTEMPTS_MAX)


def _creates(parent: Stat) -> int:
    """Children ever made: the children's version, of 32 bits, counts each creation and each deletion once."""
    return (parent.children_version + parent.children_count) % 2**32 // 2
