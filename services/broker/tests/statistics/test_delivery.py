"""Counters of deliveries and acknowledgements."""

from bindery_broker.statistics.delivery import ConsumerStatistics, SubscriptionStatistics


def test_a_delivery_counts_for_the_subscription_and_the_consumer() -> None:
    subscription, one, two = SubscriptionStatistics(), ConsumerStatistics(), ConsumerStatistics()
    subscription.deliver(one, 3, 30, redelivered=0, now=1.0)
    subscription.deliver(two, 4, 40, redelivered=1, now=2.0)
    assert (subscription.delivered.messages, subscription.delivered.bytes) == (7, 70)
    assert (one.delivered.messages, two.delivered.bytes) == (3, 40)
    assert (subscription.redelivered.messages, one.redelivered, two.redelivered) == (1, 0, 1)
    assert (subscription.last_delivered_at, one.last_delivered_at, two.last_delivered_at) == (2.0, 1.0, 2.0)
    assert subscription.redelivered.rates(2.0).messages == 1


def test_an_acknowledgement_counts_for_its_consumer_if_that_is_connected() -> None:
    subscription, consumer = SubscriptionStatistics(), ConsumerStatistics()
    assert (subscription.last_acked_at, consumer.last_acked_at) == (None, None)
    subscription.ack(consumer, 2, now=1.0)
    subscription.ack(None, 3, now=2.0)
    assert (subscription.acked.messages, consumer.acked) == (5, 2)
    assert (subscription.last_acked_at, consumer.last_acked_at) == (2.0, 1.0)
