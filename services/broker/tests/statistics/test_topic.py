"""Counters of one topic."""

from bindery_broker.statistics.delivery import ConsumerStatistics, SubscriptionStatistics
from bindery_broker.statistics.topic import TopicStatistics
from bindery_broker.statistics.volume import Volume


def test_the_mean_size_of_batches_is_known_once_something_was_published() -> None:
    statistics = TopicStatistics()
    assert (statistics.messages_per_entry, statistics.last_published_at) == (None, None)
    statistics.publish(10, 1, 500, now=1.0)
    statistics.publish(2, 2, 100, now=3.0)
    assert statistics.messages_per_entry == 4
    assert (statistics.published.messages, statistics.published.bytes, statistics.entries) == (12, 600, 3)
    assert statistics.last_published_at == 3.0


def test_what_a_subscription_delivered_counts_after_its_deletion() -> None:
    statistics, kept, deleted = TopicStatistics(), SubscriptionStatistics(), SubscriptionStatistics()
    statistics.publish(3, 1, 70, now=1.0)
    kept.deliver(ConsumerStatistics(), 3, 30, redelivered=0, now=1.0)
    deleted.deliver(ConsumerStatistics(), 2, 20, redelivered=0, now=1.0)
    before = statistics.volume([kept, deleted])
    statistics.subscription_deleted(deleted)
    assert statistics.volume([kept]) == before == Volume(3, 70, 5, 50)
