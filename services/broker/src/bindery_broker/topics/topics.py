"""The topics of a broker: loaded on demand under ownership, one object each, closed when ownership goes.

Invariants: a topic is opened by one task at a time; a loaded topic's bundle was ours when it was opened, and losing the
bundle closes it; a topic that a request uses, or a consumer, is not closed for being idle.

An idle topic is closed under its lock: a request that comes meanwhile waits for that and opens it anew. Its ledgers are
trimmed when it is open: one that only retention still holds is kept open until that is over or its place is needed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, NoSuchNode, NoSuchTopic, TooManyRequests
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.errors import NotOwner, TopicInUse
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.managed_ledger import EntryCache, ManagedLedger, ManagedLedgerSettings, WallClock
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.ownership import Ownership
from bindery_broker.topics.topic import Topic

CLOSES_MAX = 32
"""Idle topics closed at a time: a close may hang for as long as its bookies do."""
LOOK_FOR_IDLE_S_MIN = 1.0
"""Between two looks for an idle topic that found none."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLimits:
    topics_max: int = 10_000
    """Topics loaded at once. At the limit the one that was idle longest makes room; if none is, no more are opened."""
    idle_s_max: float = 300
    """Seconds after which an empty topic that nobody uses is closed. Opening it again costs a ledger: not at once."""
    loads_max: int = 32
    """Topics being opened at once."""
    subscriptions_max: int = 1_000
    consumers_max: int = 1_000
    read_ahead_bytes_max: int = 64 * 2**20
    """Messages that all subscriptions together have read ahead of their consumers. Beyond it each call reads what it
    asks for. Small beside a container of 512 MiB, large enough that sixteen reads at once may go ahead."""
    auto_create: bool = True
    dispatch: DispatchLimits = field(default_factory=DispatchLimits)


class Topics:
    def __init__(
        self,
        *,
        client: LedgerClient,
        store: MetadataStore,
        clock: WallClock,
        now: MonotonicClock,
        ledger_settings: ManagedLedgerSettings,
        limits: TopicLimits | None = None,
        producer_name: str = "bindery-http",
    ) -> None:
        """`clock`: wall time in ms; `now`: monotonic seconds; `producer_name`: of messages whose sender gave none."""
        self.limits = limits or TopicLimits()
        self.cache = EntryCache(size_max=ledger_settings.cache_size_max)
        self.read_ahead = ReadAhead(self.limits.read_ahead_bytes_max)
        self._client = client
        self._store = store
        self._clock = clock
        self._now = now
        self._ledger_settings = ledger_settings
        self._producer_name = producer_name
        self._loaded: dict[TopicName, Topic] = {}
        self._locks: KeyedLocks[TopicName] = KeyedLocks()
        self._users: dict[TopicName, int] = {}
        """Requests under way for a topic, loaded or not."""
        self._opening = 0
        self._no_room_until = 0.0
        """Nothing was idle a moment ago: it is not looked for again at once, which costs a look at all topics."""
        self._loading = asyncio.Semaphore(self.limits.loads_max)
        self._closing = False
        self._ownership: Ownership | None = None
        self._cleanups: set[asyncio.Task[None]] = set()
        """Abandoned topics letting go of their handles, idle ones being closed."""
        self.loads_failed = 0

    @property
    def client(self) -> LedgerClient:
        return self._client

    def bind(self, ownership: Ownership) -> None:
        """Topics are only opened while `ownership` says that their bundle is ours."""
        self._ownership = ownership

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._loaded.values()))

    def __len__(self) -> int:
        return len(self._loaded)

    def loaded(self, name: TopicName) -> Topic | None:
        """The topic if it is open here: no waiting, the hot path's way."""
        topic = self._loaded.get(name)
        return topic if topic is not None and topic.is_open else None

    def begin_use(self, name: TopicName) -> None:
        """A request for the topic begins: until `end_use` it is not closed for being idle."""
        self._users[name] = self._users.get(name, 0) + 1

    def end_use(self, name: TopicName) -> None:
        left = self._users[name] - 1
        if left:
            self._users[name] = left
            return
        del self._users[name]
        topic = self._loaded.get(name)
        if topic is not None:
            topic.used_at = self._now()

    async def exists(self, name: TopicName) -> bool:
        if self.loaded(name) is not None:
            return True
        path = znode_layout.managed_ledger(tenant=name.tenant, namespace=name.namespace, topic=name.local)
        return await self._store.exists(path) is not None

    async def get(self, name: TopicName, *, create: bool = False) -> Topic:
        """The topic, opened if need be and made if it may be. Its bundle must be ours.

        Raises NoSuchTopic, NotOwner, TopicFenced, TryAgain.
        """
        topic = self.loaded(name)
        if topic is not None:
            return topic
        async with self._locks.hold(name):
            return self.loaded(name) or await self._open(name, create=create)

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Remove a topic with its subscriptions and ledgers. Raises TopicInUse while consumers are connected."""
        topic = await self.get(name)
        if topic.has_consumers and not force:
            raise TopicInUse("the topic has consumers; force=true deletes it all the same", topic=name.short)
        await topic.delete()

    def abandon(self, bundle: Bundle) -> None:
        """The bundle is no longer ours: stop serving its topics at once."""
        for topic in self:
            if Bundle.of(topic.name) == bundle:
                topic.abandon("the broker lost the topic's bundle")

    async def close(self) -> None:
        """Close every topic cleanly and open none any more."""
        self._closing = True
        await self._close_all(list(self))
        await asyncio.gather(*self._cleanups, return_exceptions=True)

    async def list_names(self, *, namespace: tuple[str, str] | None = None) -> list[TopicName]:
        """The topics that exist in the cluster, or in (tenant, namespace), sorted by name."""
        if namespace is not None:
            return sorted(await self._names_in(*namespace), key=lambda name: name.short)
        names: list[TopicName] = []
        root = znode_layout.MANAGED_LEDGERS_ROOT
        for tenant in await self._children(root):
            for space in await self._children(f"{root}/{tenant}"):
                names += await self._names_in(tenant, space)
        return sorted(names, key=lambda name: name.short)

    async def maintain(self) -> None:
        """One round of what time asks for in the loaded topics: sessions end, unneeded ledgers go, idle topics too."""
        idle: list[Topic] = []
        for topic in self:
            if not topic.is_open:
                continue
            for subscription in topic.subscriptions.values():
                subscription.tick()
            try:
                await topic.ledger.trim()
            except BinderyError as error:
                if topic.is_open:
                    log.warning("topic_maintenance_failed", topic=topic.name.short, **error_fields(error))
            is_kept = topic.ledger.entries_count > 0  # only what is loaded is trimmed, and has metrics of its backlog
            if not is_kept and self._now() - topic.used_at >= self.limits.idle_s_max and self._is_idle(topic):
                idle.append(topic)
        for first in range(0, len(idle), CLOSES_MAX):
            some = idle[first : first + CLOSES_MAX]
            await asyncio.gather(*(self._unload(topic) for topic in some if self._is_idle(topic)))

    async def _open(self, name: TopicName, *, create: bool) -> Topic:
        create = create and self.limits.auto_create
        if self._closing:
            raise NotOwner("the broker is stopping; ask again", topic=name.short)
        if not create and not await self.exists(name):
            raise NoSuchTopic("no such topic", topic=name.short)
        is_owner = self._ownership.proof(Bundle.of(name)) if self._ownership is not None else None
        if self._ownership is not None and is_owner is None:
            raise NotOwner("the topic's owner is changing; ask again", topic=name.short)
        await self._make_room()
        self._opening += 1
        try:
            return await self._load(name, create=create, is_owner=is_owner)
        finally:
            self._opening -= 1

    async def _make_room(self) -> None:
        while len(self._loaded) + self._opening >= self.limits.topics_max:
            idle = None
            if self._now() >= self._no_room_until:
                by_age = sorted(self._loaded.values(), key=lambda topic: topic.used_at)
                idle = next(filter(self._is_idle, by_age), None)
            if idle is None:
                self._no_room_until = max(self._no_room_until, self._now() + LOOK_FOR_IDLE_S_MIN)
                raise TooManyRequests("the broker has its full number of topics", topics=len(self._loaded))
            await self._unload(idle)

    def _is_idle(self, topic: Topic) -> bool:
        name = topic.name
        return topic.is_open and name not in self._users and name not in self._locks and not topic.is_consumed

    async def _unload(self, topic: Topic) -> None:
        """Close an idle topic, whoever waits for it: half closed it would be of no use to anybody."""
        task = asyncio.get_running_loop().create_task(self._close_idle(topic))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    async def _close_idle(self, topic: Topic) -> None:
        async with self._locks.hold(topic.name):
            if topic.name in self._users or not topic.is_open:  # somebody was faster
                return
            try:
                await topic.close("the topic was idle; ask again")
            except BinderyError as error:
                log.warning("topic_close_failed", topic=topic.name.short, **error_fields(error))
                await topic.ledger.crash()

    async def _load(self, name: TopicName, *, create: bool, is_owner: Callable[[], Awaitable[bool]] | None) -> Topic:
        async with self._loading:
            began = self._now()
            try:
                ledger = await ManagedLedger.open(
                    name.managed_ledger_name, client=self._client, store=self._store, clock=self._clock,
                    settings=self._ledger_settings, cache=self.cache, create=create, is_owner=is_owner,
                )  # fmt: skip
            except BinderyError as error:
                self.loads_failed += 1
                log.warning("topic_load_failed", topic=name.short, **error_fields(error))
                raise
        topic = Topic(
            name, ledger, clock=self._clock, now=self._now, limits=self.limits.dispatch,
            read_ahead=self.read_ahead,
            sessions_max=self.limits.consumers_max, subscriptions_max=self.limits.subscriptions_max,
            default_producer=self._producer_name, on_closed=self._forget,
        )  # fmt: skip
        if self._closing or (self._ownership is not None and not self._ownership.is_mine(Bundle.of(name))):
            await topic.close()
            raise NotOwner("the topic's owner is changing; ask again", topic=name.short)
        self._loaded[name] = topic
        log.info(
            "topic_loaded", topic=name.short, ms=round((self._now() - began) * 1000), entries=ledger.entries_count,
            subscriptions=len(topic.subscriptions),
        )  # fmt: skip
        return topic

    async def _close_all(self, topics: list[Topic]) -> None:
        results = await asyncio.gather(*(topic.close() for topic in topics), return_exceptions=True)
        for topic, result in zip(topics, results, strict=True):
            if isinstance(result, Exception):
                log.warning("topic_close_failed", topic=topic.name.short, **error_fields(result))

    def _forget(self, topic: Topic) -> None:
        if self._loaded.get(topic.name) is topic:
            del self._loaded[topic.name]
            log.info("topic_closed", topic=topic.name.short, reason=topic.closed_because)
        if topic.is_abandoned:
            task = asyncio.get_running_loop().create_task(topic.ledger.crash())
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)

    async def _names_in(self, tenant: str, namespace: str) -> list[TopicName]:
        children = await self._children(znode_layout.managed_ledgers(tenant=tenant, namespace=namespace))
        names = []
        for child in children:
            try:
                local = znode_layout.decode_name(child)
                names.append(TopicName.of(tenant=tenant, namespace=namespace, local=local))
            except (BinderyError, UnicodeDecodeError):
                log.warning("odd_topic_node", tenant=tenant, namespace=namespace, node=child)
        return names

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []
