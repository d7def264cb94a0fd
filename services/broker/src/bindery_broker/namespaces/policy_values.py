"""Policies as users write them: JSON by field of `EffectivePolicies`, with its units. Pure.

`null` removes a policy from its level, so that the next level decides. `"none"` sets explicitly that there is no limit,
for the policies in NONE_ALLOWED. All other values have the form of the field.

| rule                                                                     | source                              |
|--------------------------------------------------------------------------|-------------------------------------|
| retention: both limits are 0, or neither is                              | Pulsar's NamespacesBase             |
| retention: larger than the backlog quotas of the same level              | the same, checkQuotas               |
| retention.time_s and subscription_expiration_s: whole minutes            | Pulsar stores minutes               |
| retention.size_max: whole MiB                                            | Pulsar stores MiB                   |
| persistence: ensemble_size >= write_quorum >= ack_quorum >= 1            | BookKeeper                          |
"""

import typing
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from bindery_broker.errors import InvalidPolicy
from bindery_broker.namespaces.policies import BacklogQuota, EffectivePolicies, Persistence, Rate, Retention
from bindery_broker.namespaces.policy_codec import MIB, UNSET, PolicySet

NONE: Final = "none"
"""Value of a policy that sets no limit."""
NONE_ALLOWED: Final = frozenset(
    {
        "backlog_quota_size", "backlog_quota_age", "inactive_topics", "publish_rate", "dispatch_rate",
        "subscription_dispatch_rate", "subscribe_rate",
    }
)  # fmt: skip
INT32_MAX: Final = 2**31 - 1
"""Maximum of most numbers, because Pulsar reads them as 32-bit integers."""
INT64_MAX: Final = 2**63 - 1
_LARGE: Final = frozenset({"compaction_threshold"})
_TYPES: Final[Mapping[str, Any]] = typing.get_type_hints(EffectivePolicies)


def parse(members: Mapping[str, Any], *, allowed: Collection[str], level: str) -> dict[str, Any]:
    """Return the changes that a request asks for, by field; UNSET for `null`. `allowed`: fields that the level can set.

    Raises InvalidPolicy, which names the field and what is allowed.
    """
    changes: dict[str, Any] = {}
    for name, value in members.items():
        check_field(name, allowed=allowed, level=level)
        if value is None:
            changes[name] = UNSET
        elif value == NONE and name in NONE_ALLOWED:
            changes[name] = None
        else:
            changes[name] = _convert(name, value)
    return changes


def check_field(name: str, *, allowed: Collection[str], level: str) -> None:
    """Raise InvalidPolicy if `name` is no policy, or none that the level can set."""
    if name in allowed:
        return
    if name in _TYPES:
        raise InvalidPolicy(f"a {level} cannot set this policy", field=name)
    raise InvalidPolicy("no such policy", field=name, policies=", ".join(sorted(allowed)))


def render(value: Any) -> Any:
    """Return a value as JSON. None is null, which in a policy in force means no limit."""
    if isinstance(value, frozenset):
        return sorted(value)
    return msgspec.to_builtins(value)


def render_set(policies: PolicySet) -> dict[str, Any]:
    """Return the policies that a level sets in the form that `parse` reads."""
    return {name: NONE if value is None else render(value) for name, value in policies.items()}


def check_level(policies: PolicySet) -> None:
    """Raise InvalidPolicy if the policies of one level contradict one another."""
    retention: Retention | None = policies.get("retention")
    if retention is None:
        return
    size: BacklogQuota | None = policies.get("backlog_quota_size")
    if size is not None and retention.size_max and retention.size_max <= size.limit:
        raise InvalidPolicy(
            "retention.size_max must be larger than backlog_quota_size.limit",
            field="retention.size_max",
            size_max=retention.size_max,
            limit=size.limit,
        )
    age: BacklogQuota | None = policies.get("backlog_quota_age")
    if age is not None and retention.time_s and retention.time_s <= age.limit:
        raise InvalidPolicy(
            "retention.time_s must be larger than backlog_quota_age.limit",
            field="retention.time_s",
            time_s=retention.time_s,
            limit=age.limit,
        )


def _convert(name: str, value: Any) -> Any:
    try:
        converted = msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        hint = f'; or "{NONE}"' if name in NONE_ALLOWED else ""
        raise InvalidPolicy(f"{error}{hint}", field=name) from error
    if isinstance(value, Mapping):
        unknown = set(value) - set(msgspec.to_builtins(converted))
        if unknown:
            raise InvalidPolicy("no such member", field=f"{name}.{min(unknown)}")
    _check(name, converted)
    return converted


def _check(name: str, value: Any) -> None:
    match value:
        case bool() | str():
            return
        case int() | float():
            _range(name, value, 0, INT64_MAX if name in _LARGE else INT32_MAX)
            if name == "subscription_expiration_s":
                _multiple(name, value, 60)
        case frozenset():
            if not value:
                raise InvalidPolicy("at least one type is required", field=name)
            unknown = value - EffectivePolicies().subscription_types
            if unknown:
                types = ", ".join(sorted(EffectivePolicies().subscription_types))
                raise InvalidPolicy(f"no such type of subscription; known: {types}", field=name, type=min(unknown))
        case Retention():
            _check_retention(value)
        case BacklogQuota():
            _range(f"{name}.limit", value.limit, 1, INT64_MAX if name == "backlog_quota_size" else INT32_MAX)
        case Rate():
            _check_rate(name, value)
        case Persistence():
            _range("persistence.ack_quorum", value.ack_quorum, 1, value.write_quorum)
            _range("persistence.write_quorum", value.write_quorum, 1, value.ensemble_size)
        case _:
            _range(f"{name}.seconds_max", value.seconds_max, 1, INT32_MAX)


def _check_retention(value: Retention) -> None:
    if value.time_s is not None:
        _range("retention.time_s", value.time_s, 0, INT32_MAX * 60)
        _multiple("retention.time_s", value.time_s, 60)
    if value.size_max is not None:
        _range("retention.size_max", value.size_max, 0, INT32_MAX * MIB)
        _multiple("retention.size_max", value.size_max, MIB)
    if (value.time_s == 0) != (value.size_max == 0):
        raise InvalidPolicy(
            "time_s and size_max are both 0, which deletes acknowledged messages at once, or neither; null: no limit",
            field="retention",
        )


def _check_rate(name: str, value: Rate) -> None:
    if value.messages is None and value.size is None:
        raise InvalidPolicy(f'messages or size is required; "{NONE}" stands for no limit', field=name)
    if value.messages is not None:
        _range(f"{name}.messages", value.messages, 1, INT32_MAX)
    if value.size is not None:
        _range(f"{name}.size", value.size, 1, INT64_MAX)
    _range(f"{name}.period_s", value.period_s, 1, INT32_MAX)
    if name == "subscribe_rate" and value.size is not None:
        raise InvalidPolicy("subscribe requests have no size", field="subscribe_rate.size")
    if name == "publish_rate" and value.period_s != 1:
        raise InvalidPolicy("the period of a publish rate is 1 second", field="publish_rate.period_s")
    if value.is_relative_to_publish_rate and "dispatch" not in name:
        raise InvalidPolicy("only dispatch rates have this", field=f"{name}.is_relative_to_publish_rate")


def _range(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidPolicy(f"must be from {least} to {most}", field=field, value=value)


def _multiple(field: str, value: float, of: int) -> None:
    if value % of:
        raise InvalidPolicy(f"must be a multiple of {of}", field=field, value=value)
