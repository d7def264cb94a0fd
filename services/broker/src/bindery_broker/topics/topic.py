"""A topic that is loaded in this broker: its entries, its subscriptions, its counters.

Invariants: one Topic object per topic name; once closed (fenced, unloaded, deleted) it stays closed, and every waiting
call fails with the reason.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bindery_core.errors import (
    BadRequest,
    BinderyError,
    Conflict,
    NoSuchEntry,
    NoSuchLedger,
    NoSuchSubscription,
    NoSuchTopic,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import Message, OutgoingMessage, PackedEntry
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName, validate_subscription

from bindery_broker.compaction.compactor import CompactionTools
from bindery_broker.compaction.topic_compaction import TopicCompaction
from bindery_broker.compaction.view import CompactedView
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.errors import (
    RESPONSES_FULL,
    NoSuchMessage,
    NotOwner,
    PolicyForbids,
    ResponsesFull,
    SubscribeRateExceeded,
)
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.managed_ledger import COMPACTION_CURSOR, SYSTEM_CURSORS, ManagedCursor, ManagedLedger, WallClock
from bindery_broker.namespaces.policies import EffectivePolicies, PolicySource
from bindery_broker.producers.connected import ConnectedProducers
from bindery_broker.producers.deduplication import Deduplication
from bindery_broker.producers.holding import TopicHold
from bindery_broker.producers.keys import RequestKey
from bindery_broker.retries.targets import Targets
from bindery_broker.statistics.topic import TopicStatistics
from bindery_broker.statistics.volume import Volume
from bindery_broker.subscriptions.consumer import TAG_VERSION
from bindery_broker.subscriptions.decoding import EntryDecoder, RoomNeeded
from bindery_broker.subscriptions.reading import STORED_BYTES_MAX
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.batching import (
    ADD_CALL_SIZE_MAX,
    EntryPlan,
    encode_entries,
    message_ids,
    parts_of,
    plan_entries,
)
from bindery_broker.topics.publishing_once import Admit, OncePublisher

READ_ENTRIES_MAX = 100
"""Maximum number of entries of one read."""
SUBSCRIBING_REMEMBERED_MAX = 1_000
"""Maximum number of consumers of a topic of which the rate of their connections is known."""
ROOM_WAIT_S = 3.0
"""Maximum seconds that a read waits until its messages fit into the responses. Others that are read by their clients
make room in milliseconds, and clients that read nothing are given up within two seconds."""


@dataclass(frozen=True, slots=True)
class ReadMessage:
    id: MessageId
    message: Message


class _ReadLimits(NamedTuple):
    count_max: int
    """Maximum number of messages."""
    bytes_max: int
    """Maximum bytes of payload, unless the first message is larger."""
    room: int
    """Maximum bytes of payload and metadata, unless the first message is larger."""
    decoded_max: int
    """Maximum bytes that an entry may take once it is decoded."""


class Topic:
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_clock",
        "_closed",
        "_decoder",
        "_default_producer",
        "_dispatch_rate",
        "_draining",
        "_is_deleting",
        "_limits",
        "_next_sequence_id",
        "_now",
        "_on_closed",
        "_on_subscription",
        "_once",
        "_partition",
        "_policies",
        "_producers",
        "_read_ahead",
        "_remove_listener",
        "_sessions_max",
        "_subscribing",
        "_subscribing_rates",
        "_subscriptions",
        "_subscriptions_max",
        "_targets",
        "_waiting",
        "closed_because",
        "compaction",
        "hold",
        "is_abandoned",
        "ledger",
        "loaded_at",
        "name",
        "statistics",
        "unsubscribed_at",
        "used_at",
    )

    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger,
        *,
        clock: WallClock,
        now: MonotonicClock,
        limits: DispatchLimits,
        read_ahead: ReadAhead,
        decoder: EntryDecoder,
        sessions_max: int,
        subscriptions_max: int,
        default_producer: str,
        policies: PolicySource,
        targets: Targets,
        deduplication: Callable[["Topic"], Deduplication],
        compaction: CompactionTools,
        on_closed: Callable[["Topic"], None],
        on_subscription: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """`deduplication`: creates what is known of the producers. `on_subscription`: called for each subscription that
        is attached: those that exist, then new ones."""
        self.name = name
        self.ledger = ledger
        self.statistics = TopicStatistics()
        self._clock = clock
        self._now = now
        self._limits = limits
        self._read_ahead = read_ahead
        self._decoder = decoder
        self._sessions_max = sessions_max
        self._subscriptions_max = subscriptions_max
        self._default_producer = default_producer
        self._policies = policies
        self._targets = targets
        self._partition = name.partition
        self.compaction = TopicCompaction(name, ledger, compaction)
        self._next_sequence_id = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._subscribing: KeyedLocks[str] = KeyedLocks()
        self._on_closed = on_closed
        self._on_subscription = on_subscription
        self.used_at = now()
        """Time at which the last request for the topic ended; monotonic seconds."""
        self._waiting: dict[asyncio.Timeout, None] = {}
        """Timeouts of the reads that wait for an entry."""
        self.loaded_at = now()
        """Time at which the topic was loaded; monotonic seconds."""
        self.unsubscribed_at: float | None = None
        """Time at which a subscription was last deleted; monotonic seconds. None: never since the topic was loaded."""
        self._draining = False
        self._moving: BinderyError | None = None
        """The error of calls that would wait, because the topic moves to another broker."""
        self._closed = False
        self.closed_because = ""
        self._dispatch_rate = RateLimit()
        self._subscribing_rates: dict[str, RateLimit] = {}
        """Limits of the consumers that connected last, by name."""
        self._is_deleting = False
        self.is_abandoned = False
        """Whether the topic was closed without calls to bookies and metadata; its handles are not released yet."""
        self._once = OncePublisher(
            ledger,
            deduplication(self),
            topic=name.short,
            partition=name.partition,
            clock=clock,
            default_producer=default_producer,
            on_stored=lambda messages, entries, size: self.statistics.publish(messages, entries, size, now=now()),
        )
        self.hold = TopicHold(ledger, topic=name.short)
        """The producer that has the topic exclusively."""
        self._producers = ConnectedProducers()
        self._remove_listener = ledger.on_fenced(self._fenced)
        for cursor in ledger.cursors.values():
            self._attach(cursor)

    @property
    def is_open(self) -> bool:
        return not self._closed and not self._is_deleting and self.ledger.is_open

    @property
    def partition(self) -> int:
        return self._partition

    @property
    def policies(self) -> EffectivePolicies:
        """The policies in force at present."""
        return self._policies.effective(self.name)

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        return self._subscriptions

    @property
    def volume(self) -> Volume:
        """What went in and out since the topic was loaded."""
        return self.statistics.volume([subscription.statistics for subscription in self._subscriptions.values()])

    @property
    def producers_count(self) -> int:
        """Number of connected producers: those that are known by name, or the one that has the topic exclusively."""
        return 1 if self.hold.holder is not None else self._producers.count(self._now())

    @property
    def producers(self) -> list[str]:
        """The connected producers, as far as they are known by name."""
        return [self.hold.holder] if self.hold.holder is not None else self._producers.names(self._now())

    # -- producing -----------------------------------------------------------------------------------------------

    def connect_producer(self, producer: str) -> None:
        """Record a request of a named producer. Raises TooManyProducers if the policy `producers_max` refuses it."""
        if self.hold.holder is None:  # else `hold.check` refuses all others
            producers_max = 0 if self.name.local.startswith("__") else self.policies.producers_max
            self._producers.join(producer, now=self._now(), producers_max=producers_max)

    async def publish(
        self,
        messages: Sequence[OutgoingMessage],
        *,
        producer: str | None,
        batch: bool,
        check: Callable[[], None] | None = None,
    ) -> list[MessageId | BinderyError]:
        """Store `messages` in order. Returns for each message its id, once it is durable, or its error.

        `check`: raises an error if they may not be stored; called in the turn in which they are submitted.

        Raises TooLarge before anything is written. An error that applies to *all* messages is raised.
        """
        sequence_id = self._next_sequence_id
        self._next_sequence_id += len(messages)
        plan = plan_entries(messages, batch=batch)
        entries = encode_entries(
            messages,
            plan,
            producer_name=producer or self._default_producer,
            publish_time_ms=self._clock(),
            sequence_id=sequence_id,
        )
        size = sum(map(len, entries))
        if check is not None:
            check()
        if size > ADD_CALL_SIZE_MAX:
            return await self._publish_in_parts(plan, entries, count=len(messages))
        try:
            positions = await self.ledger.add_many(entries)
        except TopicFenced as error:
            raise _fenced_while_writing(self.name) from error
        self.statistics.publish(len(messages), len(entries), size, now=self._now())
        return list(message_ids(plan, positions, partition=self._partition))

    @property
    def deduplication(self) -> Deduplication:
        """What is known of the producers."""
        return self._once.deduplication

    async def publish_once(
        self,
        messages: Sequence[OutgoingMessage],
        *,
        producer: str | None,
        request: RequestKey | None,
        batch: bool,
        admit: Admit | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[MessageId | BinderyError]:
        """Store the messages in order, unless the same request, or the producer with the same sequence ids, has stored
        them before. Returns as `publish`, and for a message stored before, its id. Errors: `OncePublisher.publish`.

        The sequence ids count if a producer is named and each message has one, or the policy of the topic says so.
        `check`: as in `publish`.
        """
        first = self._next_sequence_id
        self._next_sequence_id += len(messages)
        sequenced = producer is not None and self.counts_sequences(messages)
        return await self._once.publish(
            messages,
            producer=producer,
            request=request,
            sequenced=sequenced,
            sequence_id=first,
            batch=batch,
            admit=admit,
            check=check,
        )

    def counts_sequences(self, messages: Sequence[OutgoingMessage]) -> bool:
        """Whether `publish_once` must store the messages, if their producer is named."""
        return all(message.sequence_id is not None for message in messages) or self.policies.deduplication

    async def _publish_in_parts(
        self, plan: Sequence[EntryPlan], entries: Sequence[bytes], *, count: int
    ) -> list[MessageId | BinderyError]:
        """Store the entries in several pipelined calls. To keep the order, no part is submitted after a refused one."""
        results: list[MessageId | BinderyError | None] = [None] * count
        parts = parts_of(entries, ADD_CALL_SIZE_MAX)
        submitted: list[asyncio.Future[list[Position]]] = []
        refusal: BinderyError | None = None
        for start, end in parts:
            try:
                submitted.append(self.ledger.submit_many(entries[start:end]))
            except BinderyError as error:
                refusal = error
                break
        if refusal is not None and not submitted:
            raise refusal
        outcomes: list[list[Position] | BaseException | None] = [
            *await asyncio.gather(*submitted, return_exceptions=True),
            *[refusal] * (len(parts) - len(submitted)),
        ]
        for (start, end), outcome in zip(parts, outcomes, strict=True):
            assert outcome is not None
            indexes = [list(entry.indexes) for entry in plan[start:end]]
            if isinstance(outcome, TopicFenced):
                outcome = _fenced_while_writing(self.name)
            if isinstance(outcome, BinderyError):
                for index in (index for entry in indexes for index in entry):
                    results[index] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                size = sum(map(len, entries[start:end]))
                self.statistics.publish(sum(map(len, indexes)), end - start, size, now=self._now())
                for entry, position in zip(indexes, outcome, strict=True):
                    for batch_index, index in enumerate(entry):
                        in_batch = batch_index if len(entry) > 1 else -1
                        results[index] = MessageId.of(position, batch_index=in_batch, partition=self._partition)
        settled = [result for result in results if result is not None]
        assert len(settled) == count
        if isinstance(settled[0], BinderyError) and all(isinstance(result, BinderyError) for result in settled):
            raise settled[0]
        return settled

    @property
    def is_terminated(self) -> bool:
        """Whether the topic accepts no more messages, for good."""
        return self.ledger.is_terminated

    # -- reading without a subscription --------------------------------------------------------------------------

    async def read(
        self,
        start: MessageId | Position,
        *,
        charge: Charge,
        count_max: int,
        bytes_max: int,
        wait_s: float = 0.0,
        compacted: bool = False,
    ) -> tuple[list[ReadMessage], MessageId]:
        """Return messages from `start` on (inclusive), and the id with which the next call continues.

        `compacted`: read the compacted topic. An id then stands for the first message at or after it.
        `charge` has the bytes of the messages on return; the caller releases it once they are sent. Raises
        ResponsesFull if there is no room for the messages.
        """
        first_index = start.batch_index if isinstance(start, MessageId) else -1
        wanted = start.position if isinstance(start, MessageId) else start
        source = self.compaction.view if compacted else self.ledger
        position = await _clamped(source, wanted)
        if position != wanted:
            first_index = -1
        if wait_s > 0 and not source.contains(position) and not self.is_terminated:
            await self._wait_for_entry(position, wait_s)
            position = await _clamped(source, position)
        room = decoded_max = max(bytes_max, ENTRY_SIZE_MAX)
        while True:
            if source.contains(position):
                await self._take_room(charge, room + decoded_max)  # entries, and their messages
            limits = _ReadLimits(count_max, bytes_max, room, decoded_max)
            try:
                found, following = await self._read(source, position, first_index, limits)
            except RoomNeeded as needed:
                decoded_max = needed.size
                continue
            except (NoSuchLedger, NoSuchEntry):
                first_left = await _clamped(source, position)
                if first_left == position:
                    raise
                position, first_index = first_left, -1  # trimmed meanwhile
                continue
            charge.keep(sum(one.message.size for one in found))
            return found, following

    async def _read(
        self, source: ManagedLedger | CompactedView, start: Position, first_index: int, limits: _ReadLimits
    ) -> tuple[list[ReadMessage], MessageId]:
        """Return what `read` returns. `first_index`: batch index of the first message; -1: any.

        Raises RoomNeeded if the first entry does not fit.
        """
        found: list[ReadMessage] = []
        found_bytes = found_size = 0
        position = start
        while len(found) < limits.count_max and found_bytes < limits.bytes_max:
            entries = await source.read(
                position,
                entries_max=min(limits.count_max - len(found), READ_ENTRIES_MAX),
                size_max=min(STORED_BYTES_MAX, limits.bytes_max - found_bytes),
            )
            if not entries:
                break
            for entry_position, payload in entries:
                if len(found) >= limits.count_max:
                    return found, MessageId.of(entry_position, partition=self._partition)
                first = max(first_index, 0) if entry_position == start else 0
                part = range(first, first + limits.count_max - len(found))
                while True:
                    try:
                        entry = self._open(entry_position, payload)
                        messages = await self._decode(entry_position, entry, part, room=limits.decoded_max)
                    except RoomNeeded:
                        if not found:
                            raise
                        return found, MessageId.of(entry_position, partition=self._partition)
                    for message in messages:
                        if entry_position == start and message.batch_index < first_index and not entry.is_opaque:
                            continue
                        message_id = MessageId.of(
                            entry_position, batch_index=message.batch_index, partition=self._partition
                        )
                        is_full = (
                            len(found) >= limits.count_max
                            or found_bytes + len(message.payload) > limits.bytes_max
                            or found_size + message.size > limits.room
                        )
                        if found and is_full:
                            return found, message_id
                        found.append(ReadMessage(message_id, message))
                        found_bytes += len(message.payload)
                        found_size += message.size
                    if part.stop >= entry.count:
                        break
                    if found:
                        return found, MessageId.of(entry_position, batch_index=part.stop, partition=self._partition)
                    # Compaction has removed this part of the batch. An answer without messages would mean the end.
                    part = range(part.stop, part.stop + 2 * len(part))
                position = source.next_position(entry_position)
        return found, MessageId.of(position, partition=self._partition)

    async def _take_room(self, charge: Charge, size: int) -> None:
        """Let `charge` hold `size` bytes. Raises ResponsesFull if they do not fit in time, or if too many wait."""
        if charge.take(least=size, most=size):
            return
        if not charge.may_wait:
            raise ResponsesFull(RESPONSES_FULL)
        granted = charge.wait(least=size, most=size)
        try:
            async with asyncio.timeout(0 if self._draining else ROOM_WAIT_S):
                await granted
        except TimeoutError:
            raise ResponsesFull(RESPONSES_FULL) from None
        finally:
            granted.cancel()

    async def _wait_for_entry(self, position: Position, wait_s: float) -> None:
        """Return when there is an entry, after `wait_s`, or when `drain` ends the wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._draining or self._moving is not None else wait_s) as waiting:
                self._waiting[waiting] = None
                try:
                    await self.ledger.wait_for_entry(position, timeout_s=wait_s)
                finally:
                    self._waiting.pop(waiting, None)
        if self._moving is not None and not self.ledger.contains(position):
            raise NotOwner(self._moving.message, **self._moving.facts)

    async def read_one(self, message_id: MessageId, *, charge: Charge) -> ReadMessage:
        """Return one message. An id without a batch index names the first message of a batch. `charge`: as in `read`.

        Raises NoSuchMessage if there is no such entry, or no such message in it.
        """
        if message_id.partition not in (-1, self._partition) or not self.ledger.contains(message_id.position):
            raise NoSuchMessage("the topic holds no such message", message_id=str(message_id), topic=self.name.short)
        decoded_max = ENTRY_SIZE_MAX
        while True:
            await self._take_room(charge, ENTRY_SIZE_MAX + decoded_max)
            try:
                found = await self._read_one(message_id, decoded_max)
            except RoomNeeded as needed:
                decoded_max = needed.size
                continue
            charge.keep(found.message.size)
            return found

    async def cancel(self, message_id: MessageId) -> dict[str, bool]:
        """Acknowledge a delayed entry in each subscription, idempotently. Returns for each if it was not delivered.

        Raises NoSuchMessage, or Conflict if the message has no delay, or is only a part of the entry.
        """
        position = message_id.position
        if message_id.partition not in (-1, self._partition) or not self.ledger.contains(position):
            raise NoSuchMessage("the topic holds no such message", message_id=str(message_id), topic=self.name.short)
        entries = await self.ledger.read(position, entries_max=1, size_max=1)
        if not entries or entries[0][0] != position:  # trimmed meanwhile
            raise NoSuchMessage("the topic holds no such message", message_id=str(message_id), topic=self.name.short)
        entry = self._open(*entries[0])
        if entry.deliver_at_ms <= 0:
            raise Conflict("only a delayed message can be cancelled", message_id=str(message_id))
        if entry.is_batch and message_id.batch_index >= 0:
            raise Conflict(
                "a batch can only be cancelled as a whole: leave the batch index out", message_id=str(message_id)
            )
        names = list(self._subscriptions)
        done = await asyncio.gather(
            *(self._subscriptions[name].cancel(position, deliver_at_ms=entry.deliver_at_ms) for name in names)
        )
        return dict(zip(names, done, strict=True))

    async def _read_one(self, message_id: MessageId, decoded_max: int) -> ReadMessage:
        """See `read_one`. Raises RoomNeeded."""
        position = message_id.position
        entries = await self.ledger.read(position, entries_max=1, size_max=1)
        if entries and entries[0][0] == position:
            entry = self._open(*entries[0])
            wanted = message_id.batch_index
            parts = [range(wanted, wanted + 1)] if wanted >= 0 else [range(1), range(1, entry.count)]  # if compacted
            for part in parts:
                for message in await self._decode(position, entry, part, room=decoded_max):
                    if wanted in (-1, message.batch_index):
                        full = MessageId.of(position, batch_index=message.batch_index, partition=self._partition)
                        return ReadMessage(full, message)
        raise NoSuchMessage("the entry holds no such message", message_id=str(message_id), topic=self.name.short)

    def _open(self, position: Position, payload: bytes) -> PackedEntry:
        with self._naming(position):
            return self._decoder.open(payload)

    async def _decode(self, position: Position, entry: PackedEntry, part: range, *, room: int) -> list[Message]:
        """Return the messages of a part of an entry. Raises RoomNeeded if they take more than `room` bytes."""
        with self._naming(position):
            return await self._decoder.decode(entry, room=room, first=part.start, count_max=len(part))

    @contextlib.contextmanager
    def _naming(self, position: Position) -> Iterator[None]:
        """Add the message id to errors of decoding."""
        try:
            yield
        except BinderyError as error:
            error.facts.setdefault("message_id", str(MessageId.of(position, partition=self._partition)))
            raise

    # -- subscriptions -------------------------------------------------------------------------------------------

    def subscription(self, name: str, *, tags: Sequence[str] = ()) -> Subscription:
        """Return a subscription. Raises NoSuchSubscription, or Corrupt if its stored state cannot be read.

        Raises Conflict if `tags` are given and the subscription has others.
        """
        found = self._subscriptions.get(name)
        if found is None:
            self.ledger.check_cursor(name)
            raise NoSuchSubscription(
                "the topic has no such subscription", topic=self.name.short, subscription=name[:256]
            )
        _check_tags(found, tags)
        return found

    async def subscribe(
        self,
        name: str,
        *,
        initial: Position = EARLIEST,
        tags: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> tuple[Subscription, bool]:
        """Return the subscription, and whether this call created it (durably).

        `durable=False`: a subscription that is not stored, keeps no entries, and ends with its last consumer. Raises
        Conflict if it exists with other tags, which are fixed at creation, or is durable unlike `durable`.
        """
        assert initial in (EARLIEST, LATEST)
        found = self._subscriptions.get(name)
        if found is None:
            validate_subscription(name)
            if name in SYSTEM_CURSORS:
                raise BadRequest("this name is reserved for brokers", subscription=name)
            async with self._subscribing.hold(name):
                found = self._subscriptions.get(name)
                if found is None:
                    self._check_open()
                    if len(self._subscriptions) >= self._subscriptions_max:
                        raise Conflict("the topic has the maximum number of subscriptions", max=self._subscriptions_max)
                    count, count_max = len(self._subscriptions), self.policies.subscriptions_max
                    if count_max and count >= count_max:
                        raise PolicyForbids(
                            "the topic has the maximum number of subscriptions by the policy subscriptions_max",
                            subscriptions=count,
                            max=count_max,
                        )
                    if not durable:
                        if tags or properties:
                            raise BadRequest("a subscription that is not durable has no tags and no properties")
                        return self._attach(await self.ledger.open_transient_cursor(name, start=initial)), True
                    all_properties = {**(properties or {}), **dict.fromkeys(tags, TAG_VERSION)}
                    cursor = await self.ledger.open_cursor(name, start=initial, properties=all_properties)
                    return self._attach(cursor), True
        _check_tags(found, tags)
        if found.is_durable != durable:
            raise Conflict(
                f"the subscription is {'' if found.is_durable else 'not '}durable; use another name", subscription=name
            )
        return found, False

    def end_readers(self) -> None:
        """End the subscriptions that are not durable and have no consumer."""
        for name, subscription in list(self._subscriptions.items()):
            if not subscription.is_durable and not len(subscription.sessions):
                _end(subscription, NoSuchSubscription("the subscription has ended", subscription=name))
                subscription.cursor.end(NoSuchSubscription("the subscription has ended", subscription=name))
                del self._subscriptions[name]
                self._unsubscribed(subscription)

    async def reset_subscription(self, name: str, *, initial: Position) -> MessageId:
        """Replace the state of a damaged subscription, durably. Returns the position that comes next.

        Raises Conflict if it is not damaged, NoSuchSubscription if there is none.
        """
        assert initial in (EARLIEST, LATEST)
        async with self._subscribing.hold(name):
            self._check_open()
            cursor = await self.ledger.reset_cursor(name, start=initial)
            if name not in SYSTEM_CURSORS:
                self._attach(cursor)
        return MessageId.of(self.ledger.next_position(cursor.mark_delete), partition=self._partition)

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription, durably. Raises Conflict while it has consumers, unless `force`.

        Waits for a creation or reset in progress, which would otherwise attach the subscription to a deleted cursor.
        """
        async with self._subscribing.hold(name):
            if name == COMPACTION_CURSOR:
                self._check_open()
                await self.compaction.forget()
                return
            subscription = self._subscriptions.get(name)
            if subscription is None:  # a damaged one, or one whose creation had an unknown outcome
                self._check_open()
                await self.ledger.delete_cursor(name)
                return
            subscription.tick()
            if consumers := 0 if force else len(subscription.sessions):
                raise Conflict("the subscription has consumers", subscription=name, consumers=consumers)
            await self.ledger.delete_cursor(name)
            if self._subscriptions.pop(name, None) is subscription:
                self._unsubscribed(subscription)
            _end(subscription, NoSuchSubscription("the subscription was deleted", subscription=name))

    def _unsubscribed(self, subscription: Subscription) -> None:
        self.statistics.subscription_deleted(subscription.statistics)
        self.unsubscribed_at = self._now()

    @property
    def has_consumers(self) -> bool:
        for subscription in self._subscriptions.values():
            subscription.tick()
        return any(len(subscription.sessions) for subscription in self._subscriptions.values())

    @property
    def is_consumed(self) -> bool:
        """Whether a consumer is connected, or a message in memory waits for its redelivery."""
        return self.has_consumers or any(
            subscription.dispatcher.next_deadline() is not None for subscription in self._subscriptions.values()
        )

    @property
    def last_use(self) -> float:
        """When the topic was last used, for the policy of inactive topics; monotonic seconds. Showing its statistics is
        no use; a subscription that was deleted has been one until then."""
        used_at = [self.loaded_at, self.statistics.last_published_at or 0.0, self.unsubscribed_at or 0.0]
        for subscription in self._subscriptions.values():
            used_at += [subscription.created_at, subscription.statistics.last_request_at or 0.0]
        return max(used_at)

    @property
    def is_draining(self) -> bool:
        """Whether no call waits any more, because the broker is stopping."""
        return self._draining

    # -- life ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """End every wait, because the broker stops."""
        self._draining = True
        self.hold.end_waiting(TryAgain("the broker is stopping; retry", topic=self.name.short))
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(now)
        for subscription in self._subscriptions.values():
            subscription.drain()

    def end_waits(self, reason: NotOwner) -> None:
        """Fail what waits in this topic with `reason`, because it moves to another broker. Nothing is leased, stored or
        lost by that, so the same calls can be made there. Other calls in progress go on."""
        self._moving = reason
        self.hold.end_waiting(reason)
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(now)
        for subscription in self._subscriptions.values():
            subscription.end_waits(reason)

    async def close(self, why: str = "the topic is moving to another broker; retry") -> None:
        """End the consumers' calls, store the cursors, close the ledger. `why`: reason for later calls."""
        if self.is_open:
            await asyncio.gather(
                self.deduplication.close(), *(one.store_delays() for one in self._subscriptions.values())
            )
        await self.compaction.stop()
        self._shut(NotOwner(why, topic=self.name.short))
        await self.ledger.close()

    async def delete(self) -> None:
        """Delete the topic with its subscriptions and ledgers. After an error it must be opened again."""
        self._is_deleting = True
        await self.compaction.stop()
        compacted = self.compaction.ledger_ids()
        try:
            await self.ledger.delete()
        except BinderyError:
            self._shut(TopicFenced("the deletion of the topic failed", topic=self.name.short))
            raise
        await self.compaction.delete_ledgers(compacted)
        self._shut(NoSuchTopic("the topic was deleted", topic=self.name.short))

    def abandon(self, reason: str) -> None:
        """Stop serving at once, without calls to bookies or metadata: another broker may own the topic."""
        self.is_abandoned = not self._closed
        self._shut(TopicFenced(reason, topic=self.name.short))

    def _fenced(self) -> None:
        self.abandon("another broker took the topic over")

    def _shut(self, reason: BinderyError) -> None:
        if self._closed:
            return
        self._closed = True
        self.closed_because = reason.message
        self._remove_listener()
        self.deduplication.end()
        self.hold.end_waiting(reason)
        self.compaction.cancel()
        for subscription in self._subscriptions.values():
            _end(subscription, reason)
        self._on_closed(self)

    def _attach(self, cursor: ManagedCursor) -> Subscription:
        subscription = Subscription(
            cursor,
            self.ledger,
            topic=self.name,
            now=self._now,
            clock=self._clock,
            limits=self._limits,
            read_ahead=self._read_ahead,
            decoder=self._decoder,
            sessions_max=self._sessions_max,
            targets=self._targets,
            policies=lambda: self.policies,
            dispatch_rate=self._dispatch_rate,
            publish_rate=lambda: self.statistics.published.rates(self._now()),
            check_joining=self._check_joining,
            is_kept=partial(self._keeps, cursor.name),
        )
        self._subscriptions[cursor.name] = subscription
        self._on_subscription(cursor.name)
        return subscription

    def _keeps(self, name: str, other: str) -> bool:
        """Return whether there is another stored subscription than `name`."""
        found = self._subscriptions.get(other)
        return other != name and found is not None and found.is_durable

    def _check_joining(self, consumer: str) -> None:
        """Check the policies before a new consumer is admitted. Raises TooManyRequests or SubscribeRateExceeded."""
        policies, now = self.policies, self._now()
        if policies.consumers_max:
            count = sum(len(subscription.sessions) for subscription in self._subscriptions.values())
            if count >= policies.consumers_max:
                raise TooManyRequests(
                    "the topic has the maximum number of consumers by the policy consumers_max",
                    consumers=count,
                    limit=policies.consumers_max,
                )
        if policies.subscribe_rate is None:
            return
        limit = self._subscribing_rates.pop(consumer, None) or RateLimit()
        self._subscribing_rates[consumer] = limit
        if len(self._subscribing_rates) > SUBSCRIBING_REMEMBERED_MAX:
            del self._subscribing_rates[next(iter(self._subscribing_rates))]
        limit.set(policies.subscribe_rate, now)
        if wait_s := limit.wait_s(now):
            raise SubscribeRateExceeded(
                f"the consumer connects more often than the policy subscribe_rate allows: {limit.text()}",
                consumer=consumer,
                retry_after_s=round(wait_s, 3),
            )
        limit.take(1, 0, now)

    def _check_open(self) -> None:
        if self._closed:
            raise TopicFenced("the topic is closed here", topic=self.name.short)


async def _clamped(source: ManagedLedger | CompactedView, position: Position) -> Position:
    return await source.clamp(position) if isinstance(source, CompactedView) else source.clamp(position)


def _check_tags(subscription: Subscription, tags: Sequence[str]) -> None:
    if tags and frozenset(tags) != subscription.tags:
        raise Conflict(
            "the subscription was created with other tags; delete it to change them",
            subscription=subscription.name,
            tags="||".join(sorted(subscription.tags)),
        )


def _end(subscription: Subscription, reason: BinderyError) -> None:
    """Close the subscription and release the messages that it holds in memory."""
    subscription.close(reason)
    subscription.dispatcher.reset()


def _fenced_while_writing(name: TopicName) -> OutcomeUnknown:
    """Return OutcomeUnknown: the entries in flight may be stored, so this broker must not store them again."""
    return OutcomeUnknown("the topic was taken over while this was written; it may be stored", topic=name.short)
