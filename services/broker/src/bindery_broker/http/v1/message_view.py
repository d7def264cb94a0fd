"""Stored messages as the JSON that consumers get."""

import msgspec
from bindery_core.errors import BadRequest
from bindery_pulsar.message_codec import TAG_VALUE, Message, OpaqueMessage
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from msgspec import UNSET

from bindery_broker.http.v1.schemas import MS_MAX, EncodingOut, MessageOut


def view(message: Message, *, message_id: str, lease: str | None = None, redelivery_count: int = 0) -> MessageOut:
    """Return `message` as JSON fields: UTF-8 as text, else base64; tags are separated from the other properties.

    The payload of an OpaqueMessage is base64 in any case, because it is no text of the producer.
    """
    out = MessageOut(
        message_id=message_id,
        properties=message.properties,
        publish_time=message.publish_time_ms,
        redelivery_count=redelivery_count,
        producer=message.producer_name,
        sequence_id=message.sequence_id,
    )
    if isinstance(message, OpaqueMessage):
        out.payload_base64 = message.payload
        out.encoding = msgspec.convert(message.encoding.as_json(), EncodingOut)
    else:
        try:
            out.payload = message.payload.decode()
        except UnicodeDecodeError:
            out.payload_base64 = message.payload
    if lease is not None:
        out.lease = lease
    if isinstance(message.key, bytes):
        out.key_base64 = message.key
    elif message.key is not None:
        out.key = message.key
    if message.event_time_ms:
        out.event_time = message.event_time_ms
    if message.deliver_at_ms is not None:
        out.deliver_at = message.deliver_at_ms
    tags = message.tags if message.properties else None
    if tags:
        out.tags = "||".join(sorted(tags))
        out.properties = {name: value for name, value in message.properties.items() if value != TAG_VALUE}
    assert (out.payload is UNSET) != (out.payload_base64 is UNSET)
    return out


def parse_place(text: str) -> MessageId | Position:
    """Parse `earliest`, `latest` or a message id. Raises BadRequest."""
    if text == "earliest":
        return EARLIEST
    if text == "latest":
        return LATEST
    return MessageId.parse(text)


def parse_start(text: str) -> MessageId | Position | int:
    """As `parse_place`, but also parse `@MS`, and return it as a publish time in ms since 1970. Raises BadRequest."""
    if not text.startswith("@"):
        return parse_place(text)
    digits = text.removeprefix("@")
    if not (digits.isascii() and digits.isdecimal()) or int(digits) > MS_MAX:
        raise BadRequest("not a time; the format is @ and milliseconds since 1970", given=text)
    return int(digits)


def parse_ids(texts: list[str]) -> list[MessageId]:
    """Parse message ids. Raises BadRequest with the index of the first text that is not a message id."""
    ids = []
    for index, text in enumerate(texts):
        try:
            ids.append(MessageId.parse(text))
        except BadRequest as error:
            raise BadRequest(f"message_ids[{index}]: {error.message}", index=index, **error.facts) from error
    return ids
