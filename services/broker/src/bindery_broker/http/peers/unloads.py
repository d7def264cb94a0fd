"""Unload bundles wherever they are: here, at another broker of Bindery, or at a Pulsar broker.

| owner              | request                                                        |
|--------------------|----------------------------------------------------------------|
| this broker        | none                                                           |
| another of Bindery | `POST /v1/namespaces/T/N/unload?bundle=...&hold_s=...`         |
| a Pulsar broker    | `PUT /admin/v2/namespaces/T/N/<bundle>/unload`                 |
| none               | none: there is nothing to unload                               |

With a destination, the bundle goes to that broker, of either kind: only it may take the bundle during the hold. A
broker of Bindery is asked to take it. A lookup of one of its topics makes a Pulsar broker take it, so a bundle without
topics is left to the next client, as is one that had neither topics nor an owner. Pulsar brokers move bundles among
themselves with `destinationBroker`. If the clients of a Pulsar broker ask it first, it takes the bundle back; that is
an error.

An unload goes on if the client that asked for it disconnects.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from bindery_core.errors import BadRequest, NoSuchNode, TryAgain
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout

from bindery_broker.broker import Broker
from bindery_broker.http.proxy import ANSWER_TIMEOUT_S, Proxy
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.holds import HOLD_S_DEFAULT
from bindery_broker.ownership.ownership import RemoteOwner, Unloaded
from bindery_broker.ownership.records import is_pulsar_broker, web_url

REASON_SHOWN_MAX: Final = 300
"""Maximum characters of another broker's reason in an error."""


class Unloads:
    def __init__(self, broker: Broker, proxy: Proxy) -> None:
        self._broker = broker
        self._proxy = proxy

    async def unload(
        self, bundles: Sequence[Bundle], *, hold_s: float | None, only_here: bool = False, destination: str = ""
    ) -> list[Unloaded]:
        """Unload bundles of one namespace at their owners. `only_here`: leave out those of other brokers, and let the
        caller make the destination take the bundles. `destination`: name of the broker that gets them, `host:port`.

        `hold_s`: seconds for which no broker of Bindery takes them then; None: HOLD_S_DEFAULT if a Pulsar broker is
        registered, otherwise 0. If some bundles fail, the others are unloaded nevertheless. Then raises the first
        error: NotOwner or TryAgain (retry), BadRequest if the destination is not registered, MetadataUnavailable,
        OutcomeUnknown.
        """
        to = await self._destination(destination) if destination else None
        if hold_s is None:
            hold_s = HOLD_S_DEFAULT if to is not None or await has_pulsar_brokers(self._broker.store) else 0.0
        task = asyncio.ensure_future(
            asyncio.gather(*(self._one(bundle, hold_s, only_here, to) for bundle in bundles), return_exceptions=True)
        )
        done: list[Unloaded] = []
        for result in await asyncio.shield(task):
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    async def _one(self, bundle: Bundle, hold_s: float, only_here: bool, to: "_Destination | None") -> Unloaded:
        if to is None:
            return await self._unload(bundle, hold_s, only_here, None)
        if await self._broker.owner_url(bundle) == to.url:
            return Unloaded(bundle, None)
        done = await self._unload(bundle, hold_s, only_here, to)
        if not only_here and await self._broker.owner_url(bundle) != to.url:
            await self._bring(bundle, to, was_owned=done.owner is not None)
        return done

    async def _unload(self, bundle: Bundle, hold_s: float, only_here: bool, to: "_Destination | None") -> Unloaded:
        broker = self._broker
        if await broker.unload(bundle, hold_s=hold_s, destination=to.name if to is not None else ""):
            return Unloaded(bundle, broker.url)
        owner = None if only_here else await broker.ownership.owner(bundle)
        if owner is None:
            return Unloaded(bundle, None)
        await self._at(owner, bundle, hold_s, to)
        broker.ownership.forget_remote(bundle)
        return Unloaded(bundle, owner.http_url)

    async def _destination(self, name: str) -> "_Destination":
        name = name.removeprefix("http://").removeprefix("https://").rstrip("/")
        try:
            record = (await self._broker.store.get(znode_layout.broker(name))).data
        except NoSuchNode:
            raise BadRequest("the destination is not a live broker", destination=name) from None
        return _Destination(name, web_url(record), is_pulsar_broker(record))

    async def _bring(self, bundle: Bundle, to: "_Destination", *, was_owned: bool) -> None:
        """Make the destination take a bundle that has no owner. Raises TryAgain if another broker has taken it."""
        topics = await self._broker.directory.topics(bundle.tenant, bundle.namespace)
        topic = next((one for one in topics if bundle.contains(one)), None)
        if topic is None and (to.is_pulsar or not was_owned):
            return
        if to.url == self._broker.url:
            await self._broker.ownership.locate(bundle, take=True)
            return
        if to.is_pulsar:
            assert topic is not None
            path = f"/lookup/v2/topic/persistent/{_path(bundle)}/{quote(topic.local, safe='')}?authoritative=true"
            status, answer = await self._proxy.call("GET", to.url, path)
        else:
            status, answer = await ask_to_take(self._proxy, to.url, bundle)
        self._broker.ownership.forget_remote(bundle)
        owner = await self._broker.owner_url(bundle)
        if owner != to.url:
            raise TryAgain(
                "the bundle was unloaded, but the destination did not take it; stop the clients of its former owner, "
                "and retry",
                bundle=str(bundle),
                destination=to.name,
                owner=owner,
                status=status,
                answer=answer[:REASON_SHOWN_MAX].decode(errors="replace"),
            )

    async def _at(self, owner: RemoteOwner, bundle: Bundle, hold_s: float, to: "_Destination | None") -> None:
        space = _path(bundle)
        if owner.is_pulsar:
            path = f"/admin/v2/namespaces/{space}/{bundle.name}/unload"
            if to is not None and to.is_pulsar:
                path += f"?destinationBroker={quote(to.name, safe='')}"
            call = self._proxy.call("PUT", owner.http_url, path, b"")
        else:
            path = f"/v1/namespaces/{space}/unload?bundle={bundle.name}&hold_s={hold_s:g}"
            if to is not None:
                path += f"&destination={quote(to.name, safe='')}"
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


@dataclass(frozen=True, slots=True)
class _Destination:
    """A registered broker."""

    name: str
    """`host:port`."""
    url: str
    is_pulsar: bool


async def ask_to_take(
    proxy: Proxy, url: str, bundle: Bundle, *, timeout_s: float = ANSWER_TIMEOUT_S
) -> tuple[int, bytes]:
    """Ask the broker of Bindery at `url` to take a bundle that has no owner. Returns status and body of its answer."""
    body = json.dumps({"bundle": bundle.name}).encode()
    return await proxy.call("POST", url, f"/v1/namespaces/{_path(bundle)}/take", body, timeout_s=timeout_s)


def _path(bundle: Bundle) -> str:
    """Return the part of a path that names the bundle's namespace."""
    return f"{quote(bundle.tenant, safe='')}/{quote(bundle.namespace, safe='')}"


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
