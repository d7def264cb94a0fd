"""Entries of a topic: one message, or a batch of them, with Pulsar's metadata.

(Signatures first: bodies follow.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

ENTRY_SIZE_MAX: Final = 5 * 2**20 - 10 * 2**10
MESSAGE_SIZE_MAX: Final = 5 * 2**20 - 64 * 2**10
"""Bytes of one message's payload."""


@dataclass(slots=True, kw_only=True)
class OutgoingMessage:
    """A message to be stored. Tags are properties whose value is TAGS."""

    payload: bytes
    key: str | bytes | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time_ms: int = 0
    sequence_id: int | None = None
    """None: numbered by the encoder."""
    deliver_at_ms: int | None = None
    null_value: bool = False


@dataclass(slots=True, kw_only=True)
class Message:
    """A message as it was stored."""

    payload: bytes
    batch_index: int
    """-1: the entry's only message, no batch."""
    batch_size: int
    """Messages in the entry; 1 when it is no batch."""
    producer_name: str
    sequence_id: int
    publish_time_ms: int
    key: str | bytes | None = None
    ordering_key: bytes | None = None
    properties: dict[str, str] = field(default_factory=dict)
    event_time_ms: int = 0
    deliver_at_ms: int | None = None
    null_value: bool = False


@dataclass(slots=True, kw_only=True)
class EntryHead:
    """What dispatch needs of an entry, without its payload."""

    messages_count: int
    is_batch: bool
    is_marker: bool
    producer_name: str
    sequence_id: int
    publish_time_ms: int
    key: str | bytes | None
    ordering_key: bytes | None
    deliver_at_ms: int | None
    tags: frozenset[str]
    """Of all its messages: batches hold messages of equal tags."""


def encode_message(message: OutgoingMessage, *, producer_name: str, publish_time_ms: int, sequence_id: int) -> bytes:
    """One entry with one message. `sequence_id` counts when the message has none. TooLarge over ENTRY_SIZE_MAX."""
    raise NotImplementedError


def encode_batch(
    messages: Sequence[OutgoingMessage], *, producer_name: str, publish_time_ms: int, sequence_id: int
) -> bytes:
    """One batch entry; `sequence_id` is the first message's, the others follow. TooLarge over ENTRY_SIZE_MAX."""
    raise NotImplementedError


def decode_entry(entry: bytes) -> list[Message]:
    """All messages of an entry, a batch's in order. Raises Corrupt, or UnreadableMessage (encrypted, unknown codec)."""
    raise NotImplementedError


def read_head(entry: bytes) -> EntryHead:
    """Without verifying the checksum or touching the payload. Raises Corrupt."""
    raise NotImplementedError


def publish_time_ms(entry: bytes) -> int:
    """When the broker stored it, if it noted that, else when it was published."""
    raise NotImplementedError
