"""Decide which level a policy in force comes from. Pure.

| level     | set by                                             |
|-----------|----------------------------------------------------|
| topic     | /bindery/topic-policies/T/N/<topic>                |
| namespace | /admin/policies/T/N                                |
| broker    | the settings of the broker, or Pulsar's defaults   |

The first level that sets a policy decides; a partition has the level of its partitioned topic.
Source: Pulsar's HierarchyTopicPolicies.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bindery_broker.namespaces.policies import EffectivePolicies
from bindery_broker.namespaces.policy_codec import PolicySet


class Source(StrEnum):
    TOPIC = "topic"
    NAMESPACE = "namespace"
    BROKER = "broker"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The value of a policy in force, and the level that sets it."""

    value: Any
    source: Source


def effective(defaults: EffectivePolicies, namespace: PolicySet, topic: PolicySet) -> EffectivePolicies:
    """Return the policies in force. `defaults`: those of the broker."""
    if not namespace and not topic:
        return defaults
    return dataclasses.replace(defaults, **{**namespace, **topic})


def explain(defaults: EffectivePolicies, namespace: PolicySet, topic: PolicySet) -> dict[str, Resolved]:
    """Return each policy in force with its source, in the order of the fields."""
    found = {}
    for field in dataclasses.fields(EffectivePolicies):
        name = field.name
        if name in topic:
            found[name] = Resolved(topic[name], Source.TOPIC)
        elif name in namespace:
            found[name] = Resolved(namespace[name], Source.NAMESPACE)
        else:
            found[name] = Resolved(getattr(defaults, name), Source.BROKER)
    return found
