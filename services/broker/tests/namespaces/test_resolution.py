"""Topic before namespace before broker."""

import dataclasses

from bindery_broker.namespaces.policies import EffectivePolicies
from bindery_broker.namespaces.resolution import Resolved, Source, effective, explain

DEFAULTS = EffectivePolicies(consumers_max=7)


def test_the_first_level_that_sets_a_policy_decides() -> None:
    namespace = {"message_ttl_s": 5, "producers_max": 3}
    topic = {"producers_max": 0, "inactive_topics": None}
    found = effective(DEFAULTS, namespace, topic)
    assert found == dataclasses.replace(DEFAULTS, message_ttl_s=5, producers_max=0, inactive_topics=None)
    assert effective(DEFAULTS, {}, {}) is DEFAULTS


def test_each_value_has_its_source() -> None:
    found = explain(DEFAULTS, {"message_ttl_s": 5, "producers_max": 3}, {"producers_max": 0})
    assert found["producers_max"] == Resolved(0, Source.TOPIC)
    assert found["message_ttl_s"] == Resolved(5, Source.NAMESPACE)
    assert found["consumers_max"] == Resolved(7, Source.BROKER)
    assert {name: resolved.value for name, resolved in found.items()} == {
        field.name: getattr(
            effective(DEFAULTS, {"message_ttl_s": 5, "producers_max": 3}, {"producers_max": 0}), field.name
        )
        for field in dataclasses.fields(EffectivePolicies)
    }
