"""Parsing of produce requests: any bytes result in messages or in a BinderyError."""

import json

import pytest
from bindery_broker.errors import DelayTooLong
from bindery_broker.http.v1.produce_request import ProduceLimits, parse_produce, split_tags
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
FIELDS = [
    "payload",
    "payload_json",
    "payload_base64",
    "key",
    "properties",
    "tags",
    "event_time",
    "sequence_id",
    "deliver_at",
    "deliver_after_ms",
    "x",
]


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


NOW_MS = 1_700_000_000_000
END_MS = 253_402_300_799_999


def delivery_times(
    *fields: dict[str, int], query: dict[str, int] | None = None, delay_s_max: int = 0
) -> list[int | None]:
    """Return the delivery times of messages with these fields, which each form of the body must give alike."""
    lines = [{"payload": "x", **one} for one in fields]
    found = []
    for body, content_type in (
        ("\n".join(map(json.dumps, lines)).encode(), "application/x-ndjson"),
        (json.dumps(lines).encode(), "application/json"),
    ):
        messages = parse_produce(
            body,
            content_type=content_type,
            query=ProduceQuery(**(query or {})),
            headers=[],
            now_ms=NOW_MS,
            limits=ProduceLimits(delay_s_max=delay_s_max),
        )
        found.append([message.deliver_at_ms for message in messages])
    assert found[0] == found[1]
    return found[0]


def test_a_delay_counts_from_the_time_of_the_request():
    assert delivery_times({"deliver_after_ms": 1}, {"deliver_at": NOW_MS + 1}, {}) == [NOW_MS + 1, NOW_MS + 1, None]


@pytest.mark.parametrize("fields", [{"deliver_after_ms": 0}, {"deliver_at": 0}, {"deliver_at": NOW_MS}])
def test_a_delivery_time_that_is_reached_is_no_delay(fields: dict[str, int]):
    assert delivery_times(fields, delay_s_max=1) == [None]
    assert delivery_times(fields, query={"deliver_after_ms": 500}) == [None], "nor does the query apply"


@pytest.mark.parametrize(
    ("query", "applied"), [({"deliver_after_ms": 9}, NOW_MS + 9), ({"deliver_at": END_MS}, END_MS)]
)
def test_the_query_applies_to_messages_without_a_delay_of_their_own(query: dict[str, int], applied: int):
    own = [{"deliver_after_ms": 2}, {"deliver_at": NOW_MS + 3}]
    assert delivery_times({}, *own, query=query) == [applied, NOW_MS + 2, NOW_MS + 3]
    (raw,) = parse_produce(b"x", content_type="", query=ProduceQuery(**query), headers=[], now_ms=NOW_MS)
    assert raw.deliver_at_ms == applied


@pytest.mark.parametrize("body", [b"x", b'{"payload": "x", "deliver_at": 1}'])
def test_both_fields_in_one_place_are_refused(body: bytes):
    query = ProduceQuery(deliver_after_ms=1, deliver_at=1)
    with pytest.raises(BadRequest, match="deliver_after_ms or deliver_at, not both"):
        parse_produce(body, content_type="application/json", query=query, headers=[], now_ms=NOW_MS)
    with pytest.raises(BadRequest, match="line 2: give deliver_after_ms or deliver_at, not both"):
        parse(b'\n{"payload": "x", "deliver_at": 1, "deliver_after_ms": 1}', "application/x-ndjson")


def test_a_delay_beyond_the_year_9999_is_refused():
    assert delivery_times({"deliver_after_ms": END_MS - NOW_MS}) == [END_MS]
    with pytest.raises(BadRequest, match="leads beyond the year 9999"):
        delivery_times({"deliver_after_ms": END_MS - NOW_MS + 1})


def test_a_delay_above_the_limit_names_the_message_and_the_setting():
    assert (
        delivery_times({"deliver_after_ms": 2_000}, {"deliver_at": NOW_MS + 2_000}, delay_s_max=2)
        == [NOW_MS + 2_000] * 2
    )
    with pytest.raises(
        DelayTooLong, match="line 2: the delay is longer than delayed_delivery_max_delay_s allows"
    ) as caught:
        delivery_times({}, {"deliver_after_ms": 2_001}, delay_s_max=2)
    assert caught.value.facts == {"line": 2, "delay_ms": 2_001, "delayed_delivery_max_delay_s": 2}
    with pytest.raises(DelayTooLong):
        delivery_times({}, query={"deliver_at": NOW_MS + 2_001}, delay_s_max=2)
