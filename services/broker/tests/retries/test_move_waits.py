"""What calls wait for while messages are moved, what the moves hold meanwhile, and what is delivered after refusals."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from bindery_broker.retries.intents import names_of_intents
from bindery_broker.topics.topic import Topic
from bindery_client.memory.memory import MemoryLedgers
from bindery_core.errors import AddTimeout, BookieUnavailable, NotEnoughBookies
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

RETRY = f"{TOPIC}-s-RETRY"
SUB = f"{TOPIC}/subscriptions/s"
LONG_MS = 3_600_000
"""Lease and session of consumers, in milliseconds."""
Results = list[Any]


@pytest.fixture
async def target(broker: Harness) -> Topic:
    """The retry topic, with its subscription."""
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    return await broker.broker.topic(TopicName.parse("t-s-RETRY"))


async def held(broker: Harness, *texts: str, **fields: Any) -> list[str]:
    """Produce messages, and let a consumer hold them. Returns their ids."""
    await broker.produce(*texts)
    return ids(await broker.receive(ack_timeout_ms=LONG_MS, session_ttl_ms=LONG_MS, **fields))


async def retry(broker: Harness, message_ids: list[str], **fields: Any) -> Any:
    return await broker.post(f"{SUB}/retry", {"message_ids": message_ids, **fields})


async def texts(broker: Harness, topic: str = TOPIC, **fields: Any) -> list[str]:
    fields = {"ack_timeout_ms": LONG_MS, "session_ttl_ms": LONG_MS, **fields}
    return payloads(await broker.receive("z", topic=topic, **fields))


def intents(broker: Harness) -> list[str]:
    topic = broker.broker.topics.loaded(TopicName.parse("t"))
    assert topic is not None
    return names_of_intents(topic.ledger.cursors["s"].blobs)


def before(topic: Topic, action: Callable[[], Any], *, wait: Awaitable[Any] | None = None) -> None:
    """Run `action` when the next message is published to the topic, then wait for `wait`, then publish it."""
    publish = topic.publish

    async def hooked(*arguments: Any, **options: Any) -> Results:
        topic.publish = publish  # type: ignore[method-assign]
        action()
        if wait is not None:
            await wait
        return list(await publish(*arguments, **options))

    topic.publish = hooked  # type: ignore[method-assign]


def fail_add(ledgers: MemoryLedgers, *, stored: bool = True) -> None:
    """Let the next add fail, so that nobody can find out whether it is stored."""
    ledgers.fail_next("add", AddTimeout("made up"), stored=stored)
    for operation in ("open", "close", "create"):
        ledgers.fail_next(operation, BookieUnavailable("made up"), count=1_000_000)


async def test_a_repeated_retry_holds_what_the_settling_released(broker, target, ledgers):
    (message_id,) = await held(broker, "a")
    before(target, functools.partial(fail_add, ledgers, stored=False))
    answer = await retry(broker, [message_id])
    assert answer.status_code == 504
    ledgers._faults.clear()
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    call = asyncio.create_task(retry(broker, [message_id]))
    await reached.wait()
    assert len(intents(broker)) == 1
    got = await texts(broker)
    gate.set_result(None)
    moved = (await call).json()
    assert moved["moved"]
    assert got == [], "delivered while its copy is being written"


async def test_a_refused_message_of_a_batch_that_is_read_in_parts_is_delivered_again(broker, target):
    assert await texts(broker) == []
    message_ids = await broker.produce_batch(*map(str, range(2500)))
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()

    async def refuse(*_: Any, **__: Any) -> Any:
        reached.set()
        await gate
        raise NotEnoughBookies("made up")

    target.publish = refuse
    call = asyncio.create_task(retry(broker, [message_ids[5], message_ids[2400]]))
    await reached.wait()
    got = await texts(broker, max=10)
    gate.set_result(None)
    assert (await call).status_code == 503
    broker.clock.advance(10)
    for _ in range(4):
        got += await texts(broker, max=1000)
    assert sorted(got) == sorted(map(str, range(2500)))


async def test_a_receive_ends_although_a_move_must_end_before_the_first_read(broker, target):
    await broker.client.put(SUB, json={})
    (message_id,) = await broker.produce("a")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    call = asyncio.create_task(retry(broker, [message_id]))
    await reached.wait()
    loop = asyncio.get_running_loop()
    began = loop.time()
    problem(await broker.receive_raw("z"), status=503, code="try_again")
    assert loop.time() - began < 30
    gate.set_result(None)
    assert (await call).json()["moved"]


async def test_a_receive_ends_in_time_although_a_dead_letter_cannot_be_written(broker):
    await broker.client.put(f"{TOPIC}-s-DLQ/subscriptions/dead-letters", json={})
    dlq = await broker.broker.topic(TopicName.parse("t-s-DLQ"))
    await held(broker, "a")
    policy = {"max_redeliver": 0}
    await broker.post(f"{SUB}/nack", {"message_ids": ids(await held(broker))})
    topic = broker.broker.topics.loaded(TopicName.parse("t"))
    (portion,) = topic.subscriptions["s"].dispatcher._table
    message_id = f"{portion.position.ledger_id}:{portion.position.entry_id}:-1"
    await broker.post(f"{SUB}/nack", {"message_ids": [message_id]})
    loop = asyncio.get_running_loop()
    gate = loop.create_future()
    before(dlq, lambda: loop.call_later(600, gate.set_result, None), wait=gate)
    began = loop.time()
    answer = await broker.receive_raw(wait_ms=0, dead_letter=policy)
    assert answer.status_code == 200, answer.text
    assert loop.time() - began < 60, loop.time() - began


async def test_a_retry_that_waits_holds_only_the_bytes_of_its_messages(broker, target):
    (message_id,) = await held(broker, "a")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    call = asyncio.create_task(retry(broker, [message_id]))
    await reached.wait()
    used = broker.broker.topics.responses.used
    gate.set_result(None)
    await call
    assert used < 2**20, used
