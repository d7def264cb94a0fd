"""A producer that has a topic exclusively over HTTP: others are refused, and fencing outlives brokers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
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

    async def fail(_records: object) -> None:
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

    async def fail(_records: object) -> None:
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
