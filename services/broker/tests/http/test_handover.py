"""Bundles move between brokers without a failed request: calls that wait, requests that arrive meanwhile, drains."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from bindery_broker.http import at_owner
from bindery_broker.ownership.bundles import Bundle
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem, settle

NAME = TopicName.parse("public/default/t")
BUNDLE = Bundle.of(NAME)
OTHER = next(
    name
    for number in itertools.count()
    if Bundle.of(name := TopicName.parse(f"public/default/other{number}")) != BUNDLE
)


@pytest.fixture(autouse=True)
async def registrations():
    """End the registrations of a test."""
    yield
    tasks, followers = RUNNING
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for follower in followers:
        await follower.close()
    tasks.clear()
    followers.clear()


async def registered(*brokers: Harness) -> None:
    """Register brokers, and let each see the others."""
    tasks, followers = RUNNING
    for broker in brokers:
        tasks.append(asyncio.create_task(broker.broker.balancing.registration.run()))
        broker.broker.balancing.brokers.start()
        followers.append(broker.broker.balancing.brokers)
    async with asyncio.timeout(30):
        while any(len(broker.broker.balancing.brokers.records) < len(brokers) for broker in brokers):
            await asyncio.sleep(0.001)


RUNNING: tuple[list[asyncio.Task[None]], list[Any]] = ([], [])


async def hand_over(broker: Harness) -> bool:
    return await broker.app.drain._handovers.move(BUNDLE)


async def test_the_next_owner_has_the_bundle_and_its_topics_at_once(pair):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    assert await hand_over(one)
    await settle()
    assert (one.broker.ownership.held, two.broker.ownership.held) == ([], [BUNDLE])
    assert two.broker.topics.loaded(NAME) is not None
    assert payloads(await one.receive()) == ["a"]
    assert "bindery_broker_bundles_handed_over_total 1.0" in one.metrics.render().decode()


async def test_nothing_is_handed_over_without_another_broker(pair):
    one, two = pair
    await one.produce("a")
    await registered(one)
    assert not await hand_over(one)
    assert one.broker.ownership.held == [BUNDLE]
    assert one.broker.topics.loaded(NAME) is not None
    assert two.broker.ownership.held == []


async def test_a_call_that_waits_goes_on_at_the_next_owner(pair):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    await one.ack(ids(await one.receive()))
    waiting = asyncio.create_task(one.receive_raw(wait_ms=30_000))
    await settle()
    assert await hand_over(one)
    await settle()
    assert not waiting.done()
    await two.produce("b")
    async with asyncio.timeout(30):
        got = (await waiting).json()["messages"]
    assert payloads(got) == ["b"]
    assert got[0]["redelivery_count"] == 0
    assert payloads(await two.receive("c2")) == [], "leased once"
    assert (await one.ack(ids(got))).json() == {"acknowledged": 1}


async def test_a_call_that_another_broker_has_passed_on_goes_on_at_the_next_owner(pair):
    """The broker that gets the request of the client repeats it: the former owner answers that it is none any more."""
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    await one.ack(ids(await one.receive()))
    waiting = asyncio.create_task(two.receive_raw(wait_ms=30_000))
    await settle()
    assert two.broker.ownership.held == []
    assert await hand_over(one)
    await settle()
    assert not waiting.done()
    await one.produce("b")
    async with asyncio.timeout(30):
        assert payloads((await waiting).json()["messages"]) == ["b"]


async def test_a_call_waits_no_longer_because_its_topic_has_moved(pair, clock):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    await one.ack(ids(await one.receive()))
    waiting = [asyncio.create_task(broker.receive_raw("c", wait_ms=30_000)) for broker in pair]
    await settle()
    clock.advance(40)
    assert await hand_over(one)
    async with asyncio.timeout(30):
        for one_call in waiting:
            assert (await one_call).json()["messages"] == []


async def test_requests_during_a_hand_over_wait_and_are_passed_on(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    closing, may_close = asyncio.Event(), asyncio.Event()
    unload = one.broker.topics.unload

    async def unload_later(bundle):
        closing.set()
        await may_close.wait()
        await unload(bundle)

    monkeypatch.setattr(one.broker.topics, "unload", unload_later)
    moving = asyncio.create_task(hand_over(one))
    await closing.wait()
    produced = [asyncio.create_task(broker.produce("b")) for broker in (one, two, one)]
    reading = asyncio.create_task(one.client.get(f"{TOPIC}/messages"))
    await settle()
    assert not any(task.done() for task in (*produced, reading))
    assert one.broker.running.held >= 3
    may_close.set()
    assert await moving
    async with asyncio.timeout(30):
        await asyncio.gather(*produced)
        assert (await reading).status_code == 200
    assert one.broker.running.held == two.broker.running.held == 0
    assert payloads(await two.receive(max=10)) == ["a", "b", "b", "b"]


async def test_no_more_requests_wait_than_allowed(tree, ledgers, clock, monkeypatch):
    one = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", held_requests_max=2)
    await one.produce("a")
    may_close = asyncio.Event()
    monkeypatch.setattr(one.broker.topics, "unload", lambda _bundle: may_close.wait())
    moving = asyncio.create_task(one.broker.unload(BUNDLE, hold_s=0))
    await settle()
    calls = [asyncio.create_task(one.client.get(TOPIC)) for _ in range(2)]
    await settle()
    problem(await one.client.get(TOPIC), status=503, code="not_owner")
    may_close.set()
    assert await moving
    async with asyncio.timeout(30):
        assert [(await call).status_code for call in calls] == [200, 200]
    await one.close()


async def test_requests_wait_only_for_a_time(tree, ledgers, clock, monkeypatch):
    one = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", held_request_s_max=0.1)
    await one.produce("a")
    may_close = asyncio.Event()
    monkeypatch.setattr(one.broker.topics, "unload", lambda _bundle: may_close.wait())
    moving = asyncio.create_task(one.broker.unload(BUNDLE, hold_s=0))
    await settle()
    async with asyncio.timeout(30):
        problem(await one.client.get(TOPIC), status=503, code="not_owner")
    may_close.set()
    assert await moving
    await one.close()


async def test_operations_in_progress_finish_before_the_topics_are_closed(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    topic = await one.broker.topic(NAME)
    submitted, may_store = asyncio.Event(), asyncio.Event()
    add_many = topic.ledger.add_many

    async def add_later(entries):
        submitted.set()
        await may_store.wait()
        return await add_many(entries)

    monkeypatch.setattr(topic.ledger, "add_many", add_later)
    storing = asyncio.create_task(one.produce("b"))
    await submitted.wait()
    moving = asyncio.create_task(hand_over(one))
    await settle()
    assert topic.is_open
    may_store.set()
    async with asyncio.timeout(30):
        await storing
        assert await moving
    assert payloads(await two.receive(max=10)) == ["a", "b"]


async def test_a_request_that_finds_no_owner_for_long_is_answered_with_503(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    monkeypatch.setattr(two.broker.settings.__class__, "held_request_s_max", 0.3, raising=False)
    two.peers.clear()
    async with asyncio.timeout(60):
        problem(await two.client.get(TOPIC), status=503, code="not_owner")


async def test_a_request_is_repeated_at_the_next_owner_of_a_broker_that_has_died(pair):
    one, two = pair
    await one.produce("a")
    await two.produce("b")  # the owner is remembered
    two.peers.clear()
    asked = asyncio.create_task(two.produce("c"))
    await settle()
    await one.die()
    async with asyncio.timeout(30):
        await asked
    assert two.broker.ownership.held == [BUNDLE]
    assert payloads(await two.receive(max=10)) == ["a", "b", "c"]


async def test_a_request_to_a_former_owner_says_that_it_is_none(pair):
    one, two = pair
    await one.produce("a")
    answer = await two.client.get(TOPIC, headers={"bindery-proxied": "1"})
    problem(answer, status=503, code="not_owner")
    assert answer.headers["bindery-not-owner"] == "1"
    assert "bindery-not-owner" not in (await two.client.get(f"{TOPIC}/messages/9:9")).headers


async def test_a_stream_ends_with_an_event_when_its_topic_moves(pair):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    await one.ack(ids(await one.receive()))
    streaming = asyncio.create_task(one.client.get(f"{TOPIC}/subscriptions/s/stream?consumer=c1"))
    await settle()
    assert await hand_over(one)
    async with asyncio.timeout(30):
        text = (await streaming).text
    assert text.endswith("\n\n")
    assert text.rstrip().splitlines()[-2:][0] == "event: moved"


async def test_a_drain_hands_over_every_bundle_and_the_broker_goes_on_answering(pair):
    one, two = pair
    other = f"/v1/topics/{OTHER.short}"
    await one.produce("a")
    await one.produce("x", topic=other)
    await registered(one, two)
    status = (await two.post("/v1/brokers/one/drain", {})).json()
    assert status["broker"] == "one"
    assert status["state"] == "draining"
    async with asyncio.timeout(30):
        while (status := (await one.client.get("/v1/brokers/local/drain")).json())["state"] != "drained":
            await asyncio.sleep(0.01)
    assert (status["moved"], status["left"], status["blocked"]) == (2, 0, False)
    assert one.broker.ownership.held == []
    assert set(two.broker.ownership.held) == {BUNDLE, Bundle.of(OTHER)}
    await one.produce("b")
    assert payloads(await one.receive(max=10)) == ["a", "b"]
    new = "/v1/topics/public/default/new-one"
    await one.produce("n", topic=new)  # a bundle without owner: another broker takes it
    assert one.broker.ownership.held == []


async def test_a_draining_broker_takes_no_bundle_until_the_drain_is_cancelled(pair):
    one, two = pair
    await registered(one, two)
    assert (await one.post("/v1/brokers/local/drain", {})).json()["state"] in ("draining", "drained")
    await settle()
    body = {"bundle": BUNDLE.name}
    problem(await one.post("/v1/namespaces/public/default/take", body), status=503, code="not_owner")
    assert one.app.drain._handovers.destinations.choose(BUNDLE) == "two"
    assert two.app.drain._handovers.destinations.choose(BUNDLE) is None
    assert (await two.post("/v1/brokers/one/undrain", {})).json()["state"] == "active"
    await settle()
    assert two.app.drain._handovers.destinations.choose(BUNDLE) == "one"
    taken = (await one.post("/v1/namespaces/public/default/take", body)).json()
    assert taken == {"namespace": "public/default", "bundle": BUNDLE.name, "owner": "http://one"}


async def test_a_drain_without_another_broker_says_so(pair):
    one, _ = pair
    await one.produce("a")
    await registered(one)
    await one.app.drain.run(timeout_s=30)
    assert one.app.drain.status.blocked
    await one.produce("b")
    assert payloads(await one.receive(max=10)) == ["a", "b"]
    problem(await one.post("/v1/brokers/nobody%3A1/drain", {}), status=404, code="no_such_broker")


async def test_a_bundle_that_its_destination_does_not_take_is_taken_by_the_next_request(pair):
    one, two = pair
    await one.produce("a")
    await registered(one, two)
    reachable = one.peers.pop("two")
    assert await hand_over(one)
    assert one.broker.ownership.held == []
    one.peers["two"] = reachable
    async with asyncio.timeout(60):
        await two.produce("b")
    assert payloads(await one.receive(max=10)) == ["a", "b"]


async def test_a_broker_that_stops_ends_the_calls_that_it_has_passed_on(pair):
    """They are sent to the owner again, to be answered at once, so that nothing stays leased."""
    one, two = pair
    await one.produce("a")
    await one.ack(ids(await one.receive()))
    waiting = asyncio.create_task(two.receive_raw(wait_ms=30_000))
    await settle()
    two.broker.finish()
    async with asyncio.timeout(30):
        assert (await waiting).json()["messages"] == []
    await one.produce("b")
    assert payloads(await one.receive("c2")) == ["b"]


def test_the_pauses_between_attempts_ascend():
    assert list(at_owner.PAUSES_S) == sorted(at_owner.PAUSES_S)
    assert at_owner.PAUSES_S[0] == 0


async def test_topics_of_other_bundles_are_not_opened_by_a_take(pair):
    one, _ = pair
    await one.produce("x", topic=f"/v1/topics/{OTHER.short}")
    body = {"bundle": BUNDLE.name, "topics": [OTHER.local, "missing", "bad/name"]}
    assert (await one.post("/v1/namespaces/public/default/take", body)).status_code == 200
    await settle()
    assert one.broker.topics.loaded(NAME) is None
    answer: httpx.Response = await one.post("/v1/namespaces/public/default/take", {"bundle": "0x0_0x1"})
    problem(answer, status=400, code="bad_request")
