"""Acknowledgements: which ids are accepted, and what the dispatcher does if the cursor cannot be written."""

import asyncio

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.errors import UNKNOWN_SHOWN_MAX, UnknownMessages
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.subscriptions.consumer import SubscriptionType
from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_pulsar.message_id import MessageId
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, one, single


def message(text: str) -> MessageId:
    return MessageId.parse(text)


async def test_messages_of_a_failed_acknowledgement_are_delivered_to_a_waiting_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    began = parts.now()
    assert await parts.take("c1") == [b"a"]

    async def refuse(*arguments: object, **batches: object) -> None:
        await asyncio.sleep(1)
        raise MetadataUnavailable("made up")

    ids = [message("0:0")]
    resolved = await parts.acknowledger.resolve(ids)
    waiting = asyncio.ensure_future(parts.take("c2", wait_s=20))
    with monkeypatch.context() as patch:
        patch.setattr(parts.cursor, "ack_many", refuse)
        with pytest.raises(MetadataUnavailable):
            await parts.acknowledger.ack(*resolved)
    assert await waiting == [b"a"]
    assert parts.now() - began < 2
    await parts.acknowledger.ack(*resolved)
    assert parts.loop.dispatcher.known_count == 0


async def test_an_acknowledgement_is_kept_if_the_type_changes_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    await parts.take("c1")
    ack_many = parts.cursor.ack_many

    async def change_type_meanwhile(*arguments: object, **batches: object) -> object:
        monkeypatch.setattr(parts.cursor, "ack_many", ack_many)
        parts.loop.change_type("exclusive")
        assert await parts.take("c2", count_max=1) == [b"a"]
        return await ack_many(*arguments, **batches)

    monkeypatch.setattr(parts.cursor, "ack_many", change_type_meanwhile)
    ids = [message("0:0")]
    await parts.ack(*ids)
    assert parts.loop.dispatcher.state_counts() == {"ready": 1}


async def test_an_acknowledgement_is_kept_if_reading_restarts_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    await parts.take("c1")
    ack_many = parts.cursor.ack_many

    async def restart_meanwhile(*arguments: object, **batches: object) -> object:
        monkeypatch.setattr(parts.cursor, "ack_many", ack_many)
        parts.loop.restart()
        assert await parts.take("c2", count_max=1) == [b"a"]
        return await ack_many(*arguments, **batches)

    monkeypatch.setattr(parts.cursor, "ack_many", restart_meanwhile)
    ids = [message("0:0")]
    await parts.ack(*ids)
    assert parts.loop.dispatcher.state_counts() == {"ready": 1}


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_a_late_acknowledgement_counts_for_a_message_that_is_read_meanwhile(
    cluster: Cluster, kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher did not know the message when the acknowledgement began."""
    parts = await Parts.create(cluster, single(b"a"), single(b"b"))
    parts.loop.change_type(kind)
    ack_many = parts.cursor.ack_many

    async def read_meanwhile(*arguments: object, **batches: object) -> object:
        monkeypatch.setattr(parts.cursor, "ack_many", ack_many)
        assert await parts.take(count_max=1) == [b"a"]
        state = "acking" if kind == "exclusive" else "ready"  # which records what it does not know
        assert parts.loop.dispatcher.state_counts() == {"leased": 1, state: 1}
        return await ack_many(*arguments, **batches)

    monkeypatch.setattr(parts.cursor, "ack_many", read_meanwhile)
    await parts.ack(message("0:1"))
    assert parts.loop.dispatcher.state_counts() == {"leased": 1}
    assert await parts.take() == []


async def test_the_size_of_an_acknowledged_batch_is_not_kept(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"))
    await parts.take()
    for text in ("0:0:-1:0", "0:0:-1:1", "0:0:-1:1"):
        ids = [message(text)]
        await parts.ack(*ids)
    assert parts.cursor.mark_delete == at(0)
    assert len(parts.reader.batch_sizes) == 0


async def exclusive(cluster: Cluster, *entries: bytes) -> Parts:
    parts = await Parts.create(cluster, *entries)
    parts.loop.change_type("exclusive")
    return parts


async def ack_upto(parts: Parts, text: str) -> None:
    last = message(text)
    await parts.acknowledger.ack_cumulative(*await parts.acknowledger.resolve([last]), last)


async def test_a_cumulative_acknowledgement_includes_its_message_and_no_later_one(cluster: Cluster) -> None:
    parts = await exclusive(cluster, single(b"a"), batch(b"b", b"c", b"d"), single(b"e"))
    await parts.take()
    await ack_upto(parts, "0:0")
    assert parts.cursor.mark_delete == at(0)
    await ack_upto(parts, "0:1:-1:1")
    assert (parts.cursor.mark_delete, parts.cursor.remaining(at(1))) == (at(0), 0b100)
    assert [portion.ref for portion in parts.loop.dispatcher.leases] == [one(at(1), 2), one(at(2))]
    assert len(parts.reader.batch_sizes) == 1
    await ack_upto(parts, "0:1")
    assert parts.cursor.mark_delete == at(1)
    assert parts.loop.dispatcher.state_counts() == {"leased": 1}
    assert len(parts.reader.batch_sizes) == 0


async def test_messages_of_a_failed_cumulative_acknowledgement_are_delivered_to_a_waiting_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await exclusive(cluster, single(b"a"), single(b"b"))
    began = parts.now()
    await parts.take()

    async def refuse(*arguments: object, **batches: object) -> None:
        raise MetadataUnavailable("made up")

    waiting = asyncio.ensure_future(parts.take(wait_s=20))
    await asyncio.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(parts.cursor, "ack_cumulative", refuse)
        with pytest.raises(MetadataUnavailable):
            await ack_upto(parts, "0:0")
    assert await waiting == [b"a", b"b"]
    assert parts.now() - began < 2


async def test_a_cumulative_acknowledgement_is_kept_if_reading_restarts_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await exclusive(cluster, single(b"a"), single(b"b"))
    await parts.take()
    ack_cumulative = parts.cursor.ack_cumulative

    async def restart_meanwhile(*arguments: object, **batches: object) -> object:
        parts.loop.restart()
        assert await parts.take(count_max=1) == [b"a"]
        return await ack_cumulative(*arguments, **batches)

    monkeypatch.setattr(parts.cursor, "ack_cumulative", restart_meanwhile)
    await ack_upto(parts, "0:0")
    assert parts.loop.dispatcher.state_counts() == {"ready": 1}


async def test_a_cumulative_acknowledgement_is_kept_if_the_type_changes_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await exclusive(cluster, single(b"a"), batch(b"b", b"c"))
    await parts.take()
    ack_cumulative = parts.cursor.ack_cumulative

    async def change_type_meanwhile(*arguments: object, **batches: object) -> object:
        parts.loop.change_type("shared")
        assert await parts.take(count_max=1) == [b"a"]
        return await ack_cumulative(*arguments, **batches)

    monkeypatch.setattr(parts.cursor, "ack_cumulative", change_type_meanwhile)
    await ack_upto(parts, "0:1:-1:0")
    assert parts.loop.dispatcher.state_counts() == {"ready": 1}


async def test_a_call_that_a_limit_blocks_continues_after_a_cumulative_acknowledgement(cluster: Cluster) -> None:
    limits = DispatchLimits(unacked_max=2, unacked_per_consumer_max=2)
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(4)), limits=limits)
    parts.loop.change_type("exclusive")
    began = parts.now()
    assert await parts.take() == [b"0", b"1"]
    waiting = asyncio.ensure_future(parts.take(wait_s=20))
    await asyncio.sleep(1)
    await ack_upto(parts, "0:1")
    assert await waiting == [b"2", b"3"]
    assert parts.now() - began < 2


async def test_a_shared_subscription_has_no_cumulative_acknowledgement(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    await parts.take()
    with pytest.raises(BadRequest, match="exclusive"):
        await ack_upto(parts, "0:0")
    assert not parts.cursor.is_acked(at(0))


async def test_ids_become_positions_and_batches(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), batch(b"b", b"c"), batch(b"d", b"e"))
    ids = [message(text) for text in ("0:0", "0:1:-1:1", "0:1:-1:0", "0:2:-1:0", "0:2")]
    assert await parts.acknowledger.resolve(ids) == ([at(0), at(2)], [BatchAck(at(1), 2, [0, 1])])


async def test_all_unknown_ids_are_counted_and_the_first_ones_listed(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), batch(b"b", b"c"))
    foreign = [MessageId(0, 0, -1, 4)]
    missing = [MessageId(0, entry_id, -1, -1) for entry_id in range(100, 130)]
    with pytest.raises(UnknownMessages, match="31 of 32 message ids") as caught:
        await parts.acknowledger.resolve([message("0:0"), *foreign, *missing])
    listed = caught.value.facts["message_ids"]
    assert listed == [str(unknown) for unknown in [*foreign, *missing]][:UNKNOWN_SHOWN_MAX]
    with pytest.raises(UnknownMessages) as caught:
        await parts.acknowledger.resolve([message("0:1:-1:1"), message("0:1:-1:2")])
    assert caught.value.facts["message_ids"] == ["0:1:-1:2"]


async def test_an_id_of_a_trimmed_entry_is_accepted(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"))
    await parts.cursor.ack_many([at(0)])
    await parts.topic.roll()
    await parts.topic.trim()
    assert not parts.topic.contains(at(0))
    assert await parts.acknowledger.resolve([message("0:0:-1:1")]) == ([], [])
    assert await parts.acknowledger.resolve([message("0:0")]) == ([at(0)], [])
