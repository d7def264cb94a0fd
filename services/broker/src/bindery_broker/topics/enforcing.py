"""Enforce the policies of loaded topics. What is due is decided by pure functions; this module executes it."""

from bindery_broker.managed_ledger import RetentionRule
from bindery_broker.namespaces.policies import Retention
from bindery_broker.topics.topic import Topic


def retention_rule(retention: Retention | None) -> RetentionRule | None:
    """Return the retention of a policy for the managed ledger. None: its settings apply."""
    return None if retention is None else RetentionRule(retention.time_s, retention.size_max)


async def roll_for_retention(topic: Topic) -> None:
    """Continue in a new ledger if the open one is older than the retention time, also without traffic.

    Only closed ledgers can be deleted. Without this, messages would be kept until the ledger is full or reaches the
    maximum age of a ledger, which is longer than many retention times.
    """
    retention = topic.policies.retention
    if retention is not None and retention.time_s:
        await topic.ledger.roll_if_older(retention.time_s)
