"""Acknowledgements: which ids are accepted, and what the dispatcher does if the cursor cannot be written."""

import asyncio

import pytest
from bindery_broker.errors import UnknownMessages
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.subscriptions.acknowledging import UNKNOWN_SHOWN_MAX
from bindery_core.errors import MetadataUnavailable
from bindery_pulsar.message_id import MessageId
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, single


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
            await parts.acknowledger.ack(*resolved, ids)
    assert await waiting == [b"a"]
    assert parts.now() - began < 2
    await parts.acknowledger.ack(*resolved, ids)
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
    await parts.acknowledger.ack(*await parts.acknowledger.resolve(ids), ids)
    assert parts.loop.dispatcher.state_counts() == {"ready": 1}


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
