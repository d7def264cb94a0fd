"""Draw the plan of a run: topics, their policies over time, traffic and faults. The seed determines it."""

import random
from dataclasses import dataclass, replace
from typing import Final

from bindery_simulation.policies.model import Action, Policy

HOURS: Final = (1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 24)
"""Simulated hours of traffic, one of these at random."""
MESSAGES: Final = 70
"""Mean number of messages of a topic."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    name: str
    size: int
    pause_s: float
    """Mean time between two messages."""
    delayed_share: float
    fast_s: float
    """Mean time between two visits of the consumer of the first subscription."""
    slow_s: float
    """The same of the second subscription; 0: it is never read."""
    subscriptions: tuple[str, ...]
    policies: tuple[Policy, ...]
    """The first one is in force from the beginning; the others at random times."""


@dataclass(frozen=True, slots=True)
class IdlePlan:
    """A topic that is used from time to time, and deleted meanwhile."""

    name: str
    policy: Policy
    size: int = 100


@dataclass(frozen=True, slots=True)
class Plan:
    brokers: int
    topics: tuple[TopicPlan, ...]
    idle: IdlePlan | None
    traffic_s: float
    faults: int


def draw_plan(rng: random.Random) -> Plan:
    hours = rng.choice(HOURS)
    traffic_s = hours * 3_600.0
    topics = tuple(_draw_topic(rng, f"public/default/t{number}", traffic_s) for number in range(rng.choice((1, 1, 2))))
    idle = None
    if rng.random() < 0.6:
        seconds = round(traffic_s / rng.choice((10, 30)))
        policy = Policy(has_retention=True, inactive_s=seconds, deletes_caught_up=rng.random() < 0.6)
        idle = IdlePlan("public/default/idle", policy)
    return Plan(brokers=2, topics=topics, idle=idle, traffic_s=traffic_s, faults=rng.choice((0, 0, 1, 2, 4, 6)))


def _draw_topic(rng: random.Random, name: str, traffic_s: float) -> TopicPlan:
    size = rng.choice((100, 400, 1_500))
    pause_s = traffic_s / MESSAGES * rng.choice((0.7, 1.0, 2.0))
    first = _draw_policy(rng, size, pause_s)
    policies = [first]
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = _draw_policy(rng, size, pause_s)
        part = rng.choice(("ttl", "retention", "quota", "all"))
        last = policies[-1]
        if part == "ttl":
            other = replace(last, ttl_s=other.ttl_s)
        elif part == "retention":
            other = replace(
                last,
                has_retention=other.has_retention,
                retention_s=other.retention_s,
                retention_size=other.retention_size,
            )
        elif part == "quota":
            other = replace(last, action=other.action, quota_size=other.quota_size, quota_age_s=other.quota_age_s)
        policies.append(other)
    return TopicPlan(
        name,
        size,
        pause_s,
        delayed_share=rng.choice((0.0, 0.2)),
        fast_s=pause_s * rng.choice((0.5, 2.0)),
        slow_s=pause_s * rng.choice((0.0, 10.0, 25.0)),
        subscriptions=rng.choice(((), ("s0",), ("s0", "s1"), ("s0", "s1"))),
        policies=tuple(policies),
    )


def _draw_policy(rng: random.Random, size: int, pause_s: float) -> Policy:
    """Return policies whose limits some of the messages reach."""
    policy = Policy(action=rng.choice(tuple(Action)))
    if rng.random() < 0.5:
        policy = replace(policy, ttl_s=round(pause_s * rng.choice((1.5, 6.0, 15.0))))
    if rng.random() < 0.6:
        minutes = round(pause_s * rng.choice((0.0, 5.0, 20.0)) / 60)
        units = rng.choice((None, round(5 * size / 1024), round(20 * size / 1024)))
        if minutes == 0 or units == 0:  # Pulsar: both are 0, or none of them
            minutes = units = 0
        is_endless = rng.random() < 0.2
        policy = replace(
            policy,
            has_retention=True,
            retention_s=None if is_endless else minutes * 60,
            retention_size=None if units is None else units * 1024,
        )
    if rng.random() < 0.6:
        by_size, by_age = rng.choice(((True, False), (False, True), (True, True)))
        policy = replace(
            policy,
            quota_size=round(size * rng.choice((3, 8, 15))) if by_size else None,
            quota_age_s=round(pause_s * rng.choice((3, 8, 15))) if by_age else None,
        )
    return policy
