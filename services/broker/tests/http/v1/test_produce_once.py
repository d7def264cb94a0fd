"""A repeated produce request stores nothing twice: by idempotency key, or by producer and sequence id."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_broker.namespaces.policies import EffectivePolicies, FixedPolicies
from bindery_broker.topics import publishing_once
from bindery_core.errors import AddTimeout, NotEnoughBookies, TopicFenced
from broker_harness import TOPIC, Harness, payloads, problem

MESSAGES = f"{TOPIC}/messages"
NDJSON = {"content-type": "application/x-ndjson"}


def keyed(key: str = "k1", **headers: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **headers}


def lines(*payloads: str, **fields: Any) -> str:
    return "\n".join(json.dumps({"payload": payload, **fields}) for payload in payloads)


async def stored(broker: Harness) -> list[str]:
    answer = await broker.client.get(MESSAGES, params={"max": 1000})
    assert answer.status_code == 200, answer.text
    return payloads(answer.json()["messages"])


async def send(broker: Harness, body: str = "a", *, status: int = 200, **options: Any) -> Any:
    answer = await broker.client.post(MESSAGES, content=body, **options)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
async def successor(tree, ledgers, clock) -> AsyncIterator[Harness]:
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    yield harness
    await harness.close()


# -- idempotency keys


async def test_a_repeated_request_gets_the_same_ids_and_stores_nothing(broker):
    first = await send(broker, headers=keyed())
    assert await send(broker, headers=keyed('"k1"')) == first
    assert await stored(broker) == ["a"]


async def test_another_key_is_another_request(broker):
    first = await send(broker, headers=keyed("k1"))
    assert await send(broker, headers=keyed("k2")) != first
    assert await stored(broker) == ["a", "a"]


async def test_the_ids_of_many_entries_are_the_same(broker):
    body = "\n".join(json.dumps({"payload": str(i), "key": f"k{i // 3 % 2}"}) for i in range(20))
    first = await send(broker, body, headers=keyed(**NDJSON))
    assert len(set(first["message_ids"])) == 20
    assert await send(broker, body, headers=keyed(**NDJSON)) == first
    single = await send(broker, body, headers=keyed("k2", **NDJSON), params={"batch": "false"})
    assert await send(broker, body, headers=keyed("k2", **NDJSON), params={"batch": "false"}) == single
    assert await stored(broker) == [str(i) for i in range(20)] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"content": "b"},
        {"params": {"key": "k"}},
        {"headers": keyed(**{"Bindery-Property-Colour": "red"})},
        {"headers": keyed(**NDJSON), "content": '{"payload": "a"}'},
    ],
    ids=["body", "query", "property", "type"],
)
async def test_the_same_key_with_other_content_is_refused(broker, other):
    await send(broker, headers=keyed())
    answer = await broker.client.post(MESSAGES, **{"content": "a", "headers": keyed(), **other})
    problem(answer, status=422, code="idempotency_key_reused")
    assert await stored(broker) == ["a"]


async def test_a_key_belongs_to_its_topic(broker):
    await send(broker, headers=keyed())
    other = await broker.client.post("/v1/topics/public/default/u/messages", content="b", headers=keyed())
    assert other.status_code == 200


async def test_the_way_of_the_request_does_not_count(broker):
    first = await send(broker, headers=keyed())
    assert await send(broker, headers=keyed(), params={"redirect": "true"}) == first


@pytest.mark.parametrize(
    "key", ["", '"', '""', '"a"b"', "a" * 256, "a\u00e9", '"a', '"a\\b"'], ids=lambda key: key[:5] or "empty"
)
async def test_an_invalid_key_is_refused(broker, key):
    answer = await broker.client.post(MESSAGES, content="a", headers=[(b"idempotency-key", key.encode("latin-1"))])
    problem(answer, status=400, code="bad_request")


async def test_two_keys_are_refused(broker):
    headers = [("idempotency-key", "a"), ("idempotency-key", "a")]
    problem(await broker.client.post(MESSAGES, content="a", headers=headers), status=400, code="bad_request")


async def test_a_quoted_key_may_contain_quotes(broker):
    first = await send(broker, headers=keyed(r'"a\"b"'))
    assert await send(broker, headers=keyed('a"b')) == first


async def test_a_key_is_forgotten_after_the_window(broker):
    await send(broker, headers=keyed())
    broker.clock.advance(299)
    await send(broker, headers=keyed())
    broker.clock.advance(2)
    await send(broker, headers=keyed())
    assert await stored(broker) == ["a", "a"]


async def test_an_invalid_request_does_not_use_up_its_key(broker):
    await send(broker, "{", status=400, headers=keyed(**NDJSON))
    await send(broker, headers=keyed())


async def test_a_new_key_is_refused_at_the_limit(tree, ledgers, clock):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", idempotency_keys_max=2)
    first = await send(broker, headers=keyed("1"))
    await send(broker, headers=keyed("2"))
    answer = await broker.client.post(MESSAGES, content="a", headers=keyed("3"))
    problem(answer, status=429, code="too_many_requests")
    assert answer.headers["retry-after"] == "1"
    assert await send(broker, headers=keyed("1")) == first
    clock.advance(301)
    await send(broker, headers=keyed("3"))
    await broker.close()


async def test_a_concurrent_request_gets_the_answer_of_the_first(broker, monkeypatch):
    await broker.produce("x")
    (topic,) = broker.broker.topics
    really, gate = topic.ledger.submit_many, asyncio.Event()

    def held(entries: Any) -> Any:
        async def later() -> Any:
            await gate.wait()
            return await really(entries)

        return asyncio.ensure_future(later())

    monkeypatch.setattr(topic.ledger, "submit_many", held)
    tasks = [asyncio.create_task(send(broker, headers=keyed())) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    gate.set()
    first, *others = await asyncio.gather(*tasks)
    assert others == [first, first]
    assert await stored(broker) == ["x", "a"]


async def test_a_concurrent_request_is_refused_if_the_first_takes_long(broker, monkeypatch):
    monkeypatch.setattr(publishing_once, "WAIT_S_MAX", 0.05)
    await broker.produce("x")
    (topic,) = broker.broker.topics
    really, gate = topic.ledger.submit_many, asyncio.Event()

    def held(entries: Any) -> Any:
        async def later() -> Any:
            await gate.wait()
            return await really(entries)

        return asyncio.ensure_future(later())

    monkeypatch.setattr(topic.ledger, "submit_many", held)
    first = asyncio.create_task(send(broker, headers=keyed()))
    await asyncio.sleep(0.01)
    answer = await broker.client.post(MESSAGES, content="a", headers=keyed())
    problem(answer, status=409, code="idempotency_key_in_use")
    assert answer.headers["retry-after"] == "1"
    gate.set()
    assert await send(broker, headers=keyed()) == await first


async def test_a_request_continues_without_its_client(broker, monkeypatch):
    await broker.produce("x")
    (topic,) = broker.broker.topics
    really, gate = topic.ledger.submit_many, asyncio.Event()

    def held(entries: Any) -> Any:
        async def later() -> Any:
            await gate.wait()
            return await really(entries)

        return asyncio.ensure_future(later())

    monkeypatch.setattr(topic.ledger, "submit_many", held)
    first = asyncio.create_task(send(broker, headers=keyed()))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    again = await send(broker, headers=keyed())
    assert await stored(broker) == ["x", "a"]
    assert again["message_ids"] == ["0:1:-1:-1"]


async def test_a_refused_write_is_stored_by_the_repeated_request(broker, monkeypatch):
    await broker.produce("x")
    (topic,) = broker.broker.topics

    def refused(_entries: Any) -> Any:
        raise NotEnoughBookies("made up")

    with monkeypatch.context() as patch:
        patch.setattr(topic.ledger, "submit_many", refused)
        await send(broker, status=503, headers=keyed())
        await send(broker, status=503, params={"producer": "p", "sequence_id": 0})
    await send(broker, headers=keyed())
    await send(broker, "b", params={"producer": "p", "sequence_id": 0})
    assert await stored(broker) == ["x", "a", "b"]


@pytest.mark.parametrize("was_stored", [True, False])
@pytest.mark.parametrize("by", [{"headers": keyed()}, {"params": {"producer": "p", "sequence_id": 7}}], ids=["k", "s"])
async def test_an_unknown_outcome_is_found_out_by_the_repeated_request(broker, monkeypatch, was_stored, by):
    await broker.produce("x")
    (topic,) = broker.broker.topics
    really = topic.ledger.submit_many

    def unknown(entries: Any) -> Any:
        async def later() -> Any:
            if was_stored:
                await really(entries)
            raise AddTimeout("made up")

        return asyncio.ensure_future(later())

    with monkeypatch.context() as patch:
        patch.setattr(topic.ledger, "submit_many", unknown)
        await send(broker, status=504, **by)
    answer = await send(broker, **by)
    assert answer["message_ids"] == ["0:1:-1:-1"]
    assert await send(broker, **by) == answer
    assert await stored(broker) == ["x", "a"]


async def test_what_is_missing_of_a_part_answer_is_stored_by_the_repeated_request(broker, monkeypatch):
    await broker.produce("x")
    (topic,) = broker.broker.topics
    monkeypatch.setattr(publishing_once, "parts_of", lambda entries: [(i, i + 1) for i in range(len(entries))])
    really, calls = topic.ledger.submit_many, 0

    def third_fails(entries: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise NotEnoughBookies("made up")
        return really(entries)

    body = lines("a", "b", "c", "d")
    with monkeypatch.context() as patch:
        patch.setattr(topic.ledger, "submit_many", third_fails)
        partly = await send(broker, body, status=207, headers=keyed(**NDJSON), params={"batch": "false"})
    whole = await send(broker, body, headers=keyed(**NDJSON), params={"batch": "false"})
    assert [result.get("message_id") for result in partly["results"]] == [*whole["message_ids"][:2], None, None]
    assert partly["results"][3]["error"]["code"] == "try_again"
    assert await stored(broker) == ["x", "a", "b", "c", "d"]
    assert await send(broker, body, headers=keyed(**NDJSON), params={"batch": "false"}) == whole


# -- sequence ids


async def test_a_message_of_a_producer_is_stored_once(broker):
    first = await send(broker, params={"producer": "p", "sequence_id": 0})
    assert await send(broker, params={"producer": "p", "sequence_id": 0}) == first
    await send(broker, "b", params={"producer": "p", "sequence_id": 1})
    assert await send(broker, params={"producer": "p", "sequence_id": 0}) == first
    await send(broker, "c", params={"producer": "q", "sequence_id": 0})
    assert await stored(broker) == ["a", "b", "c"]


async def test_the_id_of_an_old_message_is_not_known_any_more(broker):
    for number in range(6):
        await send(broker, str(number), params={"producer": "p", "sequence_id": number})
    again = await send(broker, "0", params={"producer": "p", "sequence_id": 0})
    assert again == {"message_ids": ["-1:-1:-1:-1"]}
    assert len(await stored(broker)) == 6


async def test_messages_of_a_request_count_up_from_the_sequence_id_of_the_query(broker):
    first = await send(broker, lines("a", "b", "c"), params={"producer": "p", "sequence_id": 5}, headers=NDJSON)
    assert await send(broker, lines("b", "c", "d"), params={"producer": "p", "sequence_id": 6}, headers=NDJSON) == {
        "message_ids": [*first["message_ids"][1:], "0:1:-1:-1"]
    }
    assert await stored(broker) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("ids", [[1, 1], [2, 1]], ids=str)
async def test_sequence_ids_of_a_request_must_ascend(broker, ids):
    body = "\n".join(json.dumps({"payload": "a"} | ({} if one is None else {"sequence_id": one})) for one in ids)
    answer = await broker.client.post(MESSAGES, content=body, params={"producer": "p"}, headers=NDJSON)
    problem(answer, status=400, code="bad_request")


@pytest.fixture
async def deduplicating(tree, ledgers, clock) -> AsyncIterator[Harness]:
    """A broker whose policies deduplicate all named producers."""
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://three")
    harness.broker.topics.policies = FixedPolicies(EffectivePolicies(deduplication=True))
    yield harness
    await harness.close()


async def test_with_the_policy_the_broker_numbers_the_messages_of_a_producer(deduplicating):
    """As a client of Pulsar does, because a broker of Pulsar would take them for duplicates otherwise."""
    await send(deduplicating, "a", params={"producer": "p"})
    await send(deduplicating, lines("b", "c"), params={"producer": "p"}, headers=NDJSON)
    await send(deduplicating, "d", params={"producer": "p", "sequence_id": 2})
    await send(deduplicating, "e", params={"producer": "p", "sequence_id": 3})
    answer = await deduplicating.client.get(MESSAGES)
    found = [(one["payload"], one["sequence_id"]) for one in answer.json()["messages"]]
    assert found == [("a", 0), ("b", 1), ("c", 2), ("e", 3)]
    mixed = '{"payload": "a"}\n{"payload": "b", "sequence_id": 9}'
    answer = await deduplicating.client.post(MESSAGES, content=mixed, params={"producer": "p"}, headers=NDJSON)
    problem(answer, status=400, code="bad_request")


async def test_a_producer_without_sequence_ids_is_not_deduplicated(broker):
    await send(broker, params={"producer": "p"})
    await send(broker, params={"producer": "p"})
    assert await stored(broker) == ["a", "a"]
    (topic,) = broker.broker.topics
    assert not topic.deduplication.is_stored


# -- other brokers


async def give_up(broker: Harness, how: str) -> None:
    await (broker.die() if how == "die" else broker.broker.close())


@pytest.mark.parametrize("how", ["die", "close"])
async def test_the_next_owner_answers_as_the_first(broker, successor, how):
    body = lines("a", "b")
    by_key = await send(broker, body, headers=keyed(**NDJSON))
    by_sequence = await send(broker, "c", params={"producer": "p", "sequence_id": 3})
    await give_up(broker, how)
    assert await send(successor, body, headers=keyed(**NDJSON)) == by_key
    assert await send(successor, "c", params={"producer": "p", "sequence_id": 3}) in (
        by_sequence,
        {"message_ids": ["-1:-1:-1:-1"]},
    )
    problem(
        await successor.client.post(MESSAGES, content="x", headers=keyed()), status=422, code="idempotency_key_reused"
    )
    assert await stored(successor) == ["a", "b", "c"]


async def test_entries_after_the_snapshot_are_read_again(broker, successor):
    first = await send(broker, "a", headers=keyed("1"))
    (topic,) = broker.broker.topics
    await topic.deduplication.snapshot()
    second = await send(broker, "b", headers=keyed("2"))
    await send(broker, "c", params={"producer": "p", "sequence_id": 1})
    await broker.die()
    assert await send(successor, "a", headers=keyed("1")) == first
    assert await send(successor, "b", headers=keyed("2")) == second
    await send(successor, "c", params={"producer": "p", "sequence_id": 1})
    assert await stored(successor) == ["a", "b", "c"]


async def test_the_cursor_is_no_subscription(broker, successor):
    await send(broker, headers=keyed())
    answer = await broker.client.get(f"{TOPIC}/subscriptions")
    assert answer.json()["subscriptions"] == []
    problem(await broker.receive_raw(sub="pulsar.dedup"), status=400, code="bad_request")
    await broker.broker.close()
    await send(successor, headers=keyed())
    assert (await successor.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"] == []


async def test_a_request_whose_topic_is_lost_is_tried_again_at_the_next_owner(broker, monkeypatch):
    """The outcome of the first attempt is unknown, but it may be repeated: so it is, and the client does not see it."""
    await broker.produce("x")
    (topic,) = broker.broker.topics
    really, calls = topic.ledger.submit_many, 0

    def lost(entries: Any) -> Any:
        nonlocal calls
        calls += 1

        async def later() -> Any:
            positions = await really(entries)
            if calls == 1:
                raise TopicFenced("made up")
            return positions

        return asyncio.ensure_future(later())

    monkeypatch.setattr(topic.ledger, "submit_many", lost)
    assert await send(broker, headers=keyed()) == {"message_ids": ["0:1:-1:-1"]}
    assert calls == 1
    assert await stored(broker) == ["x", "a"]


# -- the last sequence id


async def last_of(broker: Harness, producer: str) -> int:
    answer = await broker.client.get(f"{TOPIC}/producers/{producer}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["producer"] == producer
    return int(answer.json()["last_sequence_id"])


async def test_a_producer_that_restarts_learns_what_is_stored(broker, successor):
    await send(broker, params={"producer": "p", "sequence_id": "41"})
    await send(broker, params={"producer": "q", "sequence_id": "7"})
    await send(broker, params={"producer": "unnumbered"})
    assert [await last_of(broker, name) for name in ("p", "q", "unnumbered", "nobody")] == [41, 7, -1, -1]
    await broker.die()
    assert [await last_of(successor, name) for name in ("p", "q", "nobody")] == [41, 7, -1]


async def test_asking_for_a_producer_keeps_nothing(broker):
    await send(broker)
    assert await last_of(broker, "nobody") == -1
    topic = next(iter(broker.broker.topics))
    assert not topic.deduplication.is_stored


async def test_a_producer_of_no_topic_is_not_found(broker):
    problem(await broker.client.get(f"{TOPIC}/producers/p"), status=404, code="no_such_topic")
    await send(broker)
    problem(await broker.client.get(f"{TOPIC}/producers/%0A"), status=400, code="bad_request")
    problem(await broker.client.get(f"{TOPIC}/producers/{'x' * 257}"), status=400, code="bad_request")
