"""Decide whether a topic, or a subscription, has been unused for so long that its policy deletes it. Pure.

| what                     | is not deleted                                                                         |
|--------------------------|----------------------------------------------------------------------------------------|
| any topic                | while it has consumers or producers, or a request uses it                              |
| any topic                | while the retention keeps messages of it                                               |
| any topic                | while a subscription has messages to read                                              |
| any topic                | while it has a subscription, in the mode `delete_when_no_subscriptions`                |
| topics of the broker     | ever: those whose names begin with two underscores                                     |
| partitions               | by themselves                                                                          |
| retry, dead-letter topic | while it has messages                                                                  |
| subscriptions            | while they have consumers; ever, if they belong to the broker                          |

Source: Pulsar's PersistentTopic.checkGC and checkInactiveSubscriptions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from bindery_broker.namespaces.policies import InactiveMode, InactiveTopics

SYSTEM_PREFIX = "__"
"""First characters of the names of topics that belong to the broker. Source: Pulsar's SystemTopicNames."""


class TopicUse(NamedTuple):
    """What a topic is used for."""

    local: str
    """Name without tenant and namespace."""
    partition: int
    """-1: it is no partition."""
    idle_s: float
    """Seconds since the last request, delivery, message, and creation or deletion of a subscription."""
    is_in_use: bool
    """Whether a consumer or a producer is connected, or a request is in progress."""
    is_moved_to: bool
    """Whether it is a retry or a dead-letter topic."""
    entries: int
    has_retained: bool
    """Whether messages are kept that every subscription has acknowledged."""
    backlogs: Mapping[str, int]
    """Unacknowledged entries of each subscription, without those of the broker."""


def is_inactive(use: TopicUse, policy: InactiveTopics | None) -> bool:
    """Return whether the topic is deleted."""
    if policy is None or use.is_in_use or use.idle_s < policy.seconds_max:
        return False
    if use.local.startswith(SYSTEM_PREFIX) or use.partition >= 0 or use.has_retained:
        return False
    if (use.is_moved_to and use.entries) or any(use.backlogs.values()):
        return False
    return policy.mode is InactiveMode.CAUGHT_UP or not use.backlogs
