"""Compose the parts of a broker that serve requests."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, Conflict, NoSuchTopic
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.metrics import Metrics
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.topic_name import TopicName

from bindery_broker.access.access import Access
from bindery_broker.access.decision import Rules
from bindery_broker.balancing.balancing import Balancing
from bindery_broker.balancing.loads import measure
from bindery_broker.balancing.metrics import BalancingMetrics
from bindery_broker.errors import NamespaceDeleted, NoSuchNamespace, NotOwner
from bindery_broker.limits.accounts import Accounts
from bindery_broker.managed_ledger import WallClock
from bindery_broker.metrics import BrokerMetrics
from bindery_broker.namespaces.directory import Directory
from bindery_broker.namespaces.names import Names
from bindery_broker.namespaces.policies import SchemaCompatibility
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_broker.namespaces.records import Json, bundles_with, is_deleted
from bindery_broker.ownership.bundles import Boundaries, Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.ownership import Ownership, RemoteOwner
from bindery_broker.ownership.records import BundleLoad, OwnerRecord
from bindery_broker.ownership.running import Running
from bindery_broker.ownership.splits import BY_TOPICS, Split
from bindery_broker.partitioned.catalog import PartitionedTopics
from bindery_broker.partitioned.consumers import PartitionedConsumers
from bindery_broker.partitioned.deletions import Deletions
from bindery_broker.schemas.registry import SchemaRegistry
from bindery_broker.schemas.store import SchemaStore
from bindery_broker.settings import BrokerSettings
from bindery_broker.topics.retry_topics import RetryTopics
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

log = get_logger(__name__)
FINISH_S_MAX: Final = 5.0
"""Maximum seconds that operations have to finish before the topics of a bundle that moves are closed. Those that wait
are ended at once; others take as long as a write."""
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

    def __init__(
        self,
        settings: BrokerSettings,
        components: Components,
        *,
        url: str,
        accounts: Accounts | None = None,
    ) -> None:
        """`url`: address at which other brokers reach this one. `accounts`: limits of clients; None: those of the
        settings, without a file of overrides."""
        self.settings = settings
        self.url = url
        self.listeners = listeners = settings.listeners
        """Addresses for clients in other networks."""
        self.clock = components.clock
        self.now = components.now
        self.store = components.store
        self.policies = PolicyStore(
            components.store, cluster=settings.cluster_name, defaults=settings.default_policies()
        )
        self.names = Names(components.store)
        self.directory = Directory(components.store, self.policies, self.names)
        self.permissions = Access(
            components.store,
            Rules(settings.authorization.super_users, allow_wildcards=settings.authorization.allow_wildcards),
            now=components.now,
        )
        """Decides what roles may do by the permissions that are stored, whether they are checked or not."""
        self.policies.on_stored = self.directory.on_stored = self.permissions.records.stored
        self.access = self.permissions if settings.authorization.enabled else None
        """Checks what roles may do; None: every client may do everything."""
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
            record=OwnerRecord.of(url, listeners),
            on_lost=self.topics.abandon,
            divisions=Divisions(components.store),
        )
        self.topics.bind(self.ownership)
        self.balancing = Balancing(
            settings.balancing,
            url=url,
            store=components.store,
            leases=components.leases,
            clock=components.clock,
            now=components.now,
            measure=self._measure,
            held=lambda: self.ownership.held,
            split=self._split_hot,
            listeners=listeners,
        )
        self.schemas = SchemaRegistry(
            SchemaStore(components.store, components.client, settings=settings.ledger, clock=components.clock)
        )
        self.schemas.check_new = self._check_new_schema
        self.policies.check_topic = self._check_exists
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
            is_draining=lambda: self.stopping,
        )
        self.accounts = settings.limits.accounts() if accounts is None else accounts
        self.metrics = BrokerMetrics(components.metrics, self.topics, self.policies, self.accounts)
        self.running = Running(held_max=settings.held_requests_max)
        """The operations on topics that run here, and the requests that wait for the next owner."""
        self.metrics.requests_held.set_function(lambda: self.running.held)
        components.metrics.registry.register(BalancingMetrics(self.balancing, cluster=settings.cluster_name))
        self._closing = False
        self.stops = asyncio.Event()
        """Set when the process stops. Calls that wait are then answered at once."""

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
        return await self.ownership.locate(await self.ownership.divisions.find(name), take=True) is None

    def _is_mine(self, name: TopicName) -> bool:
        return self.ownership.is_mine(self.ownership.divisions.known(name))

    def _forget_owner(self, name: TopicName) -> None:
        self.ownership.forget_remote(self.ownership.divisions.known(name))

    async def unload(
        self,
        bundle: Bundle,
        *,
        hold_s: float,
        destination: str = "",
        bring: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Close the topics of a bundle and release it. Returns False if this broker does not own it.

        See `Ownership.unload`.
        """
        return await self.ownership.unload(
            bundle, close=lambda: self._close_topics(bundle), hold_s=hold_s, destination=destination, bring=bring
        )

    async def _close_topics(self, bundle: Bundle) -> None:
        """Let the operations on the topics of a bundle finish, then close the topics."""
        self.topics.end_waits(bundle)
        if left := await self.running.ended(bundle, timeout_s=FINISH_S_MAX):
            log.warning("bundle_closed_with_operations", bundle=str(bundle), operations=left)
        await self.topics.unload(bundle)

    async def split(self, bundle: Bundle, points: Sequence[int]) -> bool:
        """Divide a bundle at `points`. Returns False if this broker does not own it. See `Ownership.split`.

        The boundaries in the policies of the namespace, which only tools read, are changed as well.
        """
        if not await self.ownership.split(bundle, points):
            return False
        space = (bundle.tenant, bundle.namespace)
        try:
            stored = None
            while stored != (now := await self.ownership.divisions.stored(*space)):  # another split may have followed
                stored = now
                await self.policies.update_namespace(*space, functools.partial(_with_boundaries, now))
        except BinderyError as error:
            log.warning("bundles_in_policies_outdated", namespace="/".join(space), **error_fields(error))
        return True

    async def _split_hot(self, bundle: Bundle, bundles_max: int) -> bool:
        """Split a bundle that this broker owns between the two topics in its middle. Returns False if its namespace has
        `bundles_max` bundles, or if the bundle has fewer than two topics. See `split`."""
        if len(await self.ownership.divisions.bundles(bundle.tenant, bundle.namespace)) >= bundles_max:
            return False
        topics = await self.directory.topics(bundle.tenant, bundle.namespace)
        points = Split(BY_TOPICS).points(bundle, topics)
        return bool(points) and await self.split(bundle, points)

    async def _measure(self) -> dict[Bundle, BundleLoad]:
        divisions = self.ownership.divisions
        return await measure(self.ownership.held, self.topics, bundle_of=divisions.known, now=self.now)

    async def owner_url(self, bundle: Bundle) -> str | None:
        """Return the address of the broker that serves a bundle, of either kind; None: no broker does."""
        if self.ownership.is_mine(bundle):
            return self.url
        try:
            owner = await self.ownership.owner(bundle)
        except NotOwner:  # it is being unloaded
            return None
        return None if owner is None else owner.http_url

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

    async def _check_exists(self, name: TopicName) -> None:
        """Raise NoSuchTopic, or Conflict if the topic is being deleted: what is stored about it would outlive it."""
        stored = await self.partitioned.read(name)
        if stored is not None and stored.value.is_deleted:
            raise Conflict("the topic is being deleted", topic=name.short)
        if stored is None and not await self.topics.exists(name):
            raise NoSuchTopic("no such topic", topic=name.short)

    async def _check_new_schema(self, name: TopicName) -> None:
        """Raise Conflict if the topic is being deleted, or if it was deleted by force a short time ago. A topic that
        was never created can have a schema."""
        try:
            await self._check_exists(name.partitioned_topic)
        except NoSuchTopic:
            await self.topics.forced_deletions.check(name)

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

    @property
    def draining(self) -> bool:
        """Whether this broker hands its bundles over, and takes none that another broker can take."""
        return self.balancing.draining

    @property
    def stopping(self) -> bool:
        return self.stops.is_set()

    def finish(self) -> None:
        """End all waiting, so that requests in flight finish soon."""
        self.stops.set()
        for topic in self.topics:
            topic.drain()

    async def close(self) -> None:
        """Close topics (cursors flushed, ledgers sealed), then release their bundles. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await self.topics.close()
        await self.ownership.close()
        await self.permissions.close()
        await self.policies.close()


def _with_boundaries(boundaries: Boundaries, policies: Json) -> Json:
    return {**policies, "bundles": bundles_with(boundaries)}
