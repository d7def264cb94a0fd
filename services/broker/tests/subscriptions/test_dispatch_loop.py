"""Waiting calls: what wakes them, what ends them, and how they share reads."""

import asyncio
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import pytest
from bindery_broker.dispatch.delays import DelayIndex
from bindery_broker.dispatch.item import WHOLE, DispatchLimits, MessageRef
from bindery_broker.errors import ResponsesFull
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.subscriptions.consumer import ClientWatch, SubscriptionType
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX
from bindery_broker.subscriptions.dispatch_loop import IDLE_S
from bindery_broker.subscriptions.reading import (
    MESSAGE_OVERHEAD,
    READ_BYTES_MAX,
    READ_ENTRIES_MAX,
    READ_MESSAGES_MAX,
    messages_of,
)
from bindery_broker.subscriptions.response_budget import Charge
from bindery_core.errors import TryAgain
from bindery_pulsar.message_codec import Message, OutgoingMessage, PackedEntry, encode_batch, encode_message
from bindery_pulsar.message_id import MessageId
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, expand, keys_of, single, texts, zipped, zipped_batch

KINDS = pytest.mark.parametrize("kind", ["shared", "exclusive"])


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode large entries at once: while a thread works, the clock of the loop would jump from timer to timer."""

    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


async def refuse(*arguments: object, **limits: object) -> None:
    raise TryAgain("made up")


async def test_a_waiting_call_gets_the_message_of_an_expired_lease(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    began = parts.now()
    assert await parts.take("c1", ack_timeout_s=5) == [b"a"]
    assert await parts.take("c2", wait_s=60) == [b"a"]
    assert parts.now() - began == pytest.approx(5, abs=0.1)


async def test_a_call_without_messages_ends_at_its_deadline(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    began = parts.now()
    assert await parts.take(wait_s=7) == []
    assert parts.now() - began == pytest.approx(7, abs=0.1)
    assert parts.loop.demands_count == 0


async def test_an_entry_that_arrives_during_the_read_of_a_call_is_not_missed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster)
    read_on, began = parts.reader.read_on, parts.now()

    async def find_nothing_and_add(*arguments: object, **limits: object) -> bool:
        monkeypatch.setattr(parts.reader, "read_on", read_on)
        await parts.topic.add_many([single(b"a")])
        return False

    monkeypatch.setattr(parts.reader, "read_on", find_nothing_and_add)
    assert await parts.take(wait_s=60) == [b"a"]
    assert parts.now() - began < 1


async def test_calls_share_one_read(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(READ_ENTRIES_MAX + 1)))
    read, running, reads = parts.cursor.read_unacked, 0, 0

    async def counted(*arguments: object, **limits: object) -> object:
        nonlocal running, reads
        running += 1
        reads += 1
        assert running == 1
        await asyncio.sleep(1)
        running -= 1
        return await read(*arguments, **limits)

    monkeypatch.setattr(parts.cursor, "read_unacked", counted)
    taken = await asyncio.gather(*(parts.take(f"c{n}", count_max=2) for n in range(2)))
    assert taken == [[b"0", b"1"], [b"2", b"3"]]
    assert reads == 1


async def test_a_call_whose_client_has_disconnected_takes_nothing(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    client = ClientWatch()
    client.set_gone()
    assert await parts.take(client=client) == []
    assert await parts.take() == [b"a"]


async def test_a_client_that_disconnects_wakes_its_own_call_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of clients that wait and disconnect must not make each other's calls check again."""
    parts = await Parts.create(cluster)
    clients = [ClientWatch() for _ in range(50)]
    calls = [asyncio.create_task(parts.take(f"c{n}", wait_s=60, client=one)) for n, one in enumerate(clients)]
    await asyncio.sleep(1)
    looks: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(parts.loop, "_read_soon", lambda: looks.append(None))
        for client, call in zip(clients[:40], calls[:40], strict=True):
            client.set_gone()
            assert await call == []
    assert not looks
    assert not any(call.done() for call in calls[40:])
    assert parts.loop.demands_count == 10
    parts.loop.drain()
    assert [await call for call in calls[40:]] == [[]] * 10


async def test_draining_ends_waiting_calls_but_delivers_available_messages(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    began = parts.now()
    waiting = asyncio.ensure_future(parts.take(wait_s=60))
    await asyncio.sleep(1)
    parts.loop.drain()
    assert await waiting == []
    assert parts.now() - began < 2
    await parts.topic.add_many([single(b"a")])
    assert await parts.take(wait_s=60) == [b"a"]


async def test_closing_fails_each_call_with_its_own_copy_of_the_reason(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    began = parts.now()
    waiting = [asyncio.ensure_future(parts.take(f"c{n}", wait_s=60)) for n in range(2)]
    await asyncio.sleep(1)
    reason = TryAgain("made up", topic="t")
    parts.loop.close(reason)
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert parts.now() - began < 2
    assert [type(error) for error in errors] == [TryAgain, TryAgain]
    assert [str(error) for error in errors] == [str(reason)] * 2
    assert len({id(error) for error in [*errors, reason]}) == 3


async def test_a_cancelled_call_leaves_the_queue(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    waiting = asyncio.ensure_future(parts.take(wait_s=60))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert parts.loop.demands_count == 0


async def test_a_replaced_dispatcher_is_reset_and_reading_starts_again(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"))
    assert await parts.take() == [b"a", b"b"]
    replaced = parts.loop.dispatcher
    generation = replaced.generation
    parts.loop.change_type("exclusive")
    assert (replaced.generation > generation, replaced.known_count) == (True, 0)
    assert parts.loop.dispatcher.in_order
    assert parts.loop.type == "exclusive"
    assert len(parts.reader.batch_sizes) == 0
    assert await parts.take() == [b"a", b"b"]


async def test_a_call_that_finds_enough_ready_messages_reads_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(READ_ENTRIES_MAX + 10)))
    assert len(await parts.take(count_max=READ_ENTRIES_MAX - 2)) == READ_ENTRIES_MAX - 2
    read, reads = parts.reader.read_on, 0

    async def counted(*arguments: Any, **limits: Any) -> bool:
        nonlocal reads
        reads += 1
        return await read(*arguments, **limits)

    monkeypatch.setattr(parts.reader, "read_on", counted)
    assert await parts.take(count_max=2) == [b"98", b"99"]
    assert reads == 0
    assert await parts.take(count_max=2) == [b"100", b"101"]
    assert reads == 1


@pytest.mark.parametrize(
    "limits",
    [
        DispatchLimits(unacked_max=2, unacked_per_consumer_max=2),
        DispatchLimits(unacked_max=10, unacked_per_consumer_max=2),
    ],
)
async def test_a_call_that_a_limit_blocks_continues_after_an_acknowledgement(
    cluster: Cluster, limits: DispatchLimits
) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(3)), limits=limits)
    began = parts.now()
    assert await parts.take() == [b"0", b"1"]
    waiting = asyncio.ensure_future(parts.take(wait_s=20))
    await asyncio.sleep(1)
    assert not waiting.done()
    ids = [MessageId.parse("0:0")]
    await parts.ack(*ids)
    assert await waiting == [b"2"]
    assert parts.now() - began < 2


async def test_an_acknowledgement_wakes_only_calls_that_a_limit_blocks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = DispatchLimits(unacked_max=10, unacked_per_consumer_max=1)
    parts = await Parts.create(cluster, single(b"a"), limits=limits)
    await parts.take("c1")
    waiting = [asyncio.ensure_future(parts.take("c2", wait_s=20))]
    await asyncio.sleep(1)
    looks: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(parts.loop, "_read_soon", lambda: looks.append(None))
        parts.loop.wake_blocked()
    assert not looks
    waiting.append(asyncio.ensure_future(parts.take("c1", wait_s=20)))
    await asyncio.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(parts.loop, "_read_soon", lambda: looks.append(None))
        parts.loop.wake_blocked()
    assert len(looks) == 1
    for call in waiting:
        call.cancel()


async def test_a_call_of_a_consumer_that_left_during_the_read_takes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    read_on = parts.reader.read_on

    async def leave_meanwhile(*arguments: Any, **limits: Any) -> bool:
        parts.sessions.remove("c1")
        return await read_on(*arguments, **limits)

    with monkeypatch.context() as patch:
        patch.setattr(parts.reader, "read_on", leave_meanwhile)
        assert await parts.take("c1") == []
    assert await parts.take("c2") == [b"a"]


async def test_ready_messages_are_delivered_before_a_read_error_is_raised(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    assert await parts.take(count_max=1) == [b"a"]
    monkeypatch.setattr(parts.reader, "read_on", refuse)
    assert await parts.take(count_max=5) == [b"b"]
    with pytest.raises(TryAgain):
        await parts.take(count_max=5)
    assert parts.loop.demands_count == 0


async def test_ready_messages_are_put_down_when_the_last_session_ends_but_not_during_a_read(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    call = parts.call(count_max=1, ack_timeout_s=5, session_ttl_s=3)
    await parts.loop.take(call)
    parts.sessions.end_call(call.session, now=parts.now())
    parts.loop.tick()
    assert parts.loop.dispatcher.ready_count == 1
    await asyncio.sleep(6)  # the lease ends after the session
    async with parts.loop.read_lock:
        parts.loop.tick()
        assert len(parts.sessions) == 0
        assert parts.loop.dispatcher.ready_count == 1
    parts.loop.tick()
    assert parts.loop.dispatcher.ready_count == 0
    assert parts.reader.position == at(1)
    assert await parts.take() == [b"a", b"b"]


async def test_a_call_gets_as_much_as_it_asked_for_although_that_takes_several_reads(cluster: Cluster) -> None:
    count = 2 * READ_ENTRIES_MAX + 1
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(count)))
    assert await parts.take(count_max=count) == [b"%d" % n for n in range(count)]


async def test_what_is_read_after_the_last_call_has_ended_is_put_down(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    read = parts.cursor.read_unacked

    async def slow(*arguments: Any, **limits: Any) -> Any:
        await asyncio.sleep(1)
        return await read(*arguments, **limits)

    monkeypatch.setattr(parts.cursor, "read_unacked", slow)
    client = ClientWatch()
    call = asyncio.ensure_future(parts.take(wait_s=20, client=client))
    await asyncio.sleep(0.5)
    client.set_gone()
    assert await call == []
    await asyncio.sleep(1)
    assert parts.loop.dispatcher.ready_count == 1
    await asyncio.sleep(IDLE_S)
    assert parts.loop.dispatcher.ready_count == 0
    assert await parts.take() == [b"a"]


async def test_a_restart_delivers_again_from_the_position_of_the_cursor(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    assert await parts.take() == [b"a", b"b", b"c"]
    waiting = asyncio.ensure_future(parts.take("c2", wait_s=20))
    await asyncio.sleep(1)
    began = parts.now()
    parts.reader.stuck = "made up"
    parts.loop.restart()
    assert (parts.reader.stuck, len(parts.reader.batch_sizes)) == (None, 0)
    assert await waiting == [b"a", b"b", b"c"]
    assert parts.now() - began < 1
    assert parts.consumer("c").held == 0


async def test_a_delayed_message_is_delivered_when_its_delay_ends(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    parts.loop.change_type("exclusive")
    assert await parts.take(count_max=1) == [b"a"]
    began = parts.now()
    assert parts.nack(MessageId.parse("0:0"), delay_s=5, consumer="c") == [MessageId.parse("0:0")]
    assert await parts.take() == []
    assert await parts.take(wait_s=60) == [b"a", b"b"]
    assert parts.now() - began == pytest.approx(5, abs=0.1)


# -- room for the messages in responses


def fill(parts: Parts) -> Charge:
    """Let another response hold all the room. Returns its charge."""
    other = parts.responses.charge("a")
    assert other.take(least=parts.responses.total, most=parts.responses.total)
    return other


async def test_a_call_holds_the_bytes_of_its_messages(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a" * 1_000), single(b"b" * 1_000))
    call = parts.call()
    taken = await parts.loop.take(call)
    assert (
        call.charge.size
        == parts.responses.used
        == sum(message.size + MESSAGE_OVERHEAD for delivery in taken for message in messages_of(delivery))
    )
    call.charge.release()
    assert parts.responses.used == 0


async def test_a_call_without_messages_holds_nothing(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    call = parts.call(wait_s=1)
    assert await parts.loop.take(call) == []
    assert (call.charge.size, parts.responses.used) == (0, 0)


async def test_a_call_without_room_leases_nothing_and_fails_at_its_deadline(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    other = fill(parts)
    began = parts.now()
    for wait_s in (0, 7):
        with pytest.raises(ResponsesFull, match="take too much memory"):
            await parts.take(wait_s=wait_s)
    assert parts.now() - began == pytest.approx(7, abs=0.1)
    assert (len(parts.loop.dispatcher.leases), parts.loop.demands_count) == (0, 0)
    assert parts.responses.used == other.size
    other.release()
    assert await parts.take() == [b"a"]


async def test_a_call_goes_on_when_there_is_room_again(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    other = fill(parts)
    task = asyncio.create_task(parts.take(wait_s=60))
    await asyncio.sleep(5)
    assert not task.done()
    other.release()
    assert await task == [b"a"]
    assert parts.loop.demands_count == 0


async def test_a_call_that_waits_for_room_ends_when_its_client_is_gone_or_the_broker_stops(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    fill(parts)
    client = ClientWatch()
    gone = asyncio.create_task(parts.take("gone", wait_s=60, client=client))
    await asyncio.sleep(1)
    client.set_gone()
    assert await gone == []
    stopped = asyncio.create_task(parts.take("stopped", wait_s=60))
    await asyncio.sleep(1)
    parts.loop.drain()
    assert await stopped == []
    assert len(parts.loop.dispatcher.leases) == 0


async def test_a_call_gets_what_fits(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n * 10_000) for n in range(5)))
    other = fill(parts)
    other.keep(other.size - 25_000)
    assert [text[:1] for text in await parts.take()] == [b"0", b"1"]


async def test_an_idle_call_needs_no_room_even_if_nothing_can_be_read_ahead(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    fill(parts)
    parts.read_ahead.change(parts.read_ahead.total)
    assert await parts.take(wait_s=1) == []


async def test_without_room_to_read_ahead_a_read_counts_as_part_of_its_response(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    parts.read_ahead.change(parts.read_ahead.total)
    other = fill(parts)
    task = asyncio.create_task(parts.take(wait_s=60))
    await asyncio.sleep(1)
    assert parts.loop.dispatcher.ready_count == 0, "nothing is read"
    other.release()
    assert await task == [b"a"]


async def test_a_cancelled_call_releases_its_room_with_its_charge(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    other = fill(parts)
    call = parts.call(wait_s=60)
    task = asyncio.create_task(parts.loop.take(call))
    await asyncio.sleep(1)
    other.release()  # grants the room
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    call.charge.release()
    assert parts.responses.used == 0
    assert parts.loop.demands_count == 0


async def test_a_repeated_request_waits_for_room_too(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    call = parts.call()
    assert texts(await parts.redelivery.take(call, "r1")) == [b"a"]
    call.charge.release()
    other = fill(parts)
    with pytest.raises(ResponsesFull):
        await parts.redelivery.take(parts.call(wait_s=1), "r1")
    other.release()
    assert texts(await parts.redelivery.take(parts.call(wait_s=1), "r1")) == [b"a"]


# -- entries that take much more once they are decoded


async def test_a_large_entry_is_read_once_it_fits_into_what_is_read_ahead(cluster: Cluster) -> None:
    limits = DispatchLimits(ready_bytes_max=2 * DECODED_BYTES_MAX)
    parts = await Parts.create(cluster, single(b"a"), zipped(DECODED_BYTES_MAX), single(b"c"), limits=limits)
    sizes = [len((await parts.take(count_max=1))[0]) for _ in range(3)]
    assert sizes == [1, DECODED_BYTES_MAX, 1]
    assert parts.read_ahead.used == 0


async def test_a_large_entry_that_cannot_be_read_ahead_waits_for_room_in_the_responses(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(DECODED_BYTES_MAX))
    parts.read_ahead.change(parts.read_ahead.total - READ_BYTES_MAX)
    other = fill(parts)
    other.keep(other.size - DECODED_BYTES_MAX // 2)
    task = asyncio.create_task(parts.take(wait_s=60))
    await asyncio.sleep(1)
    assert parts.loop.dispatcher.ready_count == 0, "half of it fits"
    assert not task.done()
    other.release()
    (large,) = await task
    assert len(large) == DECODED_BYTES_MAX


async def test_a_large_entry_is_delivered_again(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(DECODED_BYTES_MAX))
    call = parts.call()
    assert len(texts(await parts.redelivery.take(call, "r1"))) == 1
    call.charge.release()
    call = parts.call()
    (again,) = texts(await parts.redelivery.take(call, "r1"))
    assert len(again) == DECODED_BYTES_MAX
    assert DECODED_BYTES_MAX < call.charge.size < DECODED_BYTES_MAX + MESSAGE_OVERHEAD + 100
    parts.release("c")
    (again,) = await parts.take()
    assert len(again) == DECODED_BYTES_MAX


# -- messages that are read ahead are put down without room for them, and without calls


def no_read_ahead(parts: Parts) -> None:
    """Let other subscriptions hold more than may be read ahead."""
    parts.read_ahead.change(parts.read_ahead.total + 1)


def numbers(count: int, size: int = 0) -> bytes:
    """Return a batch of `count` messages that begin with their index."""
    return batch(*(b"%d " % n + bytes(size) for n in range(count)))


def indexes(payloads: list[bytes]) -> list[int]:
    return [int(payload.partition(b" ")[0]) for payload in payloads]


class Decoded:
    """Counts what is decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.messages = 0
        self.skipped = 0
        decode = PackedEntry.decode

        def counted(entry: PackedEntry, *, size_max: int, first: int, count_max: int | None) -> list[Message]:
            found = decode(entry, size_max=size_max, first=first, count_max=count_max)
            self.reads += 1
            self.messages += len(found)
            self.skipped += first
            return found

        monkeypatch.setattr(PackedEntry, "decode", counted)


@KINDS
async def test_a_large_batch_is_decoded_once_if_there_is_room(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * READ_MESSAGES_MAX
    parts = await Parts.create(cluster, numbers(count))
    parts.loop.change_type(kind)
    decoded = Decoded(monkeypatch)
    found: list[int] = []
    while len(found) < count:
        found += indexes(await parts.take(count_max=100))
        assert parts.loop.dispatcher.ready_count <= READ_MESSAGES_MAX
    assert found == [*range(count)]
    assert (decoded.reads, decoded.messages, decoded.skipped) == (2, count, READ_MESSAGES_MAX)


@KINDS
async def test_a_call_without_room_decodes_what_it_delivers_and_keeps_nothing(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, numbers(3_000), numbers(5))
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    held = parts.read_ahead.used
    decoded = Decoded(monkeypatch)
    for start in range(0, 3_000, 500):
        assert indexes(await parts.take(count_max=500)) == [*range(start, start + 500)]
        assert (parts.loop.dispatcher.ready_count, parts.read_ahead.used) == (0, held)
    assert (decoded.reads, decoded.messages) == (6, 3_000)
    assert indexes(await parts.take(count_max=500)) == [*range(5)]


@KINDS
async def test_the_filter_reads_many_messages_for_a_call_without_room(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await cluster.open()
    messages = [
        OutgoingMessage(payload=b"%d " % n, properties={"blue" if n == 999 else "red": "TAGS"}) for n in range(1_000)
    ]
    await topic.add_many([encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(1_000))])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    decoded = Decoded(monkeypatch)
    assert indexes(await parts.take(count_max=1)) == [999]
    assert decoded.reads == 1


@KINDS
async def test_what_a_call_leaves_because_of_its_bytes_is_put_down_without_room(
    cluster: Cluster, kind: SubscriptionType
) -> None:
    parts = await Parts.create(cluster, numbers(10, size=300_000), single(b"10 "))
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    found = []
    for _ in range(4):
        found.append(indexes(await parts.take()))
        assert parts.loop.dispatcher.ready_count == 0
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert indexes(await parts.take()) == [10]


@KINDS
async def test_a_call_that_waits_for_room_in_the_responses_keeps_nothing_without_room_to_read_ahead(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many such calls would hold an entry of the maximum size each."""
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    parts.loop.change_type(kind)
    other = fill(parts)
    read_on = parts.reader.read_on

    async def then_others_read_ahead(*arguments: Any, **limits: Any) -> bool:
        monkeypatch.setattr(parts.reader, "read_on", read_on)
        found = await read_on(*arguments, **limits)
        assert parts.loop.dispatcher.ready_count == 2
        no_read_ahead(parts)
        return found

    monkeypatch.setattr(parts.reader, "read_on", then_others_read_ahead)
    task = asyncio.create_task(parts.take(wait_s=60))
    await asyncio.sleep(1)
    assert (task.done(), parts.loop.dispatcher.ready_count) == (False, 0)
    other.release()
    assert await task == [b"a", b"b"]


@KINDS
async def test_a_call_that_made_room_for_a_large_entry_delivers_it(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata and its overhead count, too."""
    parts = await Parts.create(cluster, zipped(DECODED_BYTES_MAX))
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    other = fill(parts)
    other.keep(other.size - DECODED_BYTES_MAX - 2 * MESSAGE_OVERHEAD)
    decoded = Decoded(monkeypatch)
    assert [len(text) for text in await parts.take()] == [DECODED_BYTES_MAX]
    assert decoded.reads == 1


@KINDS
async def test_what_a_call_leaves_is_kept_if_there_is_room(cluster: Cluster, kind: SubscriptionType) -> None:
    parts = await Parts.create(cluster, numbers(10))
    parts.loop.change_type(kind)
    await parts.take(count_max=1)
    assert parts.loop.dispatcher.ready_count == 9


@KINDS
async def test_messages_in_delivery_stay_leased_while_others_are_put_down(
    cluster: Cluster, kind: SubscriptionType
) -> None:
    parts = await Parts.create(cluster, numbers(10, size=300_000))
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    await parts.take(count_max=2)
    await parts.take(count_max=2)
    assert len(parts.loop.dispatcher.leases) == 4
    held = parts.loop.dispatcher.held(parts.consumer("c"), [MessageRef(at(0), WHOLE)])
    assert expand(portion.ref for portion in held) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    await asyncio.sleep(31)
    again = [*await parts.loop.take(parts.call(count_max=2)), *await parts.loop.take(parts.call(count_max=2))]
    assert indexes(texts(again)) == [0, 1, 2, 3]
    assert {delivery.redelivery_count for delivery in again} == {1}


@KINDS
async def test_a_consumer_that_holds_all_it_may_reads_nothing_without_room(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new entry wakes its call, which must not decode a batch each time."""
    limits = DispatchLimits(unacked_max=10, unacked_per_consumer_max=2)
    parts = await Parts.create(cluster, numbers(5), limits=limits)
    parts.loop.change_type(kind)
    no_read_ahead(parts)
    assert indexes(await parts.take(count_max=2)) == [0, 1]
    decoded = Decoded(monkeypatch)
    waiting = asyncio.create_task(parts.take(count_max=2, wait_s=20))
    for _ in range(3):
        await asyncio.sleep(1)
        await parts.topic.add_many([single(b"x")])
    assert decoded.reads == 0
    ids = [MessageId.parse("0:0:-1:0")]
    await parts.ack(*ids)
    assert indexes(await waiting) == [2]


@KINDS
async def test_without_a_call_for_some_time_ready_messages_are_put_down(
    cluster: Cluster, kind: SubscriptionType
) -> None:
    parts = await Parts.create(cluster, numbers(10), single(b"10 "))
    parts.loop.change_type(kind)
    assert indexes(await parts.take(count_max=2)) == [0, 1]
    await asyncio.sleep(IDLE_S - 1)
    assert indexes(await parts.take(count_max=2)) == [2, 3]
    await asyncio.sleep(IDLE_S - 1)
    assert parts.loop.dispatcher.ready_count == 7
    await asyncio.sleep(1.1)
    assert (parts.loop.dispatcher.ready_count, parts.read_ahead.used) == (0, 0)
    assert 7 * MESSAGE_OVERHEAD < parts.read_ahead.idle_size < 7 * MESSAGE_OVERHEAD + 100
    assert parts.loop._idle_check is None
    assert len(parts.loop.dispatcher.leases) == 4
    assert indexes(await parts.take()) == [4, 5, 6, 7, 8, 9, 10]


async def test_ready_messages_are_kept_while_a_call_waits(cluster: Cluster) -> None:
    limits = DispatchLimits(unacked_max=10, unacked_per_consumer_max=2)
    parts = await Parts.create(cluster, numbers(5), limits=limits)
    await parts.take(ack_timeout_s=1_000)
    waiting = asyncio.create_task(parts.take(wait_s=3 * IDLE_S, ack_timeout_s=1_000))
    await asyncio.sleep(2 * IDLE_S)
    assert parts.loop.dispatcher.ready_count == 3
    assert await waiting == []
    await asyncio.sleep(IDLE_S - 1)
    assert parts.loop.dispatcher.ready_count == 3
    await asyncio.sleep(1.1)
    assert parts.loop.dispatcher.ready_count == 0


async def test_ready_messages_are_not_put_down_while_the_cursor_is_moved(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, numbers(5))
    await parts.take(count_max=1)
    async with parts.loop.read_lock:
        await asyncio.sleep(IDLE_S + 1)
        assert parts.loop.dispatcher.ready_count == 4
    await asyncio.sleep(IDLE_S + 1)
    assert parts.loop.dispatcher.ready_count == 0


async def test_a_closed_subscription_has_no_timer(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, numbers(5))
    await parts.take(count_max=1)
    assert parts.loop._idle_check is not None
    parts.loop.close(TryAgain("made up"))
    assert parts.loop._idle_check is None
    with pytest.raises(TryAgain):
        await parts.take()
    assert parts.loop._idle_check is None


OTHERS = ["ack-unread", "nack", "leave", "idle", "seek", "reopen"]


@KINDS
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_each_message_is_delivered_until_it_is_acknowledged(
    cluster: Cluster, kind: SubscriptionType, has_room: bool, seed: int
) -> None:
    """Random calls, acknowledgements of parts, returns, pauses, moves and takeovers, with and without room.

    No acknowledged message is delivered; no message is delivered while it is held; the order is kept if the
    subscription is exclusive; and in the end everything was delivered.
    """
    random = Random(seed)
    entries = [numbers(7), single(b"x"), zipped_batch(1_200), numbers(3, size=400_000), single(b"y")]
    parts = await Parts.create(cluster, *entries)
    sizes = [7, 0, 1_200, 3, 0]
    everything = {(n, index) for n, size in enumerate(sizes) for index in (range(size) if size else [-1])}
    acked: set[tuple[int, int]] = set()
    held: dict[tuple[int, int], str] = {}

    def begin() -> None:
        held.clear()
        parts.loop.change_type(kind)
        if not has_room:
            no_read_ahead(parts)

    async def receive(consumer: str) -> None:
        call = parts.call(consumer, count_max=random.choice([1, 40, 500]), ack_timeout_s=100)
        found = [key[1:] for key in keys_of(await parts.loop.take(call))]
        call.charge.release()
        assert not acked.intersection(found)
        assert not held.keys() & set(found)
        if kind == "exclusive":
            assert found == sorted(everything - acked - held.keys())[: len(found)]
        held.update(dict.fromkeys(found, consumer))

    async def ack(keys: Collection[tuple[int, int]]) -> None:
        ids = [MessageId(0, *key) for key in keys]
        await parts.ack(*ids)
        acked.update(keys)
        for key in keys:
            held.pop(key, None)

    begin()
    for _ in range(40):
        consumer = random.choice("ab") if kind == "shared" else "a"
        action = random.choice(
            ["receive"] * 5 + ["ack"] * 3 + ["ack-unread", "nack", "leave", "idle", "seek", "reopen"]
        )
        some = random.sample(sorted(held), min(len(held), random.choice([1, 100, 1_000])))
        if action == "receive":
            await receive(consumer)
        elif action == "ack" and some:
            await ack(some)
        elif action == "ack-unread":
            await ack(random.sample(sorted(everything), 3))
        elif action == "nack" and some:
            parts.nack(*(MessageId(0, *key) for key in some))
            for key in some if kind == "shared" else [*held]:
                held.pop(key, None)
        elif action == "leave":
            if parts.sessions.get(consumer) is not None:
                parts.release(consumer)
            for key in [key for key, holder in held.items() if holder == consumer]:
                del held[key]
        elif action == "idle":
            await asyncio.sleep(IDLE_S + 1)
            assert parts.loop.dispatcher.ready_count == 0
        elif action == "seek" and random.random() < 0.3 and parts.topic.contains(at(2)):  # not trimmed
            async with parts.loop.read_lock:
                await parts.cursor.seek(at(2), passed=BatchAck(at(2), 1_200, range(600)))
                parts.loop.restart()
            held.clear()
            acked = {key for key in everything if key < (2, 600)}
        elif action == "reopen" and random.random() < 0.3:
            await parts.topic.close()
            cluster.forget(parts.topic)
            topic = await cluster.open()
            parts = Parts(topic, topic.cursors["s"])
            begin()
    for _ in range(200):
        if acked == everything:
            break
        await receive("a")
        await ack([*held])
    assert acked == everything
    assert parts.read_ahead.messages == 0


async def test_delays_that_were_not_loaded_are_not_loaded_to_be_stored(cluster: Cluster) -> None:
    """Loading takes 50 ms for each blob: too long for the close of a broker with many subscriptions."""
    delayed = encode_message(
        OutgoingMessage(payload=b"m", deliver_at_ms=10**12), producer_name="p", publish_time_ms=1, sequence_id=0
    )
    parts = await Parts.create(cluster, delayed, delayed)
    assert await parts.take() == []
    await parts.loop.store_delays(seal=True)
    blobs = dict(parts.cursor.blobs)
    assert len(blobs) == 1
    again = Parts(parts.topic, parts.cursor)
    await again.loop.store_delays(seal=True)
    assert (len(again.reader.delays), again.cursor.blobs) == (0, blobs)
    assert await again.take() == []
    await again.loop.store_delays(seal=True)
    assert (len(again.reader.delays), again.cursor.blobs) == (2, blobs)


async def test_delays_that_were_not_loaded_before_a_seek_that_failed_are_replaced_under_other_names(
    cluster: Cluster,
) -> None:
    """The cursor still has its blobs. With one of their names, the new index would count as stored."""
    delayed = encode_message(
        OutgoingMessage(payload=b"m", deliver_at_ms=10**12), producer_name="p", publish_time_ms=1, sequence_id=0
    )
    parts = await Parts.create(cluster, delayed, delayed)
    assert await parts.take() == []
    await parts.loop.store_delays(seal=True)
    (name,) = parts.cursor.blobs
    await parts.topic.add_many([delayed] * 3)
    again = Parts(parts.topic, parts.cursor)
    async with again.loop.read_lock:
        again.loop.restart()  # as after a seek that failed
    assert await again.take() == []
    await again.loop.store_delays(seal=True)
    assert name not in again.cursor.blobs
    stored = DelayIndex()
    stored.restore(again.cursor.blobs, again.cursor.is_acked)
    assert stored.delayed_in(0, 0, 9) == [(0, 4)]
