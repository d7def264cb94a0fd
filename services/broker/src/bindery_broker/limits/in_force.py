"""Say which policies of a topic stop, slow, refuse or drop something, and whether one does so now. Pure.

| effect  | policies                                                                                               |
|---------|--------------------------------------------------------------------------------------------------------|
| drops   | message_ttl_s, backlog quotas that evict, subscription_expiration_s, inactive_topics                   |
| refuses | backlog quotas for producers, message_size_max, delay_s_max, encryption_required, subscribe_rate,      |
|         | producers_max, consumers_max, consumers_per_subscription_max, subscriptions_max, subscription_types    |
| slows   | publish_rate, dispatch_rate, subscription_dispatch_rate                                                |
| stops   | unacked_per_subscription_max, unacked_per_consumer_max                                                 |

A policy that sets no limit is left out. Whether one acts now is known only for those of `Facts`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from bindery_broker.namespaces.policies import SUBSCRIPTION_TYPES, BacklogQuota, QuotaAction, Rate
from bindery_broker.namespaces.resolution import Resolved

Effect = Literal["drops", "refuses", "slows", "stops"]
_QUOTAS: Final[Mapping[QuotaAction, tuple[Effect, str]]] = {
    QuotaAction.HOLD: ("refuses", "producers wait and are then refused"),
    QuotaAction.REFUSE: ("refuses", "producers are refused"),
    QuotaAction.EVICT: ("drops", "the oldest messages are acknowledged"),
}


class Facts(NamedTuple):
    """What is known of a topic, or of one subscription of it."""

    backlog_size: int = 0
    """Bytes of the largest backlog of a subscription."""
    oldest_age_s: float | None = None
    """Age of the oldest message that is not acknowledged; None: not known, or there is none."""
    consumers: int = 0
    """Connected consumers of the topic."""
    consumers_per_subscription: int = 0
    """The most connected consumers of a subscription."""
    subscriptions: int = 0
    producers: int = 0
    is_blocked_on_unacked: bool = False
    is_consumer_blocked: bool = False
    """Whether a consumer holds the maximum number of messages."""
    throttled_by: str | None = None
    """The policy that holds back deliveries now."""
    expired: int = 0
    """Messages acknowledged because of message_ttl_s since the topic was loaded."""
    evicted: int = 0
    """Entries acknowledged because of a backlog quota since the topic was loaded."""


class Rule(NamedTuple):
    policy: str
    resolved: Resolved
    effect: Effect
    detail: str
    """One sentence: what the policy does, with its value."""
    acts: bool | None = None
    """Whether it does so now; None: it is not known."""
    dropped: int | None = None
    """What it has dropped since the topic was loaded; None: it drops nothing, or that is not counted."""


def rules_in_force(policies: Mapping[str, Resolved], facts: Facts) -> list[Rule]:
    """Return the policies with an effect, in the order of their fields."""
    found = []
    for name, resolved in policies.items():
        for effect, detail, acts, dropped in _effects(name, resolved.value, facts):
            level = resolved.source.value
            found.append(Rule(name, resolved, effect, f"{detail} (policy {name} of the {level})", acts, dropped))
    return found


def rate_text(rate: Rate) -> str:
    """Return a rate for people."""
    parts = [f"{count} {unit}" for count, unit in ((rate.messages, "messages"), (rate.size, "bytes")) if count]
    return f"{' and '.join(parts) or 'nothing'} in {rate.period_s} s"


def _effects(name: str, value: Any, facts: Facts) -> Iterator[tuple[Effect, str, bool | None, int | None]]:
    if value is None or value is False or value == 0:
        return
    match name:
        case "message_ttl_s":
            text = f"messages are acknowledged {value} s after they were published, or became due"
            yield "drops", text, facts.expired > 0, facts.expired
        case "backlog_quota_size":
            assert isinstance(value, BacklogQuota)
            effect, text = _QUOTAS[value.action]
            dropped = facts.evicted if effect == "drops" else None
            yield effect, f"above a backlog of {value.limit} bytes, {text}", facts.backlog_size > value.limit, dropped
        case "backlog_quota_age":
            assert isinstance(value, BacklogQuota)
            effect, text = _QUOTAS[value.action]
            acts = None if facts.oldest_age_s is None else facts.oldest_age_s > value.limit
            dropped = facts.evicted if effect == "drops" else None
            yield effect, f"if a message is not acknowledged for {value.limit} s, {text}", acts, dropped
        case "subscription_expiration_s":
            yield "drops", f"a subscription without consumers for {value} s is deleted", None, None
        case "inactive_topics":
            yield "drops", f"the topic is deleted after {value.seconds_max} s without use", None, None
        case "message_size_max":
            yield "refuses", f"messages above {value} bytes are refused", None, None
        case "delay_s_max":
            yield "refuses", f"delays above {value:g} s are refused", None, None
        case "encryption_required":
            yield "refuses", "messages without encryption are refused", None, None
        case "subscribe_rate":
            yield "refuses", f"consumers that connect more often than {rate_text(value)} are refused", None, None
        case "publish_rate":
            yield "slows", f"producers wait above {rate_text(value)}", None, None
        case "dispatch_rate" | "subscription_dispatch_rate":
            whose = "the subscriptions together" if name == "dispatch_rate" else "each subscription"
            yield "slows", f"at most {rate_text(value)} for {whose}", facts.throttled_by == name, None
        case "unacked_per_subscription_max":
            text = f"a subscription with {value} unacknowledged messages gets no new ones"
            yield "stops", text, facts.is_blocked_on_unacked, None
        case "unacked_per_consumer_max":
            text = f"a consumer with {value} unacknowledged messages gets no new ones"
            yield "stops", text, facts.is_consumer_blocked, None
        case "subscription_types":
            if value != SUBSCRIPTION_TYPES:
                yield "refuses", f"only subscriptions of these types: {', '.join(sorted(value))}", None, None
        case "producers_max":
            text = f"at most {value} producers; {facts.producers} are connected"
            yield "refuses", text, facts.producers >= value, None
        case "consumers_max":
            yield "refuses", f"at most {value} consumers", facts.consumers >= value, None
        case "consumers_per_subscription_max":
            acts = facts.consumers_per_subscription >= value
            yield "refuses", f"at most {value} consumers of a subscription", acts, None
        case "subscriptions_max":
            yield "refuses", f"at most {value} subscriptions", facts.subscriptions >= value, None
