"""Messages in the answers of other brokers (`MessageOut`, as NDJSON), as the messages that they were there."""

from base64 import b64decode
from typing import Any, NamedTuple

import msgspec
from bindery_core.errors import BadRequest
from bindery_pulsar.message_codec import PROPERTY_SIZE, TAG_VALUE, Message, OpaqueMessage
from bindery_pulsar.message_encoding import Chunk, Encoding, Encryption, EncryptionKey, OpaqueReason
from bindery_pulsar.message_id import MessageId
from msgspec import UNSET

from bindery_broker.http.v1.schemas import ChunkOut, EncodingOut, EncryptionOut, MessageOut

HEAD_SIZE = 200
"""Approximate bytes of the metadata of a message, without key and properties."""


class RemoteMessage(NamedTuple):
    id: MessageId
    message: Message
    lease: str
    redelivery_count: int


_decoder = msgspec.json.Decoder(MessageOut)


def decode_messages(lines: bytes) -> list[RemoteMessage]:
    """Return the messages of an answer in NDJSON. Raises MsgspecError or BadRequest if it is no such answer."""
    return [_message(out) for out in _decoder.decode_lines(lines)]


def _message(out: MessageOut) -> RemoteMessage:
    message_id = MessageId.parse(out.message_id)
    properties = dict(out.properties)
    if out.tags is not UNSET:
        properties |= dict.fromkeys(out.tags.split("||"), TAG_VALUE)
    if out.payload is not UNSET:
        payload = out.payload.encode()
    elif out.payload_base64 is not UNSET:
        payload = out.payload_base64
    else:
        raise BadRequest("a message without a payload", message_id=out.message_id)
    key = out.key if out.key is not UNSET else out.key_base64 if out.key_base64 is not UNSET else None
    size = HEAD_SIZE + (0 if key is None else len(key))
    size += sum(len(name) + len(value) + PROPERTY_SIZE for name, value in properties.items())
    fields: dict[str, Any] = {
        "payload": payload,
        "batch_index": message_id.batch_index,
        "batch_size": 1,
        "producer_name": out.producer,
        "sequence_id": out.sequence_id,
        "publish_time_ms": out.publish_time,
        "key": key,
        "properties": properties,
        "event_time_ms": 0 if out.event_time is UNSET else out.event_time,
        "deliver_at_ms": None if out.deliver_at is UNSET else out.deliver_at,
        "metadata_size": size,
    }
    message = Message(**fields) if out.encoding is UNSET else OpaqueMessage(**fields, encoding=_encoding(out.encoding))
    lease = "" if out.lease is UNSET else out.lease
    return RemoteMessage(message_id, message, lease, out.redelivery_count)


def _encoding(out: EncodingOut) -> Encoding:
    return Encoding(
        reason=OpaqueReason(out.reason),
        batch_size=None if out.batch_size is UNSET else out.batch_size,
        compression=None if out.compression is UNSET else out.compression,
        uncompressed_size=None if out.uncompressed_size is UNSET else out.uncompressed_size,
        chunk=None if out.chunk is UNSET else _chunk(out.chunk),
        encryption=None if out.encryption is UNSET else _encryption(out.encryption),
    )


def _chunk(out: ChunkOut) -> Chunk:
    return Chunk(uuid=out.uuid, index=out.index, count=out.count, total_size=out.total_size)


def _encryption(out: EncryptionOut) -> Encryption:
    return Encryption(
        algorithm=None if out.algorithm is UNSET else out.algorithm,
        param=b64decode(out.param_base64),
        keys=tuple(
            EncryptionKey(name=key.name, value=b64decode(key.value_base64), metadata=key.metadata) for key in out.keys
        ),
    )
