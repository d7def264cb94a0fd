"""The format of entries stands in `bindery_metadata.topics.message_codec`, for readers that are no brokers, too."""

from bindery_metadata.topics.message_codec import (
    METADATA_SIZE_MAX,
    PAYLOAD_SIZE_MAX,
    TAG_VALUE,
    CorruptMessage,
    Message,
    OutgoingMessage,
    UnreadableMessage,
    check_size,
    decode_entry,
    encode_batch,
    encode_message,
    metadata_size,
    publish_time_ms,
    read_head,
)

__all__ = [
    "METADATA_SIZE_MAX",
    "PAYLOAD_SIZE_MAX",
    "TAG_VALUE",
    "CorruptMessage",
    "Message",
    "OutgoingMessage",
    "UnreadableMessage",
    "check_size",
    "decode_entry",
    "encode_batch",
    "encode_message",
    "metadata_size",
    "publish_time_ms",
    "read_head",
]
