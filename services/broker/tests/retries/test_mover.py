"""The mover over topics in memory: outcomes that are unknown, refused targets, and changes during a move."""

import asyncio
import functools
from typing import Any

import pytest
from bindery_core.errors import NotEnoughBookies
from broker_harness import Harness, problem
from move_parts import RETRY, SUB, Results, before, fail_add, held, intents, retry, texts


@pytest.mark.parametrize("stored", [True, False])
async def test_a_message_with_an_unknown_outcome_is_held_until_the_target_is_read(stored, broker, target, ledgers):
    (message_id,) = await held(broker, "a")

    before(target, functools.partial(fail_add, ledgers, stored=stored))
    problem(await retry(broker, [message_id]), status=504, code="add_timeout")
    assert intents(broker) == ["move-1"]
    broker.clock.advance(100_000)
    await asyncio.sleep(30)
    assert await texts(broker) == [], "it is not known whether there is a copy"
    assert intents(broker) == ["move-1"]
    ledgers._faults.clear()
    await asyncio.sleep(30)
    assert intents(broker) == []
    places = (await texts(broker), await texts(broker, RETRY))
    assert places == (([], ["a"]) if stored else (["a"], []))


async def test_a_message_with_an_unknown_outcome_is_settled_before_consumers_of_another_type_get_it(
    broker, target, ledgers
):
    (message_id,) = await held(broker, "a")

    before(target, functools.partial(fail_add, ledgers))
    problem(await retry(broker, [message_id]), status=504, code="add_timeout")
    await broker.client.delete(f"{SUB}/consumers/c1")
    answer = await broker.receive_raw("z", type="key_shared")
    assert problem(answer, status=503, code="try_again")["detail"].startswith("whether messages were moved to another")
    ledgers._faults.clear()
    await asyncio.sleep(30)
    assert await texts(broker, type="key_shared") == []
    assert await texts(broker, RETRY) == ["a"]


async def test_the_next_move_settles_the_last_one_first(broker, target, ledgers):
    first, second = await held(broker, "a", "b")

    before(target, functools.partial(fail_add, ledgers))
    problem(await retry(broker, [first]), status=504, code="add_timeout")
    problem(await retry(broker, [second]), status=503, code="try_again")
    assert intents(broker) == ["move-1"]
    ledgers._faults.clear()
    await asyncio.sleep(30)
    assert (await retry(broker, [first])).json()["acknowledged"] == [first]
    broker.clock.advance(10)
    assert await texts(broker) == ["b"], "the message that was refused is delivered again"
    assert (await retry(broker, [second])).json()["moved"][0]["message_id"] == second
    assert await texts(broker, RETRY) == ["a", "b"]


async def test_messages_that_the_target_refuses_are_delivered_again_after_growing_delays(broker, target):
    (message_id,) = await held(broker, "a")
    for delay_s in (1, 2, 4):

        async def refuse(*_: Any, **__: Any) -> Results:
            raise NotEnoughBookies("made up")

        target.publish = refuse  # type: ignore[method-assign]
        problem(await retry(broker, [message_id]), status=503, code="not_enough_bookies")
        assert intents(broker) == []
        broker.clock.advance(delay_s - 0.5)
        assert await texts(broker) == []
        broker.clock.advance(1)
        assert await texts(broker) == ["a"]
    del target.publish
    assert (await retry(broker, [message_id])).json()["moved"]
    assert await texts(broker, RETRY) == ["a"]


async def test_a_message_that_is_too_large_with_its_new_properties_stays_with_its_consumer(broker, target):
    first, second = await held(broker, "a", "b")
    huge = {str(number): "x" * 60_000 for number in range(5)}
    await broker.produce("c")
    problem(await retry(broker, [first], properties=huge), status=413, code="too_large")
    broker.clock.advance(2)
    assert await texts(broker) == ["c"]
    answer = (await retry(broker, [first, second])).json()
    assert [moved["message_id"] for moved in answer["moved"]] == [first, second]


async def test_a_seek_during_a_move_delivers_the_messages_again(broker, target):
    message_ids = await held(broker, "a", "b")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seeks: list[asyncio.Task[Any]] = []

    def seek() -> None:
        seeks.append(asyncio.create_task(broker.post(f"{SUB}/seek", {"message_id": "earliest"})))
        asyncio.get_running_loop().call_later(1, gate.set_result, None)

    before(target, seek, wait=gate)
    answer = await retry(broker, message_ids)
    assert [moved["message_id"] for moved in answer.json()["moved"]] == message_ids
    assert (await seeks[0]).status_code == 200
    assert intents(broker) == []
    assert await texts(broker) == ["a", "b"], "what was sought back to is not acknowledged by the move"
    assert await texts(broker, RETRY) == ["a", "b"]


async def test_a_seek_forgets_messages_with_an_unknown_outcome(broker, target, ledgers):
    message_ids = await held(broker, "a")

    before(target, functools.partial(fail_add, ledgers))
    problem(await retry(broker, message_ids), status=504, code="add_timeout")
    assert (await broker.post(f"{SUB}/seek", {"message_id": "earliest"})).status_code == 200
    assert intents(broker) == []
    assert await texts(broker) == ["a"]


async def test_messages_of_a_move_whose_target_was_deleted_are_delivered_again(broker, target, tree, ledgers, clock):
    message_ids = await held(broker, "a")

    before(target, functools.partial(fail_add, ledgers))
    problem(await retry(broker, message_ids), status=504, code="add_timeout")
    ledgers._faults.clear()
    await broker.client.delete(RETRY, params={"force": "true"})
    await asyncio.sleep(30)
    assert intents(broker) == []
    assert await texts(broker) == ["a"]


async def test_a_move_continues_if_its_caller_has_gone(broker, target):
    (message_id,) = await held(broker, "a")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    call = asyncio.create_task(retry(broker, [message_id]))
    await reached.wait()
    call.cancel()
    await asyncio.sleep(1)
    gate.set_result(None)
    await asyncio.sleep(1)
    broker.clock.advance(100_000)
    assert await texts(broker) == []
    assert await texts(broker, RETRY) == ["a"]


async def test_messages_that_are_being_moved_are_delivered_to_nobody(broker, target):
    assert await texts(broker) == []  # so that the type is known
    message_ids = await broker.produce("a", "b", "c")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    call = asyncio.create_task(retry(broker, [message_ids[1]]))  # not read before
    await reached.wait()
    assert await texts(broker) == ["a", "c"]
    gate.set_result(None)
    assert (await call).json()["moved"]
    assert await texts(broker) == []


async def test_a_retry_that_waits_continues_if_the_type_of_the_subscription_changes(broker, target):
    first, second = await held(broker, "a", "b")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reached = asyncio.Event()
    before(target, reached.set, wait=gate)
    calls = [asyncio.create_task(retry(broker, [first]))]
    await reached.wait()
    calls.append(asyncio.create_task(retry(broker, [second])))
    await asyncio.sleep(1)
    await broker.client.delete(f"{SUB}/consumers/c1")
    receiving = asyncio.create_task(texts(broker, type="exclusive"))
    await asyncio.sleep(1)
    gate.set_result(None)
    for call in calls:
        assert len((await call).json()["moved"]) == 1
    assert await receiving == []
    assert await texts(broker, RETRY) == ["a", "b"]


async def test_an_unexpected_error_of_the_target_is_an_unknown_outcome(broker, target):
    (message_id,) = await held(broker, "a")

    async def fail(*_: Any, **__: Any) -> Results:
        raise RuntimeError("made up")

    target.publish = fail  # type: ignore[method-assign]
    problem(await retry(broker, [message_id]), status=504, code="outcome_unknown")
    del target.publish
    await asyncio.sleep(10)
    assert await texts(broker) == ["a"]
    assert intents(broker) == []


async def test_a_delayed_message_that_is_refused_keeps_its_delay(broker, target):
    await broker.client.put(SUB, json={})
    (message_id,) = await broker.produce("a", params={"deliver_after_ms": 60_000})
    assert await texts(broker) == []

    async def refuse(*_: Any, **__: Any) -> Results:
        raise NotEnoughBookies("made up")

    target.publish = refuse  # type: ignore[method-assign]
    problem(await retry(broker, [message_id]), status=503, code="not_enough_bookies")
    broker.clock.advance(30)
    assert await texts(broker) == []
    broker.clock.advance(31)
    assert await texts(broker) == ["a"]


async def test_a_target_whose_owner_does_not_answer_is_refused(broker, tree, ledgers, clock):
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    await other.client.put(f"{RETRY}/subscriptions/s", json={})
    (message_id,) = await held(broker, "a")
    problem(await retry(broker, [message_id]), status=503, code="try_again")
    assert intents(broker) == []
    broker.clock.advance(2)
    assert await texts(broker) == ["a"]
    await other.close()
