"""Consume the partitions of a topic through one subscription, as if it were one topic.

The partitions that this broker owns are used here, the others through their owners (`topics.retry_sides`). The retry
topic of the subscription, which the partitions share, is one more side of a receive. An id says by its partition where
its message is; -1: in the retry topic.

A call that waits is continued with all partitions when the topic gets more of them, when the retry topic appears, and
when the owner of a partition changes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Final, TypeVar

import msgspec.structs
from bindery_core.errors import BinderyError, NoSuchSubscription, NoSuchTopic, OutcomeUnknown, TryAgain
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import UnknownMessages
from bindery_broker.ownership.ownership import RemoteOwner
from bindery_broker.partitioned.catalog import PartitionedTopics
from bindery_broker.partitioned.receiving import PASSING, Got, receive_again, receive_at_once, wait_for_any
from bindery_broker.partitioned.record import PartitionedRecord
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.explaining import Reason
from bindery_broker.subscriptions.moving import MoveResult, RetryTo
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.topics.retried import Part
from bindery_broker.topics.retry_sides import LocalSide, Peers, RetrySide
from bindery_broker.topics.retry_topics import Locate, RetryLink, RetryTopics, check_receives_retries
from bindery_broker.topics.topics import Topics

SUBSCRIPTIONS_MAX: Final = 10_000
"""Maximum number of subscriptions of which it is remembered how their partitions are reached."""
PAUSE_S: Final = 0.25
"""Minimum seconds between two attempts of a waiting call to wait at the partitions."""
LOOK_AGAIN_S: Final = 1.0
"""Seconds after which a waiting call uses a partition again that failed."""
MAKE_MAX: Final = 16
"""Maximum number of partitions in which a call creates the subscription in parallel."""
RETRY_PARTITION: Final = -1
T = TypeVar("T")
MakeSubscription = Callable[[TopicName], Awaitable[None]]
"""Creates the subscription in a partition where it is missing."""


class _State:
    """What is known of a subscription."""

    __slots__ = ("link", "remote", "turn")

    def __init__(self, link: RetryLink) -> None:
        self.link = link
        self.remote: dict[TopicName, tuple[str, RetrySide]] = {}
        """Partitions of other brokers, with the URLs of these."""
        self.turn = 0


class PartitionedConsumers:
    def __init__(
        self,
        topics: Topics,
        catalog: PartitionedTopics,
        retry_topics: RetryTopics,
        *,
        locate: Locate,
        forget: Callable[[TopicName], None],
        is_draining: Callable[[], bool],
    ) -> None:
        """`forget`: discards what is known of the owner of a topic."""
        self.topics = topics
        self.catalog = catalog
        self.retry_topics = retry_topics
        self.peers: Peers | None = None
        self.locate = locate
        self.forget = forget
        self.is_draining = is_draining
        self._states: OrderedDict[tuple[TopicName, str], _State] = OrderedDict()

    def subscription(
        self,
        name: TopicName,
        whole: PartitionedRecord,
        subscription: str,
        *,
        tags: Sequence[str] = (),
        has_retries: bool = True,
    ) -> "PartitionedSubscription":
        """Return a subscription for one call. `tags`: those that it must have. `has_retries`: with its retry topic."""
        key = name, subscription
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(self.retry_topics.link_of(name, subscription))
            if len(self._states) > SUBSCRIPTIONS_MAX:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        link = state.link if has_retries else RetryLink(None, None, subscription)
        return PartitionedSubscription(self, name, whole, subscription, tags, state, link)

    async def side(self, partition: TopicName, subscription: str, tags: Sequence[str], state: _State) -> RetrySide:
        """Return the subscription in a partition. Raises NoSuchTopic, NoSuchSubscription, TryAgain."""
        if (topic := self.topics.loaded(partition)) is None:
            owner = await self.locate(partition, create=False)
            if owner is not None:
                return self._remote(partition, subscription, owner, state)
            topic = await self.topics.get(partition)
        found = topic.subscription(subscription, tags=list(tags))
        return LocalSide(topic, found, in_use=partial(self._in_use, partition))

    def _remote(self, partition: TopicName, subscription: str, owner: RemoteOwner, state: _State) -> RetrySide:
        known = state.remote.get(partition)
        if known is not None and known[0] == owner.http_url:
            return known[1]
        if self.peers is None:
            raise TryAgain("the partition belongs to another broker", topic=partition.short)
        side = self.peers.retry_side(
            owner.http_url,
            partition,
            subscription,
            ledger_ids=partial(self.topics.ledger_ids, partition),
            on_lost=partial(self.forget, partition),
            is_partition=True,
        )
        state.remote[partition] = owner.http_url, side
        return side

    @contextmanager
    def _in_use(self, partition: TopicName) -> Iterator[None]:
        self.topics.begin_use(partition)
        try:
            yield
        finally:
            self.topics.end_use(partition)


class PartitionedSubscription:
    """Made for one call. It has the calls of `RetriedSubscription`."""

    def __init__(
        self,
        owner: PartitionedConsumers,
        name: TopicName,
        whole: PartitionedRecord,
        subscription: str,
        tags: Sequence[str],
        state: _State,
        link: RetryLink,
    ) -> None:
        self._owner = owner
        self._name = name
        self._whole = whole
        self._subscription = subscription
        self._tags = tags
        self._state = state
        self._link = link
        self.make: MakeSubscription | None = None
        """None: a missing subscription is an error."""

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None = None
    ) -> list[Part]:
        """Return messages of all partitions; see `receiving`. Those of each part are in its order."""
        try:
            return await self._receive(request, kind=kind, charge=charge, client=client)
        except (NoSuchTopic, NoSuchSubscription):
            if self.make is None or (client is not None and client.is_gone):
                raise
        # A partition of another broker has no such subscription.
        names = [self._name.with_partition(index) for index in range(self._whole.partitions)]
        for start in range(0, len(names), MAKE_MAX):
            await _all([self.make(name) for name in names[start : start + MAKE_MAX]])
        return await self._receive(request, kind=kind, charge=charge, client=client)

    async def _receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None
    ) -> list[Part]:
        catalog, now = self._owner.catalog, asyncio.get_running_loop().time
        watch = client or ClientWatch()
        deadline = now() + request.wait_s
        has_asked = False
        has_changed = False
        end_wait: Callable[[], None] | None = None

        def changed() -> None:
            nonlocal has_changed
            has_changed = True
            if end_wait is not None:
                end_wait()

        def on_waiting(end: Callable[[], None]) -> None:
            nonlocal end_wait
            end_wait = end
            if has_changed:
                end()

        link = self._link
        with catalog.watched(self._name, changed):
            link.waiting[changed] = None
            try:
                while True:
                    has_changed, end_wait = False, None
                    self._whole = await catalog.find(self._name) or self._gone()
                    if self._whole.is_deleted:
                        self._gone()
                    sides, failure = await self._sides(kind)
                    with ExitStack() as uses:
                        for side in sides:
                            uses.enter_context(side.in_use())
                        got = await self._receive_once(request, sides, kind, charge, watch, has_asked=has_asked)
                        has_asked = True
                        failure = got.failure or failure
                        left_s = 0.0 if self._owner.is_draining() else deadline - now()
                        if any(part.deliveries for part in got.parts) or watch.is_gone:
                            return got.parts
                        if left_s <= 0:
                            if failure is not None:
                                raise failure
                            return []
                        wait_s = left_s if failure is None else min(left_s, LOOK_AGAIN_S)
                        if not sides:
                            watch.look()
                            await _pause(min(wait_s, PAUSE_S))
                            continue
                        began = now()
                        waiting = msgspec.structs.replace(request, wait_s=wait_s, redeliver=False)
                        got = await wait_for_any(
                            sides, waiting, kind=kind, charge=charge, client=watch, on_waiting=on_waiting
                        )
                    if any(part.deliveries for part in got.parts) or watch.is_gone:
                        return got.parts
                    left_s = 0.0 if self._owner.is_draining() else deadline - now()
                    if left_s <= 0 or self._has_left(request.consumer):
                        if got.failure is not None:
                            raise got.failure
                        return []
                    if not has_changed and now() - began < PAUSE_S:
                        await _pause(PAUSE_S)
            finally:
                link.waiting.pop(changed, None)

    def _gone(self) -> PartitionedRecord:
        raise NoSuchTopic("the partitioned topic was deleted", topic=self._name.short)

    def _has_left(self, consumer: str) -> bool:
        """Whether the consumer has left a partition of this broker: its session ended while its call waited."""
        for index in range(self._whole.partitions):
            topic = self._owner.topics.loaded(self._name.with_partition(index))
            found = None if topic is None else topic.subscriptions.get(self._subscription)
            if found is not None:
                return found.sessions.get(consumer) is None
        return False

    async def _receive_once(
        self,
        request: ReceiveRequest,
        sides: list[RetrySide],
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch,
        *,
        has_asked: bool,
    ) -> Got:
        if request.request_id is not None and not has_asked:
            again = await receive_again(sides, request, request.request_id, kind=kind, charge=charge)
            if again is not None:
                return Got(again)
        if has_asked:
            request = msgspec.structs.replace(request, redeliver=False)
        if kind == "exclusive" and not has_asked and sides:
            # Partition 0 decides which consumer has the topic, so that two of them cannot have a part each.
            first = min(sides, key=lambda side: side.partition)
            got = await receive_at_once([first], request, kind=kind, charge=charge, client=client)
            if got.parts or got.failure is not None or client.is_gone:
                return got
            sides = [side for side in sides if side is not first]
        self._state.turn += 1
        turn = self._state.turn % max(1, len(sides))
        rotated = [*sides[turn:], *sides[:turn]]
        return await receive_at_once(rotated, request, kind=kind, charge=charge, client=client)

    async def _sides(self, kind: SubscriptionType) -> tuple[list[RetrySide], BinderyError | None]:
        """Return the subscription in each partition that can be reached, and why others cannot."""
        found = await asyncio.gather(
            *(self._partition(index) for index in range(self._whole.partitions)), return_exceptions=True
        )
        sides: list[RetrySide] = []
        failure: BinderyError | None = None
        for one in found:
            if not isinstance(one, BaseException):
                sides.append(one)
            elif isinstance(one, BinderyError) and isinstance(one, PASSING):
                failure = one
            else:
                raise one
        if kind in ("shared", "key_shared"):
            try:
                retry = await self._owner.retry_topics.find(self._link)
            except BinderyError as error:
                retry, failure = None, error
            if retry is not None:
                sides.append(retry)
        return sides, failure

    async def _partition(self, index: int) -> RetrySide:
        """Return the subscription in a partition. It is created there if it is missing and `make` is set."""
        partition = self._name.with_partition(index)
        try:
            return await self._owner.side(partition, self._subscription, self._tags, self._state)
        except (NoSuchTopic, NoSuchSubscription):
            if self.make is None:
                raise
        await self.make(partition)
        return await self._owner.side(partition, self._subscription, self._tags, self._state)

    async def check(self) -> None:
        """Raise NoSuchSubscription or another error if a partition cannot be consumed."""
        await self._sides("exclusive")

    # -- messages by id ------------------------------------------------------------------------------------------

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None = None) -> None:
        """Acknowledge messages; durable on return. After an error, those of some partitions may be acknowledged."""
        parts = await self._parts(ids)
        await _all([side.ack(some, consumer=consumer) for side, some in parts])

    async def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None = None) -> list[MessageId]:
        parts = await self._parts(ids)
        returned = await _all([side.nack(some, delay_s=delay_s, consumer=consumer) for side, some in parts])
        return [one for some in returned for one in some]

    async def retry(
        self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None = None
    ) -> MoveResult:
        """Move messages to the retry topic. The copies have the order of `ids`."""
        sides = {side.partition: side for side, _ in await self._parts(ids)}
        for side in sides.values():
            if isinstance(side, LocalSide):  # the brokers of the others check it
                check_receives_retries(side.topic.name, side.subscription)
        result = MoveResult([], [], [])
        failure: BinderyError | None = None
        for partition, group in groupby(ids, lambda one: one.partition):
            some = list(group)
            if failure is not None:
                result.failed.extend((one, failure) for one in some)
                continue
            try:
                done = await sides[partition].retry(some, to, charge=charge, consumer=consumer)
            except BinderyError as error:
                if not result.moved and not result.acknowledged and not result.failed:
                    raise
                result.failed.extend((one, error) for one in some)
                failure = error
                continue
            charge.release()
            result.moved.extend(done.moved)
            result.acknowledged.extend(done.acknowledged)
            result.failed.extend(done.failed)
        return result

    def blocked(self, consumer: str) -> Reason | None:
        """Return why the consumer gets nothing, if that is so in all partitions of this broker, and it owns all."""
        reason: Reason | None = None
        for index in range(self._whole.partitions):
            topic = self._owner.topics.loaded(self._name.with_partition(index))
            found = None if topic is None else topic.subscriptions.get(self._subscription)
            one = None if found is None else found.blocked(consumer)
            if one is None:
                return None
            reason = reason or one
        return reason

    async def _parts(self, ids: Sequence[MessageId]) -> list[tuple[RetrySide, list[MessageId]]]:
        """Return the ids by side. Raises UnknownMessages, with nothing done, if one names no partition."""
        by_partition: dict[int, list[MessageId]] = {}
        for one in ids:
            by_partition.setdefault(one.partition, []).append(one)
        unknown = [one for one in ids if not RETRY_PARTITION <= one.partition < self._whole.partitions]
        retry = None
        if not unknown and RETRY_PARTITION in by_partition:
            retry = await self._owner.retry_topics.find(self._link)
            if retry is None:
                unknown = by_partition[RETRY_PARTITION]
        if unknown:
            raise UnknownMessages.of(unknown, count=len(ids), what="partition of this topic")
        parts = []
        for partition, some in by_partition.items():
            side = retry if partition == RETRY_PARTITION else await self._partition(partition)
            assert side is not None
            parts.append((side, some))
        return parts

    async def leave_retry_topic(self, consumer: str) -> None:
        """End the session of a consumer in the retry topic, if there is one."""
        retry = await self._owner.retry_topics.find(self._link)
        if retry is not None:
            await retry.leave(consumer)


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results, or raise the worst error once all calls have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    if errors:
        raise next((one for one in errors if isinstance(one, OutcomeUnknown)), errors[0])
    return [one for one in results if not isinstance(one, BaseException)]


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
