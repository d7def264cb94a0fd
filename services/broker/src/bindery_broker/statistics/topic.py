"""What was published to a topic since it was loaded, and what its deleted subscriptions delivered."""

from bindery_broker.statistics.delivery import SubscriptionStatistics
from bindery_broker.statistics.traffic import Traffic
from bindery_broker.statistics.volume import Volume


class TopicStatistics:
    """Counts durable messages only. Times are monotonic seconds; None: never."""

    __slots__ = (
        "deleted",
        "entries",
        "evictions_by_age",
        "evictions_by_size",
        "last_published_at",
        "publish_limited",
        "published",
    )

    def __init__(self) -> None:
        self.published = Traffic()
        """Messages, and the bytes of the entries that store them."""
        self.entries = 0
        """Number of these entries. An entry is a message or a batch."""
        self.last_published_at: float | None = None
        self.publish_limited = 0
        """Number of requests that waited for the publish rate, or were refused because of it."""
        self.evictions_by_size = 0
        """Number of evictions because of the quota of the backlog's size; `_age`: of its age."""
        self.evictions_by_age = 0
        self.deleted = Volume()
        """What the deleted subscriptions delivered."""

    def publish(self, messages: int, entries: int, size: int, *, now: float) -> None:
        self.published.add(messages, size, now=now)
        self.entries += entries
        self.last_published_at = now

    def subscription_deleted(self, subscription: SubscriptionStatistics) -> None:
        self.deleted.add(_volume_of(subscription))

    def volume(self, subscriptions: "list[SubscriptionStatistics]") -> Volume:
        """Return what went in and out. `subscriptions`: those that exist."""
        total = Volume(
            messages_in=self.published.messages,
            bytes_in=self.published.bytes,
            evictions_by_size=self.evictions_by_size,
            evictions_by_age=self.evictions_by_age,
        )
        total.add(self.deleted)
        for subscription in subscriptions:
            total.add(_volume_of(subscription))
        return total

    @property
    def messages_per_entry(self) -> float | None:
        """The mean size of batches; None: nothing was published since the topic was loaded."""
        return self.published.messages / self.entries if self.entries else None


def _volume_of(subscription: SubscriptionStatistics) -> Volume:
    delivered = subscription.delivered
    return Volume(messages_out=delivered.messages, bytes_out=delivered.bytes)
