"""Unload bundles wherever they are: here, at another broker of Bindery, or at a Pulsar broker.

| owner              | request                                                        |
|--------------------|----------------------------------------------------------------|
| this broker        | none                                                           |
| another of Bindery | `POST /v1/namespaces/T/N/unload?bundle=...&hold_s=...`         |
| a Pulsar broker    | `PUT /admin/v2/namespaces/T/N/<bundle>/unload`                 |
| none               | none: there is nothing to unload                               |

An unload goes on if the client that asked for it disconnects.
"""

import asyncio
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from bindery_core.errors import NoSuchNode, TryAgain
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout

from bindery_broker.broker import Broker
from bindery_broker.http.proxy import Proxy
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.holds import HOLD_S_DEFAULT
from bindery_broker.ownership.ownership import RemoteOwner, Unloaded
from bindery_broker.ownership.records import is_pulsar_broker

REASON_SHOWN_MAX: Final = 300
"""Maximum characters of another broker's reason in an error."""


class Unloads:
    def __init__(self, broker: Broker, proxy: Proxy) -> None:
        self._broker = broker
        self._proxy = proxy

    async def unload(
        self, bundles: Sequence[Bundle], *, hold_s: float | None, only_here: bool = False
    ) -> list[Unloaded]:
        """Unload bundles of one namespace at their owners. `only_here`: leave out those of other brokers.

        `hold_s`: seconds for which no broker of Bindery takes them then; None: HOLD_S_DEFAULT if a Pulsar broker is
        registered, otherwise 0. If some bundles fail, the others are unloaded nevertheless. Then raises the first
        error: NotOwner or TryAgain (retry), MetadataUnavailable, OutcomeUnknown.
        """
        if hold_s is None:
            hold_s = HOLD_S_DEFAULT if await has_pulsar_brokers(self._broker.store) else 0.0
        task = asyncio.ensure_future(
            asyncio.gather(*(self._one(bundle, hold_s, only_here) for bundle in bundles), return_exceptions=True)
        )
        done: list[Unloaded] = []
        for result in await asyncio.shield(task):
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    async def _one(self, bundle: Bundle, hold_s: float, only_here: bool) -> Unloaded:
        broker = self._broker
        if await broker.unload(bundle, hold_s=hold_s):
            return Unloaded(bundle, broker.url)
        owner = None if only_here else await broker.ownership.owner(bundle)
        if owner is None:
            return Unloaded(bundle, None)
        await self._at(owner, bundle, hold_s)
        broker.ownership.forget_remote(bundle)
        return Unloaded(bundle, owner.http_url)

    async def _at(self, owner: RemoteOwner, bundle: Bundle, hold_s: float) -> None:
        space = f"{quote(bundle.tenant, safe='')}/{quote(bundle.namespace, safe='')}"
        if owner.is_pulsar:
            call = self._proxy.call("PUT", owner.http_url, f"/admin/v2/namespaces/{space}/{bundle.name}/unload", b"")
        else:
            path = f"/v1/namespaces/{space}/unload?bundle={bundle.name}&hold_s={hold_s:g}"
            call = self._proxy.call("POST", owner.http_url, path, b"{}")
        status, answer = await call
        if status >= 300:
            raise TryAgain(
                "the owner of a bundle did not unload it; retry",
                bundle=str(bundle),
                owner=owner.http_url,
                status=status,
                answer=answer[:REASON_SHOWN_MAX].decode(errors="replace"),
            )


async def has_pulsar_brokers(store: MetadataStore) -> bool:
    """Return whether a broker of Apache Pulsar is registered in the cluster."""
    try:
        names = await store.children(znode_layout.BROKERS_ROOT)
    except NoSuchNode:
        return False
    for name in names:
        try:
            node = await store.get(f"{znode_layout.BROKERS_ROOT}/{name}")
        except NoSuchNode:
            continue
        if is_pulsar_broker(node.data):
            return True
    return False
