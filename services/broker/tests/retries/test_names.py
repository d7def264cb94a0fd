"""Names of retry and dead-letter topics."""

import pytest
from bindery_broker.retries.names import check_target, dead_letter_topic, is_retry_topic, origin_topic, retry_topic
from bindery_core.errors import BadRequest, TooLarge
from bindery_pulsar.topic_name import TopicName


@pytest.mark.parametrize(
    ("topic", "subscription", "origin"),
    [
        ("t", "s", "t"),
        ("a/b/t-partition-3", "s", "a/b/t"),
        ("t-s-RETRY", "s", "t"),
        ("t-s-RETRY", "other", "t-s-RETRY"),
        ("t-s-RETRY-partition-1", "s", "t"),
        ("-s-RETRY", "s", "-s-RETRY"),
        ("t-s-DLQ", "dead-letters", "t-s-DLQ"),
        ("t-s-RETRY-s-RETRY", "s", "t-s-RETRY"),
    ],
)
def test_both_names_are_derived_from_the_original_topic(topic, subscription, origin):
    name, base = TopicName.parse(topic), TopicName.parse(origin)
    assert origin_topic(name, subscription) == base
    assert retry_topic(name, subscription).local == f"{base.local}-{subscription}-RETRY"
    assert dead_letter_topic(name, subscription).local == f"{base.local}-{subscription}-DLQ"
    assert retry_topic(name, subscription).short.rpartition("/")[0] == base.short.rpartition("/")[0]
    assert is_retry_topic(name, subscription) == (name.partitioned_topic != base)


def test_a_name_that_is_not_valid_is_refused():
    with pytest.raises(BadRequest, match="slash"):
        retry_topic(TopicName.parse("t"), "a/b")
    with pytest.raises(TooLarge):
        dead_letter_topic(TopicName.parse("t" * 200), "s" * 100)


def test_the_topic_of_the_subscription_is_no_target():
    check_target(TopicName.parse("x"), TopicName.parse("t"), what="dead-letter")
    with pytest.raises(BadRequest, match="the dead-letter topic must not be"):
        check_target(TopicName.parse("t"), TopicName.parse("t-partition-1"), what="dead-letter")
