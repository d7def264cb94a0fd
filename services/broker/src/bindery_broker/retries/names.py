"""Names of the retry topic and the dead-letter topic of a subscription. Pure.

| topic       | name                                                                                      |
|-------------|-------------------------------------------------------------------------------------------|
| retry       | `{topic}-{subscription}-RETRY`                                                            |
| dead letter | `{topic}-{subscription}-DLQ`                                                              |

`topic` is the local name without the partition. If the topic is itself the retry topic of the subscription, both names
are those of the original topic: a message is retried to the end of the same retry topic, never to one with a longer
name. Names are derived from the topic alone, not from the property REAL_TOPIC, which any producer can set.
Source: Pulsar's clients (RetryMessageUtil, ConsumerBuilderImpl).
"""

import functools
from typing import Final

from bindery_core.errors import BadRequest, BinderyError, TooLarge
from bindery_pulsar.topic_name import TopicName

RETRY_SUFFIX: Final = "-RETRY"
DEAD_LETTER_SUFFIX: Final = "-DLQ"
DEAD_LETTERS: Final = "dead-letters"
"""Default name of the subscription with which a dead-letter topic is created, so that it keeps its messages."""
NAMES_CACHED_MAX: Final = 4_096
"""Maximum number of names that are kept, because each call of a consumer needs those of its subscription."""
NAME_SHOWN_MAX: Final = 256
"""Maximum characters of a name in an error."""


def origin_topic(topic: TopicName, subscription: str) -> TopicName:
    """Return the topic whose subscription this is: if `topic` is its retry topic, the topic it belongs to.

    The result has no partition.
    """
    base = topic.partitioned_topic
    suffix = f"-{subscription}{RETRY_SUFFIX}"
    if base.local.endswith(suffix) and base.local != suffix:
        return TopicName.of(
            tenant=base.tenant, namespace=base.namespace, local=base.local.removesuffix(suffix)
        ).partitioned_topic
    return base


def is_retry_topic(topic: TopicName, subscription: str) -> bool:
    """Return whether `topic` is the retry topic of `subscription`, by its name."""
    return origin_topic(topic, subscription) != topic.partitioned_topic


def retry_topic(topic: TopicName, subscription: str) -> TopicName:
    """Return the retry topic of a subscription of `topic`. Raises BadRequest if that is no valid name of a topic."""
    return _derived(topic, subscription, RETRY_SUFFIX)


def dead_letter_topic(topic: TopicName, subscription: str) -> TopicName:
    """Return the default dead-letter topic of a subscription of `topic`. Errors as `retry_topic`."""
    return _derived(topic, subscription, DEAD_LETTER_SUFFIX)


def check_target(target: TopicName, source: TopicName, *, what: str) -> None:
    """Raise BadRequest if `target` is the topic of the subscription, where the copies would be consumed again."""
    if target.partitioned_topic == source.partitioned_topic:
        raise BadRequest(f"the {what} topic must not be the topic of the subscription", topic=target.short)


def chosen_dead_letter_topic(text: str | None, topic: TopicName, subscription: str) -> TopicName:
    """Return the dead-letter topic that a request names, or the default one.

    Raises BadRequest for a name that is not valid, and for a topic of the subscription: `check_target`.
    """
    if text is None:
        return dead_letter_topic(topic, subscription)
    chosen = TopicName.parse(text)
    for other in (topic, origin_topic(topic, subscription), retry_topic(topic, subscription)):
        check_target(chosen, other, what="dead-letter")
    return chosen


@functools.lru_cache(NAMES_CACHED_MAX)
def _derived(topic: TopicName, subscription: str, suffix: str) -> TopicName:
    base = origin_topic(topic, subscription)
    local = f"{base.local}-{subscription}{suffix}"
    cause: BinderyError
    try:
        return TopicName.of(tenant=base.tenant, namespace=base.namespace, local=local)
    except TooLarge as error:
        cause, why, advice = error, "its name would be too long", "use a shorter subscription name"
    except BadRequest as error:
        cause, why, advice = error, "a topic's local name holds no slash", "use a subscription name without a slash"
    kind = "retry" if suffix == RETRY_SUFFIX else "dead-letter"
    raise BadRequest(
        f"this subscription can have no {kind} topic, because {why}; {advice}",
        topic=base.short[:NAME_SHOWN_MAX],
        subscription=subscription[:NAME_SHOWN_MAX],
    ) from cause
