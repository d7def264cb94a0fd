"""Split a bundle wherever it is: here, at another broker of Bindery, or at a Pulsar broker.

| owner              | request                                                           |
|--------------------|-------------------------------------------------------------------|
| this broker, none  | none: this broker takes the bundle if it has no owner, as Pulsar does |
| another of Bindery | `POST /v1/namespaces/T/N/split`                                   |
| a Pulsar broker    | `PUT /admin/v2/namespaces/T/N/<bundle>/split`                     |

A split goes on if the client that asked for it disconnects.
"""

import asyncio
import json
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from bindery_core.errors import BadRequest, BinderyError, TryAgain
from bindery_kit.observability.logs import error_fields, get_logger

from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner, OwnedByPulsar
from bindery_broker.http.peers.unloads import REASON_SHOWN_MAX, Unloads
from bindery_broker.http.proxy import Proxy
from bindery_broker.ownership.bundles import Bundle, bundles_of
from bindery_broker.ownership.ownership import RemoteOwner
from bindery_broker.ownership.splits import BY_POSITIONS, Split

log: Final = get_logger(__name__)


class Splits:
    def __init__(self, broker: Broker, proxy: Proxy, unloads: Unloads) -> None:
        self._broker = broker
        self._proxy = proxy
        self._unloads = unloads

    async def split(self, bundle: Bundle, how: Split, *, unload: bool, only_here: bool = False) -> list[Bundle]:
        """Split a bundle at its owner. Returns what it consists of then: the bundle itself if nothing was to be done.

        `unload`: unload the parts then, so that several brokers can take them. An error of that is logged. `only_here`:
        raise NotOwner if another broker owns it. Raises NotOwner or TryAgain (retry), BadRequest, Conflict if the
        bundle was split by others meanwhile, MetadataUnavailable, OutcomeUnknown.
        """
        return await asyncio.shield(asyncio.ensure_future(self._split(bundle, how, unload, only_here)))

    async def _split(self, bundle: Bundle, how: Split, unload: bool, only_here: bool) -> list[Bundle]:
        broker = self._broker
        try:
            owner = await broker.ownership.locate(bundle, take=True)
        except OwnedByPulsar as error:
            owner = RemoteOwner(error.http_url, is_pulsar=True)
        if owner is not None:
            if only_here:
                raise NotOwner("another broker owns the bundle; retry", bundle=str(bundle), owner=owner.http_url)
            await self._at(owner, bundle, how, unload)
            broker.ownership.forget_remote(bundle)
            found = bundles_of(*bundle[:2], await broker.ownership.divisions.stored(bundle.tenant, bundle.namespace))
            return [one for one in found if bundle.lower <= one.lower and one.upper <= bundle.upper]
        topics = await broker.directory.topics(bundle.tenant, bundle.namespace)
        points = how.points(bundle, topics)
        if not points:
            return [bundle]
        if not await broker.split(bundle, points):
            raise NotOwner("the bundle's owner is changing; retry", bundle=str(bundle))
        parts = bundle.parts(points)
        if unload:
            try:
                await self._unloads.unload(parts, hold_s=None)
            except BinderyError as error:
                log.warning("parts_not_unloaded", bundle=str(bundle), **error_fields(error))
        return parts

    async def _at(self, owner: RemoteOwner, bundle: Bundle, how: Split, unload: bool) -> None:
        path = f"namespaces/{quote(bundle.tenant, safe='')}/{quote(bundle.namespace, safe='')}"
        positions = list(how.positions) if how.algorithm == BY_POSITIONS else []
        if owner.is_pulsar:
            query = urlencode({"unload": str(unload).lower(), "splitAlgorithmName": how.algorithm})
            body = json.dumps(positions).encode() if positions else b""
            call = self._proxy.call("PUT", owner.http_url, f"/admin/v2/{path}/{bundle.name}/split?{query}", body)
        else:
            wanted = {"bundle": bundle.name, "algorithm": how.algorithm, "positions": positions, "unload": unload}
            call = self._proxy.call("POST", owner.http_url, f"/v1/{path}/split", json.dumps(wanted).encode())
        status, answer = await call
        if status < 300:
            return
        self._broker.ownership.forget_remote(bundle)
        facts: dict[str, Any] = {"bundle": str(bundle), "owner": owner.http_url, "answer": _reason(answer)}
        if 400 <= status < 500:
            raise BadRequest("the owner of the bundle refuses to split it", status=status, **facts)
        raise TryAgain("the owner of the bundle did not split it; retry", status=status, **facts)


def _reason(answer: bytes) -> str:
    """Return the reason in the answer of a broker of either kind."""
    try:
        found = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = {}
    text = found.get("detail") or found.get("reason") or answer.decode(errors="replace")
    return str(text)[:REASON_SHOWN_MAX]
