"""Read how namespaces are divided into bundles, and notice changes.

Pulsar stores the boundaries twice. `/admin/policies/T/N` has those of a new namespace. A Pulsar broker copies them to
`/admin/local-policies/T/N` when it first serves the namespace. A split changes the copy, so the copy counts where there
is one. Both are read once and watched.

A split changes `/admin/local-policies/T/N` by compare-and-set, so that splits by several brokers follow one another.
The node is created if there is none. Afterwards the boundaries in the policies are changed as well, for tools that read
them (`Broker.split`).

A broker that has not noticed a change could take a bundle that no longer exists. `is_current` therefore reads again
after a bundle was taken. The boundaries are changed before the bundle that was split is given up, here and by Pulsar.
Source: Pulsar NamespaceBundleFactory, NamespaceService.splitAndOwnBundle, LocalPolicies.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    VersionConflict,
)
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.stores.store import MetadataStore, Node
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.namespaces.records import BUNDLES_MAX, bundles_with, decode, encode
from bindery_broker.ownership.bundles import (
    BOUNDARIES_DEFAULT,
    Boundaries,
    Bundle,
    bundles_of,
    parse_boundaries,
)
from bindery_broker.ownership.holds import RELEASE_RETRY_S, RELEASES_MAX

REMEMBERED_MAX: Final = 10_000
"""Maximum number of namespaces whose boundaries are kept in memory."""

_NEW_LOCAL_POLICIES: Final[dict[str, Any]] = {
    "bookieAffinityGroup": None,
    "namespaceAntiAffinityGroup": None,
    "migrated": False,
}
"""What Pulsar stores besides the bundles in a new node."""

log = get_logger(__name__)


class Divisions:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._known: dict[tuple[str, str], Boundaries] = {}
        """The boundaries that were read last. They may have changed."""
        self._current: set[tuple[str, str]] = set()
        """Namespaces whose boundaries have not changed since they were read."""

    def known(self, topic: TopicName) -> Bundle:
        """Return the bundle of a topic by what was read last, without waiting. `find` must have been called before."""
        return Bundle.of(topic, self._known.get((topic.tenant, topic.namespace), BOUNDARIES_DEFAULT))

    async def find(self, topic: TopicName) -> Bundle:
        """Return the bundle of a topic. Raises Corrupt, MetadataUnavailable."""
        return Bundle.of(topic, await self.boundaries(topic.tenant, topic.namespace))

    async def bundles(self, tenant: str, namespace: str) -> list[Bundle]:
        """Return the bundles of a namespace, ascending. Raises Corrupt, MetadataUnavailable."""
        return bundles_of(tenant, namespace, await self.boundaries(tenant, namespace))

    async def boundaries(self, tenant: str, namespace: str) -> Boundaries:
        """Return the boundaries of a namespace; BOUNDARIES_DEFAULT if it sets none, or does not exist."""
        space = (tenant, namespace)
        if space in self._current:
            return self._known[space]
        is_current = True

        def on_change() -> None:
            nonlocal is_current
            is_current = False
            self._current.discard(space)

        found = await self._read(tenant, namespace, on_change)
        if space not in self._known and len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
            self._current.clear()
        self._known[space] = found
        if is_current:
            self._current.add(space)
        return found

    async def stored(self, tenant: str, namespace: str) -> Boundaries:
        """Read the boundaries of a namespace, also if they are known."""
        return await self._read(tenant, namespace, None)

    async def split(self, bundle: Bundle, points: Sequence[int]) -> None:
        """Divide a bundle at `points` (see `Bundle.parts`); only its owner may call this.

        The call goes on until it is certain whether the division was stored. Raises BadRequest if the namespace would
        have too many bundles, Conflict if it has no such bundle any more, Corrupt, and MetadataUnavailable. Nothing was
        changed then, unless the store has not answered for so long that the session of the owner has expired.
        """
        is_certain = True
        for _ in range(RELEASES_MAX):
            try:
                if await self._try_split(bundle, points, was_tried=not is_certain):
                    return
            except (MetadataUnavailable, MetadataOutcomeUnknown) as error:
                if is_certain and not isinstance(error, MetadataOutcomeUnknown):
                    raise
                is_certain = False
                log.warning("split_outcome_unknown", bundle=str(bundle), **error_fields(error))
                await asyncio.sleep(RELEASE_RETRY_S)
        raise MetadataUnavailable("the bundles of the namespace keep changing", bundle=str(bundle))

    async def _try_split(self, bundle: Bundle, points: Sequence[int], *, was_tried: bool) -> bool:
        """Return whether the division is stored. False: others have changed the node meanwhile."""
        tenant, namespace = bundle.tenant, bundle.namespace
        path = znode_layout.local_policies(tenant=tenant, namespace=namespace)
        await self._store.sync(path)
        node: Node | None = None
        record = dict(_NEW_LOCAL_POLICIES)
        with contextlib.suppress(NoSuchNode):
            node = await self._store.get(path)
            record = decode(node.data, path=path)
        before = await self._read(tenant, namespace, None)
        bundles = bundles_of(tenant, namespace, before)
        if bundle not in bundles:
            if not was_tried or not set(bundle.parts(points)) <= set(bundles):
                raise Conflict("the namespace has no such bundle any more", bundle=str(bundle))
            after = before
        else:
            after = tuple(sorted({*before, *points}))
            if len(after) - 1 > BUNDLES_MAX:
                raise BadRequest(f"a namespace has at most {BUNDLES_MAX} bundles", bundles=len(after) - 1)
            record["bundles"] = bundles_with(after)
            try:
                if node is None:
                    await self._store.create(path, encode(record), make_parents=True)
                else:
                    await self._store.set(path, encode(record), version=node.stat.version)
            except (AlreadyExists, NoSuchNode, VersionConflict):
                return False
        self._known[tenant, namespace] = after
        self._current.discard((tenant, namespace))
        return True

    async def is_current(self, bundle: Bundle) -> bool:
        """Read whether the namespace still has this bundle."""
        found = await self._read(bundle.tenant, bundle.namespace, None)
        return bundle in bundles_of(bundle.tenant, bundle.namespace, found)

    async def _read(self, tenant: str, namespace: str, on_change: Callable[[], None] | None) -> Boundaries:
        for path in (
            znode_layout.local_policies(tenant=tenant, namespace=namespace),
            znode_layout.namespace_policies(tenant=tenant, namespace=namespace),
        ):
            record = await self._record(path, on_change)
            found = parse_boundaries(record.get("bundles"), path=path)
            if found is not None:
                return found
        return BOUNDARIES_DEFAULT

    async def _record(self, path: str, on_change: Callable[[], None] | None) -> dict[str, Any]:
        """Return the record at `path`, empty if there is none; `on_change` is called when it may have changed."""
        while True:
            try:
                return decode((await self._store.get(path, watch=on_change)).data, path=path)
            except NoSuchNode:
                if on_change is None or await self._store.exists(path, watch=on_change) is None:
                    return {}
