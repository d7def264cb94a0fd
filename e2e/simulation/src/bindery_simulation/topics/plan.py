"""Draw the plan of a run with brokers from its seed: topics, producers, subscriptions and their consumers."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bindery_broker.ownership.bundles import Bundle
from bindery_broker.retries.names import dead_letter_topic, retry_topic
from bindery_pulsar.topic_name import TopicName

from bindery_simulation.topics.judging.history import Kind, SubscriptionId

MOVING: Final = (Kind.SHARED, Kind.KEY_SHARED)
"""Types of subscriptions whose consumers move messages."""
INACTIVE_S_MAX: Final = (0.2, 1.0, 1_800.0, 1_800.0)
"""What to choose from as the time without use after which ledgers are closed. Some traffic has pauses of a second."""
REMOTE_SHARE: Final = 0.5
"""Share of the plans whose targets of moves are remote."""


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
    is_remote: bool
    """Whether all targets of moves are in other bundles than their source, and brokers compete for them."""
    dead_share: float
    """Share of the moves that go to the dead-letter topic."""
    trouble_share: float
    """Share of the requests between brokers that have trouble: see `peers`."""
    inactive_s_max: float
    """Seconds after which the ledgers of topics and cursors that are not written are closed without successors."""


def draw_plan(
    rng: random.Random,
    kinds: Sequence[Kind],
    *,
    has_delays: bool = True,
    has_retries: bool = True,
    remote_share: float = REMOTE_SHARE,
) -> Plan:
    """Return a random plan with subscriptions of these kinds. `has_delays`: whether messages may be delayed.
    `has_retries`: whether messages may be moved to retry topics. `remote_share`: probability that the plan puts these
    into other bundles; otherwise they are there only by chance."""
    topics = tuple(_draw_topic(rng, f"public/default/t{number}", kinds) for number in range(rng.choice((1, 1, 2))))
    plan = Plan(
        brokers=rng.choice((2, 2, 3)),
        topics=topics,
        traffic_s=rng.choice((8.0, 12.0, 20.0)),
        faults=rng.choice((1, 2, 3, 4, 6, 8)),
        seeks=rng.choice((0, 0, 1, 2, 4)),
        delayed_share=rng.choice((0.0, 0.0, 0.3)) if has_delays else 0.0,
        retry_share=rng.choice((0.0, 0.2, 0.5)) if has_retries else 0.0,
        is_remote=False,
        dead_share=0.0,
        trouble_share=0.0,
        inactive_s_max=0.0,
    )
    # What was added later is drawn last, so that the runs without it are not other ones than before.
    plan = _with_remote_moves(rng, plan, kinds) if has_retries and rng.random() < remote_share else plan
    return replace(plan, inactive_s_max=rng.choice(INACTIVE_S_MAX))


def _with_remote_moves(rng: random.Random, plan: Plan, kinds: Sequence[Kind]) -> Plan:
    """Return the plan with all targets of moves in other bundles."""
    moving = [kind for kind in kinds if kind in MOVING]
    return replace(
        plan,
        topics=tuple(_with_remote_targets(_with_moves(rng, topic, moving)) for topic in plan.topics),
        retry_share=rng.choice((0.3, 0.6)),
        is_remote=True,
        dead_share=rng.choice((0.0, 0.3, 1.0)),
        trouble_share=rng.choice((0.0, 0.2, 0.5)),
    )


def _with_moves(rng: random.Random, topic: TopicPlan, kinds: Sequence[Kind]) -> TopicPlan:
    """Return the plan with one of these types for the first subscription, so that messages are moved at all."""
    first, *others = topic.subscriptions
    if kinds and first.kind not in kinds:
        first = replace(first, kind=rng.choice(kinds))
    return replace(topic, subscriptions=(first, *others))


def targets(subscription: SubscriptionId) -> tuple[TopicName, TopicName]:
    """Return the retry topic and the dead-letter topic of a subscription."""
    topic = TopicName.parse(subscription.topic)
    return retry_topic(topic, subscription.name), dead_letter_topic(topic, subscription.name)


def _with_remote_targets(topic: TopicPlan) -> TopicPlan:
    """Return the plan with a name of the topic whose bundle holds none of the targets."""
    for number in itertools.count():
        name = f"{topic.name}x{number}"
        subscriptions = tuple(replace(one, id=one.id._replace(topic=name)) for one in topic.subscriptions)
        bundles = {Bundle.of(target) for one in subscriptions for target in targets(one.id)}
        if Bundle.of(TopicName.parse(name)) not in bundles:
            return replace(topic, name=name, subscriptions=subscriptions)
    raise AssertionError("unreachable")


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
