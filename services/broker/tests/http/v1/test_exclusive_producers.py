"""A producer that has a topic exclusively over HTTP: others are refused, and fencing outlives brokers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_broker.errors import ProducerBusy
from bindery_broker.producers import holding
from bindery_broker.producers.holding import EPOCH_PROPERTY, HOLDER_PROPERTY
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable
from broker_harness import TOPIC, Harness, payloads

MESSAGES = f"{TOPIC}/messages"
BODY = '{"access_mode": "exclusive"}'


@pytest.fixture
async def successor(tree: Any, ledgers: Any, clock: Any) -> AsyncIterator[Harness]:
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    yield harness
    await harness.close()


async def take(broker: Harness, producer: str = "p", mode: str = "exclusive", *, status: int = 200) -> Any:
    answer = await broker.client.put(f"{TOPIC}/producers/{producer}/access", json={"access_mode": mode})
    assert answer.status_code == status, answer.text
    return answer.json()


async def taken(broker: Harness, producer: str = "p", mode: str = "exclusive") -> int:
    return int((await take(broker, producer, mode))["producer_epoch"])


async def send(broker: Harness, text: str, **query: Any) -> str | None:
    """Send a message. Returns the code of the refusal; None: it is stored."""
    answer = await broker.client.post(MESSAGES, content=text, params=query)
    return None if answer.status_code == 200 else str(answer.json()["code"])


async def stored(broker: Harness) -> list[str]:
    return payloads((await broker.client.get(MESSAGES, params={"max": 1000})).json()["messages"])


async def test_only_the_producer_that_has_the_topic_stores_messages(broker: Harness) -> None:
    await broker.produce("before")
    epoch = await taken(broker)
    assert epoch == 1
    assert await send(broker, "a", producer="p", producer_epoch=epoch) is None
    assert await send(broker, "b") == "producer_busy"
    assert await send(broker, "c", producer="q") == "producer_busy"
    assert await send(broker, "d", producer="p") == "producer_busy"
    assert await send(broker, "e", producer="q", producer_epoch=epoch) == "producer_fenced"
    assert await stored(broker) == ["before", "a"]


async def test_exclusive_is_refused_while_another_producer_has_the_topic(broker: Harness) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    assert (await take(broker, "q", status=409))["code"] == "producer_fenced"
    assert await send(broker, "a", producer="p", producer_epoch=epoch) is None


async def test_a_fenced_producer_stores_nothing(broker: Harness) -> None:
    await broker.produce("x")
    first = await taken(broker)
    second = await taken(broker, "q", "exclusive_with_fencing")
    assert second > first
    for query in ({}, {"sequence_id": 5}):
        assert await send(broker, "old", producer="p", producer_epoch=first, **query) == "producer_fenced"
    keyed = await broker.client.post(
        MESSAGES, content="old", params={"producer": "p", "producer_epoch": first}, headers={"Idempotency-Key": "k"}
    )
    assert (keyed.status_code, keyed.json()["code"]) == (409, "producer_fenced")
    assert await send(broker, "new", producer="q", producer_epoch=second) is None
    assert await stored(broker) == ["x", "new"]


async def test_a_producer_that_takes_the_topic_again_fences_its_former_requests(broker: Harness) -> None:
    await broker.produce("x")
    first, second = await taken(broker), await taken(broker)
    assert await send(broker, "old", producer="p", producer_epoch=first) == "producer_fenced"
    assert await send(broker, "new", producer="p", producer_epoch=second) is None


async def test_fencing_survives_a_restart_of_the_broker(broker: Harness, successor: Harness) -> None:
    await broker.produce("x")
    first = await taken(broker)
    second = await taken(broker, "q", "exclusive_with_fencing")
    await broker.close()
    assert await send(successor, "old", producer="p", producer_epoch=first) == "producer_fenced"
    assert await send(successor, "shared") == "producer_busy"
    assert (await take(successor, "r", status=409))["code"] == "producer_fenced"
    assert await send(successor, "new", producer="q", producer_epoch=second) is None
    assert await stored(successor) == ["x", "new"]


async def test_fencing_survives_a_kill_and_a_move(broker: Harness, successor: Harness) -> None:
    await broker.produce("x")
    first = await taken(broker)
    await broker.die()
    second = await taken(successor, "q", "exclusive_with_fencing")
    assert second > first
    assert await send(successor, "old", producer="p", producer_epoch=first) == "producer_fenced"
    assert await send(successor, "new", producer="q", producer_epoch=second) is None
    assert await stored(successor) == ["x", "new"]


async def test_a_released_topic_takes_messages_of_all_and_of_no_former_epoch(
    broker: Harness, successor: Harness
) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    path = f"{TOPIC}/producers/p/access"
    refused = await broker.client.delete(path, params={"producer_epoch": epoch + 1})
    assert (refused.status_code, refused.json()["code"]) == (409, "producer_fenced")
    assert (await broker.client.delete(path, params={"producer_epoch": epoch})).json() == {"released": True}
    assert (await broker.client.delete(path)).json() == {"released": False}
    for owner in (broker, successor):
        assert await send(owner, "shared") is None
        assert await send(owner, "old", producer="p", producer_epoch=epoch) == "producer_fenced"
        await broker.close()
    assert await taken(successor, "q") == epoch + 1


async def test_the_epoch_is_stored_as_pulsar_does(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    epoch = await taken(broker, "q:1", "exclusive_with_fencing")
    (topic,) = broker.broker.topics
    assert topic.ledger.properties == {EPOCH_PROPERTY: str(epoch), HOLDER_PROPERTY: f"{epoch}:q:1"}
    assert topic.hold.holder == "q:1"


async def test_an_epoch_that_a_pulsar_broker_has_raised_ends_the_hold(broker: Harness, successor: Harness) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    (topic,) = broker.broker.topics
    await topic.ledger.set_properties({EPOCH_PROPERTY: str(epoch + 1)})
    await broker.close()
    assert await send(successor, "old", producer="p", producer_epoch=epoch) == "producer_fenced"
    assert await send(successor, "shared") is None
    assert await taken(successor, "q") == epoch + 2


async def test_a_take_that_is_not_stored_changes_nothing(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    (topic,) = broker.broker.topics

    async def fail(_records: object, **_: object) -> None:
        raise MetadataUnavailable("made up")

    with monkeypatch.context() as patch:
        patch.setattr(topic.ledger, "_write_ledgers", fail)
        answer = await broker.client.put(f"{TOPIC}/producers/q/access", json={"access_mode": "exclusive_with_fencing"})
        assert answer.status_code == 503
    assert await send(broker, "a", producer="p", producer_epoch=epoch) is None
    assert topic.ledger.properties[EPOCH_PROPERTY] == str(epoch)


async def test_a_take_of_unknown_outcome_fences_the_former_producer(
    broker: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    (topic,) = broker.broker.topics

    async def fail(_records: object, **_: object) -> None:
        raise MetadataOutcomeUnknown("made up")

    with monkeypatch.context() as patch:
        patch.setattr(topic.ledger, "_write_ledgers", fail)
        answer = await broker.client.put(f"{TOPIC}/producers/q/access", json={"access_mode": "exclusive_with_fencing"})
        assert answer.status_code == 504
    assert await send(broker, "old", producer="p", producer_epoch=epoch) == "producer_fenced"
    second = await taken(broker, "q")
    assert second == epoch + 2
    assert await send(broker, "new", producer="q", producer_epoch=second) is None


async def test_a_request_that_is_overtaken_by_a_fencing_one_stores_nothing(broker: Harness) -> None:
    """The former producer was admitted, and waits for the publish rate, when the next one takes the topic."""
    await broker.produce("x")
    epoch = await taken(broker)
    (topic,) = broker.broker.topics
    entered, go_on = asyncio.Event(), asyncio.Event()
    admission = broker.broker.topics.admission(topic)

    async def admit(*_args: object, **_options: object) -> None:
        entered.set()
        await go_on.wait()

    admission.admit = admit  # type: ignore[method-assign]
    waiting = asyncio.create_task(send(broker, "old", producer="p", producer_epoch=epoch))
    await entered.wait()
    await taken(broker, "q", "exclusive_with_fencing")
    go_on.set()
    assert await waiting == "producer_fenced"
    assert await stored(broker) == ["x"]


async def wait_for(broker: Harness, producer: str, wait_ms: int = 30_000) -> tuple[int, Any]:
    body = {"access_mode": "wait_for_exclusive", "wait_ms": wait_ms}
    answer = await broker.client.put(f"{TOPIC}/producers/{producer}/access", json=body)
    return answer.status_code, answer.json()


async def queued(broker: Harness, *producers: str) -> list[asyncio.Task[tuple[int, Any]]]:
    """Begin to wait, one after another."""
    tasks = []
    hold = next(one for one in broker.broker.topics if one.name.short == "public/default/t").hold
    for producer in producers:
        tasks.append(asyncio.create_task(wait_for(broker, producer)))
        while not any(turn.producer == producer and turn.error is None for turn in hold._waiting):
            await asyncio.sleep(0)
    return tasks


async def release(broker: Harness, producer: str) -> None:
    answer = await broker.client.delete(f"{TOPIC}/producers/{producer}/access")
    assert answer.json() == {"released": True}


async def test_waiting_producers_get_the_topic_in_order_of_arrival(broker: Harness) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    q, r = await queued(broker, "q", "r")
    assert await send(broker, "a", producer="p", producer_epoch=epoch) is None
    assert await send(broker, "shared") == "producer_busy"
    await release(broker, "p")
    status, answer = await q
    assert (status, answer["producer_epoch"]) == (200, epoch + 1)
    assert not r.done()
    # Those that wait come before all others.
    assert (await take(broker, "s", status=409))["code"] == "producer_fenced"
    assert await send(broker, "old", producer="p", producer_epoch=epoch) == "producer_fenced"
    await release(broker, "q")
    assert await r == (200, {"producer": "r", "producer_epoch": epoch + 2})
    await release(broker, "r")
    assert await send(broker, "shared") is None


async def test_a_free_topic_is_taken_without_waiting(broker: Harness) -> None:
    await broker.produce("x")
    assert await wait_for(broker, "p", 0) == (200, {"producer": "p", "producer_epoch": 1})
    assert await wait_for(broker, "p", 0) == (200, {"producer": "p", "producer_epoch": 2})


async def test_the_end_of_the_wait_is_reported_with_what_to_do(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    status, answer = await wait_for(broker, "q", 1)
    assert (status, answer["code"]) == (409, "producer_busy")
    assert "exclusive_with_fencing" in answer["detail"]
    assert answer["facts"]["holder"] == "p"
    await release(broker, "p")
    assert await send(broker, "shared") is None  # nobody waits any more


async def test_fencing_ends_the_waiting_of_others(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    q, r = await queued(broker, "q", "r")
    assert await taken(broker, "s", "exclusive_with_fencing") == 2
    for waiting in (q, r):
        status, answer = await waiting
        assert (status, answer["code"], answer["facts"]["holder"]) == (409, "producer_fenced", "s")


async def test_a_repeated_wait_keeps_the_place(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    first, r = await queued(broker, "q", "r")
    (again,) = await queued(broker, "q")
    status, answer = await first
    assert (status, answer["code"]) == (409, "producer_busy")
    await release(broker, "p")
    assert (await again)[1]["producer_epoch"] == 2
    await release(broker, "q")
    assert (await r)[1]["producer_epoch"] == 3


async def test_a_client_that_disconnects_leaves_the_queue(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    (topic,) = broker.broker.topics
    q, r = await queued(broker, "q", "r")
    topic.hold.end_waiting(ProducerBusy("gone"), producer="q")
    assert (await q)[0] == 409
    await release(broker, "p")
    assert (await r)[0] == 200


async def test_the_holder_that_waits_goes_before_others(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    (q,) = await queued(broker, "q")
    assert await wait_for(broker, "p", 0) == (200, {"producer": "p", "producer_epoch": 2})
    assert not q.done()
    await release(broker, "p")
    assert (await q)[1]["producer_epoch"] == 3


async def test_the_number_of_waiting_producers_is_bounded(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "WAITING_MAX", 1)
    await broker.produce("x")
    await taken(broker)
    (q,) = await queued(broker, "q")
    assert (await wait_for(broker, "r"))[0] == 429
    await release(broker, "p")
    assert (await q)[0] == 200


async def test_a_broker_that_stops_answers_those_that_wait(broker: Harness) -> None:
    await broker.produce("x")
    await taken(broker)
    (q,) = await queued(broker, "q")
    broker.broker.finish()
    assert (await q)[0] == 503


async def test_a_wait_at_another_broker_is_answered_by_the_owner(pair: tuple[Harness, Harness]) -> None:
    """Through the other broker, so that it passes the request on again."""
    one, two = pair
    await one.produce("x")
    await taken(one)
    hold = next(iter(one.broker.topics)).hold
    waiting = asyncio.create_task(wait_for(two, "q"))
    while not hold._waiting:
        await asyncio.sleep(0)
    await release(two, "p")
    assert await waiting == (200, {"producer": "q", "producer_epoch": 2})
    assert await send(one, "a", producer="q", producer_epoch=2) is None
    assert await send(two, "b", producer="p", producer_epoch=1) == "producer_fenced"


async def test_messages_are_not_moved_into_a_topic_that_a_producer_has(broker: Harness) -> None:
    """As a client of Pulsar could not connect a producer to move them."""
    dead = "/v1/topics/public/default/t-s-DLQ"
    await broker.produce("x")
    (got,) = await broker.receive()
    assert (await broker.client.put(dead)).status_code == 201
    body = {"access_mode": "exclusive"}
    assert (await broker.client.put(f"{dead}/producers/p/access", json=body)).status_code == 200
    move = {"message_ids": [got["message_id"]], "max_redeliver": 0}
    answer = await broker.client.post(f"{TOPIC}/subscriptions/s/retry", json=move)
    assert "exclusively" in answer.text, answer.text
    assert (await broker.client.get(f"{dead}/messages")).json()["messages"] == []
    assert (await broker.client.delete(f"{dead}/producers/p/access")).json() == {"released": True}
    answer = await broker.client.post(f"{TOPIC}/subscriptions/s/retry", json=move)
    assert answer.status_code == 200, answer.text
    assert payloads((await broker.client.get(f"{dead}/messages")).json()["messages"]) == ["x"]


async def test_the_holder_is_shown(broker: Harness) -> None:
    await broker.produce("x")
    epoch = await taken(broker)
    path = f"{TOPIC}/producers"
    assert (await broker.client.get(f"{path}/p")).json()["producer_epoch"] == epoch
    assert (await broker.client.get(f"{path}/q")).json()["producer_epoch"] is None


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("PUT", "/producers/p/access", {"json": {"access_mode": "shared"}}, 400),
        ("PUT", "/producers/p/access", {"json": {}}, 400),
        *(
            ("PUT", "/producers/p/access", {"content": BODY, "headers": {"content-type": media_type}}, 415)
            for media_type in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", "")
        ),
        ("POST", "/messages", {"params": {"producer_epoch": 1}, "content": "a"}, 400),
        ("POST", "/messages", {"params": {"producer_epoch": 0, "producer": "p"}, "content": "a"}, 400),
        ("DELETE", "/producers/p/access", {"params": {"producer_epoch": 0}}, 400),
    ],
)
async def test_wrong_requests_are_refused(
    broker: Harness, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    await broker.produce("x")
    answer = await broker.client.request(method, TOPIC + path, **options)
    assert answer.status_code == status, answer.text


async def test_a_topic_that_does_not_exist_is_not_created(broker: Harness) -> None:
    assert (await take(broker, status=404))["code"] == "no_such_topic"


async def test_partitions_are_taken_by_their_names(broker: Harness) -> None:
    (await broker.client.put(f"{TOPIC}/partitions", json={"partitions": 2})).raise_for_status()
    whole = await broker.client.put(f"{TOPIC}/producers/p/access", json={"access_mode": "exclusive"})
    assert 400 <= whole.status_code < 500, whole.text
    one = f"{TOPIC}-partition-0"
    taken_one = await broker.client.put(f"{one}/producers/p/access", json={"access_mode": "exclusive"})
    assert taken_one.json()["producer_epoch"] == 1
    free = await broker.client.post(f"{TOPIC}-partition-1/messages", content="a")
    held = await broker.client.post(f"{one}/messages", content="a")
    assert (free.status_code, held.json()["code"]) == (200, "producer_busy")
