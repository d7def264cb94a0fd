"""Join the statistics of partitions to those of a partitioned topic. Pure.

| fields                                           | joined                                      |
|--------------------------------------------------|---------------------------------------------|
| numbers                                          | the sum                                     |
| times, and ages in seconds                       | the largest, at least 0                     |
| averageMsgSize                                   | the average of the partitions               |
| booleans                                         | whether one is true                         |
| texts, and limits of quotas                      | the first that is not null                  |
| subscriptions and other maps                     | by key                                      |
| consumers and publishers                         | by name                                     |
| ownerBroker                                      | left out                                    |

Source: Pulsar TopicStatsImpl.add, SubscriptionStatsImpl.add.
"""

from collections.abc import Sequence
from typing import Any, Final

from bindery_broker.http.admin.topic_json import NO_TYPE

Stats = dict[str, Any]
_LARGEST: Final = ("Timestamp", "TimeStamp", "AgeSeconds")
"""Ends of the names of times and ages."""
_ALIKE: Final = frozenset(("backlogQuotaLimitSize", "backlogQuotaLimitTime"))
"""Limits, which are the same in all partitions."""
_OF_ONE: Final = frozenset(("ownerBroker", "oldestBacklogMessageSubscriptionName", "connectedSince"))
"""Fields that have a meaning in one partition only."""


def join(parts: Sequence[Stats]) -> Stats:
    """Return the statistics of a whole from those of its parts."""
    joined: Stats = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        if name not in _OF_ONE:
            joined[name] = _value(name, [part[name] for part in parts if part.get(name) is not None])
    return joined


def _value(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    first = values[0]
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        if name in _ALIKE:
            return first
        if name.endswith(_LARGEST):
            return max(0, *values)
        total = sum(values)
        return total / len(values) if name == "averageMsgSize" else total
    if isinstance(first, dict):
        if name == "subscriptionProperties":
            return first
        keys = dict.fromkeys(key for value in values for key in value)
        if name == "subscriptions":
            return {key: join([value[key] for value in values if key in value]) for key in keys}
        return {key: _value(key, [value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list):
        by_name: dict[str, list[Stats]] = {}
        for one in (one for value in values for one in value):
            by_name.setdefault(one.get("consumerName") or one.get("producerName") or "", []).append(one)
        return [join(some) for some in by_name.values()]
    return next((value for value in values if value != NO_TYPE), first) if name == "type" else first
