"""List namespaces and topics page by page, with a bounded number of reads of the metadata store for each page.

A page takes the lists of names from where it begins, in order, until it is full or until READS_MAX lists were read from
the store. A page may therefore have fewer names than it could, or none, and still not be the last. Lists are kept while
they do not change (`CachedChildren`). Each page begins with one read, after which lists from memory are not older than
that read, so that a name that was created through another broker is in the next page. See docs/adr/0022.

Topics are ordered as the texts `tenant/namespace/topic`. In this order the namespaces of a tenant, and the topics of a
namespace, follow one another, but `a-b/...` comes before `a/...`, because `-` comes before `/`.

| list       | `after` of a page that ended early           | which is above                                         |
|------------|----------------------------------------------|--------------------------------------------------------|
| topics     | `tenant/namespace0`, `tenant0` (`0` follows  | `tenant/namespace/`, `tenant/` with anything behind    |
|            | `/` in ASCII)                                |                                                        |
| namespaces | `tenant/~` (above each character of a name)  | all namespaces of the tenant                           |
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from bindery_core.errors import BinderyError, NoSuchNode
from bindery_kit.observability.logs import get_logger
from bindery_metadata.stores.cached_children import CachedChildren
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

T = TypeVar("T")
READS_MAX: Final = 64
"""Number of lists, read from the store, after which a page ends, full or not. One read takes about 0.5 ms of processor
time. The last group may exceed it."""
GROUP: Final = 16
"""Number of lists that are read at once."""
_PAST_NAMES: Final = "~"
"""Greater than each name of a namespace."""
_PLAIN = re.compile(r"[A-Za-z0-9_*-][A-Za-z0-9._*-]{0,254}", re.ASCII)
"""Nodes whose names are valid local names and encode themselves. Most are, so the others may take longer."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    names: list[str]
    next: str | None
    """The `after` of the next page; None: this is the last one."""


class Names:
    """Lists of what the metadata store has."""

    def __init__(self, store: MetadataStore) -> None:
        self._lists = CachedChildren(store)

    async def local_names(self, tenant: str, namespace: str) -> list[str]:
        """Return the local names of the topics of a namespace, sorted; a partition is a topic. A missing namespace has
        none. Raises MetadataUnavailable."""
        await self._lists.catch_up(znode_layout.MANAGED_LEDGERS_ROOT)
        return await self._local_names(tenant, namespace)

    async def topics(self, *, after: str | None, limit: int, namespace: tuple[str, str] | None = None) -> Page:
        """Return up to `limit` topics, in their short form, that come after `after`; only those of `namespace`
        (tenant, namespace) if it is not None."""
        if namespace is not None:
            prefix = f"{namespace[0]}/{namespace[1]}/"
            return _full_page(_after(prefix, await self.local_names(*namespace), after), limit)
        await self._lists.catch_up(znode_layout.MANAGED_LEDGERS_ROOT)
        found: list[str] = []
        before = self._lists.reads
        async for tenants, spaces in self._groups_of_namespaces(after):
            for some in _groups(spaces):
                lists = await asyncio.gather(*(self._local_names(*space) for space in some))
                for space, names in zip(some, lists, strict=True):
                    found += _after("/".join((*space, "")), names, after)
                if len(found) > limit:
                    return _full_page(found, limit)
                if self._lists.reads - before >= READS_MAX:
                    return Page(found, "/".join(some[-1]) + "0")
            if self._lists.reads - before >= READS_MAX:
                return Page(found, tenants[-1] + "0")
        return Page(found, None)

    async def namespaces(self, *, after: str | None, limit: int) -> Page:
        """Return up to `limit` namespaces, as `tenant/namespace`, of all tenants, ordered by tenant, then by name."""
        await self._lists.catch_up(znode_layout.POLICIES_ROOT)
        before = self._lists.reads
        start_tenant, _, start = (after or "").partition("/")
        tenants = [name for name in await self._children(znode_layout.POLICIES_ROOT) if name >= start_tenant]
        if start == _PAST_NAMES and tenants[:1] == [start_tenant]:
            del tenants[0]
        found: list[str] = []
        for some in _groups(tenants):
            lists = await asyncio.gather(*(self._children(znode_layout.tenant_policies(tenant)) for tenant in some))
            for tenant, names in zip(some, lists, strict=True):
                is_first = after is not None and tenant == start_tenant
                found += [f"{tenant}/{name}" for name in names if not is_first or name > start]
            if len(found) > limit:
                return _full_page(found, limit)
            if self._lists.reads - before >= READS_MAX:
                return Page(found, f"{some[-1]}/{_PAST_NAMES}")
        return Page(found, None)

    async def _local_names(self, tenant: str, namespace: str) -> list[str]:
        names = []
        for child in await self._children(znode_layout.managed_ledgers(tenant=tenant, namespace=namespace)):
            name = child if _PLAIN.fullmatch(child) else _decoded(tenant, namespace, child)
            if name is not None:
                names.append(name)
        names.sort()
        return names

    async def _groups_of_namespaces(
        self, after: str | None
    ) -> AsyncIterator[tuple[Sequence[str], list[tuple[str, str]]]]:
        """Yield tenants and the namespaces in them that may have topics after `after`, in the order of their topics."""
        root = znode_layout.MANAGED_LEDGERS_ROOT
        tenants = [name for name in await self._children(root) if not _is_before(f"{name}/", after)]
        for some in _groups(sorted(tenants, key=lambda name: f"{name}/")):
            lists = await asyncio.gather(*(self._children(f"{root}/{tenant}") for tenant in some))
            spaces = [
                (tenant, name)
                for tenant, names in zip(some, lists, strict=True)
                for name in sorted(names, key=lambda name: f"{name}/")
                if not _is_before(f"{tenant}/{name}/", after)
            ]
            yield some, spaces

    async def _children(self, path: str) -> Sequence[str]:
        try:
            return await self._lists.children(path)
        except NoSuchNode:
            return ()


def _groups(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[first : first + GROUP] for first in range(0, len(items), GROUP)]


def _is_before(prefix: str, after: str | None) -> bool:
    """Return whether every text that begins with `prefix` is before `after`."""
    return after is not None and prefix < after and not after.startswith(prefix)


def _after(prefix: str, names: list[str], after: str | None) -> list[str]:
    """Return prefix + name of the sorted `names`, if it is after `after`."""
    first = 0
    if after is not None and prefix < after:
        first = bisect_right(names, after.removeprefix(prefix)) if after.startswith(prefix) else len(names)
    return [prefix + name for name in names[first:]]


def _full_page(names: list[str], limit: int) -> Page:
    return Page(names[:limit], names[limit - 1] if len(names) > limit else None)


def _decoded(tenant: str, namespace: str, child: str) -> str | None:
    """Return the local name of a topic's node; None: nothing that a topic can have."""
    try:
        return TopicName.of(tenant=tenant, namespace=namespace, local=znode_layout.decode_name(child)).local
    except (BinderyError, UnicodeDecodeError):
        log.warning("odd_topic_node", tenant=tenant, namespace=namespace, node=child)
        return None
