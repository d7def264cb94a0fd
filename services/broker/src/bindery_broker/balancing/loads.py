"""Measure the load of each owned bundle: the rates and numbers of its loaded topics.

Rates are those that the topics count anyway, over the last ten seconds. Nothing is counted for this on the way of a
message. Reading them takes some microseconds per topic, in slices, so that ten thousand topics do not stop the loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from bindery_core.sources import MonotonicClock
from bindery_pulsar.topic_name import TopicName

from bindery_broker.balancing.weights import NO_LOAD
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import BundleLoad
from bindery_broker.topics.topic import Topic

SLICE: Final = 50
"""Number of topics after which other tasks run."""


async def measure(
    bundles: Iterable[Bundle], topics: Iterable[Topic], *, bundle_of: Callable[[TopicName], Bundle], now: MonotonicClock
) -> dict[Bundle, BundleLoad]:
    """Return the load of each of `bundles`, from those of the loaded topics that are in it."""
    sums: dict[Bundle, list[float]] = {bundle: [0.0] * len(NO_LOAD.__struct_fields__) for bundle in bundles}
    for number, topic in enumerate(topics, start=1):
        if topic.is_open and (found := sums.get(bundle_of(topic.name))) is not None:
            _add(found, topic, now())
        if number % SLICE == 0:
            await asyncio.sleep(0)
    return {bundle: _load(*values) for bundle, values in sums.items()}


def _load(
    rate_in: float,
    rate_out: float,
    bytes_in: float,
    bytes_out: float,
    topics: float,
    consumers: float,
    producers: float,
) -> BundleLoad:
    return BundleLoad(
        round(rate_in, 3),
        round(rate_out, 3),
        round(bytes_in, 3),
        round(bytes_out, 3),
        topics=int(topics),
        consumers=int(consumers),
        producers=int(producers),
    )


def _add(values: list[float], topic: Topic, now: float) -> None:
    """Add the load of a topic. `values`: in the order of BundleLoad."""
    came = topic.statistics.published.rates(now)
    values[0] += came.messages
    values[2] += came.bytes
    values[4] += 1
    values[6] += topic.producers_count
    for subscription in topic.subscriptions.values():
        went = subscription.statistics.delivered.rates(now)
        values[1] += went.messages
        values[3] += went.bytes
        values[5] += len(subscription.sessions)
