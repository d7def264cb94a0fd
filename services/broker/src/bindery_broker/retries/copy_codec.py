"""Copies on their way to the broker that owns their target. Pure.

| bytes | field | meaning                                                              |
|------:|-------|----------------------------------------------------------------------|
|     4 | size  | big endian: bytes of the entry                                       |
|  size | entry | one message as Pulsar stores it, without a producer and without time |

One after another, in the order in which they are stored. The owner of the target sets producer and publish time.
"""

import struct
from collections.abc import Iterable
from typing import Final

from bindery_core.errors import BadRequest, BinderyError
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import METADATA_READ_SIZE_MAX, OutgoingMessage, PackedEntry, encode_message

_SIZE: Final = struct.Struct(">I")


def encode_copies(messages: Iterable[OutgoingMessage]) -> list[bytes]:
    """Return one frame for each message. Raises TooLarge for a message that cannot be stored."""
    frames: list[bytes] = []
    for message in messages:
        entry = encode_message(message, producer_name="", publish_time_ms=0, sequence_id=0)
        frames.append(_SIZE.pack(len(entry)) + entry)
    return frames


def decode_copies(body: bytes, *, count_max: int) -> list[OutgoingMessage]:
    """Return the messages of the frames in `body`, at least one. Raises BadRequest."""
    messages: list[OutgoingMessage] = []
    at = 0
    while at < len(body):
        if len(messages) >= count_max:
            raise BadRequest("too many copies in one request", count_max=count_max)
        start = at + _SIZE.size
        size = _SIZE.unpack_from(body, at)[0] if start <= len(body) else 0
        at = start + size
        if not 0 < size <= ENTRY_SIZE_MAX or at > len(body):
            raise BadRequest("a copy in the request is cut off", index=len(messages))
        messages.append(_decode(body[start:at], index=len(messages)))
    if not messages:
        raise BadRequest("the request has no copy")
    return messages


def _decode(entry: bytes, *, index: int) -> OutgoingMessage:
    try:
        packed = PackedEntry(entry, metadata_size_max=METADATA_READ_SIZE_MAX)
        if packed.is_batch or packed.is_opaque:
            raise BadRequest("a copy in the request is not a single plain message", index=index)
        (message,) = packed.decode()
    except BadRequest:
        raise
    except BinderyError as error:
        raise BadRequest("a copy in the request cannot be read", index=index, cause=str(error)) from error
    return OutgoingMessage(
        payload=message.payload,
        key=message.key,
        ordering_key=message.ordering_key,
        properties=message.properties,
        event_time_ms=message.event_time_ms,
        deliver_at_ms=message.deliver_at_ms,
        null_value=message.null_value,
    )
