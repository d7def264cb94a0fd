"""Random consumers of one subscription: nothing is lost, nothing hangs, and all memory is given back.

Several consumers receive, acknowledge, return, leave and vanish while messages arrive, reads fail and the cursor moves.
Each delivery is checked: the rules of its type hold, and nothing that was durably acknowledged is delivered.
"""

import asyncio
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.key_shared import KeySharedMode
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.errors import ResponsesFull
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD, READ_BYTES_MAX, READ_MESSAGES_MAX
from bindery_broker.subscriptions.response_budget import ResponseBudget
from bindery_broker.subscriptions.subscription import Subscription
from bindery_core.errors import BinderyError, TryAgain
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.message_id import EARLIEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName
from managed_ledger_cluster import Cluster
from subscription_parts import PARTITION, Deliveries, NoTargets, keys_of

STEPS = 25
ENDS_S = 60.0
"""Seconds after its deadline within which each call ends: reads that fail or last take time."""

Key = tuple[int, int, int]
"""Ledger, entry and batch index."""


class World:
    def __init__(self, cluster: Cluster, kind: SubscriptionType, seed: int) -> None:
        self.cluster = cluster
        self.kind = kind
        self.lots = Random(f"{kind}-{seed}")
        self.now = asyncio.get_running_loop().time
        self.names = ["a"] if kind == "exclusive" else ["a", "b", "c"]
        self.messages: dict[Key, bytes] = {}
        """The keys of all messages."""
        self.acking: set[Key] = set()
        self.acked: set[Key] = set()
        """Durably acknowledged; both sets only grow between two moves of the cursor."""
        self.moves = 0
        self.is_failing = True

    async def open(self) -> None:
        lots = self.lots
        self.topic = await self.cluster.open()
        self.cursor = await self.topic.open_cursor("s", start=EARLIEST)
        self.read_ahead = ReadAhead(lots.choice([0, READ_BYTES_MAX, 8 * READ_BYTES_MAX]))
        self.responses = ResponseBudget(lots.choice([ENTRY_SIZE_MAX, 8 * ENTRY_SIZE_MAX]), now=self.now)
        held_max = lots.choice([1, 5, 100])
        self.limits = DispatchLimits(
            unacked_max=lots.choice([1, 4]) * held_max,
            unacked_per_consumer_max=held_max,
            ready_max=lots.choice([1, 10, READ_MESSAGES_MAX]),
        )
        self.mode = KeySharedMode()
        self.subscription = Subscription(
            self.cursor,
            self.topic,
            topic=TopicName.parse("t"),
            now=self.now,
            clock=lambda: round(self.now() * 1000),
            limits=self.limits,
            read_ahead=self.read_ahead,
            decoder=EntryDecoder(),
            sessions_max=10,
            targets=NoTargets(),
        )
        self.loop = self.subscription._loop
        self._lease = self.loop._lease
        self.loop._lease = self._checked_lease  # type: ignore[method-assign]
        self._fail(self.cursor, "read_unacked")
        self._fail(self.topic, "read")
        self._fail(self.cursor, "ack_many")

    def _fail(self, of: Any, name: str) -> None:
        """Let an operation sometimes take time, and sometimes fail."""
        operation = getattr(of, name)

        async def fail(*arguments: Any, **limits: Any) -> Any:
            if self.lots.random() < 0.3:
                await asyncio.sleep(self.lots.choice([0, 0.01, 1]))
            if self.is_failing and self.lots.random() < 0.1:
                raise TryAgain("made up")
            return await operation(*arguments, **limits)

        setattr(of, name, fail)

    # -- what is checked at each delivery

    def _checked_lease(self, call: Any) -> tuple[Deliveries, int]:
        deliveries, missing = self._lease(call)
        found = keys_of(deliveries)
        assert not self.acked.intersection(found), "delivered after its acknowledgement was durable"
        assert len(set(found)) == len(found)
        consumer = call.session.consumer
        dispatcher = self.subscription.dispatcher
        holders: dict[Any, set[Any]] = defaultdict(set)
        for portion in dispatcher.leases:
            assert portion.grant is not None
            holders[portion.key_hash if self.kind == "key_shared" else None].add(portion.grant.consumer)
        if self.kind != "shared":
            assert all(len(names) == 1 for names in holders.values())
            held = {(*position, index) for position, index in _held(consumer)}
            for key in found:
                group = self.messages[key]
                for other, of in self.messages.items():
                    if other < key and (self.kind != "key_shared" or of == group):
                        assert other in self.acking or other in held, "an earlier message waits"
        return deliveries, missing

    # -- what happens

    async def produce(self) -> None:
        lots = self.lots
        entries, keys = [], []
        for _ in range(lots.choice([1, 1, 5, 30])):
            key, count = b"k%d" % lots.randrange(6), lots.choice([0, 0, 1, 4])
            size = lots.choice([0, 0, 0, 300_000])
            if count:
                batch = [OutgoingMessage(payload=bytes(size), key=key) for _ in range(count)]
                entries.append(encode_batch(batch, producer_name="p", publish_time_ms=1, sequence_ids=range(count)))
            else:
                message = OutgoingMessage(payload=bytes(size), key=key)
                entries.append(encode_message(message, producer_name="p", publish_time_ms=1, sequence_id=0))
            keys.append((key, count))
        first = self.topic.last_confirmed.entry_id + 1
        for number, (key, count) in enumerate(keys):  # before the add: a delivery may come first
            for index in range(count) if count else [-1]:
                self.messages[0, first + number, index] = key
        added = await self.topic.add_many(entries)
        assert added[0] == Position(0, first)

    async def consume(self, name: str) -> None:
        lots = self.lots
        for _ in range(STEPS):
            if lots.random() < 0.5:
                await asyncio.sleep(lots.choice([0, 0.1, 2, 30]))
            await self.receive_once(name)
            if lots.random() < 0.1:
                self.subscription.leave(name)

    async def receive_once(self, name: str) -> None:
        lots = self.lots
        moves = self.moves
        client = ClientWatch() if lots.random() < 0.5 else None
        task = asyncio.create_task(self.receive(name, wait_s=lots.choice([0, 0.5, 10]), client=client))
        if client is not None and lots.random() < 0.3:
            asyncio.get_running_loop().call_later(lots.choice([0, 0.01, 1]), client.set_gone)
        if lots.random() < 0.2:
            asyncio.get_running_loop().call_later(lots.choice([0, 0.01, 1]), task.cancel)
        try:
            found = await task
        except asyncio.CancelledError:
            return
        except BinderyError:
            await asyncio.sleep(0.1)
            return
        some = lots.sample(found, lots.randint(0, len(found)))
        try:
            if lots.random() < 0.6:
                await self.ack(some, moves)
            elif some:
                delay_s = lots.choice([0, 0, 3])
                self.subscription.nack([_id(key) for key in some], delay_s=delay_s, consumer=name)
        except TryAgain:
            pass

    async def receive(self, name: str, *, wait_s: float, client: ClientWatch | None = None) -> list[Key]:
        lots = self.lots
        charge = self.responses.charge(lots.choice("xy"))
        request = ReceiveRequest(
            consumer=name,
            count_max=lots.choice([1, 3, 100]),
            bytes_max=lots.choice([1, 1_000_000]),
            wait_s=wait_s,
            ack_timeout_s=lots.choice([1, 10, 100]),
            session_ttl_s=lots.choice([1, 30]),
            redeliver=lots.random() < 0.05,
            request_id=lots.choice([None, None, None, "r1"]),
            priority=lots.choice([0, 0, 1]) if self.kind == "shared" else 0,
            key_shared=self.mode,
        )
        try:
            async with asyncio.timeout(wait_s + ENDS_S):
                deliveries, _ = await self.subscription.receive(request, kind=self.kind, charge=charge, client=client)
            assert (charge.size > 0) == bool(deliveries)
            if deliveries:
                assert charge.size >= sum(delivery.bits.bit_count() for delivery in deliveries) * MESSAGE_OVERHEAD
            return keys_of(deliveries)
        finally:
            charge.release()

    async def ack(self, keys: list[Key], moves: int) -> None:
        if not keys or moves != self.moves:
            return
        self.acking.update(keys)
        try:
            await self.subscription.ack([_id(key) for key in keys])
        except TryAgain:
            if moves == self.moves:
                self.acking.difference_update(keys)
            raise
        if moves == self.moves:
            self.acked.update(keys)

    async def move(self) -> None:
        """Move the cursor to a random entry."""
        target = Position(0, self.lots.randrange(self.topic.last_confirmed.entry_id + 1))
        self.moves += 1
        self.acked.clear()
        self.acking.update(self.messages)  # nothing can be said about the order until the cursor has moved
        moved = await self.subscription.seek(target)
        self.acking = {key for key in self.messages if key < (*moved, -1)}
        self.moves += 1
        self.acked = set(self.acking)

    # -- the end

    async def finish(self) -> None:
        """Without failures, one consumer gets everything that is left."""
        self.is_failing = False
        for _ in range(2_000):
            if self.cursor.mark_delete == self.topic.last_confirmed:
                break
            try:
                found = await self.receive(self.names[0], wait_s=120)
            except ResponsesFull:
                continue
            assert found, ("nothing came in two minutes", self.subscription.dispatcher.state_counts())
            await self.ack(found, self.moves)
        assert self.cursor.mark_delete == self.topic.last_confirmed
        assert self.loop.demands_count == 0
        assert len(self.subscription.dispatcher.leases) == 0
        assert (self.read_ahead.used, self.read_ahead.messages) == (0, 0)
        assert (self.responses.used, self.responses.waiting) == (0, 0)


def _id(key: Key) -> MessageId:
    return MessageId(key[0], key[1], key[2], PARTITION)


def _held(consumer: Any) -> list[tuple[Position, int]]:
    """Return the messages that a consumer holds, in both forms of an entry's first message."""
    found = []
    for grant in consumer.grants.values():
        for portion in grant.portions:
            found += [(portion.position, index) for index in range(-1, 4) if portion.bits >> max(index, 0) & 1]
    return found


@pytest.mark.parametrize("kind", ["shared", "key_shared", "failover", "exclusive"])
@pytest.mark.parametrize("seed", range(6))
async def test_everything_is_delivered_and_acknowledged_and_no_call_hangs(
    cluster: Cluster, kind: SubscriptionType, seed: int
) -> None:
    world = World(cluster, kind, seed)
    await world.open()

    async def others() -> None:
        for _ in range(20):
            await world.produce()
            await asyncio.sleep(world.lots.choice([0, 0.01, 1, 20]))
            if seed % 3 == 0 and world.lots.random() < 0.1:
                await world.move()

    async with asyncio.timeout(100_000), asyncio.TaskGroup() as tasks:
        tasks.create_task(others())
        for name in world.names * 2:
            tasks.create_task(world.consume(name))
    await world.finish()
