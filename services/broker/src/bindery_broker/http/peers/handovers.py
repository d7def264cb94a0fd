"""Hand a bundle over to another broker, so that no request fails.

The steps before the release are those of `Ownership.unload`. Then the next owner is asked to take the bundle
(`POST /v1/namespaces/T/N/take`), with the topics that were used last, which it opens at once. Until then, requests
for the topics wait here (`AtOwner`); then they are passed on. If it does not take the bundle, another broker is asked.
If none does, the bundle has no owner, and the next request for one of its topics makes a broker take it.

Safety does not depend on any of this: whoever takes the bundle fences the ledgers of a broker that still writes.
"""

import asyncio
from typing import Final
from urllib.parse import quote

import msgspec
from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import get_logger

from bindery_broker.broker import Broker
from bindery_broker.http.peers.destinations import Destinations
from bindery_broker.http.proxy import Proxy
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.holds import HOLD_S_DEFAULT

EAGER_MAX: Final = 1_000
"""Maximum number of topics that the next owner opens at once; others are opened by their next request."""
TAKE_TIMEOUT_S: Final = 5.0
"""Maximum seconds until the next owner answers that it has taken the bundle."""
ASKED_MAX: Final = 3
"""Maximum number of brokers that are asked to take a bundle."""

log = get_logger(__name__)


class HandOvers:
    def __init__(self, broker: Broker, proxy: Proxy) -> None:
        self.destinations = Destinations(broker)
        self._broker = broker
        self._proxy = proxy

    async def move(self, bundle: Bundle) -> bool:
        """Hand a bundle over to the broker that is chosen. Returns False, with nothing changed, if there is none, or if
        this broker does not own the bundle. Raises MetadataUnavailable, with nothing changed."""
        to = self.destinations.choose(bundle)
        if to is None:
            return False
        began = self._broker.now()
        topics = [name.local for name in self._broker.topics.in_use(bundle, EAGER_MAX)]
        took: list[str] = []

        async def bring() -> bool:
            taker = await self._bring(bundle, to, topics)
            took.extend([taker] if taker else [])
            return bool(taker)

        moved = await self._broker.unload(bundle, hold_s=HOLD_S_DEFAULT, destination=to, bring=bring)
        if moved:
            seconds = self._broker.now() - began
            self._broker.metrics.handed_over(seconds, is_taken=bool(took))
            log.info(
                "bundle_handed_over",
                bundle=str(bundle),
                to=took[0] if took else None,
                topics=len(topics),
                ms=round(seconds * 1000),
            )
        return moved

    async def _bring(self, bundle: Bundle, to: str, topics: list[str]) -> str:
        """Make a broker take a bundle without owner: `to`, or another one. Returns its name; empty: none took it."""
        asked: set[str] = set()
        chosen: str | None = to
        while chosen is not None and len(asked) < ASKED_MAX:
            asked.add(chosen)
            if await self._take(bundle, chosen, topics):
                return chosen
            chosen = self.destinations.choose(bundle, exclude=asked)
        return ""

    async def _take(self, bundle: Bundle, broker: str, topics: list[str]) -> bool:
        path = f"/v1/namespaces/{quote(bundle.tenant, safe='')}/{quote(bundle.namespace, safe='')}/take"
        body = msgspec.json.encode({"bundle": bundle.name, "topics": topics})
        try:
            async with asyncio.timeout(TAKE_TIMEOUT_S):
                url = self.destinations.url(broker)
                status, answer = await self._proxy.call("POST", url, path, body, timeout_s=TAKE_TIMEOUT_S)
        except (BinderyError, TimeoutError) as error:
            log.warning("bundle_not_taken", bundle=str(bundle), broker=broker, error=str(error) or "timeout")
            return False
        if status != 200:
            reason = answer[:300].decode(errors="replace")
            log.warning("bundle_not_taken", bundle=str(bundle), broker=broker, status=status, answer=reason)
        return status == 200
