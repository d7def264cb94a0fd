"""Entries of topics as JSON and as text."""

import json

from bindery.common.pulsar_entry import describe_messages, message_lines
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata

PLAIN = encode_message(OutgoingMessage(payload=b"hello"), producer_name="p", publish_time_ms=1000, sequence_id=5)
RICH = encode_message(
    OutgoingMessage(
        payload=b"\xff\x00",
        key="k",
        ordering_key=b"\x01",
        properties={"a": "b"},
        event_time_ms=7,
        deliver_at_ms=9,
    ),
    producer_name="p",
    publish_time_ms=1000,
    sequence_id=5,
)
BATCH = encode_batch(
    [OutgoingMessage(payload=b"one\n", key=b"\xff"), OutgoingMessage(payload=b"", key=b"\xff", null_value=True)],
    producer_name="p",
    publish_time_ms=1000,
    sequence_ids=[5, 6],
)


def test_a_message_is_described() -> None:
    assert describe_messages(PLAIN) == {
        "producer": "p",
        "sequence_id": 5,
        "publish_time_ms": 1000,
        "is_batch": False,
        "is_marker": False,
        "count": 1,
        "messages": [{"batch_index": -1, "sequence_id": 5, "size": 5, "payload": "hello"}],
    }


def test_fields_are_shown_if_they_are_set() -> None:
    assert describe_messages(RICH)["messages"] == [
        {
            "batch_index": -1,
            "sequence_id": 5,
            "key": "k",
            "ordering_key_base64": "AQ==",
            "properties": {"a": "b"},
            "event_time_ms": 7,
            "deliver_at_ms": 9,
            "size": 2,
            "payload_base64": "/wA=",
        }
    ]


def test_a_batch_is_described_message_by_message() -> None:
    facts = describe_messages(BATCH)
    assert (facts["is_batch"], facts["count"]) == (True, 2)
    assert facts["messages"] == [
        {"batch_index": 0, "sequence_id": 5, "key_base64": "/w==", "size": 4, "payload": "one\n"},
        {"batch_index": 1, "sequence_id": 6, "key_base64": "/w==", "null_value": True, "size": 0, "payload": ""},
    ]


def test_an_entry_that_is_not_decoded_has_its_encoding() -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1000, num_messages_in_batch=2)
    metadata.encryption_keys.add(key="k", value=b"v")
    head = metadata.SerializeToString()
    entry = len(head).to_bytes(4, "big") + head + b"text"
    encoding = {
        "reason": "encrypted",
        "batch_size": 2,
        "encryption": {"param_base64": "", "keys": [{"name": "k", "value_base64": "dg==", "metadata": {}}]},
    }
    assert describe_messages(entry)["messages"] == [
        {"batch_index": -1, "sequence_id": 5, "size": 4, "encoding": encoding, "payload_base64": "dGV4dA=="}
    ]
    assert message_lines(entry) == [
        "batch of 2, producer p, sequence 5, published 1000",
        f"  sequence_id=5 encoding={json.dumps(encoding)} (4 bytes) base64:dGV4dA==",
    ]


def test_what_cannot_be_decoded_is_an_error_in_the_facts() -> None:
    assert list(describe_messages(b"junk")) == ["error"]
    damaged = describe_messages(PLAIN[:-1] + b"x")
    assert "messages" not in damaged
    assert damaged["error"]


def test_text_has_a_line_for_the_entry_and_one_per_message() -> None:
    assert message_lines(PLAIN) == [
        "one message, producer p, sequence 5, published 1000",
        "  sequence_id=5 (5 bytes) hello",
    ]
    assert message_lines(BATCH) == [
        "batch of 2, producer p, sequence 5, published 1000",
        r"  [0] sequence_id=5 key_base64=/w== (4 bytes) one\n",
        "  [1] sequence_id=6 key_base64=/w== null_value=True (0 bytes) ",
    ]
    assert message_lines(RICH)[1].endswith("event_time_ms=7 deliver_at_ms=9 (2 bytes) base64:/wA=")


def test_text_names_the_error() -> None:
    (line,) = message_lines(b"junk")
    assert line.startswith("cannot decode the messages: ")


def test_a_marker_is_named() -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1000, marker_type=7).SerializeToString()
    entry = len(metadata).to_bytes(4, "big") + metadata
    assert message_lines(entry)[0] == "marker, producer p, sequence 5, published 1000"
