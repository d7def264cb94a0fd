"""Messages and bytes that went in and out: sums that outlive subscriptions and topics, so that they never decrease."""

from dataclasses import dataclass


@dataclass(slots=True)
class Volume:
    messages_in: int = 0
    bytes_in: int = 0
    """Bytes of the entries that store the messages."""
    messages_out: int = 0
    bytes_out: int = 0
    """Payload bytes of delivered messages."""

    def add(self, other: "Volume") -> None:
        self.messages_in += other.messages_in
        self.bytes_in += other.bytes_in
        self.messages_out += other.messages_out
        self.bytes_out += other.bytes_out
