"""When a loaded topic needs its next round of maintenance, and of its policies.

A topic that is not used changes only with the time. So each round says when the next one has anything to do:

| maintenance                    | is due                                                                              |
|--------------------------------|-------------------------------------------------------------------------------------|
| sessions, leases, readers      | in each round while a consumer is connected or a message waits for redelivery       |
| read handles, cached tail      | in each round until those that are not used were dropped                            |
| ledgers to be deleted          | in each round while a deletion failed; when the retention of the oldest one ends    |
| rolling for the retention      | when the open ledger is older than the retention                                    |
| cursor ledgers                 | when one was not used for long, or reaches its maximum age                          |
| compaction                     | in each round while one runs, or enough was not compacted                           |
| age of the oldest message      | in each round until it was read                                                     |
| closing                        | when an empty topic was not used for `idle_s_max`                                   |

| policies                       | are due                                                                             |
|--------------------------------|-------------------------------------------------------------------------------------|
| time to live                   | when the next message expires                                                       |
| eviction by age                | in each round while there is a backlog                                              |
| expiration of subscriptions    | when the one that has been unused longest expires; in each round while that has a   |
|                                | consumer                                                                            |
| inactive topics                | when the topic has been unused for long enough; after that in each round while it   |
|                                | is consumed, and when ledgers were deleted, else every UNUSED_CHECK_S               |

Everything else follows from a request, or from a change of policies: both make the topic due in the next round. In any
case a topic is due after LOOK_AGAIN_S, so that what is not foreseen here waits for no longer.
"""

import math
from typing import Final

from bindery_broker.managed_ledger import WallClock
from bindery_broker.namespaces.policies import QuotaAction
from bindery_broker.topics.enforcing import acts_on_its_own, is_moved_to
from bindery_broker.topics.topic import Topic

LOOK_AGAIN_S: Final = 900.0
"""Maximum seconds between two rounds of maintenance of one topic."""
UNUSED_CHECK_S: Final = 60.0
"""Seconds between two checks of a topic that has been unused for long enough, but is kept."""


def maintenance_in_s(topic: Topic, *, now: float, idle_s_max: float) -> float:
    """Return the seconds until the topic needs maintenance; 0: in the next round. `now`: monotonic seconds.

    `idle_s_max`: seconds without use after which an empty topic is closed.
    """
    policies, ledger = topic.policies, topic.ledger
    if topic.is_consumed or any(not one.is_durable or one.oldest.must_read for one in topic.subscriptions.values()):
        return 0.0
    if topic.compaction.is_running or topic.compaction.is_due(threshold=policies.compaction_threshold):
        return 0.0
    waits = [LOOK_AGAIN_S, ledger.maintenance_in_s()]
    if policies.retention is not None and policies.retention.time_s:
        waits.append(ledger.older_in_s(policies.retention.time_s))
    if not ledger.entries_count and policies.inactive_topics is None:
        waits.append(topic.used_at + idle_s_max - now)
    return max(0.0, min(waits))


def policies_in_s(topic: Topic, *, now: float, clock: WallClock) -> float:
    """Return the seconds until a policy of the topic may act; 0: in the next round; infinite: after its next use.

    `now`: monotonic seconds.
    """
    policies = topic.policies
    if not acts_on_its_own(policies):
        return math.inf
    waits = [math.inf]
    kept = [one for one in topic.subscriptions.values() if one.is_durable and not one.is_system]
    has_backlog = any(one.cursor.backlog_entries for one in kept)
    if policies.message_ttl_s:
        waits += [one.expires_in_s(clock()) for one in kept]
    quotas = (policies.backlog_quota_size, policies.backlog_quota_age)
    if has_backlog and any(quota is not None and quota.action is QuotaAction.EVICT for quota in quotas):
        return 0.0
    if policies.subscription_expiration_s and not is_moved_to(topic):
        used = [max(one.created_at, one.statistics.last_request_at or 0.0) for one in kept]
        waits += [at + policies.subscription_expiration_s - now for at in used]
    if policies.inactive_topics is not None:
        left_s = topic.last_use + policies.inactive_topics.seconds_max - now
        waits.append(left_s if left_s > 0 or topic.is_consumed else UNUSED_CHECK_S)
    return max(0.0, min(waits))
