"""Several consumers of one subscription: which of the calls that wait gets a message, and what happens to it then."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.key_ranges import HashRing
from bindery_broker.dispatch.key_shared import KeySharedMode
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.single_active import HANDOVER_S
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.decoding import EntryDecoder, RoomNeeded
from bindery_broker.subscriptions.dispatch_loop import KEYS_KEPT_S
from bindery_broker.subscriptions.response_budget import ResponseBudget
from bindery_broker.subscriptions.subscription import Subscription
from bindery_core.errors import Conflict, TooManyRequests, TryAgain
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import EARLIEST, MessageId
from bindery_pulsar.topic_name import TopicName
from managed_ledger_cluster import Cluster
from subscription_parts import Deliveries, NoTargets, batch, single, texts

Task = asyncio.Task[Deliveries]


class World:
    """A subscription, and calls to it."""

    def __init__(self, subscription: Subscription, topic: Any, responses: ResponseBudget) -> None:
        self.subscription = subscription
        self.topic = topic
        self.responses = responses
        self.now = asyncio.get_running_loop().time
        self.kind: SubscriptionType = "shared"

    @classmethod
    async def create(
        cls,
        cluster: Cluster,
        *entries: bytes,
        kind: SubscriptionType = "shared",
        limits: DispatchLimits | None = None,
        read_ahead: ReadAhead | None = None,
        partition: int = -1,
    ) -> "World":
        topic = await cluster.open()
        if entries:
            await topic.add_many(entries)
        limits = limits or DispatchLimits()
        now = asyncio.get_running_loop().time
        subscription = Subscription(
            await topic.open_cursor("s", start=EARLIEST),
            topic,
            topic=TopicName.parse("t" if partition < 0 else f"t-partition-{partition}"),
            now=now,
            clock=lambda: round(now() * 1000),
            limits=limits,
            read_ahead=read_ahead or ReadAhead(limits.ready_bytes_max),
            decoder=EntryDecoder(),
            sessions_max=10,
            targets=NoTargets(),
        )
        world = cls(subscription, topic, ResponseBudget(64 * 2**20, now=now))
        world.kind = kind
        return world

    async def receive(
        self,
        consumer: str,
        *,
        count_max: int = 100,
        wait_s: float = 0,
        client: ClientWatch | None = None,
        ack_timeout_s: float = 1_000,
        session_ttl_s: float = 1_000,
        **fields: Any,
    ) -> Deliveries:
        request = ReceiveRequest(
            consumer=consumer,
            count_max=count_max,
            bytes_max=2**20,
            wait_s=wait_s,
            ack_timeout_s=ack_timeout_s,
            session_ttl_s=session_ttl_s,
            **fields,
        )
        charge = self.responses.charge("a")
        try:
            return (await self.subscription.receive(request, kind=self.kind, charge=charge, client=client))[0]
        finally:
            charge.release()

    async def take(self, consumer: str, **fields: Any) -> list[bytes]:
        return texts(await self.receive(consumer, **fields))

    async def wait(self, consumer: str, **fields: Any) -> Task:
        """Begin a call that waits."""
        task = asyncio.create_task(self.receive(consumer, **{"wait_s": 60, **fields}))
        await settle()
        assert not task.done()
        return task

    async def add(self, *entries: bytes) -> None:
        await self.topic.add_many(entries)
        await settle()

    async def ack(self, *ids: str) -> None:
        await self.subscription.ack([MessageId.parse(one) for one in ids])
        await settle()

    def nack(self, *ids: str, delay_s: float = 0) -> None:
        assert len(self.subscription.nack([MessageId.parse(one) for one in ids], delay_s=delay_s)) == len(ids)


async def settle() -> None:
    """Let all tasks run until they wait. No time passes."""
    for _ in range(100):
        await asyncio.sleep(0)


def keyed(key: bytes, payload: bytes) -> bytes:
    message = OutgoingMessage(payload=payload, key=key)
    return encode_message(message, producer_name="p", publish_time_ms=1, sequence_id=0)


def key_of(owner: str, *others: str) -> bytes:
    """Return a key that belongs to `owner` while the others are connected, too."""
    ring: HashRing[str] = HashRing()
    for name in (owner, *others):
        ring.add(name, name)
    return next(key for n in range(1_000) if ring.owner(ring.hash_of(key := b"%d" % n)) == owner)


# -- shared


async def test_waiting_consumers_get_messages_in_turn(cluster: Cluster) -> None:
    world = await World.create(cluster)
    calls = [await world.wait(name, count_max=1) for name in "abc"]
    for turn, call in enumerate(calls):
        await world.add(single(b"%d" % turn))
        assert [one.done() for one in calls] == [n <= turn for n in range(3)]
        assert texts(await call) == [b"%d" % turn]


async def test_the_next_call_of_a_consumer_waits_after_those_of_others(cluster: Cluster) -> None:
    world = await World.create(cluster)
    first, second = await world.wait("a", count_max=1), await world.wait("a", count_max=1)
    other = await world.wait("b", count_max=1)
    await world.add(single(b"1"))
    assert (first.done(), other.done(), second.done()) == (True, False, False)
    await world.add(single(b"2"))
    assert (other.done(), second.done()) == (True, False)
    await world.add(single(b"3"))
    assert texts(await second) == [b"3"]


async def test_a_preferred_consumer_is_served_first(cluster: Cluster) -> None:
    world = await World.create(cluster)
    other = await world.wait("other", priority=1)
    preferred = await world.wait("preferred", priority=0, count_max=2)
    await world.add(single(b"1"))
    assert texts(await preferred) == [b"1"]
    assert not other.done()
    await world.add(single(b"2"))
    assert texts(await other) == [b"2"]


@pytest.mark.parametrize("total", [0, 2**23])
async def test_other_consumers_get_what_a_preferred_one_leaves(cluster: Cluster, total: int) -> None:
    """The messages that were ready took all the room to read."""
    limits = DispatchLimits(ready_max=2)
    world = await World.create(cluster, limits=limits, read_ahead=ReadAhead(total))
    other = await world.wait("other", priority=1)
    preferred = await world.wait("preferred", priority=0)
    await world.add(*(single(b"%d" % n) for n in range(4)))
    assert len(await preferred) > 0
    assert len(await other) > 0


async def test_a_consumer_with_all_that_it_may_hold_does_not_keep_messages_from_others(cluster: Cluster) -> None:
    limits = DispatchLimits(unacked_max=10, unacked_per_consumer_max=1)
    world = await World.create(cluster, single(b"1"), limits=limits)
    assert await world.take("a", priority=0) == [b"1"]
    full = await world.wait("a", priority=0)
    other = await world.wait("b", priority=1)
    await world.add(single(b"2"), single(b"3"))
    assert texts(await other) == [b"2"]
    assert not full.done()
    await world.ack("0:0")
    assert texts(await full) == [b"3"]


async def test_a_call_that_does_not_wait_gets_what_can_be_read_now_in_spite_of_others_that_wait(
    cluster: Cluster,
) -> None:
    world = await World.create(cluster, single(b"1"), single(b"2"))
    assert await world.take("a") == [b"1", b"2"]
    waiting = await world.wait("b")
    world.nack("0:0", "0:1", delay_s=5)
    began = world.now()
    assert await world.take("c") == []
    assert world.now() == began
    await asyncio.sleep(5)
    assert texts(await waiting) == [b"1", b"2"]


async def test_a_call_ends_although_each_pass_finds_that_something_has_arrived(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World.create(cluster, kind="failover")
    active = await world.wait("active", priority=0)
    loop = world.subscription._loop
    read = loop._read_for_demands

    async def then_something_arrives() -> None:
        await read()
        await asyncio.sleep(0.1)
        loop.wake()

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_read_for_demands", then_something_arrives)
        async with asyncio.timeout(5):
            assert await world.take("standby", priority=1) == []
            assert await world.take("standby", priority=1, wait_s=2) == []
    active.cancel()


async def test_a_call_ends_although_the_clock_has_not_reached_its_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer may be early by the resolution of the clock, while a read is in progress."""
    world = await World.create(cluster)
    call = await world.wait("a", wait_s=2)
    read = world.subscription._loop._read_for_demands
    frozen = world.now()

    async def slow() -> None:
        await asyncio.sleep(5)
        await read()

    monkeypatch.setattr(world.subscription._loop, "_read_for_demands", slow)
    monkeypatch.setattr(world.subscription._loop, "_now", lambda: frozen)
    world.subscription._loop.wake()
    async with asyncio.timeout(10):
        assert await call == []


# -- calls that end before they get their messages


def disconnect(call: Task, client: ClientWatch) -> None:
    client.set_gone()


def cancel(call: Task, client: ClientWatch) -> None:
    call.cancel()


@pytest.mark.parametrize("end", [disconnect, cancel])
@pytest.mark.parametrize("kind", ["shared", "exclusive", "failover", "key_shared"])
async def test_a_call_that_ends_after_the_push_hands_its_messages_back_uncounted(
    cluster: Cluster, kind: SubscriptionType, end: Callable[[Task, ClientWatch], None]
) -> None:
    world = await World.create(cluster, kind=kind)
    client = ClientWatch()
    call = await world.wait("a", client=client)
    loop = world.subscription._loop
    push = loop._push

    def then_end(reader: Any) -> bool:
        pushed = push(reader)
        if pushed:
            assert len(world.subscription.dispatcher.leases) == 3
            end(call, client)
        return pushed

    loop._push = then_end  # type: ignore[method-assign]
    await world.add(single(b"1"), batch(b"2", b"3"))
    loop._push = push  # type: ignore[method-assign]
    (ended,) = await asyncio.gather(call, return_exceptions=True)
    assert ended == [] or isinstance(ended, asyncio.CancelledError)
    assert len(world.subscription.dispatcher.leases) == 0
    again = await world.receive("a")
    assert texts(again) == [b"1", b"2", b"3"]
    assert {delivery.redelivery_count for delivery in again} == {0}
    assert world.responses.used == 0


async def test_nothing_is_pushed_to_a_call_that_was_cancelled_and_has_not_run_since(cluster: Cluster) -> None:
    world = await World.create(cluster)
    cancelled, other = await world.wait("a"), await world.wait("b")
    loop = world.subscription._loop
    read = loop._read_for_demands

    async def cancel_before() -> None:
        cancelled.cancel()
        await read()

    loop._read_for_demands = cancel_before  # type: ignore[method-assign]
    await world.add(single(b"1"))
    assert texts(await other) == [b"1"]
    assert len(world.subscription.dispatcher.leases) == 1


@pytest.mark.parametrize("at", ["read", "lock"])
async def test_a_call_whose_client_disconnects_during_a_read_takes_no_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The bytes would be held after the end of the response."""
    world = await World.create(cluster, read_ahead=ReadAhead(0))
    client = ClientWatch()
    call = await world.wait("a", client=client)
    reader, loop = world.subscription._reader, world.subscription._loop
    read_on = reader.read_on

    async def slow(*arguments: Any, **limits: Any) -> bool:
        await asyncio.sleep(1)
        return await read_on(*arguments, **limits)

    monkeypatch.setattr(reader, "read_on", slow)
    if at == "lock":
        await loop.read_lock.acquire()
    await world.add(single(b"1"))
    client.set_gone()
    assert await call == []
    if at == "lock":
        loop.read_lock.release()
    await asyncio.sleep(5)
    assert world.responses.used == 0
    assert await world.take("b") == [b"1"]


async def test_a_call_of_a_consumer_that_leaves_after_the_push_gets_nothing(cluster: Cluster) -> None:
    world = await World.create(cluster)
    call = await world.wait("a")
    loop = world.subscription._loop
    push = loop._push

    def then_leave(reader: Any) -> bool:
        pushed = push(reader)
        if pushed:
            world.subscription.leave("a")
        return pushed

    loop._push = then_leave  # type: ignore[method-assign]
    await world.add(single(b"1"))
    loop._push = push  # type: ignore[method-assign]
    assert await call == []
    assert await world.take("b") == [b"1"]


async def test_the_calls_of_a_consumer_that_leaves_end_at_once(cluster: Cluster) -> None:
    world = await World.create(cluster)
    call, other = await world.wait("a"), await world.wait("b")
    assert world.subscription.leave("a")
    await settle()
    assert (call.done(), other.done()) == (True, False)
    assert await call == []
    other.cancel()


# -- redelivery counts


@pytest.mark.parametrize("kind", ["shared", "exclusive", "failover", "key_shared"])
async def test_redelivery_counts_are_recorded_before_the_redelivery_and_kept_if_that_fails(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: SubscriptionType
) -> None:
    world = await World.create(cluster, single(b"1"), single(b"2"), kind=kind)
    loop = world.subscription._loop
    record, recorded = loop._record, []

    async def fail(changes: Any) -> None:
        await asyncio.sleep(1)
        raise TryAgain("made up")

    async def note(changes: Any) -> None:
        await asyncio.sleep(1)
        assert len(world.subscription.dispatcher.leases) == 0
        recorded.extend(changes)
        await record(changes)

    await world.take("a")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_record", fail)
        world.nack("0:0")
        world.nack("0:1") if kind in ("shared", "key_shared") else world.subscription.leave("a")
        for _ in range(2):
            with pytest.raises(TryAgain):
                await world.take("b")
            assert len(world.subscription.dispatcher.leases) == 0
    monkeypatch.setattr(loop, "_record", note)
    again = await world.receive("b")
    assert texts(again) == [b"1", b"2"]
    counts = [1, 1] if kind in ("shared", "key_shared") else [1, 0]
    assert [delivery.redelivery_count for delivery in again] == counts
    assert [change.redelivery_count for change in recorded] == [1] * sum(counts)


async def test_returned_messages_are_delivered_although_the_cursor_has_no_room_for_their_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody gets the messages that must be acknowledged to make room."""
    world = await World.create(cluster, single(b"1"), single(b"2"))

    async def refuse(changes: Any) -> None:
        raise TooManyRequests("made up")

    monkeypatch.setattr(world.subscription._loop, "_record", refuse)
    await world.take("a")
    world.nack("0:0")
    (again,) = await world.receive("b")
    assert (texts([again]), again.redelivery_count) == ([b"1"], 1)


async def test_what_is_returned_while_counts_are_recorded_is_recorded_before_its_redelivery(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World.create(cluster, single(b"1"), single(b"2"))
    loop = world.subscription._loop
    record = loop._record

    async def slow(changes: Any) -> None:
        await asyncio.sleep(1)
        await record(changes)

    monkeypatch.setattr(loop, "_record", slow)
    await world.take("a")
    world.nack("0:0")
    call = asyncio.ensure_future(world.receive("b", wait_s=60))
    await asyncio.sleep(0.5)
    world.nack("0:1")
    again = await call
    assert [delivery.redelivery_count for delivery in again] == [1, 1]
    assert [world.subscription.cursor.redelivery_count(one.position) for one in again] == [1, 1]


async def test_redelivery_counts_that_are_not_recorded_yet_survive_a_change_of_type(cluster: Cluster) -> None:
    world = await World.create(cluster, single(b"1"))
    await world.take("a")
    world.nack("0:0")
    world.subscription.leave("a")
    world.kind = "exclusive"
    assert [delivery.redelivery_count for delivery in await world.receive("b")] == [1]


# -- failover


async def test_a_waiting_consumer_takes_over_at_once_from_the_lowest_unacknowledged_message(cluster: Cluster) -> None:
    world = await World.create(cluster, kind="failover")
    active, standby = await world.wait("active", priority=0), await world.wait("standby", priority=1)
    await world.add(*(single(b"%d" % n) for n in range(4)))
    assert texts(await active) == [b"0", b"1", b"2", b"3"]
    assert not standby.done()
    await world.ack("0:1")
    began = world.now()
    world.subscription.leave("active")
    assert texts(await standby) == [b"0", b"2", b"3"]
    assert world.now() == began


async def test_a_waiting_consumer_takes_over_when_the_session_of_the_active_one_ends(cluster: Cluster) -> None:
    world = await World.create(cluster, kind="failover")
    assert await world.take("active", priority=0, session_ttl_s=10) == []
    began = world.now()
    standby = await world.wait("standby", priority=1)
    await world.add(single(b"1"))
    assert texts(await standby) == [b"1"]
    assert world.now() - began == pytest.approx(10, abs=0.1)


async def test_a_waiting_consumer_takes_over_when_the_session_of_a_call_that_waited_ends(cluster: Cluster) -> None:
    world = await World.create(cluster, kind="failover")
    active = await world.wait("active", priority=0, session_ttl_s=10, wait_s=5)
    began = world.now()
    standby = await world.wait("standby", priority=1)
    assert await active == []
    await world.add(single(b"1"))
    assert texts(await standby) == [b"1"]
    assert world.now() - began == pytest.approx(15, abs=0.1)


async def test_a_read_for_a_consumer_that_is_no_longer_active_serves_the_one_that_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World.create(cluster, kind="failover")
    standby = await world.wait("standby", priority=1)
    read = world.subscription.cursor.read_unacked

    async def slow(*arguments: Any, **limits: Any) -> Any:
        found = await read(*arguments, **limits)
        await asyncio.sleep(1)
        return found

    monkeypatch.setattr(world.subscription.cursor, "read_unacked", slow)
    await world.add(single(b"1"))
    preferred = await world.wait("preferred", priority=0)
    assert texts(await preferred) == [b"1"]
    assert not standby.done()
    standby.cancel()


async def test_a_consumer_that_becomes_active_gets_the_next_message_with_the_last_acknowledgement(
    cluster: Cluster,
) -> None:
    """On an idle topic, nothing is delivered twice."""
    world = await World.create(cluster, *(single(b"%d" % n) for n in range(4)), kind="failover")
    assert await world.take("standby", priority=1, count_max=2) == [b"0", b"1"]
    began = world.now()
    preferred = await world.wait("preferred", priority=0)
    await world.ack("0:1")
    await asyncio.sleep(HANDOVER_S / 2)
    assert not preferred.done()
    await world.ack("0:0")
    assert texts(await preferred) == [b"2", b"3"]
    assert world.now() - began == pytest.approx(HANDOVER_S / 2, abs=0.01)


@pytest.mark.parametrize("waits", ["all the time", "from the change on", "not yet"])
async def test_a_consumer_that_becomes_active_gets_what_the_former_one_still_holds_after_a_second(
    cluster: Cluster, waits: str
) -> None:
    world = await World.create(cluster, *(single(b"%d" % n) for n in range(4)), kind="failover")
    assert await world.take("standby", priority=1, count_max=2) == [b"0", b"1"]
    began = world.now()
    if waits == "not yet":
        assert await world.take("preferred", priority=0) == []
        await asyncio.sleep(HANDOVER_S)
    elif waits == "all the time":  # from call to call
        assert await world.take("preferred", priority=0, wait_s=HANDOVER_S / 2) == []
    preferred = asyncio.create_task(world.receive("preferred", priority=0, wait_s=60))
    again = await preferred
    assert texts(again) == [b"0", b"1", b"2", b"3"]
    assert {one.redelivery_count for one in again} == {0}
    assert world.now() - began == pytest.approx(HANDOVER_S, abs=0.01)
    await world.ack("0:0")
    assert await world.take("standby", priority=1) == []


@pytest.mark.parametrize("waits", [True, False])
async def test_a_consumer_that_becomes_active_because_another_one_left_waits_for_the_former_one(
    cluster: Cluster, waits: bool
) -> None:
    """Of three consumers of a partition, the choice may change when one leaves that was not the active one."""
    world = await World.create(cluster, *(single(b"%d" % n) for n in range(4)), kind="failover", partition=2)
    for name in "ab":
        assert await world.take(name, count_max=1, wait_s=0) == ([b"0"] if name == "a" else [])
    await world.ack("0:0")
    assert await world.take("c", count_max=2) == [b"1", b"2"]
    next_one = await world.wait("b") if waits else None
    began = world.now()
    world.subscription.leave("a")
    await settle()
    await world.ack("0:2", "0:1")
    next_one = next_one or asyncio.create_task(world.receive("b", wait_s=60))
    assert texts(await next_one) == [b"3"]
    assert world.now() == began


# -- key_shared


async def test_an_idle_consumer_loses_its_keys_to_one_that_waits(cluster: Cluster) -> None:
    world = await World.create(cluster, kind="key_shared")
    assert await world.take("idle") == []
    began = world.now()
    waiting = await world.wait("waiting")
    await world.add(keyed(key_of("idle", "waiting"), b"1"))
    assert texts(await waiting) == [b"1"]
    assert world.now() - began == pytest.approx(KEYS_KEPT_S, abs=0.1)


async def test_a_consumer_keeps_its_keys_while_it_holds_messages(cluster: Cluster) -> None:
    key = key_of("busy", "waiting")
    world = await World.create(cluster, keyed(key, b"1"), keyed(key, b"2"), kind="key_shared")
    assert await world.take("busy", count_max=1) == [b"1"]
    waiting = await world.wait("waiting")
    await asyncio.sleep(10 * KEYS_KEPT_S)
    assert not waiting.done()
    began = world.now()
    await world.ack("0:0")
    assert texts(await waiting) == [b"2"]
    assert world.now() - began <= KEYS_KEPT_S


async def test_consumers_that_all_wait_are_not_looked_at_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of idle subscriptions must not take the time of the loop."""
    world = await World.create(cluster, kind="key_shared")
    calls = [await world.wait(name, wait_s=100) for name in "ab"]
    looks: list[None] = []
    monkeypatch.setattr(world.subscription._loop, "_read_soon", lambda: looks.append(None))
    await asyncio.sleep(50)
    assert not looks
    assert [await call for call in calls] == [[], []]


async def test_the_order_of_a_key_is_kept_when_its_owner_changes(cluster: Cluster) -> None:
    key = key_of("new", "old")
    world = await World.create(cluster, *(keyed(key, b"%d" % n) for n in range(4)), kind="key_shared")
    assert await world.take("old", count_max=2) == [b"0", b"1"]
    new = await world.wait("new")
    await world.ack("0:1")
    assert not new.done()
    world.nack("0:0")
    assert texts(await new) == [b"0", b"2", b"3"]


@pytest.mark.parametrize("total", [0, 2**23])
async def test_a_consumer_gets_its_keys_although_nobody_takes_those_of_others(cluster: Cluster, total: int) -> None:
    limits = DispatchLimits(ready_max=3)
    foreign, own = (key_of("a", "b"), key_of("b", "a"))
    entries = [keyed(foreign, b"%d" % n) for n in range(10)] + [keyed(own, b"own")]
    world = await World.create(cluster, kind="key_shared", limits=limits, read_ahead=ReadAhead(total))
    assert await world.take("a") == []
    assert await world.take("b") == []
    await world.topic.add_many(entries)
    assert await world.take("b") == [b"own"]
    taken: list[bytes] = []
    while found := await world.take("a"):
        taken += found
    assert taken == [b"%d" % n for n in range(10)]


async def test_a_sticky_conflict_changes_nothing_for_the_consumer_that_waits(cluster: Cluster) -> None:
    world = await World.create(cluster, kind="key_shared")
    sticky = KeySharedMode(sticky=True)
    waiting = await world.wait("a", key_shared=sticky, key_ranges=((0, 65_535),))
    with pytest.raises(Conflict, match="held by another consumer"):
        await world.take("b", key_shared=sticky, key_ranges=((5, 5),))
    await world.add(keyed(b"k", b"1"))
    assert texts(await waiting) == [b"1"]


# -- the cursor or the type changes during a read


async def test_a_large_entry_is_not_read_for_a_dispatcher_that_was_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the new one would not get what was read."""
    world = await World.create(cluster, single(b"1"), single(b"2"))
    reader, loop = world.subscription._reader, world.subscription._loop
    read_on = reader.read_on

    async def change_type(*arguments: Any, **limits: Any) -> bool:
        monkeypatch.setattr(reader, "read_on", read_on)
        loop.change_type("exclusive")
        loop.admit(world.subscription.sessions.get("a").consumer)  # type: ignore[union-attr]
        raise RoomNeeded(5 * 2**20)

    monkeypatch.setattr(reader, "read_on", change_type)
    assert await world.take("a", wait_s=5) == [b"1", b"2"]


async def test_waiting_calls_go_on_after_the_cursor_was_moved_during_their_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World.create(cluster, single(b"1"), single(b"2"))
    await world.take("a")
    read = world.subscription.cursor.read_unacked

    async def slow(*arguments: Any, **limits: Any) -> Any:
        await asyncio.sleep(1)
        return await read(*arguments, **limits)

    monkeypatch.setattr(world.subscription.cursor, "read_unacked", slow)
    waiting = await world.wait("b", count_max=3)
    await world.add(single(b"3"))
    await world.subscription.seek(EARLIEST)
    assert texts(await waiting) == [b"1", b"2", b"3"]  # the move waits for the read, and what it read is dropped
