"""Which brokers can take the bundles that this one gives up, and the mark of this one that it gets no others."""

from collections.abc import Collection

from bindery_broker.broker import Broker
from bindery_broker.errors import NoSuchBroker
from bindery_broker.ownership.bundles import Bundle


class Destinations:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.name = broker.balancing.name

    def choose(self, bundle: Bundle, *, exclude: Collection[str] = ()) -> str | None:
        """Return the broker, `host:port`, that a bundle is moved to; None: no other one can take it."""
        return self._broker.balancing.choose(bundle, exclude={self.name, *exclude})

    def url(self, name: str) -> str:
        """Return the address of a live broker, `host:port`. Raises NoSuchBroker."""
        found = self._broker.balancing.url_of(name)
        if found is None:
            raise NoSuchBroker("no broker of this name is live", broker=name)
        return found

    async def mark(self, *, draining: bool) -> None:
        """Tell the other brokers whether this one takes bundles."""
        balancing = self._broker.balancing
        await (balancing.drain() if draining else balancing.resume())
