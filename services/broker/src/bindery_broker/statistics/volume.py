"""Messages and bytes that went in and out, and evictions: sums that never decrease.

They outlive subscriptions and topics.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Volume:
    messages_in: int = 0
    bytes_in: int = 0
    """Bytes of the entries that store the messages."""
    messages_out: int = 0
    bytes_out: int = 0
    """Payload bytes of delivered messages."""
    evictions_by_size: int = 0
    """Evictions because the quota of the backlog's size was exceeded."""
    evictions_by_age: int = 0
    """Evictions because the quota of the backlog's age was exceeded."""

    def add(self, other: "Volume") -> None:
        self.messages_in += other.messages_in
        self.bytes_in += other.bytes_in
        self.messages_out += other.messages_out
        self.bytes_out += other.bytes_out
        self.evictions_by_size += other.evictions_by_size
        self.evictions_by_age += other.evictions_by_age
