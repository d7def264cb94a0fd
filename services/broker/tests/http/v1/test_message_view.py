"""Messages as JSON: text or base64, tags apart from properties, and the parsing of message ids."""

from typing import Any

import msgspec
import pytest
from bindery_broker.http.v1.message_view import parse_ids, parse_place, parse_start, view
from bindery_core.errors import BadRequest
from bindery_pulsar.message_codec import Message, OpaqueMessage
from bindery_pulsar.message_encoding import Chunk, Encoding, Encryption, EncryptionKey, OpaqueReason
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId


def message(payload: bytes = b"a", **fields: Any) -> Message:
    return Message(
        payload=payload,
        batch_index=-1,
        batch_size=1,
        producer_name="p",
        sequence_id=7,
        publish_time_ms=1_000,
        **fields,
    )


def shown(found: Message, **options: Any) -> dict[str, Any]:
    """Return the JSON of a message without the fields that every message has."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(view(found, message_id="5:0:-1:-1", **options)))
    common = {"message_id": "5:0:-1:-1", "publish_time": 1_000, "producer": "p", "sequence_id": 7}
    assert {name: fields.pop(name) for name in common} == common
    return fields


def test_a_plain_message_has_its_payload_and_no_optional_fields() -> None:
    assert shown(message("é".encode())) == {"payload": "é", "properties": {}, "redelivery_count": 0}


def test_a_payload_that_is_not_utf8_is_base64() -> None:
    assert shown(message(b"\xff\x00")) == {"payload_base64": "/wA=", "properties": {}, "redelivery_count": 0}


ENCODINGS = {
    "size": Encoding(reason=OpaqueReason.SIZE, batch_size=3),
    "chunk": Encoding(
        reason=OpaqueReason.CHUNK,
        compression="LZ4",
        uncompressed_size=5,
        chunk=Chunk(uuid="u", index=0, count=2, total_size=9),
    ),
    "encrypted": Encoding(
        reason=OpaqueReason.ENCRYPTED,
        encryption=Encryption(
            algorithm="AES", param=b"iv", keys=(EncryptionKey(name="k", value=b"v", metadata={"a": "b"}),)
        ),
    ),
    "unnamed": Encoding(reason=OpaqueReason.ENCRYPTED, encryption=Encryption(algorithm=None, param=b"", keys=())),
    "compression": Encoding(reason=OpaqueReason.COMPRESSION, compression="7", uncompressed_size=0),
}


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_a_payload_that_is_not_decoded_is_base64_with_its_encoding(encoding: Encoding) -> None:
    plain = message(b"text", key="k", properties={"red": "TAGS"})
    fields = {name: getattr(plain, name) for name in Message.__slots__}
    assert shown(OpaqueMessage(**fields, encoding=encoding)) == {
        "payload_base64": "dGV4dA==",
        "encoding": encoding.as_json(),
        "key": "k",
        "tags": "red",
        "properties": {},
        "redelivery_count": 0,
    }


def test_a_delivery_has_its_lease_and_redelivery_count() -> None:
    found = shown(message(), lease="12", redelivery_count=3)
    assert (found["lease"], found["redelivery_count"]) == ("12", 3)
    assert shown(message(), lease="")["lease"] == ""


@pytest.mark.parametrize(
    ("key", "fields"), [("k", {"key": "k"}), ("", {"key": ""}), (b"\x01", {"key_base64": "AQ=="}), (None, {})]
)
def test_a_key_is_text_or_base64(key: str | bytes | None, fields: dict[str, str]) -> None:
    found = shown(message(key=key))
    assert {name: value for name, value in found.items() if name.startswith("key")} == fields


def test_an_event_time_is_shown_if_it_is_set() -> None:
    assert shown(message(event_time_ms=5))["event_time"] == 5
    assert "event_time" not in shown(message(event_time_ms=0))


def test_a_delivery_time_is_shown_if_it_is_set() -> None:
    assert shown(message(deliver_at_ms=5))["deliver_at"] == 5
    assert "deliver_at" not in shown(message())


def test_tags_are_sorted_and_apart_from_the_other_properties() -> None:
    found = message(properties={"b": "TAGS", "x": "1", "a": "TAGS"})
    fields = shown(found)
    assert (fields["tags"], fields["properties"]) == ("a||b", {"x": "1"})
    assert found.properties == {"b": "TAGS", "x": "1", "a": "TAGS"}


def test_properties_without_tags_are_shown_unchanged() -> None:
    fields = shown(message(properties={"x": "1", "TAGS": "y"}))
    assert fields["properties"] == {"x": "1", "TAGS": "y"}
    assert "tags" not in fields


def test_a_place_is_an_end_of_the_topic_or_a_message() -> None:
    assert parse_place("earliest") == EARLIEST
    assert parse_place("latest") == LATEST
    assert parse_place("5:6:7:8") == MessageId(5, 6, batch_index=8, partition=7)
    with pytest.raises(BadRequest):
        parse_place("first")


def test_message_ids_are_parsed_in_order() -> None:
    assert parse_ids(["5:6", "1:2:-1:3"]) == [MessageId(5, 6), MessageId(1, 2, batch_index=3)]
    assert parse_ids([]) == []


def test_the_first_text_that_is_not_a_message_id_is_named() -> None:
    with pytest.raises(BadRequest, match="not a message id") as caught:
        parse_ids(["5:6", "x", "y"])
    assert caught.value.facts == {"index": 1, "message_id": "x"}


def test_a_start_is_a_place_or_a_time() -> None:
    assert parse_start("latest") == LATEST
    assert parse_start("5:6") == MessageId(5, 6)
    assert parse_start("@1700000000000") == 1_700_000_000_000
    for text in ("@", "@x", "@-1", "@253402300800000", "5"):
        with pytest.raises(BadRequest):
            parse_start(text)
