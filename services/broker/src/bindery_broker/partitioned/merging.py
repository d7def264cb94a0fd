"""Join statistics of the partitions of a topic to those of the whole topic. No I/O.

Numbers are added, except for these:

| fields                                              | joined                                             |
|-----------------------------------------------------|----------------------------------------------------|
| `oldest_unacked_at`                                 | the smallest                                       |
| ages, `last_*_at`, `session_ends_in_ms`             | the largest                                        |
| `consumers` of a subscription (their number)        | the largest: a consumer uses all partitions        |
| `producers` (their number)                          | the largest: the policy limits them by partition   |
| `connected_since`                                   | the smallest                                       |
| `blocked_on_unacked`                                | whether it is so in one of them                    |
| `backlog_messages_exact`                            | whether it is so in all of them                    |
| `average_message_size`                              | computed from the sums                             |
| `backlog_messages`                                  | null if it is null in one of them                  |
| positions                                           | left out: they have a meaning in a partition only  |
| texts and types                                     | the first that is not null                         |

Maps are joined by key, lists of consumers by the consumer's name, and lists of policies by the policy, which acts if it
does so in one part; its `value` is that of the first part.
"""

from collections.abc import Sequence
from typing import Any, Final

Stats = dict[str, Any]

_LARGEST: Final = frozenset(
    (
        "oldest_unacked_age_ms", "oldest_lease_age_ms", "session_ends_in_ms", "last_published_at", "last_request_at",
        "last_delivered_at", "last_acked_at", "consumers", "producers",
    )
)  # fmt: skip
_SMALLEST: Final = frozenset(("oldest_unacked_at", "connected_since", "next_timeout_in_ms"))
_OF_ONE: Final = frozenset(("first", "last", "mark_delete", "read_position", "owner"))
_NULL_IF_ONE_IS: Final = frozenset(("backlog_messages",))


def merge(rows: Sequence[Stats]) -> Stats:
    """Return the statistics of the whole from those of its parts, at least one, which have the same form."""
    merged: Stats = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name not in _OF_ONE:
            merged[name] = _value(name, [row[name] for row in rows if name in row])
    if "average_message_size" in merged:
        count = merged.get("messages_in")
        merged["average_message_size"] = round(merged["bytes_in"] / count, 1) if count else None
    return merged


def _value(name: str, values: list[Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present or (name in _NULL_IF_ONE_IS and len(present) < len(values)):
        return None
    first = present[0]
    if name == "value":
        return first
    if isinstance(first, bool):
        return all(present) if name == "backlog_messages_exact" else any(present)
    if isinstance(first, int | float):
        if name in _LARGEST:
            return max(present)
        if name in _SMALLEST:
            return min(present)
        total = sum(present)
        return round(total, 3) if isinstance(total, float) else total
    if isinstance(first, dict):
        if name in ("properties", "limits"):
            return first
        return {
            key: _value(key, [value[key] for value in present if key in value])
            if not isinstance(first.get(key), dict)
            else merge([value[key] for value in present if key in value])
            for key in sorted({key for value in present for key in value})
        }
    if isinstance(first, list) and name == "policies":
        by_policy: dict[str, list[Stats]] = {}
        for policy in (policy for value in present for policy in value):
            by_policy.setdefault(policy["policy"], []).append(policy)
        return [merge(some) for some in by_policy.values()]
    if isinstance(first, list) and name == "consumers":
        by_name: dict[str, list[Stats]] = {}
        for consumer in (consumer for value in present for consumer in value):
            by_name.setdefault(consumer["consumer"], []).append(consumer)
        return [merge(some) for _, some in sorted(by_name.items())]
    return first
