"""Waiting calls: what wakes them, what ends them, and how they share reads."""

import asyncio
from typing import Any

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.errors import ResponsesFull
from bindery_broker.subscriptions.consumer import ClientWatch
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD, READ_BYTES_MAX, READ_ENTRIES_MAX
from bindery_broker.subscriptions.response_budget import Charge
from bindery_core.errors import TryAgain
from bindery_pulsar.message_id import MessageId
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, single, texts, zipped


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
    assert parts.loop._waiters == {}


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
    checks = 0
    check_open = parts.loop.check_open

    def counted() -> None:
        nonlocal checks
        checks += 1
        check_open()

    monkeypatch.setattr(parts.loop, "check_open", counted)
    for client, call in zip(clients[:40], calls[:40], strict=True):
        client.set_gone()
        assert await call == []
    assert checks == 40
    assert not any(call.done() for call in calls[40:])
    assert len(parts.loop._waiters) == 10
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
    assert parts.loop._waiters == {}


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
    await parts.acknowledger.ack(*await parts.acknowledger.resolve(ids), ids)
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
    wakes: list[None] = []
    monkeypatch.setattr(parts.loop, "wake", lambda: wakes.append(None))
    parts.loop.wake_blocked()
    assert not wakes
    waiting.append(asyncio.ensure_future(parts.take("c1", wait_s=20)))
    await asyncio.sleep(1)
    parts.loop.wake_blocked()
    parts.loop.wake_blocked()
    assert len(wakes) == 1
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
    assert parts.loop._waiters == {}


async def test_ready_messages_are_kept_during_a_read_and_while_a_session_lasts(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    call = parts.call(count_max=1, session_ttl_s=10)
    await parts.loop.take(call)
    parts.sessions.end_call(call.session, now=parts.now())
    parts.loop.tick()
    assert parts.loop.dispatcher.ready_count == 1
    await asyncio.sleep(30)  # the lease ends after the session
    async with parts.loop.read_lock:
        parts.loop.tick()
        assert len(parts.sessions) == 0
        assert parts.loop.dispatcher.ready_count == 1
    parts.loop.tick()
    assert parts.loop.dispatcher.ready_count == 0
    assert parts.reader.position == at(1)
    assert [await parts.take(), await parts.take()] == [[b"a"], [b"b"]]


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
    assert parts.loop.dispatcher.leases.count_of("c") == 0


async def test_a_delayed_message_is_delivered_when_its_delay_ends(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    parts.loop.change_type("exclusive")
    assert await parts.take(count_max=1) == [b"a"]
    began = parts.now()
    assert parts.redelivery.nack([MessageId.parse("0:0")], delay_s=5, consumer="c") == [(0, 0, -1)]
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
    assert call.charge.size == parts.responses.used == sum(d.message.size + MESSAGE_OVERHEAD for d in taken)
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
    assert (len(parts.loop.dispatcher.leases), parts.loop._waiters) == (0, {})
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
    assert parts.loop._waiters == {}


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
    parts.loop._read_ahead.change(parts.loop._read_ahead.total)
    assert await parts.take(wait_s=1) == []


async def test_without_room_to_read_ahead_a_read_counts_as_part_of_its_response(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    parts.loop._read_ahead.change(parts.loop._read_ahead.total)
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
    assert parts.loop._waiters == {}


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
    assert parts.loop._read_ahead.used == 0


async def test_a_large_entry_that_cannot_be_read_ahead_waits_for_room_in_the_responses(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(DECODED_BYTES_MAX))
    parts.loop._read_ahead.change(parts.loop._read_ahead.total - READ_BYTES_MAX)
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
    parts.redelivery.release("c")
    (again,) = await parts.take()
    assert len(again) == DECODED_BYTES_MAX
