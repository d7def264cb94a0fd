"""Several brokers, one cluster: requests find the owner, and a stale owner does no harm."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from bindery_broker.ownership.bundles import Bundle
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

NAME = TopicName.parse("public/default/t")


@pytest.fixture
async def pair(tree, ledgers, clock) -> AsyncIterator[tuple[Harness, Harness]]:
    """Two brokers that reach one another."""
    one = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one")
    two = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    two.peers["one"] = httpx.ASGITransport(app=one.app)
    yield one, two
    await one.close()
    await two.close()


async def test_the_broker_that_gets_the_first_request_becomes_the_owner(pair):
    one, _ = pair
    await one.produce("a")
    assert one.broker.ownership.held == [Bundle.of(NAME)]


async def test_the_other_broker_forwards_requests(pair):
    one, two = pair
    await one.produce("a")
    await two.produce("b")
    got = await two.receive()
    assert payloads(got) == ["a", "b"]
    assert (await two.ack(ids(got))).json() == {"acknowledged": 2}
    assert payloads(await one.receive()) == []
    assert (await two.client.get(TOPIC)).json()["owner"] == "http://one"
    assert len(two.broker.topics) == 0


class Failing(httpx.AsyncBaseTransport):
    def __init__(self, error: type[httpx.HTTPError]) -> None:
        self._error = error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise self._error("made up")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (httpx.ConnectError, 503, "not_owner"),
        (httpx.ConnectTimeout, 503, "not_owner"),
        (httpx.PoolTimeout, 429, "too_many_requests"),
        (httpx.ReadTimeout, 504, "outcome_unknown"),
        (httpx.WriteTimeout, 504, "outcome_unknown"),
        (httpx.ReadError, 504, "outcome_unknown"),
        (httpx.RemoteProtocolError, 504, "outcome_unknown"),
    ],
)
async def test_only_errors_before_sending_are_answered_as_not_stored(pair, error, status, code):
    one, two = pair
    await one.produce("a")
    two.peers["one"] = Failing(error)
    answer = await two.client.post(f"{TOPIC}/messages", content=b"b")
    problem(answer, status=status, code=code)


@pytest.mark.parametrize("tail", ["/subscriptions/..", "/subscriptions/%2e%2E", "/subscriptions/s/consumers/..", "/."])
async def test_a_forwarded_path_has_the_same_meaning_at_the_owner(pair, tail):
    """HTTP libraries resolve `..`, which would turn the deletion of a subscription into the deletion of its topic."""
    one, two = pair
    await one.produce("a")
    await one.receive()
    raw_path = (TOPIC + tail).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "DELETE",
        "path": raw_path.decode(),
        "raw_path": raw_path,
        "query_string": b"",
        "headers": [(b"host", b"x")],
        "scheme": "http",
        "server": ("x", 80),
        "client": ("c", 1),
        "root_path": "",
    }

    async def nothing():
        return {"type": "http.request", "body": b"", "more_body": False}

    for harness in (one, two):
        answers = []

        async def keep(message, answers=answers):
            answers.append(message)

        await harness.app(scope, nothing, keep)
        assert answers[0]["status"] == 400
        assert list((await one.client.get(TOPIC)).json()["subscriptions"]) == ["s"]


async def test_errors_pass_through_unchanged(pair):
    one, two = pair
    await one.produce("a")
    await one.receive()
    problem(await two.ack(["9:9"]), status=400, code="unknown_messages")
    answer = await two.client.get(f"{TOPIC}/messages/0:7", headers={"x-request-id": "mine"})
    problem(answer, status=404, code="no_such_message")
    assert answer.headers.get_list("x-request-id") == ["mine"]


async def test_a_request_with_redirect_true_is_redirected_to_the_owner(pair):
    one, two = pair
    await one.produce("a")
    answer = await two.client.get(f"{TOPIC}/messages?max=1&redirect=true")
    assert answer.status_code == 307
    assert answer.headers["location"] == f"http://one{TOPIC}/messages?max=1&redirect=true"
    assert (await one.client.get(f"{TOPIC}/messages?redirect=true")).status_code == 200


class Recording(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return await self._inner.handle_async_request(request)


async def test_a_forwarded_request_is_marked_as_forwarded(pair):
    one, two = pair
    await one.produce("a")
    recording = two.peers["one"] = Recording(two.peers["one"])
    assert (await two.client.get(TOPIC, headers={"x-own": "kept"})).status_code == 200
    (request,) = recording.requests
    assert (request.headers["bindery-proxied"], request.headers["x-own"]) == ("1", "kept")


async def test_a_forwarded_request_is_not_forwarded_again(pair):
    one, two = pair
    await one.produce("a")
    answer = await two.client.get(TOPIC, headers={"bindery-proxied": "1"})
    problem(answer, status=503, code="not_owner")


async def test_an_unreachable_owner_is_answered_with_503_and_located_again(pair):
    one, two = pair
    await one.produce("a")
    two.peers.clear()
    answer = await two.client.get(TOPIC)
    problem(answer, status=503, code="not_owner")
    assert answer.headers["retry-after"]
    await one.die()
    assert payloads((await two.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a"]


async def test_a_forwarded_body_is_not_charged_to_the_budget(pair):
    one, two = pair
    await one.produce("a")
    body = b"x" * 3_000_000
    answer = await two.client.post(f"{TOPIC}/messages", content=body)
    assert answer.status_code == 200, answer.text
    assert two.app._budget.used == 0


async def test_the_next_broker_takes_over_with_all_messages_and_acknowledgements(pair):
    one, two = pair
    await one.produce("a", "b", "c")
    got = await one.receive(max=1)
    await one.ack(ids(got))
    await one.die()
    assert payloads(await two.receive()) == ["b", "c"]
    await two.produce("d")
    assert payloads(await two.receive()) == ["d"]


async def test_losing_a_bundle_closes_its_topics_and_waiting_calls_continue_on_the_new_owner(pair, monkeypatch):
    one, two = pair
    taken, locate = asyncio.Event(), one.broker.ownership.locate

    async def locate_later(bundle):  # so that the other broker takes the bundle first
        await taken.wait()
        return await locate(bundle)

    await one.produce("a")
    await one.ack(ids(await one.receive()))
    waiting = asyncio.create_task(one.receive_raw(wait_ms=30_000))
    for _ in range(50):
        await asyncio.sleep(0)
    lease = one.broker.ownership._held[Bundle.of(NAME)]
    monkeypatch.setattr(one.broker.ownership, "locate", locate_later)
    await two.store.delete(lease.path, version=None)
    await two.produce("b")
    taken.set()
    async with asyncio.timeout(30):
        answer = await waiting
    # The call was run again, on the new owner, which had the message.
    assert payloads(answer.json()["messages"]) == ["b"]
    assert one.broker.topics.loaded(NAME) is None


async def test_a_stale_owner_is_fenced_and_answers_an_unknown_outcome(pair, ledgers):
    one, two = pair
    await one.produce("a")
    lease = one.broker.ownership._held[Bundle.of(NAME)]
    lease._listeners.clear()  # the old owner is not notified of the loss
    await two.store.delete(lease.path, version=None)
    await two.produce("b")
    there = list(ledgers.ledgers)
    answer = await one.client.post(f"{TOPIC}/messages", content=b"stale")
    assert problem(answer, status=504, code="outcome_unknown")
    assert list(ledgers.ledgers) == there, "a broker that is not the owner writes nothing"
    assert ledgers._next_ledger_id == there[-1] + 1
    stored = payloads((await two.client.get(f"{TOPIC}/messages")).json()["messages"])
    assert stored == ["a", "b"]


async def test_a_broker_that_stops_releases_its_topics_at_once(pair):
    one, two = pair
    await one.produce("a")
    got = await one.receive()
    await one.ack(ids(got))
    await one.broker.close()
    assert await two.receive() == []
    assert two.broker.ownership.held == [Bundle.of(NAME)]
    answer = await one.client.put("/v1/topics/public/default/new")
    assert answer.status_code in (201, 503)


async def test_stopping_ends_waiting_calls(broker):
    await broker.receive()
    waiting = asyncio.create_task(broker.receive(wait_ms=30_000))
    for _ in range(50):
        await asyncio.sleep(0)
    broker.broker.finish()
    async with asyncio.timeout(30):
        assert await waiting == []
    assert await broker.receive(wait_ms=30_000) == []


async def test_stopping_ends_reads_that_wait(broker):
    await broker.produce("a")
    path = f"{TOPIC}/messages?start=latest&wait_ms=30000"
    waiting = asyncio.create_task(broker.client.get(path))
    for _ in range(50):
        await asyncio.sleep(0)
    broker.broker.finish()
    async with asyncio.timeout(10):
        assert (await waiting).json()["messages"] == []
        assert (await broker.client.get(path)).json()["messages"] == []
