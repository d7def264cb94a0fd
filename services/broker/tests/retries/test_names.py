"""Names of retry and dead-letter topics."""

import pytest
from bindery_broker.retries.names import (
    check_target,
    chosen_dead_letter_topic,
    dead_letter_topic,
    is_retry_topic,
    origin_topic,
    retry_topic,
)
from bindery_core.errors import BadRequest
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


@pytest.mark.parametrize(
    ("topic", "subscription", "advice"),
    [
        ("t", "a/b", "use a subscription name without a slash"),
        ("t" * 200, "s" * 100, "use a shorter subscription name"),
    ],
)
def test_a_subscription_whose_name_makes_no_topic_name_is_refused(topic, subscription, advice):
    for derive, kind in ((retry_topic, "retry"), (dead_letter_topic, "dead-letter")):
        with pytest.raises(BadRequest, match=f"this subscription can have no {kind} topic, because .*; {advice}:"):
            derive(TopicName.parse(topic), subscription)


def test_the_topic_of_the_subscription_is_no_target():
    check_target(TopicName.parse("x"), TopicName.parse("t"), what="dead-letter")
    with pytest.raises(BadRequest, match="the dead-letter topic must not be"):
        check_target(TopicName.parse("t"), TopicName.parse("t-partition-1"), what="dead-letter")


def test_a_chosen_dead_letter_topic_is_none_of_the_topics_of_the_subscription():
    name = TopicName.parse("t-partition-1")
    assert chosen_dead_letter_topic(None, name, "s") == TopicName.parse("t-s-DLQ")
    assert chosen_dead_letter_topic("a/b/x", name, "s") == TopicName.parse("a/b/x")
    for text in ("t", "t-partition-0", "t-s-RETRY"):
        for topic in (name, TopicName.parse("t-s-RETRY")):
            with pytest.raises(BadRequest, match="the dead-letter topic must not be"):
                chosen_dead_letter_topic(text, topic, "s")
