"""Parsing of produce requests: any bytes result in messages or in a BinderyError."""

import json

import pytest
from bindery_broker.http.v1.produce_request import parse_produce, split_tags
from bindery_broker.http.v1.schemas import MESSAGES_PER_REQUEST_MAX, ProduceQuery
from bindery_core.errors import BadRequest, BinderyError, TooLarge
from bindery_pulsar.message_codec import OutgoingMessage
from hypothesis import example, given, settings
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["payload", "payload_json", "payload_base64", "key", "properties", "tags", "event_time", "sequence_id", "x"]


def parse(body: bytes, content_type: str, headers: list[tuple[bytes, bytes]] | None = None) -> list[OutgoingMessage]:
    return parse_produce(body, content_type=content_type, query=ProduceQuery(), headers=headers or [], now_ms=0)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["application/x-ndjson", "application/json"]))
@example(b"\x00", "application/json")
@example(b"[" * 2_000, "application/x-ndjson")
def test_any_bytes_are_messages_or_a_bad_request(body, content_type):
    try:
        messages = parse(body, content_type)
    except BinderyError as error:
        assert error.status in (400, 413)  # noqa: PT017 - raising is one of two right outcomes
    else:
        assert messages


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4), min_size=1, max_size=3))
def test_any_objects_are_messages_or_a_bad_request_that_names_the_first_bad_line(lines):
    body = "\n".join(json.dumps(line) for line in lines).encode()
    try:
        messages = parse(body, "application/x-ndjson")
    except BadRequest as error:
        number = error.facts["line"]
        good = body.split(b"\n")[: number - 1]
        if good:
            parse(b"\n".join(good), "application/x-ndjson")
        with pytest.raises(BadRequest):
            parse(body.split(b"\n")[number - 1], "application/x-ndjson")
    else:
        assert len(messages) == len(lines)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(), st.dictionaries(st.text(min_size=1), st.text())), min_size=1, max_size=5))
def test_text_and_properties_are_parsed_unchanged(rows):
    lines = [{"payload": text, "properties": properties} for text, properties in rows]
    for body, content_type in (
        ("\n".join(map(json.dumps, lines)).encode(), "application/x-ndjson"),
        (json.dumps(lines).encode(), "application/json"),
    ):
        found = parse(body, content_type)
        assert [(m.payload.decode(), dict(m.properties)) for m in found] == rows


def test_json_payloads_keep_their_text():
    (message,) = parse(b'{"payload_json": {"b": 1.50,  "a": "\\u00e9"}}', "application/x-ndjson")
    assert message.payload == b'{"b": 1.50,  "a": "\\u00e9"}'


def test_headers_set_properties():
    headers = [(b"bindery-property-a", b"1%202"), (b"bindery-property-b", "é".encode()), (b"x-other", b"z")]
    (message,) = parse(b"x", "", headers)
    assert message.properties == {"a": "1 2", "b": "é"}


@pytest.mark.parametrize(
    "header", [(b"bindery-property-", b"1"), (b"bindery-property-a", b"\xff"), (b"bindery-property-a", b"%ff")]
)
def test_bad_property_headers_are_refused(header):
    with pytest.raises(BadRequest):
        parse(b"x", "", [header])


def test_tags_are_separated_by_two_bars():
    assert split_tags("a") == ["a"]
    assert split_tags("a || b|c") == ["a", "b|c"]
    for wrong in ("", "||", "a||"):
        with pytest.raises(BadRequest):
            split_tags(wrong)


def test_the_number_of_empty_lines_is_limited():
    line = b'{"payload": "x"}\n'
    spaced = b"\n\n\n".join([line[:-1]] * MESSAGES_PER_REQUEST_MAX)
    assert len(parse(spaced, "application/x-ndjson")) == MESSAGES_PER_REQUEST_MAX
    with pytest.raises(TooLarge, match="too many lines"):
        parse(line + b"\n" * 4 * MESSAGES_PER_REQUEST_MAX, "application/x-ndjson")
