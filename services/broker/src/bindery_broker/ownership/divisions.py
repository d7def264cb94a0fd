"""Read how namespaces are divided into bundles, and notice changes.

Pulsar stores the boundaries twice. `/admin/policies/T/N` has those of a new namespace. A Pulsar broker copies them to
`/admin/local-policies/T/N` when it first serves the namespace, and changes the copy when it splits a bundle. So the
copy counts where there is one. Both are read once and watched.

A broker that has not noticed a change could take a bundle that no longer exists. `is_current` therefore reads again
after a bundle was taken. Pulsar changes the boundaries before it gives up the bundle that it has split.
Source: Pulsar NamespaceBundleFactory.
"""

from collections.abc import Callable
from typing import Any, Final

from bindery_core.errors import NoSuchNode
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.namespaces.records import decode
from bindery_broker.ownership.bundles import (
    BOUNDARIES_DEFAULT,
    Boundaries,
    Bundle,
    bundles_of,
    parse_boundaries,
)

REMEMBERED_MAX: Final = 10_000
"""Maximum number of namespaces whose boundaries are kept in memory."""


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
