"""Policies that a test changes while topics are loaded."""

from typing import Any

from bindery_broker.namespaces.policies import DEFAULTS, EffectivePolicies
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness


class ChangingPolicies:
    """The same policies for every topic; `present` replaces them."""

    def __init__(self, present: EffectivePolicies = DEFAULTS) -> None:
        self.present = present

    def effective(self, _name: TopicName) -> EffectivePolicies:
        return self.present


def set_policies(harness: Harness, **policies: Any) -> None:
    """Have these policies in force, and the defaults for the others. Call it before the first topic is loaded."""
    topics = harness.broker.topics
    if not isinstance(topics.policies, ChangingPolicies):
        assert not len(topics), "the topics that are loaded have other policies"
        topics.policies = ChangingPolicies()
    topics.policies.present = EffectivePolicies(**policies)
