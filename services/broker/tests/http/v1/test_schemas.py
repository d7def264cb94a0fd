"""The limits of hot operations: accepted at the limit, refused beyond it; and the defaults of their fields."""

import inspect
from typing import Any

import msgspec
import pytest
from bindery_broker.http.v1.produce_request import parse_produce
from bindery_broker.http.v1.schemas import (
    AckBody,
    Acknowledged,
    LedgerOfMessage,
    MessageError,
    MessageLine,
    MessageOut,
    NackBody,
    OneMessage,
    Produced,
    ProducedPartly,
    ProduceQuery,
    ProduceResult,
    ReadAnswer,
    ReceiveBody,
    Received,
    Returned,
    RoutingQuery,
    StreamQuery,
)
from bindery_core.errors import TooLarge
from msgspec import UNSET

REQUIRED: dict[type, dict[str, Any]] = {
    ReceiveBody: {"consumer": "c"},
    StreamQuery: {"consumer": "c"},
    NackBody: {"message_ids": ["5:0"]},
}
"""The fields without a default, by struct."""
REQUESTS = [MessageLine, RoutingQuery, ProduceQuery, ReceiveBody, StreamQuery, AckBody, NackBody]
STRUCTS = [
    *REQUESTS, Produced, MessageError, ProduceResult, ProducedPartly, MessageOut, Received, ReadAnswer, LedgerOfMessage,
    OneMessage, Acknowledged, Returned,
]  # fmt: skip
END_OF_9999_MS = 253_402_300_799_999
DAY_MS = 24 * 60 * 60 * 1_000


def accepted(struct: type, field: str, value: Any) -> bool:
    """Return whether a request with this value is accepted, and then check that it is kept."""
    try:
        found = msgspec.convert({**REQUIRED.get(struct, {}), field: value}, struct)
    except msgspec.ValidationError:
        return False
    assert getattr(found, field) == value
    return True


NUMBERS: list[tuple[type, str, int, int]] = [
    (MessageLine, "event_time", 0, END_OF_9999_MS),
    (MessageLine, "deliver_at", 0, END_OF_9999_MS),
    (MessageLine, "deliver_after_ms", 0, END_OF_9999_MS),
    (MessageLine, "sequence_id", 0, 9_223_372_036_854_775_807),
    (ProduceQuery, "event_time", 0, END_OF_9999_MS),
    (ProduceQuery, "deliver_at", 0, END_OF_9999_MS),
    (ProduceQuery, "deliver_after_ms", 0, END_OF_9999_MS),
    (ProduceQuery, "sequence_id", 0, 9_223_372_036_854_775_807),
    (ReceiveBody, "max", 1, 1_000),
    (ReceiveBody, "max_bytes", 1, 16_777_216),
    (ReceiveBody, "wait_ms", 0, 30_000),
    (ReceiveBody, "ack_timeout_ms", 100, DAY_MS // 2),
    (ReceiveBody, "session_ttl_ms", 1_000, 3_600_000),
    (StreamQuery, "ack_timeout_ms", 100, DAY_MS // 2),
    (StreamQuery, "session_ttl_ms", 1_000, 3_600_000),
    (NackBody, "delay_ms", 0, DAY_MS),
]


@pytest.mark.parametrize(("struct", "field", "least", "most"), NUMBERS)
def test_numbers_are_accepted_within_their_limits(struct: type, field: str, least: int, most: int) -> None:
    assert accepted(struct, field, least)
    assert accepted(struct, field, most)
    assert not accepted(struct, field, least - 1)
    assert not accepted(struct, field, most + 1)


TEXTS: list[tuple[type, str, int, int]] = [
    (MessageLine, "key", 0, 65_536),
    (MessageLine, "tags", 1, 4_096),
    (ProduceQuery, "key", 0, 4_096),
    (ProduceQuery, "tags", 1, 4_096),
    (ProduceQuery, "producer", 1, 256),
    (ReceiveBody, "consumer", 1, 256),
    (ReceiveBody, "request_id", 1, 256),
    (ReceiveBody, "tags", 1, 4_096),
    (StreamQuery, "consumer", 1, 256),
    (StreamQuery, "tags", 1, 4_096),
    (AckBody, "consumer", 1, 256),
    (NackBody, "consumer", 1, 256),
]


@pytest.mark.parametrize(("struct", "field", "least", "most"), TEXTS)
def test_texts_are_accepted_within_their_limits(struct: type, field: str, least: int, most: int) -> None:
    assert accepted(struct, field, "é" * least)
    assert accepted(struct, field, "é" * most)
    assert not accepted(struct, field, "é" * (most + 1))
    if least:
        assert not accepted(struct, field, "é" * (least - 1))


@pytest.mark.parametrize(
    ("struct", "field"),
    [
        (ProduceQuery, "producer"),
        (ProduceQuery, "tags"),
        (MessageLine, "tags"),
        (ReceiveBody, "consumer"),
        (ReceiveBody, "request_id"),
        (ReceiveBody, "tags"),
        (StreamQuery, "consumer"),
        (StreamQuery, "tags"),
        (AckBody, "consumer"),
        (NackBody, "consumer"),
    ],
)
def test_names_have_no_control_characters(struct: type, field: str) -> None:
    assert accepted(struct, field, "a b/é")
    for character in ("\x00", "\n", "\x1f", "\x7f", "\x80", "\x85", "\x9f", "\u2028", "\u2029"):
        assert not accepted(struct, field, f"{character}a")
        assert not accepted(struct, field, f"a{character}b")


@pytest.mark.parametrize(
    ("struct", "field", "most"),
    [(MessageLine, "properties", 1_000), (ReceiveBody, "subscription_properties", 100)],
)
def test_properties_are_limited_in_number_and_size(struct: type, field: str, most: int) -> None:
    assert accepted(struct, field, {})
    assert accepted(struct, field, {str(number): "" for number in range(most)})
    assert not accepted(struct, field, {str(number): "" for number in range(most + 1)})
    assert accepted(struct, field, {"k" * 65_536: "v" * 65_536})
    assert not accepted(struct, field, {"k" * 65_537: "v"})
    assert not accepted(struct, field, {"k": "v" * 65_537})


@pytest.mark.parametrize("struct", [AckBody, NackBody])
def test_a_request_names_one_to_ten_thousand_messages(struct: type) -> None:
    assert accepted(struct, "message_ids", ["5:0"])
    assert accepted(struct, "message_ids", ["5:0"] * 10_000)
    assert not accepted(struct, "message_ids", [])
    assert not accepted(struct, "message_ids", ["5:0"] * 10_001)


def test_a_request_stores_up_to_ten_thousand_messages() -> None:
    def parse(count: int) -> int:
        body = b'{"payload":""}\n' * count
        content_type = "application/x-ndjson"
        return len(parse_produce(body, content_type=content_type, query=ProduceQuery(), headers=[], now_ms=0))

    assert parse(10_000) == 10_000
    with pytest.raises(TooLarge) as caught:
        parse(10_001)
    assert caught.value.facts == {"messages_max": 10_000}


LONGEST_ID = f"{'9' * 19}:{'9' * 19}:{'9' * 10}:{'9' * 10}"


@pytest.mark.parametrize("text", ["5:0", "0:0", "5:0:-1", "5:0:-1:-1", "5:0:3:4", LONGEST_ID])
def test_message_ids_have_two_to_four_numbers(text: str) -> None:
    assert accepted(AckBody, "cumulative", text)
    assert accepted(AckBody, "message_ids", [text])
    assert accepted(NackBody, "message_ids", [text])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "5:",
        "5:0:",
        "5:0\n",
        "5:0:-1:-1\n",
        "-1:0",
        "5:-1",
        "5:0:-2",
        "5:0:1:2:3",
        "5:x",
        " 5:0",
        "latest",
        "9" * 20 + ":0",
    ],
)
def test_other_texts_are_no_message_ids(text: str) -> None:
    assert not accepted(AckBody, "cumulative", text)
    assert not accepted(AckBody, "message_ids", ["5:0", text])


def test_the_documented_limit_of_message_ids_is_above_the_longest_one() -> None:
    schema = msgspec.json.schema(AckBody)["$defs"]["AckBody"]["properties"]["cumulative"]
    assert schema["maxLength"] == 64
    assert len(LONGEST_ID) == 61


@pytest.mark.parametrize(
    ("struct", "field"), [(ReceiveBody, "consumer"), (StreamQuery, "consumer"), (ProduceQuery, "producer")]
)
def test_the_limits_of_names_are_documented(struct: type, field: str) -> None:
    schema = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"][field]
    assert (schema["minLength"], schema["maxLength"]) == (1, 256)


@pytest.mark.parametrize(
    ("struct", "defaults"),
    [
        (MessageLine, {"payload": UNSET, "key": UNSET, "properties": UNSET, "event_time": UNSET}),
        (RoutingQuery, {"redirect": False, "listener": UNSET}),
        (ProduceQuery, {"redirect": False, "batch": True, "key": UNSET, "producer": UNSET}),
        (
            ReceiveBody,
            {
                "type": "shared",
                "initial": "earliest",
                "max": 100,
                "max_bytes": 4_194_304,
                "wait_ms": 20_000,
                "ack_timeout_ms": 30_000,
                "session_ttl_ms": 60_000,
                "request_id": UNSET,
                "redeliver": False,
            },
        ),
        (
            StreamQuery,
            {
                "redirect": False,
                "listener": UNSET,
                "type": "shared",
                "ack_timeout_ms": 30_000,
                "session_ttl_ms": 60_000,
            },
        ),
        (AckBody, {"message_ids": UNSET, "cumulative": UNSET, "consumer": UNSET}),
        (NackBody, {"delay_ms": 0, "consumer": UNSET}),
    ],
)
def test_fields_that_are_left_out_have_defaults(struct: type, defaults: dict[str, Any]) -> None:
    found = msgspec.convert(REQUIRED.get(struct, {}), struct)
    assert {name: getattr(found, name) for name in defaults} == defaults
    assert msgspec.to_builtins(found) == REQUIRED.get(struct, {})


@pytest.mark.parametrize("struct", REQUESTS)
def test_unknown_fields_are_refused(struct: type) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `deliverat`"):
        msgspec.convert({**REQUIRED.get(struct, {}), "deliverat": 1}, struct)


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields_are_given_by_name_only(struct: type) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(struct).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_answers_leave_out_what_is_not_set() -> None:
    found = MessageOut(message_id="5:0", properties={}, publish_time=1, redelivery_count=0, producer="p", sequence_id=2)
    assert msgspec.to_builtins(found) == {
        "message_id": "5:0",
        "properties": {},
        "publish_time": 1,
        "redelivery_count": 0,
        "producer": "p",
        "sequence_id": 2,
    }
    assert msgspec.to_builtins(ProduceResult(message_id="5:0")) == {"message_id": "5:0"}
