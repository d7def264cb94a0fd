"""Find the retry topic of a subscription: its name, whether it exists, and its subscription of the same name.

Whether the topic exists is read once for each subscription, when it is first used. From then on `Topics` says when a
subscription was created or loaded, and a topic that is missing when it is opened is known to be gone. A call thus reads
no metadata. A retry topic that another broker owns is used through that broker (`retry_sides`). Its owner may change,
and it may be deleted or created there, so it is looked for again after some time, and when its owner does not answer.

| state     | the retry topic                                                                      |
|-----------|--------------------------------------------------------------------------------------|
| UNKNOWN   | was not looked for                                                                   |
| ABSENT    | does not exist, or has no subscription of this name                                  |
| PRESENT   | exists; it is opened when it is needed                                               |
| ELSEWHERE | belongs to another broker, and has a subscription of this name                       |
"""

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from bindery_core.errors import BadRequest, BinderyError, NoSuchTopic, TopicFenced
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import get_logger
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner, RetryTopicAway
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.ownership.ownership import RemoteOwner
from bindery_broker.retries.names import dead_letter_topic, is_retry_topic, retry_topic
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.retry_sides import LocalSide, Peers, RetrySide
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

ELSEWHERE_S: Final = 10.0
"""Seconds after which a retry topic of another broker is looked for again."""
ABSENT_S: Final = 60.0
"""Seconds after which a retry topic that was missing, and that other brokers may create, is looked for again."""

log = get_logger(__name__)


class State(enum.Enum):
    UNKNOWN = enum.auto()
    ABSENT = enum.auto()
    PRESENT = enum.auto()
    ELSEWHERE = enum.auto()


class Locate(Protocol):
    def __call__(self, name: TopicName, /, *, create: bool) -> Awaitable[RemoteOwner | None]:
        """Return the other broker that owns a topic; None: this one does. Raises NoSuchTopic."""
        ...


class RetryLink:
    """What is known of the retry topic of one subscription. The partitions of a topic share it."""

    __slots__ = (
        "__weakref__",
        "appearances",
        "dead_letters",
        "in_progress",
        "name",
        "next_look_at",
        "remote",
        "remote_url",
        "state",
        "subscription",
        "waiting",
    )

    def __init__(self, name: TopicName | None, dead_letters: TopicName | None, subscription: str) -> None:
        self.name = name
        """Name of the retry topic; None: the subscription can have none."""
        self.dead_letters = dead_letters
        """Default name of the dead-letter topic; None: the subscription can have none."""
        self.subscription = subscription
        self.state = State.UNKNOWN if name is not None else State.ABSENT
        self.next_look_at = 0.0
        """When a topic that is ELSEWHERE is looked for again; monotonic seconds."""
        self.remote: RetrySide | None = None
        """The subscription in the broker that owns a topic that is ELSEWHERE."""
        self.remote_url = ""
        self.appearances = 0
        """How often the retry topic has appeared."""
        self.waiting: dict[Callable[[], None], None] = {}
        """Called when the retry topic appears: they end the waits of calls that do not know it yet."""
        self.in_progress: dict[tuple[TopicName, str, str], asyncio.Future[None]] = {}
        """Calls by topic, consumer and request id."""


class Found(NamedTuple):
    topic: Topic
    subscription: Subscription


def check_receives_retries(topic: TopicName, subscription: Subscription) -> None:
    """Raise BadRequest if consumers of this subscription of `topic` do not receive from its retry topic.

    A retry topic itself is exempt from the rule of types: what is moved to its end is received there.
    """
    if not subscription.is_durable:
        raise BadRequest(
            "messages cannot be moved to the retry topic, because the subscription is not stored and receives nothing "
            "from there; create it as a stored subscription (durable: true)",
            topic=topic.short,
            subscription=subscription.name,
        )
    if subscription.type in ("exclusive", "failover") and not is_retry_topic(topic, subscription.name):
        raise BadRequest(
            f"messages cannot be moved to the retry topic, because {subscription.type} consumers receive nothing from "
            "there; consume the subscription as shared or key_shared",
            topic=topic.short,
            subscription=subscription.name,
            type=subscription.type,
        )


class RetryTopics:
    """The retry topics of the subscriptions of a broker."""

    def __init__(
        self,
        topics: Topics,
        *,
        locate: Locate,
        forget: Callable[[TopicName], None],
        is_mine: Callable[[TopicName], bool],
        now: MonotonicClock,
    ) -> None:
        """`forget`: discards what is known of the owner of a topic. `is_mine`: whether this broker owns a topic, or
        would if it existed."""
        self.now = now
        self.peers: Peers | None = None
        """None: retry topics of other brokers are left out."""
        self._forget = forget
        self._is_mine = is_mine
        self._topics = topics
        self._locate = locate
        self._locks: KeyedLocks[TopicName] = KeyedLocks()
        """Held while a retry topic is looked for and opened."""
        self._links: WeakKeyDictionary[Subscription, RetryLink] = WeakKeyDictionary()
        self._by_name: WeakValueDictionary[tuple[TopicName, str], RetryLink] = WeakValueDictionary()
        topics.on_subscription = self._appeared

    def link(self, topic: Topic, subscription: Subscription) -> RetryLink:
        """Return what is known of the retry topic of a subscription."""
        link = self._links.get(subscription)
        if link is None:
            link = self._links[subscription] = self._make_link(topic.name, subscription)
        return link

    def _make_link(self, topic: TopicName, subscription: Subscription) -> RetryLink:
        if not subscription.is_durable:
            return RetryLink(None, None, subscription.name)
        return self.link_of(topic, subscription.name)

    def link_of(self, topic: TopicName, subscription: str) -> RetryLink:
        """Return what is known of the retry topic of a stored subscription, whose topic need not be loaded here."""
        name = dead_letters = None
        with contextlib.suppress(BinderyError):  # the name would be too long, or have a slash: nobody can create it
            dead_letters = dead_letter_topic(topic, subscription)
            name = retry_topic(topic, subscription)
        if name is None or name == topic:  # a retry topic is its own
            return RetryLink(None, dead_letters, subscription)
        link = self._by_name.get((name, subscription))
        if link is None:
            link = RetryLink(name, dead_letters, subscription)
            self._by_name[name, subscription] = link
        return link

    async def find(self, link: RetryLink) -> RetrySide | None:
        """Return the subscription of the retry topic; None: there is none.

        Raises the errors with which topics are opened, and Corrupt if the state of the subscription cannot be read. But
        if its owner is changing, that is TryAgain, because the topic of the caller is not.
        """
        try:
            return await self._find(link)
        except (NotOwner, TopicFenced) as error:
            name = "" if link.name is None else link.name.short
            raise RetryTopicAway(
                "the owner of the retry topic is changing; retry", topic=name, cause=error.message
            ) from error

    async def _find(self, link: RetryLink) -> RetrySide | None:
        if link.name is None or self.is_absent(link):
            return None
        topic = self._topics.loaded(link.name)
        if topic is None:
            if link.state is State.ELSEWHERE and self.now() < link.next_look_at:
                return link.remote
            topic = await self._open(link, link.name)
            if topic is None:
                return link.remote
        link.remote = None
        subscription = topic.subscriptions.get(link.subscription)
        if subscription is None:
            topic.ledger.check_cursor(link.subscription)
            self._is_absent(link, link.appearances)
            return None
        link.state = State.PRESENT
        return LocalSide(topic, subscription, in_use=partial(self._in_use, topic.name))

    def loaded(self, link: RetryLink) -> Found | None:
        """Return what `find` returns if the retry topic is loaded, else None."""
        topic = None if link.name is None else self._topics.loaded(link.name)
        subscription = None if topic is None else topic.subscriptions.get(link.subscription)
        return None if topic is None or subscription is None else Found(topic, subscription)

    def dead_letters(self, link: RetryLink) -> Topic | None:
        """Return the dead-letter topic with the default name if it is loaded."""
        return None if link.dead_letters is None else self._topics.loaded(link.dead_letters)

    async def find_dead_letters(self, link: RetryLink) -> Topic | None:
        """Return the dead-letter topic with the default name; None: there is none here. Errors as `find`."""
        if link.dead_letters is None:
            return None
        try:
            topic = self._topics.loaded(link.dead_letters)
            if topic is None and await self._locate(link.dead_letters, create=False) is None:
                topic = await self._topics.get(link.dead_letters)
        except NoSuchTopic:
            return None
        return topic

    @contextlib.contextmanager
    def _in_use(self, name: TopicName) -> Iterator[None]:
        self._topics.begin_use(name)
        try:
            yield
        finally:
            self._topics.end_use(name)

    async def _open(self, link: RetryLink, name: TopicName) -> Topic | None:
        """Return the retry topic; None: it does not exist, or is ELSEWHERE."""
        async with self._locks.hold(name):  # the calls that begin together read no metadata after the first one
            if link.state in (State.ABSENT, State.ELSEWHERE) and self.now() < link.next_look_at:
                return None
            appearances = link.appearances
            try:
                owner = await self._locate(name, create=False)
                if owner is not None:
                    await self._found_elsewhere(link, name, owner.http_url, appearances)
                    return None
                return await self._topics.get(name)
            except NoSuchTopic:
                if self._topics.loaded(name) is None:  # it may have been created meanwhile
                    self._is_absent(link, appearances)
                return None

    async def _found_elsewhere(self, link: RetryLink, name: TopicName, url: str, appearances: int) -> None:
        if not await self._topics.subscription_exists(name, link.subscription):
            self._is_absent(link, appearances)
            return
        if link.state is not State.ELSEWHERE:
            log.info("retry_topic_elsewhere", topic=name.short, subscription=link.subscription, owner=url)
            link.remote = None
        link.state, link.next_look_at = State.ELSEWHERE, self.now() + ELSEWHERE_S
        if self.peers is not None and (link.remote is None or link.remote_url != url):
            link.remote_url = url
            link.remote = self.peers.retry_side(
                url,
                name,
                link.subscription,
                ledger_ids=partial(self._topics.ledger_ids, name),
                on_lost=partial(self._lost, link, name),
            )

    def _is_absent(self, link: RetryLink, appearances: int) -> None:
        """Record what a look has found, unless the retry topic has appeared since: `appearances` before the look."""
        if link.appearances != appearances:
            return
        link.state, link.remote = State.ABSENT, None
        link.next_look_at = self.now() + ABSENT_S

    def is_absent(self, link: RetryLink) -> bool:
        """Whether `find` would return None without looking."""
        return link.name is None or (link.state is State.ABSENT and not self._must_look(link, link.name))

    def _must_look(self, link: RetryLink, name: TopicName) -> bool:
        """Whether an absent retry topic may have been created by another broker."""
        return self.now() >= link.next_look_at and not self._is_mine(name)

    def appeared_elsewhere(self, topic: TopicName, subscription: str) -> None:
        """Another broker may have created the subscription of a retry topic, at the request of this one."""
        self._appeared(topic, subscription)

    def _lost(self, link: RetryLink, name: TopicName) -> None:
        """The owner of a topic that is ELSEWHERE did not answer, or does not own it any more."""
        link.next_look_at = 0.0
        self._forget(name)

    def _appeared(self, topic: TopicName, subscription: str) -> None:
        """A subscription was created or loaded: if it is one of a retry topic, calls that wait receive from it, too."""
        link = self._by_name.get((topic, subscription))
        if link is not None:
            link.appearances += 1
        if link is None or link.state is State.ELSEWHERE:  # calls use it already, and find it if it is here now
            return
        link.state = State.PRESENT
        for end_wait in list(link.waiting):
            end_wait()
