"""Delete an ephemeral node of a session, but never one that another session has created at the same path since.

A version does not distinguish two nodes at one path, because each begins at 0. A write before the deletion does not
help either, because it could already change the other session's node. But ZooKeeper counts the children ever created
under a parent and names sequential nodes by that count. Therefore one transaction creates a sequential node, deletes it
*by the name that it has if no child was created since the count was read*, and deletes the session's node:

    read: the parent's count of created children, then the version and the owner of the node; stop if not the owner
    multi: create sequential P, delete P<count>, delete the node with its version

If any client has created a node under the parent since, P has another name and nothing is applied. This holds for all
clients, including BookKeeper's workers. No other client ever sees the sequential node.
"""

from collections.abc import Sequence
from typing import Final

from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable, NoSuchNode, VersionConflict

from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Op, Stat

ATTEMPTS_MAX: Final = 50
"""Maximum number of consecutive attempts that fail because other clients create nodes under the same parent."""
PROBE_PREFIX: Final = "release-"
"""Prefix of the sequential node."""


async def delete_own(store: MetadataStore, path: str, session_id: int, *, together_with: Sequence[Op] = ()) -> bool:
    """Delete the ephemeral node `path` if session `session_id` owns it, atomically with `together_with`.

    Return False if the session does not own the node; nothing was applied. Raises the error of an operation of
    `together_with` (nothing was applied); MetadataUnavailable, also after ATTEMPTS_MAX conflicts;
    MetadataOutcomeUnknown if a response was lost and the node no longer belongs to the session: the caller must then
    determine the outcome of `together_with`.
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
    """Return the number of children ever created. The 32-bit children's version counts each creation and deletion."""
    return (parent.children_version + parent.children_count) % 2**32 // 2
