"""What a subscription delivered and what was acknowledged, in total and by consumer.

| counter     | counts                                                                                           |
|-------------|--------------------------------------------------------------------------------------------------|
| delivered   | messages and their payload bytes, each delivery of a message                                     |
| redelivered | those of the deliveries that were not the first one, by negative acknowledgements and timeouts   |
| acked       | messages in delivery or read ahead that became acknowledged; repeated acknowledgements count 0   |
| expired     | messages that the broker acknowledged because their time to live was over                        |
| evicted     | entries that the broker acknowledged because the backlog exceeded a quota                        |

Counters begin at 0 when the topic is loaded. Times are monotonic seconds; None: never.
"""

from bindery_broker.statistics.traffic import Traffic


class ConsumerStatistics:
    """Of one consumer, as long as it is connected."""

    __slots__ = ("acked", "address", "delivered", "last_acked_at", "last_delivered_at", "redelivered")

    def __init__(self) -> None:
        self.address = ""
        """The client's address, as the last call had it; empty: unknown."""
        self.delivered = Traffic()
        self.redelivered = 0
        self.acked = 0
        """An acknowledgement counts for the consumer that it names, else for the holder of its first message."""
        self.last_delivered_at: float | None = None
        self.last_acked_at: float | None = None


class SubscriptionStatistics:
    """Of one subscription since the topic was loaded."""

    __slots__ = (
        "acked",
        "delivered",
        "evicted",
        "expired",
        "last_acked_at",
        "last_delivered_at",
        "last_expired_at",
        "last_request_at",
        "redelivered",
    )

    def __init__(self) -> None:
        self.delivered = Traffic()
        self.redelivered = Traffic()
        """Its bytes are not counted."""
        self.acked = Traffic()
        """Its bytes are not counted."""
        self.expired = Traffic()
        """Its bytes are not counted."""
        self.last_expired_at: float | None = None
        self.evicted = 0
        self.last_request_at: float | None = None
        """When a consumer last requested messages."""
        self.last_delivered_at: float | None = None
        self.last_acked_at: float | None = None

    def deliver(self, consumer: ConsumerStatistics, messages: int, size: int, *, redelivered: int, now: float) -> None:
        """Count messages of `size` payload bytes in total, `redelivered` of which had been delivered before."""
        self.delivered.add(messages, size, now=now)
        consumer.delivered.add(messages, size, now=now)
        self.last_delivered_at = consumer.last_delivered_at = now
        if redelivered:
            self.redelivered.add(redelivered, 0, now=now)
            consumer.redelivered += redelivered

    def expire(self, messages: int, *, now: float) -> None:
        """Count messages that the broker acknowledged because their time to live was over."""
        if messages:
            self.expired.add(messages, 0, now=now)
            self.last_expired_at = now

    def ack(self, consumer: ConsumerStatistics | None, messages: int, *, now: float) -> None:
        """Count a durable acknowledgement, of `messages` that were not acknowledged before."""
        self.acked.add(messages, 0, now=now)
        self.last_acked_at = now
        if consumer is not None:
            consumer.acked += messages
            consumer.last_acked_at = now
