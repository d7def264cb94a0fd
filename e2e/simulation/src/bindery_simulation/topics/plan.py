"""Draw the plan of a run with brokers from its seed: topics, producers, subscriptions and their consumers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bindery_simulation.topics.judging.history import Kind, SubscriptionId


@dataclass(frozen=True, slots=True)
class SubscriptionPlan:
    id: SubscriptionId
    kind: Kind
    consumers: int
    is_earliest: bool
    is_temporary: bool
    """Whether its only consumer deletes it and creates it again from time to time."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    name: str
    producers: int
    subscriptions: tuple[SubscriptionPlan, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    brokers: int
    topics: tuple[TopicPlan, ...]
    traffic_s: float
    """Time in seconds of traffic and faults before all faults are undone."""
    faults: int
    seeks: int
    delayed_share: float
    """Share of the requests of producers whose messages have a time of delivery."""
    retry_share: float
    """Share of the answers of Shared and Key_Shared consumers of which messages are moved to the retry topic."""


def draw_plan(rng: random.Random, kinds: Sequence[Kind], *, has_delays: bool = True, has_retries: bool = True) -> Plan:
    """Return a random plan with subscriptions of these kinds. `has_delays`: whether messages may be delayed.
    `has_retries`: whether messages may be moved to retry topics."""
    topics = tuple(_draw_topic(rng, f"public/default/t{number}", kinds) for number in range(rng.choice((1, 1, 2))))
    return Plan(
        brokers=rng.choice((2, 2, 3)),
        topics=topics,
        traffic_s=rng.choice((8.0, 12.0, 20.0)),
        faults=rng.choice((1, 2, 3, 4, 6, 8)),
        seeks=rng.choice((0, 0, 1, 2, 4)),
        delayed_share=rng.choice((0.0, 0.0, 0.3)) if has_delays else 0.0,
        retry_share=rng.choice((0.0, 0.2, 0.5)) if has_retries else 0.0,
    )


def _draw_topic(rng: random.Random, name: str, kinds: Sequence[Kind]) -> TopicPlan:
    subscriptions = []
    for number in range(rng.choice((1, 2, 2, 3))):
        is_temporary = number > 0 and rng.random() < 0.3
        subscriptions.append(
            SubscriptionPlan(
                SubscriptionId(name, f"s{number}"),
                rng.choice(kinds),
                1 if is_temporary else rng.choice((1, 2, 3)),
                rng.random() < 0.7,
                is_temporary,
            )
        )
    return TopicPlan(name, rng.choice((1, 1, 2)), tuple(subscriptions))
