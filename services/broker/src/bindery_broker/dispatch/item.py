"""What the dispatchers handle: messages known by a key, with an opaque body.

A message's key is (ledger id, entry id, batch index), the index -1 for a message that is an entry of its own. Keys
compare as the topic's order does.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")

MessageKey = tuple[int, int, int]
NOT_IN_BATCH = -1


class Item(NamedTuple, Generic[M]):
    """One readable message; `size` is what it counts against byte limits."""

    key: MessageKey
    size: int
    message: M


class Delivery(NamedTuple, Generic[M]):
    """One message handed to a consumer."""

    key: MessageKey
    message: M
    lease: str
    """Names the hand-out, not the message: a redelivery has another one."""
    redelivery_count: int
    """How often it was negatively acknowledged or ran out of time before. In memory: 0 again after the topic moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """What one subscription may hold in memory and in consumers' hands."""

    unacked_max: int = 50_000
    """Messages known and not acknowledged: held, returned, or waiting. At the limit nothing new is read."""
    unacked_per_consumer_max: int = 10_000
    ready_max: int = 2_000
    """Messages read ahead."""
    ready_bytes_max: int = 8 * 1024 * 1024
    """Bytes of those, of one subscription; `ReadAhead` bounds them for all."""

    def __post_init__(self) -> None:
        assert 1 <= self.unacked_per_consumer_max <= self.unacked_max
        assert self.ready_max >= 1
        assert self.ready_bytes_max >= 1
