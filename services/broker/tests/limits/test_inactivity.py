"""When a topic counts as inactive."""

from typing import Any

import pytest
from bindery_broker.limits.inactivity import TopicUse, is_inactive
from bindery_broker.namespaces.policies import InactiveMode, InactiveTopics

NO_SUBSCRIPTIONS = InactiveTopics(InactiveMode.NO_SUBSCRIPTIONS, 60)
CAUGHT_UP = InactiveTopics(InactiveMode.CAUGHT_UP, 60)
UNUSED = TopicUse(
    local="t",
    partition=-1,
    idle_s=60,
    is_in_use=False,
    is_moved_to=False,
    entries=0,
    has_retained=False,
    backlogs={},
)


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        (None, {}, False),
        (NO_SUBSCRIPTIONS, {}, True),
        (NO_SUBSCRIPTIONS, {"idle_s": 59.9}, False),
        (NO_SUBSCRIPTIONS, {"is_in_use": True}, False),
        (NO_SUBSCRIPTIONS, {"backlogs": {"s": 0}}, False),
        (CAUGHT_UP, {"backlogs": {"s": 0}}, True),
        (CAUGHT_UP, {"backlogs": {"s": 0, "other": 1}}, False),
        (CAUGHT_UP, {}, True),
        (CAUGHT_UP, {"has_retained": True}, False),
        (CAUGHT_UP, {"entries": 5}, True),  # acknowledged, and not retained
        (CAUGHT_UP, {"entries": 5, "is_moved_to": True}, False),
        (CAUGHT_UP, {"is_moved_to": True}, True),
        (CAUGHT_UP, {"partition": 0}, False),
        (CAUGHT_UP, {"local": "__change_events"}, False),
    ],
)
def test_what_is_inactive(policy: InactiveTopics | None, changes: dict[str, Any], expected: bool) -> None:
    assert is_inactive(UNUSED._replace(**changes), policy) is expected
