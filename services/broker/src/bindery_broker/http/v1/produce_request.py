"""Parse a produce request into messages. The whole request is parsed before anything is written.

| content type           | body                                                                       |
|------------------------|----------------------------------------------------------------------------|
| application/x-ndjson   | one `MessageLine` object per line; empty lines are skipped but counted     |
| application/json       | one `MessageLine` object, or an array of them                              |
| anything else, or none | the bytes of one message                                                   |

A message is delayed if its delivery time is later than that of the request: `deliver_at`, or the time of the request
plus `deliver_after_ms`. If a message object has neither field, those of the query apply.

Errors name the place: `line 3` (NDJSON) counts from 1, `message 0` (array) from 0. Syntax errors have line and column.
The maximum number of lines, empty ones included, is LINES_PER_MESSAGE_MAX times the maximum number of messages.
This module does no I/O.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec
import msgspec.structs
from bindery_core.errors import BadRequest, TooLarge
from bindery_pulsar.message_codec import TAG_VALUE, OutgoingMessage
from msgspec import UNSET, UnsetType

from bindery_broker.http.json_errors import JSON_ERRORS, describe
from bindery_broker.http.v1.schemas import (
    MESSAGES_PER_REQUEST_MAX,
    MS_MAX,
    PROPERTIES_MAX,
    SEQUENCE_ID_MAX,
    TEXT_MAX,
    MessageLine,
    ProduceQuery,
)
from bindery_broker.producers.keys import DIGEST_SIZE, RequestKey
from bindery_broker.topics.delivery_time import check_delay

NDJSON: Final = "application/x-ndjson"
JSON: Final = "application/json"
PROPERTY_HEADER: Final = b"bindery-property-"
LINES_PER_MESSAGE_MAX: Final = 4
"""Maximum number of lines for each allowed message. Lines are limited because parsing empty lines takes time too."""

IDEMPOTENCY_KEY: Final = b"idempotency-key"
KEY_SIZE_MAX: Final = 255
"""Maximum characters of an idempotency key."""
_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")

_line_decoder = msgspec.json.Decoder(MessageLine)
_array_decoder = msgspec.json.Decoder(list[MessageLine])
_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_raw_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class ProduceLimits:
    messages_max: int = MESSAGES_PER_REQUEST_MAX
    delay_s_max: int = 0
    """Maximum delay of a message in seconds; 0: no limit."""


class _Defaults(NamedTuple):
    """What a request says about all of its messages, and what their delivery times depend on."""

    query: ProduceQuery
    properties: dict[str, str]
    deliver_at_ms: int | None
    now_ms: int
    delay_s_max: int


def parse_produce(
    body: bytes,
    *,
    content_type: str,
    query: ProduceQuery,
    headers: Sequence[tuple[bytes, bytes]],
    now_ms: int,
    limits: ProduceLimits = ProduceLimits(),
) -> list[OutgoingMessage]:
    """Return the messages of a request, at least one, in order. Raises BadRequest, DelayTooLong or TooLarge.

    The sequence id of the query is that of the first message; messages without their own count up from it.

    `content_type`: without parameters, lower case. `headers`: names in lower case. `now_ms`: the current time in
    milliseconds since 1970.
    """
    defaults = _Defaults(
        query=query,
        properties=_properties(query, headers),
        deliver_at_ms=_delivery_time(
            query.deliver_after_ms, query.deliver_at, now_ms=now_ms, delay_s_max=limits.delay_s_max
        ),
        now_ms=now_ms,
        delay_s_max=limits.delay_s_max,
    )
    if content_type == NDJSON:
        messages = _parse_lines(body, defaults=defaults, limits=limits)
    elif content_type == JSON:
        messages = _parse_json(body, defaults=defaults, limits=limits)
    else:
        return [
            OutgoingMessage(
                payload=body,
                key=None if query.key is UNSET else query.key,
                properties=defaults.properties,
                event_time_ms=0 if query.event_time is UNSET else query.event_time,
                sequence_id=None if query.sequence_id is UNSET else query.sequence_id,
                deliver_at_ms=defaults.deliver_at_ms,
            )
        ]
    if query.sequence_id is not UNSET:
        if query.sequence_id + len(messages) - 1 > SEQUENCE_ID_MAX:
            raise BadRequest("the sequence ids exceed 2**63 - 1", sequence_id=query.sequence_id)
        for index, message in enumerate(messages):
            if message.sequence_id is None:
                message.sequence_id = query.sequence_id + index
    return messages


def parse_idempotency_key(values: Sequence[bytes]) -> str:
    """Return the key of a request. `values`: those of its `Idempotency-Key` headers. Raises BadRequest.

    The draft of the IETF wants a string in double quotes, with `\\` before `"` and `\\`. Many clients send the key
    without quotes; both forms are the same key.
    """
    text = values[0].decode("latin-1").strip()
    if len(values) > 1:
        raise BadRequest("the request has several Idempotency-Key headers")
    if text.startswith('"'):
        found = _QUOTED.fullmatch(text)
        if found is None:
            raise BadRequest("the Idempotency-Key is not a valid quoted string")
        text = _ESCAPED.sub(r"\1", found[1])
    if not (0 < len(text) <= KEY_SIZE_MAX and text.isascii() and text.isprintable()):
        raise BadRequest("an Idempotency-Key has 1 to 255 printable ASCII characters", size_max=KEY_SIZE_MAX)
    return text


def request_key(
    key: str,
    *,
    client: str,
    operation: str,
    topic: str,
    content_type: str,
    query: ProduceQuery,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
) -> RequestKey:
    """Return the digests of an idempotency key, of an operation on a topic, and of the content of the request.

    `client`: the role whose key it is, so that those of different roles have nothing in common; empty: clients do not
    authenticate.
    """
    meant = msgspec.structs.replace(query, redirect=False, listener=UNSET)
    properties = sorted(header for header in headers if header[0].startswith(PROPERTY_HEADER))
    content = blake2b(digest_size=DIGEST_SIZE)
    for part in (content_type.encode(), msgspec.json.encode(meant), msgspec.json.encode(properties)):
        content.update(b"%d:" % len(part))
        content.update(part)
    content.update(body)
    scope = msgspec.json.encode((client, operation, topic, key))
    return RequestKey(blake2b(scope, digest_size=DIGEST_SIZE).digest(), content.digest())


def _parse_lines(body: bytes, *, defaults: _Defaults, limits: ProduceLimits) -> list[OutgoingMessage]:
    lines_max = limits.messages_max * LINES_PER_MESSAGE_MAX
    if body.count(b"\n") > lines_max:
        raise TooLarge("too many lines in one request", lines_max=lines_max)
    messages: list[OutgoingMessage] = []
    decode = _line_decoder.decode
    for number, text in enumerate(body.split(b"\n"), 1):
        if not text or text.isspace():
            continue
        if len(messages) >= limits.messages_max:
            raise TooLarge("too many messages in one request", messages_max=limits.messages_max)
        try:
            line = decode(text)
            messages.append(_message(line, defaults))
        except JSON_ERRORS as error:
            found = describe(error, text)
            if found.line is None:
                raise BadRequest(f"line {number}: {found}", line=number) from error
            raise BadRequest(
                f"line {number}: malformed JSON at column {found.column}: {found.reason}",
                line=number,
                column=found.column,
            ) from error
        except BadRequest as error:
            raise type(error)(f"line {number}: {error.message}", line=number, **error.facts) from error
    if not messages:
        raise BadRequest("the body holds no message")
    return messages


def _parse_json(body: bytes, *, defaults: _Defaults, limits: ProduceLimits) -> list[OutgoingMessage]:
    """Parse one message object, or an array of them."""
    begin = body.lstrip()[:1]
    try:
        if begin == b"{":
            return [_message(_line_decoder.decode(body), defaults)]
        if begin != b"[":
            if begin:
                _raw_decoder.decode(body)
            raise BadRequest(
                "application/json takes a message object or an array of them; send one raw message with another "
                "content type"
            )
        # A message is an object, so few braces mean few messages. Otherwise count before any object is created.
        if body.count(b"{") > limits.messages_max and len(_raw_array_decoder.decode(body)) > limits.messages_max:
            raise TooLarge("too many messages in one request", messages_max=limits.messages_max)
        lines = _array_decoder.decode(body)
    except JSON_ERRORS as error:
        found = describe(error, body)
        raise BadRequest(str(found), **found.facts) from error
    if not lines:
        raise BadRequest("the body holds no message")
    messages: list[OutgoingMessage] = []
    for index, line in enumerate(lines):
        try:
            messages.append(_message(line, defaults))
        except UnicodeDecodeError as error:
            raise BadRequest(f"message {index}: not UTF-8", index=index) from error
        except BadRequest as error:
            raise type(error)(f"message {index}: {error.message}", index=index, **error.facts) from error
    return messages


def _message(line: MessageLine, defaults: _Defaults) -> OutgoingMessage:
    given = (line.payload is not UNSET) + (line.payload_json is not UNSET) + (line.payload_base64 is not UNSET)
    if given != 1:
        raise BadRequest("want exactly one of payload, payload_json and payload_base64", given=given)
    if line.payload is not UNSET:
        payload = line.payload.encode()
    elif line.payload_base64 is not UNSET:
        payload = line.payload_base64
    else:
        assert line.payload_json is not UNSET
        payload = bytes(line.payload_json)
        payload.decode()  # the decoder does not check that the strings in raw JSON are UTF-8
    properties: Mapping[str, str] = defaults.properties
    if line.properties is not UNSET or line.tags is not UNSET:
        properties = dict(defaults.properties)
        if line.tags is not UNSET:
            for tag in [name for name, value in properties.items() if value == TAG_VALUE]:
                del properties[tag]
            _add_tags(properties, line.tags)
        if line.properties is not UNSET:
            properties.update(line.properties)
    deliver_at_ms = defaults.deliver_at_ms
    if line.deliver_after_ms is not UNSET or line.deliver_at is not UNSET:
        deliver_at_ms = _delivery_time(
            line.deliver_after_ms, line.deliver_at, now_ms=defaults.now_ms, delay_s_max=defaults.delay_s_max
        )
    query = defaults.query
    key = query.key if line.key is UNSET else line.key
    event_time = query.event_time if line.event_time is UNSET else line.event_time
    return OutgoingMessage(
        payload=payload,
        key=None if key is UNSET else key,
        properties=properties,
        event_time_ms=0 if event_time is UNSET else event_time,
        sequence_id=None if line.sequence_id is UNSET else line.sequence_id,
        deliver_at_ms=deliver_at_ms,
    )


def _delivery_time(after: int | UnsetType, at: int | UnsetType, *, now_ms: int, delay_s_max: int) -> int | None:
    """Return the delivery time in milliseconds since 1970; None: the message is not delayed."""
    if after is not UNSET and at is not UNSET:
        raise BadRequest("give deliver_after_ms or deliver_at, not both", deliver_after_ms=after, deliver_at=at)
    if after is not UNSET:
        at = now_ms + after
        if at > MS_MAX:
            raise BadRequest("deliver_after_ms leads beyond the year 9999", deliver_after_ms=after)
    if at is UNSET or at <= now_ms:
        return None
    check_delay(at, now_ms=now_ms, delay_s_max=delay_s_max)
    return at


def _properties(query: ProduceQuery, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the properties that each message of the request gets: from headers, and from the tags in the query."""
    properties: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(PROPERTY_HEADER):
            if len(properties) >= PROPERTIES_MAX or len(value) > TEXT_MAX:
                raise TooLarge("too many or too long properties", properties_max=PROPERTIES_MAX, size_max=TEXT_MAX)
            key, text = name.removeprefix(PROPERTY_HEADER).decode("latin-1"), _header_text(value)
            if not key:
                raise BadRequest("the header Bindery-Property- names no property")
            properties[key] = text
    if query.tags is not UNSET:
        _add_tags(properties, query.tags)
    return properties


def _header_text(value: bytes) -> str:
    """Return a header's value as text. Characters that a header cannot contain are percent-encoded UTF-8."""
    try:
        return unquote(value.decode("utf-8"), errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest("a Bindery-Property- header is UTF-8, percent-encoded where needed") from error


def split_tags(text: str) -> list[str]:
    """Return the tags of a text such as `a||b`. Raises BadRequest for an empty tag."""
    tags = [tag.strip() for tag in text.split("||")]
    if not all(tags):
        raise BadRequest("an empty tag", tags=text)
    return tags


def _add_tags(properties: dict[str, str], text: str) -> None:
    for tag in split_tags(text):
        if properties.get(tag, TAG_VALUE) != TAG_VALUE:
            raise BadRequest("a tag and a property of one name", name=tag)
        properties[tag] = TAG_VALUE
