"""Subscriptions with a tag filter, over HTTP."""

from bindery_pulsar.message_codec import OutgoingMessage, encode_batch
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata, SingleMessageMetadata
from broker_harness import TOPIC, ids, payloads, problem

SUB = f"{TOPIC}/subscriptions/s"


async def test_a_subscription_gets_messages_with_one_of_its_tags_or_without_tags(broker):
    lines = [
        {"payload": "1", "tags": "a"},
        {"payload": "2", "tags": "b"},
        {"payload": "3"},
        {"payload": "4", "tags": "c||b"},
    ]
    await broker.client.post(f"{TOPIC}/messages", json=lines)
    got = await broker.receive(tags="b||x")
    assert payloads(got) == ["2", "3", "4"]
    await broker.ack(ids(got))
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["tags"] == "b||x"
    assert explained["subscription"]["backlog_entries"] == 0  # filtered messages are acknowledged
    problem(await broker.receive_raw(tags="a"), status=409, code="conflict")


async def test_tags_filter_single_messages_of_a_batch_from_another_client(broker):
    await broker.receive(tags="b")
    topic = next(iter(broker.broker.topics))
    messages = [OutgoingMessage(payload=tag.encode(), properties={tag: "TAGS"}) for tag in "abab"]
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(4))
    await topic.ledger.add_many([entry])
    got = await broker.receive()
    assert [message["message_id"] for message in got] == ["0:0:-1:1", "0:0:-1:3"]
    await broker.ack(ids(got))
    assert (await broker.client.get(f"{SUB}/explain")).json()["subscription"]["backlog_entries"] == 0


async def test_tags_inside_a_batch_count_as_those_of_its_messages(broker):
    """The metadata of a batch has no tags if one of Pulsar's clients wrote it."""
    subscriptions = {"red": ["0", "1", "3"], "blue": ["1", "2", "3"], "green": ["1"], "red||blue": ["0", "1", "2", "3"]}
    for tags in subscriptions:
        assert await broker.receive(sub=tags.replace("||", "-"), tags=tags) == []
    payload = b""
    for number, tags in enumerate((["red"], [], ["blue"], ["blue", "red"])):
        single = SingleMessageMetadata(payload_size=1)
        single.properties.add(key="number", value=str(number))
        for tag in tags:
            single.properties.add(key=tag, value="TAGS")
        head = single.SerializeToString()
        payload += len(head).to_bytes(4, "big") + head + str(number).encode()
    metadata = MessageMetadata(producer_name="q", sequence_id=1, publish_time=5, num_messages_in_batch=4)
    head = metadata.SerializeToString()
    (topic,) = broker.broker.topics
    await topic.ledger.add_many([len(head).to_bytes(4, "big") + head + payload])
    for tags, wanted in subscriptions.items():
        sub = tags.replace("||", "-")
        got = await broker.receive(sub=sub)
        assert payloads(got) == wanted
        await broker.ack(ids(got), sub=sub)
        explained = (await broker.client.get(f"{TOPIC}/subscriptions/{sub}/explain")).json()
        assert explained["subscription"]["backlog_entries"] == 0
