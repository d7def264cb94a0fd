"""Compose the parts of a broker that serve requests."""

import asyncio
from dataclasses import dataclass
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import NoSuchTopic
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.metrics import Metrics
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NamespaceDeleted, NoSuchNamespace
from bindery_broker.managed_ledger import WallClock
from bindery_broker.metrics import BrokerMetrics
from bindery_broker.namespaces.directory import Directory
from bindery_broker.namespaces.names import Names
from bindery_broker.namespaces.policies import SchemaCompatibility
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_broker.namespaces.records import is_deleted
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.ownership import Ownership, RemoteOwner
from bindery_broker.ownership.records import OwnerRecord
from bindery_broker.partitioned.catalog import PartitionedTopics
from bindery_broker.partitioned.consumers import PartitionedConsumers
from bindery_broker.partitioned.deletions import Deletions
from bindery_broker.schemas.registry import SchemaRegistry
from bindery_broker.schemas.store import SchemaStore
from bindery_broker.settings import BrokerSettings
from bindery_broker.topics.retry_topics import RetryTopics
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

ENFORCE_S: Final = 5.0
"""Seconds between rounds of the policies, which may have short times; the interval of maintenance if that is less."""


@dataclass(frozen=True, slots=True)
class Components:
    """External dependencies of the broker; tests replace them."""

    client: LedgerClient
    store: MetadataStore
    leases: Leases
    clock: WallClock
    now: MonotonicClock
    metrics: Metrics


class Broker:
    """One broker: its topics, its ownership of bundles, and its metrics."""

    def __init__(self, settings: BrokerSettings, components: Components, *, url: str) -> None:
        """`url`: address at which other brokers reach this one."""
        self.settings = settings
        self.url = url
        self.clock = components.clock
        self.now = components.now
        self.store = components.store
        self.policies = PolicyStore(
            components.store, cluster=settings.cluster_name, defaults=settings.default_policies()
        )
        self.names = Names(components.store)
        self.directory = Directory(components.store, self.policies, self.names)
        self.topics = Topics(
            client=components.client,
            store=components.store,
            clock=components.clock,
            now=components.now,
            ledger_settings=settings.ledger,
            limits=settings.topic_limits(),
            producer_name=f"http-{components.store.session_id:x}",
            policies=self.policies,
        )
        self.ownership = Ownership(
            components.leases,
            record=OwnerRecord(http_url=url),
            on_lost=self.topics.abandon,
            divisions=Divisions(components.store),
        )
        self.topics.bind(self.ownership)
        self.schemas = SchemaRegistry(
            SchemaStore(components.store, components.client, settings=settings.ledger, clock=components.clock)
        )
        self.topics.on_deletion = self.schemas.remove
        self.partitioned = PartitionedTopics(
            components.store, now=components.now, partitions_max=settings.partitions_per_topic_max
        )
        self.deletions = Deletions(self.partitioned, is_mine=self._take)
        self.partitioned.on_removal = self.topics.forget_deleted
        self.topics.check_new = self.partitioned.check_new
        self.retry_topics = RetryTopics(
            self.topics,
            locate=self.locate,
            forget=self._forget_owner,
            is_mine=self._is_mine,
            now=self.now,
        )
        self.partitioned_consumers = PartitionedConsumers(
            self.topics,
            self.partitioned,
            self.retry_topics,
            locate=self.locate,
            forget=self._forget_owner,
            is_draining=lambda: self.draining,
        )
        self.metrics = BrokerMetrics(components.metrics, self.topics, self.policies)
        self._closing = False
        self.draining = False
        """Whether the process is stopping. Waiting calls are then answered at once."""

    async def locate(self, name: TopicName, *, create: bool) -> RemoteOwner | None:
        """Return the other broker that serves the topic; None: this broker serves it.

        Raises NoSuchTopic, without taking the bundle, if the topic does not exist and `create` is false, and the errors
        of `Topics.check_creatable` if it is true.
        """
        if self._is_mine(name):
            return None
        if not create and not await self.topics.exists(name):
            raise NoSuchTopic("no such topic", topic=name.short)
        if create:
            await self.topics.check_creatable(name)
        return await self.ownership.locate(await self.ownership.divisions.find(name))

    async def _take(self, name: TopicName) -> bool:
        """Return whether this broker owns the bundle of a topic, which may be missing. Takes an unowned bundle."""
        return await self.ownership.locate(await self.ownership.divisions.find(name)) is None

    def _is_mine(self, name: TopicName) -> bool:
        return self.ownership.is_mine(self.ownership.divisions.known(name))

    def _forget_owner(self, name: TopicName) -> None:
        self.ownership.forget_remote(self.ownership.divisions.known(name))

    async def unload(self, bundle: Bundle, *, hold_s: float) -> bool:
        """Close the topics of a bundle and release it. Returns False if this broker does not own it.

        See `Ownership.unload`.
        """
        return await self.ownership.unload(bundle, close=lambda: self.topics.unload(bundle), hold_s=hold_s)

    async def topic(self, name: TopicName, *, create: bool = False, is_explicit: bool = False) -> Topic:
        """Return a topic that this broker owns. `is_explicit`: a request of its own creates the topic."""
        return self.topics.loaded(name) or await self.topics.get(name, create=create, is_explicit=is_explicit)

    async def schema_strategy(self, name: TopicName) -> SchemaCompatibility:
        """Return the strategy in force for a topic, which need not exist.

        Raises NoSuchNamespace, and NamespaceDeleted while the namespace is being deleted: a schema would outlive it.
        """
        record = await self.policies.namespace(name.tenant, name.namespace)
        if record is None:
            raise NoSuchNamespace.of(name.tenant, name.namespace)
        if is_deleted(record):
            raise NamespaceDeleted("the namespace is being deleted", topic=name.short)
        strategy: SchemaCompatibility = (await self.policies.resolve(name))["schema_compatibility"].value
        return strategy

    async def maintain_forever(self) -> None:
        """Run the maintenance of the topics periodically, until cancelled, and their policies more often."""
        loop = asyncio.get_running_loop()
        while True:
            maintain_at = loop.time() + self.settings.maintenance_interval_s
            while (left_s := maintain_at - loop.time()) > 0:
                await asyncio.sleep(min(left_s, ENFORCE_S))
                await self.topics.enforce()
            await self.topics.maintain()
            await self.deletions.maintain()

    def drain(self) -> None:
        """End all waiting, so that requests in flight finish soon."""
        self.draining = True
        for topic in self.topics:
            topic.drain()

    async def close(self) -> None:
        """Close topics (cursors flushed, ledgers sealed), then release their bundles. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await self.topics.close()
        await self.ownership.close()
        await self.policies.close()
