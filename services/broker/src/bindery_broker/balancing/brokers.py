"""Follow the registrations of all brokers, with their load reports: `/loadbalance/brokers/<host:port>`.

What is known may be some milliseconds old, and as old as the outage while the metadata store does not answer.
"""

from collections.abc import Callable, Mapping
from functools import partial

from bindery_core.errors import NoSuchNode
from bindery_metadata.stores.followers import End, Followers
from bindery_metadata.stores.store import MetadataStore, Watch
from bindery_pulsar import znode_layout

from bindery_broker.ownership.records import BrokerRecord, decode_broker


class Brokers:
    """Invariant: there is one follower for each broker in `records`."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._followers = Followers()
        self._records: dict[str, BrokerRecord] = {}
        self._following: dict[str, Callable[[], None]] = {}
        """By the name of the broker: stops to follow it."""
        self.on_report: Callable[[str, BrokerRecord], None] = lambda _name, _record: None
        """Called with each record that was read, and the name of its broker."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after a broker has come or gone."""

    @property
    def records(self) -> Mapping[str, BrokerRecord]:
        """Records by name, `host:port`; of either kind of broker. Do not keep the mapping."""
        return self._records

    @property
    def has_pulsar(self) -> bool:
        """Whether a broker of Apache Pulsar is registered."""
        return any(record.is_pulsar for record in self._records.values())

    def start(self) -> None:
        """Follow the brokers until `close`."""
        self._followers.follow("brokers", self._look)

    async def close(self) -> None:
        await self._followers.close()

    async def _look(self, watch: Watch) -> None:
        names = await self._names(watch)
        for name in names - self._following.keys():
            self._following[name] = self._followers.follow("broker", partial(self._look_at, name), broker=name)
        for name in self._following.keys() - names:
            self._following.pop(name)()
            self._gone(name)

    async def _names(self, watch: Watch) -> set[str]:
        while True:
            try:
                return set(await self._store.children(znode_layout.BROKERS_ROOT, watch=watch))
            except NoSuchNode:
                if await self._store.exists(znode_layout.BROKERS_ROOT, watch=watch) is None:
                    return set()

    async def _look_at(self, name: str, watch: Watch) -> None:
        try:
            node = await self._store.get(f"{znode_layout.BROKERS_ROOT}/{name}", watch=watch)
        except NoSuchNode:
            self._following.pop(name, None)
            self._gone(name)
            raise End from None
        record = decode_broker(node.data)
        is_new = name not in self._records
        self._records[name] = record
        self.on_report(name, record)
        if is_new:
            self.on_change()

    def _gone(self, name: str) -> None:
        if self._records.pop(name, None) is not None:
            self.on_change()
