"""The messages that dispatchers handle: a key and an opaque body.

A message's key is (ledger id, entry id, batch index). The index is -1 if the message is an entry of its own. The order
of the keys is the order of the topic.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from bindery_pulsar.message_id import MessageId

M = TypeVar("M")

MessageKey = tuple[int, int, int]
NOT_IN_BATCH = -1
"""Batch index of a message that is an entry of its own."""


def key_of(message_id: MessageId) -> MessageKey:
    return (message_id.ledger_id, message_id.entry_id, message_id.batch_index)


class Item(NamedTuple, Generic[M]):
    """One readable message; `size` counts against the byte limits."""

    key: MessageKey
    size: int
    message: M


class Delivery(NamedTuple, Generic[M]):
    """One message delivered to a consumer."""

    key: MessageKey
    message: M
    lease: str
    """Id of the delivery, not of the message: a redelivery has another lease."""
    redelivery_count: int
    """Number of earlier negative acknowledgements and timeouts. Kept in memory: 0 after the topic is loaded again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Limits of one subscription, in memory and in delivery."""

    unacked_max: int = 50_000
    """Maximum number of unacknowledged messages: delivered, returned, or waiting. At the limit nothing new is read."""
    unacked_per_consumer_max: int = 10_000
    """Maximum number of messages that one consumer holds."""
    ready_max: int = 2_000
    """Maximum number of messages that are read and not delivered."""
    ready_bytes_max: int = 8 * 1024 * 1024
    """Maximum bytes of messages that are read and not delivered; `ReadAhead` limits the sum over all subscriptions."""

    def __post_init__(self) -> None:
        assert 1 <= self.unacked_per_consumer_max <= self.unacked_max
        assert self.ready_max >= 1
        assert self.ready_bytes_max >= 1
