"""Entries that the broker does not decode are delivered, read and acknowledged as one message, over HTTP."""

import base64
import struct
import zlib
from typing import Any

import pytest
from bindery_broker.http.v1.message_pieces import AT_ONCE_SIZE_MAX
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX
from bindery_pulsar.message_codec import MESSAGE_SIZE, OutgoingMessage, encode_message
from bindery_pulsar.pulsar_messages_pb2 import LZ4, ZLIB, MessageMetadata
from broker_harness import TOPIC, ids, payloads, problem

SUB = f"{TOPIC}/subscriptions/s"
KEYS = [{"key": "key-1", "value": b"\xff", "metadata": [{"key": "version", "value": "2"}]}]
ENCRYPTION = {"param_base64": "AAE=", "keys": [{"name": "key-1", "value_base64": "/w==", "metadata": {"version": "2"}}]}


def foreign(payload: bytes, *tags: str, **fields: Any) -> bytes:
    """Return an entry of another producer."""
    metadata = MessageMetadata(producer_name="q", sequence_id=1, publish_time=5, **fields)
    for tag in tags:
        metadata.properties.add(key=tag, value="TAGS")
    head = metadata.SerializeToString()
    return struct.pack(">I", len(head)) + head + payload


def encrypted(payload: bytes, *tags: str, **fields: Any) -> bytes:
    return foreign(payload, *tags, encryption_keys=KEYS, encryption_param=b"\x00\x01", **fields)


def plain(payload: bytes) -> bytes:
    return encode_message(OutgoingMessage(payload=payload), producer_name="p", publish_time_ms=1, sequence_id=0)


async def store(broker, *entries, **subscription):
    """Create the topic and the subscription, and store entries that no broker wrote."""
    await broker.receive(**subscription)
    (topic,) = broker.broker.topics
    await topic.ledger.add_many(entries)


async def backlog(broker):
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    return explained["subscription"]["backlog_entries"], explained["blocked_by"]


async def test_an_encrypted_batch_is_one_message_between_others(broker):
    await store(
        broker,
        plain(b"a"),
        encrypted(b"text", num_messages_in_batch=3, compression=LZ4, uncompressed_size=50, partition_key="k"),
        plain(b"c"),
    )
    first, second, third = await broker.receive()
    assert payloads([first, third]) == ["a", "c"]
    lease = second.pop("lease")
    assert second == {
        "message_id": "0:1:-1:-1",
        "payload_base64": base64.b64encode(b"text").decode(),
        "encoding": {
            "reason": "encrypted",
            "batch_size": 3,
            "compression": "LZ4",
            "uncompressed_size": 50,
            "encryption": ENCRYPTION,
        },
        "key": "k",
        "properties": {},
        "publish_time": 5,
        "redelivery_count": 0,
        "producer": "q",
        "sequence_id": 1,
    }
    await broker.post(f"{SUB}/nack", {"message_ids": [second["message_id"]]})
    (again,) = await broker.receive()
    assert again.pop("lease") != lease
    assert again == second | {"redelivery_count": 1}
    await broker.ack(["0:0:-1:-1", "0:1:-1:-1"])
    assert await backlog(broker) == (1, [])


async def test_chunks_are_messages_that_a_client_joins(broker):
    whole = bytes(range(256)) * 3
    fields = {"uuid": "q-1", "num_chunks_from_msg": 3, "total_chunk_msg_size": len(whole)}
    await store(broker, *(foreign(whole[n * 256 :][:256], chunk_id=n, **fields) for n in range(3)))
    found = await broker.receive()
    assert b"".join(base64.b64decode(message["payload_base64"]) for message in found) == whole
    assert [message["encoding"] for message in found] == [
        {"reason": "chunk", "chunk": {"uuid": "q-1", "index": n, "count": 3, "total_size": len(whole)}}
        for n in range(3)
    ]
    await broker.ack(ids(found))
    assert await backlog(broker) == (0, [])


async def test_entries_that_are_compressed_in_an_unknown_way_do_not_stop_a_subscription(broker):
    await store(broker, foreign(b"?", compression=7, uncompressed_size=1), plain(b"c"))
    first, second = await broker.receive()
    assert first["encoding"] == {"reason": "compression", "compression": "7", "uncompressed_size": 1}
    assert payloads([second]) == ["c"]


@pytest.mark.parametrize("kind", ["shared", "key_shared", "exclusive"])
async def test_an_entry_that_is_too_large_once_decoded_is_one_message_as_stored(broker, kind):
    size = DECODED_BYTES_MAX + 1
    stored = zlib.compress(bytes(size))
    large = foreign(stored, compression=ZLIB, uncompressed_size=size)
    count = DECODED_BYTES_MAX // MESSAGE_SIZE + 1
    many = foreign(bytes(count), num_messages_in_batch=count)
    await store(broker, large, many, plain(b"c"))
    first, second, third = await broker.receive(type=kind)
    assert base64.b64decode(first["payload_base64"]) == stored
    assert first["encoding"] == {"reason": "size", "compression": "ZLIB", "uncompressed_size": size}
    assert base64.b64decode(second["payload_base64"]) == bytes(count)
    assert (second["message_id"], second["encoding"]) == ("0:1:-1:-1", {"reason": "size", "batch_size": count})
    assert payloads([third]) == ["c"]
    await broker.ack([f"0:1:-1:{count - 1}"])
    again = await broker.receive(type=kind, redeliver=True)
    assert ids(again) == ids([first, second, third]), "of the batch, other messages are left"
    await broker.ack(ids(again))
    assert await backlog(broker) == (0, [])


async def test_the_part_of_an_encrypted_batch_that_is_left_is_the_whole_entry(broker):
    """A client that decrypts the entry may acknowledge its messages by their index."""
    await store(broker, encrypted(b"x", num_messages_in_batch=3))
    await broker.ack(["0:0:-1:0", "0:0:-1:2"])
    (message,) = await broker.receive()
    assert message["message_id"] == "0:0:-1:-1"
    await broker.post(f"{SUB}/nack", {"message_ids": ["0:0:-1:-1"]})
    problem(await broker.ack(["0:0:-1:3"]), status=400, code="unknown_messages")
    await broker.ack(["0:0:-1:1"])
    assert await backlog(broker) == (0, [])


async def test_the_tags_of_an_entry_that_is_not_decoded_are_those_of_its_metadata(broker):
    entries = [encrypted(b"1", "a"), encrypted(b"2", num_messages_in_batch=2), encrypted(b"3", "x", "b")]
    await store(broker, *entries, tags="b")
    found = await broker.receive()
    assert [base64.b64decode(message["payload_base64"]) for message in found] == [b"2", b"3"]
    assert [message.get("tags") for message in found] == [None, "b||x"]
    assert (await backlog(broker))[0] == 2  # the first one was acknowledged


async def test_reads_without_a_subscription_show_what_is_not_decoded(broker):
    await store(broker, encrypted(b"x", num_messages_in_batch=3), plain(b"b"))
    answer = (await broker.client.get(f"{TOPIC}/messages")).json()
    assert [message["message_id"] for message in answer["messages"]] == ["0:0:-1:-1", "0:1:-1:-1"]
    assert answer["messages"][0]["encoding"]["encryption"] == ENCRYPTION
    within = (await broker.client.get(f"{TOPIC}/messages?start=0:0:-1:2")).json()["messages"]
    assert within == answer["messages"]
    one = (await broker.client.get(f"{TOPIC}/messages/0:0")).json()
    assert (one["message"], one["batch_size"]) == (answer["messages"][0], 1)


async def test_a_large_payload_that_is_not_decoded_is_base64_though_it_is_text(broker):
    text = b"text" * (AT_ONCE_SIZE_MAX // 4)
    await store(broker, encrypted(text))
    for line in (True, False):
        headers = {"accept": "application/x-ndjson"} if line else {}
        answer = await broker.post(
            f"{SUB}/receive", {"consumer": "c1", "wait_ms": 0, "redeliver": True}, headers=headers
        )
        message = answer.json() if line else answer.json()["messages"][0]
        assert base64.b64decode(message["payload_base64"]) == text
        assert "payload" not in message
        assert message["encoding"] == {"reason": "encrypted", "encryption": ENCRYPTION}
