"""An event loop without real time: waits end at once. And each topic is received from alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bindery_broker.topics.retry_topics import RetryTopics
from bindery_broker.topics.topic import Topic
from bindery_pulsar.topic_name import TopicName
from bindery_simulation.instant import InstantLoop
from broker_harness import Harness
from move_parts import RETRY


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"instant": InstantLoop}


@pytest.fixture(autouse=True)
def topics_are_received_from_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive delivers only from the topic that it names, so that a test sees in which topic each message is.

    The tests of `topics.retried` and those of consuming retries over HTTP receive from both.
    """

    async def find(_self: RetryTopics, _link: Any) -> None:
        return None

    monkeypatch.setattr(RetryTopics, "find", find)


@pytest.fixture
async def target(broker: Harness) -> Topic:
    """The retry topic, with its subscription and an open ledger: faults of the first add are not those of its start."""
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    topic = await broker.broker.topic(TopicName.parse("t-s-RETRY"))
    assert topic.ledger._writer is not None
    await topic.ledger._writer.start()
    return topic
