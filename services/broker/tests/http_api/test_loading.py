"""Topics come and go: opened by one task at a time, whatever fails on the way."""

import asyncio
from typing import Any

from bindery_broker import topics as topics_module
from bindery_broker.topic_name import TopicName
from bindery_core.errors import MetadataUnavailable
from broker_harness import Harness

NAME = TopicName.parse("public/default/t")


async def test_a_topic_is_opened_by_one_task_at_a_time(broker: Harness, monkeypatch):
    """Also when the first one fails and another comes just then."""
    await broker.produce("a")
    topics = broker.broker.topics
    (topic,) = topics
    await topic.close()
    open_really = topics_module.ManagedLedger.open
    inside = most = calls = 0

    async def opened(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, most, calls
        calls += 1
        fails = calls == 1
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(0.01)
            if fails:
                raise MetadataUnavailable("made up")
            return await open_really(*args, **kwargs)
        finally:
            inside -= 1

    monkeypatch.setattr(topics_module.ManagedLedger, "open", opened)
    tasks = [asyncio.create_task(topics.get(NAME)) for _ in range(2)]
    await asyncio.wait(tasks[:1])
    tasks.append(asyncio.create_task(topics.get(NAME)))
    failed, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, MetadataUnavailable)
    assert second is third
    assert topics.loaded(NAME) is second
    assert most == 1


async def test_a_cursor_has_one_subscription(broker: Harness, monkeypatch):
    await broker.produce("a")
    (topic,) = broker.broker.topics
    open_really = topic.ledger.open_cursor
    calls = 0

    async def opened(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        fails = calls == 1
        await asyncio.sleep(0.01)
        if fails:
            raise MetadataUnavailable("made up")
        return await open_really(*args, **kwargs)

    monkeypatch.setattr(topic.ledger, "open_cursor", opened)
    tasks = [asyncio.create_task(topic.subscribe("s")) for _ in range(2)]
    await asyncio.wait(tasks[:1])
    tasks.append(asyncio.create_task(topic.subscribe("s")))
    failed, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, MetadataUnavailable)
    assert isinstance(second, tuple)
    assert isinstance(third, tuple)
    assert second[0] is third[0]
    assert [second[1], third[1]] == [True, False]
