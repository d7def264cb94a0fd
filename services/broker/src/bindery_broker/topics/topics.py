"""The topics of a broker. They are loaded on demand by the owner of their bundle, and closed when the ownership ends.

Invariants: a topic is opened by one task at a time; this broker owned the bundle of a loaded topic when it was opened,
and losing the bundle closes it; an idle topic is closed only while no request and no consumer uses it.

An idle topic is closed under its lock: a request that arrives during the close waits for its end and opens the topic
again. Ledgers are trimmed only while their topic is open. A topic that has entries therefore stays open until they are
trimmed, or until the limit of loaded topics is reached.

An idle topic has no task and no timer. A round of maintenance, or of the policies, looks only at the topics that are
due (`upkeep.due`): a topic is due in the next round after each request and each change of its policies, and after that
when something of it ends with the time.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, Conflict, NoSuchNode, NoSuchTopic, TooManyRequests
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.op_stat import OpStat
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import decode_topic
from bindery_pulsar.topic_name import TopicName, check_new_name

from bindery_broker.compaction.compactor import CompactionTools
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.errors import NamespaceDeleted, NoSuchNamespace, NotOwner, TooManyTopics, TopicInUse
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.managed_ledger import EntryCache, ManagedLedger, ManagedLedgerSettings, WallClock
from bindery_broker.namespaces.policies import FixedPolicies, FollowedPolicies, PolicySource
from bindery_broker.namespaces.records import is_deleted
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.ownership import Ownership
from bindery_broker.producers.deduplication import Deduplication, DeduplicationLimits
from bindery_broker.producers.keys import KeyBudget
from bindery_broker.statistics.entries import EntryStatistics
from bindery_broker.statistics.volume import Volume
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.response_budget import ResponseBudget
from bindery_broker.topics.admission import Admission
from bindery_broker.topics.enforcing import (
    EXPIRY_READS_MAX,
    acts_on_its_own,
    enforce,
    retention_rule,
    roll_for_retention,
    topic_is_inactive,
)
from bindery_broker.topics.forced_deletions import ForcedDeletions
from bindery_broker.topics.move_targets import HostedMoves, TopicTargets
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.upkeep.due import maintenance_in_s, policies_in_s
from bindery_broker.topics.upkeep.turns import Turns
from bindery_broker.topics.upkeep.wheel import Wheel

COMPACTIONS_MAX = 2
"""Maximum number of topics that are compacted at a time; others wait."""
OLDEST_READS_MAX = 1_000
"""Maximum number of entries that a round of maintenance reads to find the age of the oldest messages."""
CLOSES_MAX = 32
"""Maximum number of idle topics that are closed in parallel, because a close may have to wait for slow bookies."""
STOP_CLOSES_MAX = 128
"""The same for all topics of a broker that stops: no request waits for anything else then."""
REPLAYS_MAX = 8
"""Maximum number of topics whose entries are read again in parallel to find out what producers have stored."""
TURN_TOPICS = 32
"""Number of topics after which a round of maintenance lets requests run."""
CLOSE_S_MAX = 10.0
"""Maximum seconds for the close of an unloaded topic. Then it is abandoned, so that it does not hold its bundle."""
LOOK_FOR_IDLE_S_MIN = 1.0
"""Minimum seconds between two searches for an idle topic if the first found none."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLimits:
    topics_max: int
    """Maximum number of loaded topics. At the limit the topic that is idle longest is closed, else the load fails."""
    idle_s_max: float
    """Seconds after which an empty, unused topic is closed. Not at once, because opening it again takes some reads and
    a write of metadata."""
    loads_max: int = 32
    """Maximum number of topics that are opened in parallel."""
    subscriptions_max: int
    """Maximum number of subscriptions of one topic."""
    consumers_max: int
    """Maximum number of consumer sessions of one subscription."""
    read_ahead_bytes_max: int
    """Maximum bytes of messages that all subscriptions together have read and not delivered. Above it, each call reads
    only what it delivers. Small compared with a container of 512 MiB; enough for sixteen parallel reads of 4 MiB."""
    response_bytes_max: int
    """Maximum bytes of messages in responses, from before they are read until the clients have read them."""
    decoded_bytes_max: int
    """Maximum bytes of one entry once it is decoded."""
    compaction_keys_bytes_max: int
    """Maximum bytes of memory that the keys of one compaction take, estimated."""
    dispatch: DispatchLimits
    deduplication: DeduplicationLimits = field(default_factory=DeduplicationLimits)


@dataclass(slots=True)
class RoundCounts:
    """Numbers of topics that were looked at since the start."""

    maintained: int = 0
    enforced: int = 0


class Topics:
    def __init__(
        self,
        *,
        client: LedgerClient,
        store: MetadataStore,
        clock: WallClock,
        now: MonotonicClock,
        ledger_settings: ManagedLedgerSettings,
        limits: TopicLimits,
        producer_name: str,
        policies: FollowedPolicies | None = None,
    ) -> None:
        """`clock`: wall time in ms; `now`: monotonic seconds; `producer_name`: default name of a message's producer.
        `policies`: None stands for the defaults."""
        self.limits = limits
        self.cache = EntryCache(size_max=ledger_settings.cache_size_max)
        self.read_ahead = ReadAhead(self.limits.read_ahead_bytes_max)
        self.responses = ResponseBudget(self.limits.response_bytes_max, now=now)
        self._decoder = EntryDecoder(size_max=self.limits.decoded_bytes_max)
        self._client = client
        self._store = store
        self._clock = clock
        self._now = now
        self._ledger_settings = ledger_settings
        self._producer_name = producer_name
        self._followed: FollowedPolicies = policies or FixedPolicies()
        self.policies: PolicySource = self._followed
        self._loaded: dict[TopicName, Topic] = {}
        self._locks: KeyedLocks[TopicName] = KeyedLocks()
        self._users: dict[TopicName, int] = {}
        """Number of requests in progress for each topic, loaded or not."""
        self._opening = 0
        self._no_room_until = 0.0
        """Monotonic time in seconds until which no search for idle topics runs, because the last one found none. A
        search iterates over all topics."""
        self._loading: Turns[TopicName] = Turns(self.limits.loads_max, weight_of=lambda name: self._users.get(name, 0))
        self._maintenance: Wheel[Topic] = Wheel()
        """When the loaded topics need maintenance."""
        self._enforcement: Wheel[Topic] = Wheel()
        """When a policy of the loaded topics may act. Topics without such policies are not scheduled."""
        self.rounds = RoundCounts()
        self._followed.on_change(self._policies_changed)
        self._keys = KeyBudget(self.limits.deduplication.keys_max)
        self._replaying = asyncio.Semaphore(REPLAYS_MAX)
        self._closing = False
        self._ownership: Ownership | None = None
        self.forced_deletions = ForcedDeletions(store, clock=clock)
        self.targets = TopicTargets(self, HostedMoves(producer_name))
        self._admissions: WeakKeyDictionary[Topic, Admission] = WeakKeyDictionary()
        self._compaction = CompactionTools(
            client=client,
            decoder=self._decoder,
            settings=ledger_settings,
            keys_bytes_max=limits.compaction_keys_bytes_max,
            slots=asyncio.Semaphore(COMPACTIONS_MAX),
            clock=clock,
            hold=self.begin_use,
            release=self.end_use,
        )
        self._cleanups: set[asyncio.Task[None]] = set()
        """Tasks that close the handles of abandoned topics, close idle topics, or open those of a bundle just taken."""
        self.check_new: Callable[[TopicName], Awaitable[None]] | None = None
        """Called before and after a topic is created. It raises an error if there must be none of this name."""
        self.admit_new: Callable[[TopicName, int], Awaitable[None]] | None = None
        """Called with a topic, and the number 1, before it is created. It raises an error if a limit forbids it."""
        self.on_deletion: Callable[[TopicName], Awaitable[None]] | None = None
        """Called before a topic is deleted. It removes what others store about the topic."""
        self.on_subscription: Callable[[TopicName, str], None] = lambda _topic, _subscription: None
        """Called when a subscription of a topic was created, or loaded with it."""
        self.loads_failed = 0
        self.publish_ms = OpStat(now)
        """Milliseconds from the call that adds entries to a topic until they are durable, by entry."""
        self.former_volume = Volume()
        """What went in and out of the topics that were closed."""

    @property
    def client(self) -> LedgerClient:
        return self._client

    def bind(self, ownership: Ownership) -> None:
        """Set the ownership of bundles. A topic is opened only while this broker owns its bundle."""
        self._ownership = ownership
        self.targets.bind(ownership)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._loaded.values()))

    def __len__(self) -> int:
        return len(self._loaded)

    def __contains__(self, topic: object) -> bool:
        """Whether this object is loaded. What went in and out of it is not in `former_volume` then."""
        return isinstance(topic, Topic) and self._loaded.get(topic.name) is topic

    def loaded(self, name: TopicName) -> Topic | None:
        """Return the topic if it is open here, else None. Never waits, for use on the hot path."""
        topic = self._loaded.get(name)
        return topic if topic is not None and topic.is_open else None

    def begin_use(self, name: TopicName) -> None:
        """Record that a request for the topic begins. The topic is not closed as idle until `end_use`."""
        self._users[name] = self._users.get(name, 0) + 1

    def end_use(self, name: TopicName) -> None:
        """Record that a request for the topic ends."""
        left = self._users[name] - 1
        if left:
            self._users[name] = left
            return
        del self._users[name]
        topic = self._loaded.get(name)
        if topic is not None:
            topic.used_at = self._now()
            self._schedule_soon(topic)

    def _schedule_soon(self, topic: Topic) -> None:
        """Something of a topic has changed, or may have: it is looked at in the next rounds."""
        self._maintenance.soon(topic)
        self._enforcement.soon(topic)

    def _policies_changed(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            self._schedule_soon(topic)

    async def exists(self, name: TopicName) -> bool:
        if self.loaded(name) is not None:
            return True
        path = znode_layout.managed_ledger(tenant=name.tenant, namespace=name.namespace, topic=name.local)
        return await self._store.exists(path) is not None

    async def subscription_exists(self, name: TopicName, subscription: str) -> bool:
        """Return whether a topic, also one of another broker, has a stored subscription."""
        path = znode_layout.cursor(
            tenant=name.tenant, namespace=name.namespace, topic=name.local, subscription=subscription
        )
        return await self._store.exists(path) is not None

    async def ledger_ids(self, name: TopicName) -> list[int]:
        """Return the ids of the ledgers of a topic, also of one of another broker, ascending. Raises NoSuchTopic."""
        path = znode_layout.managed_ledger(tenant=name.tenant, namespace=name.namespace, topic=name.local)
        try:
            data = (await self._store.get(path)).data
        except NoSuchNode as error:
            raise NoSuchTopic("no such topic", topic=name.short) from error
        return [record.ledger_id for record in decode_topic(data).ledgers]

    async def get(self, name: TopicName, *, create: bool = False, is_explicit: bool = False) -> Topic:
        """Return the topic; open it if it is not loaded. This broker must own its bundle.

        A missing topic is created if `create` and if its policies allow it, or if `is_explicit`. Raises NoSuchTopic,
        NotOwner, TopicFenced, TryAgain, and the errors of `check_creatable`.
        """
        topic = self.loaded(name)
        if topic is not None:
            return topic
        async with self._locks.hold(name):
            return self.loaded(name) or await self._open(name, create=create, is_explicit=is_explicit)

    async def check_creatable(self, name: TopicName) -> None:
        """Raise NoSuchNamespace, NamespaceDeleted, or TooManyTopics if the topic is missing and cannot be created."""
        record = await self._followed.namespace(name.tenant, name.namespace)
        topics_max = self.policies.effective(name).topics_per_namespace_max
        if (record is not None and not is_deleted(record) and not topics_max) or await self.exists(name):
            return
        if record is None:
            raise NoSuchNamespace.of(name.tenant, name.namespace)
        if is_deleted(record):
            raise NamespaceDeleted("the namespace is being deleted", topic=name.short)
        count = len(await self._children(znode_layout.managed_ledgers(tenant=name.tenant, namespace=name.namespace)))
        if count >= topics_max:
            raise TooManyTopics(
                "the namespace has its maximum number of topics", topic=name.short, topics_per_namespace_max=topics_max
            )

    async def implicit_partitions(self, name: TopicName) -> int:
        """Return the number of partitions with which a request creates the topic if it is missing; 0: without any.

        Raises TopicDeleted, and the errors of `check_creatable`.
        """
        if name.partition >= 0 or name.local.startswith("__"):
            return 0
        await self._followed.namespace(name.tenant, name.namespace)
        policies = self.policies.effective(name)
        if not policies.auto_create_topics or not policies.auto_create_partitions or await self.exists(name):
            return 0
        await self.check_creatable(name)
        check_new_name("topic", name.local)
        await self.forced_deletions.check(name)
        return policies.auto_create_partitions

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic with its subscriptions and ledgers. Raises TopicInUse if it has consumers, unless `force`.

        Requests that arrive meanwhile wait until the topic is gone. If they opened it instead, they would take it over
        from the deletion.
        """
        async with self._locks.hold(name):
            topic = self.loaded(name) or await self._open(name, create=False, is_explicit=False)
            if topic.has_consumers and not force:
                raise TopicInUse("the topic has consumers; pass force=true to delete it", topic=name.short)
            if force and name.partition < 0:
                namespace = await self._followed.namespace(name.tenant, name.namespace)
                if namespace is None or not is_deleted(namespace):
                    await self.forced_deletions.record(name)
            await self.forget_deleted(name)  # first, because the deletion cannot be repeated once the topic is gone
            await topic.delete()
            await self.forget_deleted(name)  # what was stored meanwhile

    async def forget_deleted(self, name: TopicName) -> None:
        """Remove what is stored about a topic besides its messages. A partition has none."""
        await self._followed.remove_topic(name)
        if self.on_deletion is not None:
            await self.on_deletion(name)

    def end_waits(self, bundle: Bundle) -> None:
        """Fail what waits in the topics of a bundle that this broker gives up: it can wait at the next owner."""
        for topic in self:
            if bundle.contains(topic.name):
                topic.end_waits(NotOwner("the topic is moving to another broker; retry", topic=topic.name.short))

    def in_use(self, bundle: Bundle, count_max: int) -> list[TopicName]:
        """Return the loaded topics of a bundle, those that were used last first."""
        found = [topic for topic in self if bundle.contains(topic.name)]
        found.sort(key=lambda topic: (topic.name in self._users, topic.used_at), reverse=True)
        return [topic.name for topic in found[:count_max]]

    def open_soon(self, bundle: Bundle, names: Sequence[str]) -> None:
        """Open topics of a bundle that this broker has just taken, in order. Those that cannot be opened are left to
        their next request. `names`: their local names."""
        found = []
        for local in names:
            with contextlib.suppress(BinderyError):
                name = TopicName.parse(f"persistent://{bundle.tenant}/{bundle.namespace}/{local}")
                if bundle.contains(name) and self.loaded(name) is None:
                    found.append(name)
        if found:
            task = asyncio.get_running_loop().create_task(self._open_all(found))
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)

    async def _open_all(self, names: Sequence[TopicName]) -> None:
        async def open_one(name: TopicName) -> None:
            try:
                await self.get(name)
            except BinderyError as error:
                log.info("topic_not_opened", topic=name.short, **error_fields(error))

        for first in range(0, len(names), self.limits.loads_max):
            await asyncio.gather(*map(open_one, names[first : first + self.limits.loads_max]))

    async def unload(self, bundle: Bundle) -> None:
        """Close the topics of a bundle that this broker gives up; it must not count as the owner any more.

        Raises nothing: a topic whose close fails, or takes too long, is abandoned, and the next owner recovers it.
        """
        for name in self._locks:  # a topic that is being opened is closed again, because the bundle is not owned
            if bundle.contains(name):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S_MAX), self._locks.hold(name):
                        pass
        turns = asyncio.Semaphore(CLOSES_MAX)
        await asyncio.gather(*(self._close_surely(topic, turns) for topic in self if bundle.contains(topic.name)))

    async def unload_topic(self, name: TopicName) -> None:
        """Close one topic. The next request opens it again. Raises NoSuchTopic, NotOwner."""
        topic = await self.get(name)
        async with self._locks.hold(name):
            await self._close_surely(topic, asyncio.Semaphore(1))

    async def _close_surely(
        self, topic: Topic, turns: asyncio.Semaphore, why: str = "the topic was unloaded; retry"
    ) -> None:
        async with turns:
            try:
                async with asyncio.timeout(CLOSE_S_MAX):
                    await topic.close(why)
            except Exception as error:  # whatever it is, the others are closed
                log.warning("topic_not_closed", topic=topic.name.short, error=str(error) or type(error).__name__)
                topic.abandon("the topic could not be closed cleanly; retry")
                await topic.ledger.crash()

    def abandon(self, bundle: Bundle) -> None:
        """Stop serving the topics of a lost bundle at once."""
        for topic in self:
            if bundle.contains(topic.name):
                topic.abandon("the broker lost the topic's bundle")

    async def close(self) -> None:
        """Close every topic cleanly, and open no more. Raises nothing: see `unload`."""
        self._closing = True
        turns = asyncio.Semaphore(STOP_CLOSES_MAX)
        why = "the topic is moving to another broker; retry"
        await asyncio.gather(*(self._close_surely(topic, turns, why) for topic in self), return_exceptions=True)
        await asyncio.gather(*self._cleanups, return_exceptions=True)

    def admission(self, topic: Topic) -> Admission:
        """Return what admits messages to a loaded topic."""
        found = self._admissions.get(topic)
        if found is None:
            found = self._admissions[topic] = Admission(topic, now=self._now, clock=self._clock)
        return found

    async def enforce(self) -> None:
        """Run one round of the policies that act on their own: times to live, evictions, expiration of subscriptions
        and inactive topics. Call it every few seconds, and before `maintain`. Only topics that are due are looked at.
        """
        reads_left = EXPIRY_READS_MAX
        async for topic in _in_turns(self._enforcement.take_due(self._now())):
            if not topic.is_open:
                continue
            self.rounds.enforced += 1
            for subscription in topic.subscriptions.values():
                subscription.follow_policies()
            if acts_on_its_own(topic.policies):
                backlog = _backlog_entries(topic)
                reads = await enforce(topic, now=self._now, clock=self._clock, reads_max=max(reads_left, 1))
                reads_left -= reads
                # What is acknowledged may be deleted. Not every eviction needs a read.
                if (reads or _backlog_entries(topic) != backlog) and topic in self:
                    self._maintenance.soon(topic)
                if self._is_inactive(topic):
                    await self._delete_inactive(topic)
            if topic.is_open and topic in self and topic not in self._enforcement:
                wait_s = policies_in_s(topic, now=self._now(), clock=self._clock)
                if wait_s <= 0:
                    self._enforcement.soon(topic)
                elif wait_s < math.inf:
                    self._enforcement.put(topic, self._now() + wait_s)

    def _is_inactive(self, topic: Topic) -> bool:
        if not topic.is_open:
            return False
        is_in_use = topic.name in self._users or topic.name in self._locks
        return topic_is_inactive(topic, now=self._now(), is_in_use=is_in_use)

    async def _delete_inactive(self, topic: Topic) -> None:
        """Delete a topic. A request that arrives meanwhile waits for the end, and may create the topic again.

        The topic is closed first, without waiting for anything, so that no message is stored in it any more.
        """
        async with self._locks.hold(topic.name):
            if topic.name in self._users or not topic.is_open or topic.is_consumed:  # used or closed meanwhile
                return
            try:
                await topic.delete()
                await self.forget_deleted(topic.name)
            except BinderyError as error:
                log.warning("inactive_topic_not_deleted", topic=topic.name.short, **error_fields(error))
            else:
                log.info("inactive_topic_deleted", topic=topic.name.short)

    async def maintain(self) -> None:
        """Run one round of maintenance of the loaded topics that are due: end sessions, delete ledgers, replace old
        cursor ledgers, compact, close idle topics."""
        idle: list[Topic] = []
        reads_left = OLDEST_READS_MAX
        async for topic in _in_turns(self._maintenance.take_due(self._now())):
            if not topic.is_open:
                continue
            self.rounds.maintained += 1
            for subscription in topic.subscriptions.values():
                subscription.tick()
            topic.end_readers()
            topic.ledger.next_cache_round()
            await topic.ledger.next_handles_round()
            entries = topic.ledger.entries_count
            try:
                await roll_for_retention(topic)
                await topic.ledger.trim()
                await topic.ledger.renew_cursor_ledgers()
                await topic.compaction.maintain(threshold=topic.policies.compaction_threshold)
            except BinderyError as error:
                if topic.is_open:
                    log.warning("topic_maintenance_failed", topic=topic.name.short, **error_fields(error))
            reads_left -= await _read_oldest(topic, reads_left)
            if topic.ledger.entries_count < entries and topic in self:  # it may be inactive now
                self._enforcement.soon(topic)
            # Only loaded topics are trimmed, have backlog metrics, and are deleted if they are inactive.
            is_kept = topic.ledger.entries_count > 0 or topic.policies.inactive_topics is not None
            if not is_kept and self._now() - topic.used_at >= self.limits.idle_s_max and self._is_idle(topic):
                idle.append(topic)
            if topic.is_open and topic in self and topic not in self._maintenance:
                wait_s = maintenance_in_s(topic, now=self._now(), idle_s_max=self.limits.idle_s_max)
                if wait_s <= 0:
                    self._maintenance.soon(topic)
                else:
                    self._maintenance.put(topic, self._now() + wait_s)
        await self.forced_deletions.clean()
        for first in range(0, len(idle), CLOSES_MAX):
            some = idle[first : first + CLOSES_MAX]
            await asyncio.gather(*(self._unload(topic) for topic in some if self._is_idle(topic)))

    async def _open(self, name: TopicName, *, create: bool, is_explicit: bool) -> Topic:
        if self._closing:
            raise NotOwner("the broker is stopping; retry", topic=name.short)
        if create:
            await self.check_creatable(name)
            create = is_explicit or self.policies.effective(name).auto_create_topics
        if not create and not await self.exists(name):
            raise NoSuchTopic("no such topic", topic=name.short)
        is_new = create and not await self.exists(name)
        if is_new:
            check_new_name("topic", name.local)
            if self.check_new is not None:
                await self.check_new(name)
            if not is_explicit:
                await self.forced_deletions.check(name)
        is_owner = self._ownership.proof(name) if self._ownership is not None else None
        if self._ownership is not None and is_owner is None:
            raise NotOwner("the topic's owner is changing; retry", topic=name.short)
        await self._make_room()
        self._opening += 1
        try:
            await self._followed.follow(name)
            if is_new and self.admit_new is not None:  # not before: requests that another broker runs count there
                await self.admit_new(name, 1)
            topic = await self._load_checked(name, create=create, is_new=is_new, is_owner=is_owner)
            if is_new and self.check_new is not None:
                await self._check_created(topic, self.check_new)
            return topic
        finally:
            self._opening -= 1
            if name not in self._loaded:
                self._followed.forget(name)

    async def _load_checked(
        self, name: TopicName, *, create: bool, is_new: bool, is_owner: Callable[[], Awaitable[bool]] | None
    ) -> Topic:
        """Load the topic; create it only if it was missing when the name was checked."""
        try:
            return await self._load(name, create=is_new, is_owner=is_owner)
        except NoSuchTopic as error:
            if not create:
                raise
            raise NotOwner("the topic was deleted by another broker; retry", topic=name.short) from error

    async def _check_created(self, topic: Topic, check: Callable[[TopicName], Awaitable[None]]) -> None:
        """Check the name again, because it may have been taken meanwhile. Then the topic is deleted."""
        try:
            await check(topic.name)
        except Conflict:
            await topic.delete()
            raise

    async def _make_room(self) -> None:
        while len(self._loaded) + self._opening >= self.limits.topics_max:
            idle = None
            if self._now() >= self._no_room_until:
                by_age = sorted(self._loaded.values(), key=lambda topic: topic.used_at)
                idle = next(filter(self._is_idle, by_age), None)
                if idle is None:  # not after a load that was refused without a search: many would prevent every search
                    self._no_room_until = self._now() + LOOK_FOR_IDLE_S_MIN
            if idle is None:
                raise TooManyRequests(
                    "the broker has loaded the maximum number of topics, and none of them is idle",
                    topics=len(self._loaded),
                )
            await self._unload(idle)

    def _is_idle(self, topic: Topic) -> bool:
        name = topic.name
        return topic.is_open and name not in self._users and name not in self._locks and not topic.is_consumed

    async def _unload(self, topic: Topic) -> None:
        """Close an idle topic. The close completes even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(self._close_idle(topic))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    async def _close_idle(self, topic: Topic) -> None:
        async with self._locks.hold(topic.name):
            if topic.name in self._users or not topic.is_open:  # used or closed meanwhile
                return
            try:
                await topic.close("the topic was closed because it was idle; retry")
            except BinderyError as error:
                log.warning("topic_close_failed", topic=topic.name.short, **error_fields(error))
                await topic.ledger.crash()

    async def _load(self, name: TopicName, *, create: bool, is_owner: Callable[[], Awaitable[bool]] | None) -> Topic:
        async with self._loading.hold(name):
            began = self._now()
            try:
                ledger = await ManagedLedger.open(
                    name.managed_ledger_name,
                    client=self._client,
                    store=self._store,
                    clock=self._clock,
                    settings=self._ledger_settings,
                    cache=self.cache,
                    create=create,
                    is_owner=is_owner,
                    retention=lambda: retention_rule(self.policies.effective(name).retention),
                    statistics=EntryStatistics(self._now, observe_ms=self.publish_ms.observe),
                )
            except BinderyError as error:
                self.loads_failed += 1
                log.warning("topic_load_failed", topic=name.short, **error_fields(error))
                raise
        topic = Topic(
            name,
            ledger,
            clock=self._clock,
            now=self._now,
            limits=self.limits.dispatch,
            read_ahead=self.read_ahead,
            decoder=self._decoder,
            sessions_max=self.limits.consumers_max,
            subscriptions_max=self.limits.subscriptions_max,
            default_producer=self._producer_name,
            policies=self.policies,
            targets=self.targets,
            deduplication=self._deduplication,
            compaction=self._compaction,
            on_closed=self._forget,
            on_subscription=lambda subscription: self._subscribed(name, subscription),
        )
        ownership = self._ownership
        if self._closing or (ownership is not None and not ownership.is_mine(ownership.divisions.known(name))):
            await topic.close()
            raise NotOwner("the topic's owner is changing; retry", topic=name.short)
        self._loaded[name] = topic
        self._schedule_soon(topic)
        log.info(
            "topic_loaded",
            topic=name.short,
            ms=round((self._now() - began) * 1000),
            entries=ledger.entries_count,
            subscriptions=len(topic.subscriptions),
        )
        return topic

    def _subscribed(self, name: TopicName, subscription: str) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            self._schedule_soon(topic)
        self.on_subscription(name, subscription)

    def _deduplication(self, topic: Topic) -> Deduplication:
        return Deduplication(
            topic.ledger,
            topic=topic.name.short,
            clock=self._clock,
            budget=self._keys,
            turns=self._replaying,
            limits=self.limits.deduplication,
            is_on=lambda: topic.policies.deduplication,
            snapshot_s=lambda: topic.policies.deduplication_snapshot_s,
        )

    def _forget(self, topic: Topic) -> None:
        if self._loaded.get(topic.name) is topic:
            del self._loaded[topic.name]
            self._maintenance.discard(topic)
            self._enforcement.discard(topic)
            self._followed.forget(topic.name)
            self.former_volume.add(topic.volume)
            log.info("topic_closed", topic=topic.name.short, reason=topic.closed_because)
        if topic.is_abandoned:
            task = asyncio.get_running_loop().create_task(topic.ledger.crash())
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []


def _backlog_entries(topic: Topic) -> int:
    """Return the entries that the subscriptions of a topic have to read."""
    return sum(one.cursor.backlog_entries for one in topic.subscriptions.values())


async def _in_turns(topics: Sequence[Topic]) -> AsyncIterator[Topic]:
    """Yield the topics, and let requests run after every TURN_TOPICS: a round over many topics takes long."""
    for number, topic in enumerate(topics, start=1):
        yield topic
        if number % TURN_TOPICS == 0:
            await asyncio.sleep(0)


async def _read_oldest(topic: Topic, reads_max: int) -> int:
    """Find out how old the oldest messages of the topic are, for the metrics. Returns the number of reads that count:
    all that are left after one failed, because the next ones would take as long."""
    reads = 0
    for subscription in list(topic.subscriptions.values()):
        if reads < reads_max and subscription.oldest.must_read:
            reads += 1
            await subscription.oldest.read()
            if subscription.oldest.must_read and topic.is_open:
                return reads_max
    return reads
