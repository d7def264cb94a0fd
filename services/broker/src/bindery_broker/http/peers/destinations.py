"""Which brokers can take the bundles that this one gives up, and the mark of this one that it gets no others."""

from collections.abc import Collection
from zlib import crc32

from bindery_core.errors import BinderyError, NoSuchNode
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar import znode_layout

from bindery_broker.broker import Broker
from bindery_broker.errors import NoSuchBroker
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import broker_id, may_take_bundles, web_url
from bindery_broker.ownership.registration import publish

log = get_logger(__name__)


class Destinations:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.name = broker_id(broker.url)

    async def choose(self, bundle: Bundle, *, exclude: Collection[str] = ()) -> str | None:
        """Return the broker, `host:port`, that a bundle is moved to; None: no other one can take it."""
        store = self._broker.store
        found: list[str] = []
        try:
            names = await store.children(znode_layout.BROKERS_ROOT)
        except NoSuchNode:
            return None
        for name in names:
            if name == self.name or name in exclude:
                continue
            try:
                node = await store.get(znode_layout.broker(name))
            except NoSuchNode:
                continue
            if may_take_bundles(node.data):
                found.append(name)
        return max(found, key=lambda name: crc32(f"{bundle} {name}".encode()), default=None)

    async def url(self, name: str) -> str:
        """Return the address of a live broker, `host:port`. Raises NoSuchBroker."""
        try:
            found = web_url((await self._broker.store.get(znode_layout.broker(name))).data)
        except NoSuchNode:
            found = ""
        if not found:
            raise NoSuchBroker("no broker of this name is live", broker=name)
        return found

    async def mark(self, *, draining: bool) -> None:
        """Tell the other brokers whether this one takes bundles. An error is logged: they ask, and are refused."""
        self._broker.draining = draining
        try:
            await publish(self._broker.leases, url=self._broker.url, draining=draining)
        except BinderyError as error:
            log.warning("draining_not_published", draining=draining, **error_fields(error))
