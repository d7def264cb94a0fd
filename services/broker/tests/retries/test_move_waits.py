"""What calls wait for while messages are moved, what the moves hold meanwhile, and what is delivered after refusals."""

import asyncio
import functools
from typing import Any

from bindery_core.errors import NotEnoughBookies
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, ids, problem
from move_parts import SUB, before, fail_add, held, intents, retry, texts


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
