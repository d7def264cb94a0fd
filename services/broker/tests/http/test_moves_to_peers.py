"""Messages are moved to topics that other brokers own, so that each has exactly one copy."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from bindery_broker.http.peers import moves as peers
from bindery_broker.http.peers.moves import COPIES_SIZE_MAX
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.retries.copy_codec import encode_copies
from bindery_broker.retries.intents import names_of_intents
from bindery_core.errors import NotEnoughBookies
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

SOURCE = TopicName.parse("public/default/t")
TARGET = next(
    name
    for number in itertools.count()
    if Bundle.of(name := TopicName.parse(f"public/default/dead{number}")) != Bundle.of(SOURCE)
)
PATH = f"/v1/topics/{TARGET.short}"
SUB = f"{TOPIC}/subscriptions/s"
LONG_MS = 3_600_000


class Wire(httpx.AsyncBaseTransport):
    """The network to a broker. `on_copies` decides what happens to the next request that stores copies."""

    def __init__(self, broker: Harness) -> None:
        self._transport = httpx.ASGITransport(app=broker.app)
        self.on_copies: Callable[[Callable[[], Awaitable[httpx.Response]]], Awaitable[httpx.Response]] | None = None
        self.copies: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> httpx.Response:
            response = await self._transport.handle_async_request(request)
            await response.aread()
            return response

        if not request.url.path.endswith("/moves/copies"):
            return await send()
        self.copies.append(request)
        action, self.on_copies = self.on_copies, None
        return await (send() if action is None else action(send))


@pytest.fixture
async def owner(tree, ledgers, clock) -> AsyncIterator[Harness]:
    """The broker that owns the target."""
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://owner")
    await broker.client.put(f"{PATH}/subscriptions/keeper", json={})
    yield broker
    await broker.close()


@pytest.fixture
async def mover(tree, ledgers, clock, owner) -> AsyncIterator[Harness]:
    """The broker that owns the source."""
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://mover")
    broker.peers["owner"] = Wire(owner)  # type: ignore[assignment]
    yield broker
    await broker.close()


async def held(broker: Harness, *texts: str) -> list[str]:
    await broker.produce(*texts)
    return ids(await broker.receive(ack_timeout_ms=LONG_MS, session_ttl_ms=LONG_MS))


async def bury(broker: Harness, message_ids: list[str]) -> httpx.Response:
    """Move messages to the target."""
    wanted = {"message_ids": message_ids, "max_redeliver": 0, "dead_letter_topic": TARGET.short}
    return await broker.post(f"{SUB}/retry", wanted)


async def copies(owner: Harness) -> list[str]:
    return payloads((await owner.client.get(f"{PATH}/messages?max=1000")).json()["messages"])


async def left(broker: Harness) -> list[str]:
    """Return what the source delivers to another consumer."""
    return payloads(await broker.receive("z", ack_timeout_ms=LONG_MS, session_ttl_ms=LONG_MS))


async def intents(broker: Harness) -> list[str]:
    return names_of_intents((await broker.broker.topic(SOURCE)).subscription("s").cursor.blobs)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_the_owner_of_the_target_stores_the_copies_in_order(owner, mover):
    message_ids = await held(mover, "a", "b", "c")
    answer = await bury(mover, message_ids)
    assert answer.status_code == 200, answer.text
    moved = answer.json()["moved"]
    assert [one["message_id"] for one in moved] == message_ids
    stored = (await owner.client.get(f"{PATH}/messages")).json()["messages"]
    assert payloads(stored) == ["a", "b", "c"]
    assert ids(stored) == [one["copy_id"] for one in moved]
    assert stored[0]["properties"]["REAL_SUBSCRIPTION"] == "s"
    assert await intents(mover) == []
    assert (await mover.client.get(TOPIC)).json()["subscriptions"]["s"]["backlog_entries"] == 0
    assert ids(await owner.receive(topic=PATH, sub="dead-letters")) == ids(stored)


async def test_everything_of_a_message_is_kept(owner, mover):
    line = {"payload_base64": "/wA=", "key": "k", "properties": {"p": "q"}, "tags": "tag", "event_time": 5}
    await mover.client.post(f"{TOPIC}/messages", json=line)
    await bury(mover, ids(await mover.receive(ack_timeout_ms=LONG_MS)))
    (found,) = (await owner.client.get(f"{PATH}/messages")).json()["messages"]
    assert (found["payload_base64"], found["key"], found["event_time"], found["tags"]) == ("/wA=", "k", 5, "tag")
    assert found["properties"]["p"] == "q"


async def test_messages_with_an_unknown_outcome_are_searched_for_at_the_owner(owner, mover):
    """The owner stores the copies, and its answer is lost."""
    message_ids = await held(mover, "a", "b")

    async def lose(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        await send()
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = lose
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")
    assert await left(mover) == []

    async def is_settled() -> bool:
        return not await intents(mover)

    await until(is_settled)
    assert (await left(mover), await copies(owner)) == ([], ["a", "b"])


async def test_messages_whose_request_was_lost_are_delivered_again(owner, mover):
    message_ids = await held(mover, "a")

    async def lose(_send: Any) -> httpx.Response:
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = lose
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")

    async def is_back() -> bool:
        return await left(mover) == ["a"]

    await until(is_back)
    assert await copies(owner) == []


async def test_a_request_that_arrives_after_the_settlement_stores_nothing(owner, mover):
    message_ids = await held(mover, "a")
    late: list[Callable[[], Awaitable[httpx.Response]]] = []

    async def delay(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        late.append(send)
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = delay
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")

    async def is_back() -> bool:
        return await left(mover) == ["a"]

    await until(is_back)
    answer = await late[0]()
    assert answer.status_code == 503
    assert answer.json()["code"] == "try_again"
    assert await copies(owner) == []


async def test_a_request_of_the_former_owner_of_the_source_stores_nothing(tree, ledgers, clock, owner, mover):
    """Its successor has found no copy, and delivers the message; then the request arrives."""
    message_ids = await held(mover, "a")
    waiting, go_on = asyncio.Event(), asyncio.Event()
    answers: list[httpx.Response] = []

    async def delay(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        waiting.set()
        await go_on.wait()
        answers.append(await send())
        return answers[0]

    mover.peers["owner"].on_copies = delay
    move = asyncio.create_task(bury(mover, message_ids))
    await waiting.wait()
    mover.tree.expire(mover.store)
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://successor")
    successor.peers["owner"] = Wire(owner)  # type: ignore[assignment]
    assert await left(successor) == ["a"]
    go_on.set()
    await move
    assert answers[0].status_code == 503
    assert await copies(owner) == []
    await successor.close()


async def test_a_local_move_ends_what_the_source_began_from_another_broker(owner, mover):
    """The owner of the target becomes that of the source, too."""
    message_ids = await held(mover, "a")
    late: list[Callable[[], Awaitable[httpx.Response]]] = []

    async def delay(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        late.append(send)
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = delay
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")
    await mover.close()
    assert await left(owner) == ["a"]
    assert (await late[0]()).status_code == 503
    assert await copies(owner) == []


async def test_the_outcome_at_an_owner_that_was_replaced_is_found_at_the_next_one(tree, ledgers, clock, owner, mover):
    message_ids = await held(mover, "a")

    async def lose(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        await send()
        await owner.close()
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = lose
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")

    async def is_settled() -> bool:
        return not await intents(mover)

    await until(is_settled)  # the mover takes the target over
    assert (await left(mover), await copies(mover)) == ([], ["a"])


async def test_what_the_owner_refuses_is_delivered_again_later(owner, mover):
    message_ids = await held(mover, "a")
    topic = await owner.broker.topic(TARGET)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise NotEnoughBookies("made up")

    topic.publish = refuse  # type: ignore[method-assign]
    problem(await bury(mover, message_ids), status=503, code="try_again")
    assert await intents(mover) == []
    assert await left(mover) == []
    mover.clock.advance(2)
    assert await left(mover) == ["a"]
    del topic.publish
    assert (await bury(mover, message_ids)).json()["moved"]
    assert await copies(owner) == ["a"]


async def test_copies_are_stored_by_several_requests_if_they_are_large(owner, mover, monkeypatch):
    monkeypatch.setattr(peers, "COPIES_SIZE_MAX", 1_000)
    assert COPIES_SIZE_MAX > 1_000
    message_ids = await held(mover, *("x" * 400 for _ in range(5)))
    assert len((await bury(mover, message_ids)).json()["moved"]) == 5
    assert len(mover.peers["owner"].copies) > 2
    assert len(await copies(owner)) == 5


async def test_after_a_failed_request_nothing_more_is_sent(owner, mover, monkeypatch):
    monkeypatch.setattr(peers, "COPIES_SIZE_MAX", 1)
    message_ids = await held(mover, "a", "b", "c")

    async def first(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        mover.peers["owner"].on_copies = lose
        return await send()

    async def lose(_send: Any) -> httpx.Response:
        raise httpx.ReadError("made up")

    mover.peers["owner"].on_copies = first
    answer = (await bury(mover, message_ids)).json()
    assert [one["message_id"] for one in answer["moved"]] == message_ids[:1]
    assert [one["error"]["code"] for one in answer["failed"]] == ["outcome_unknown"] * 2
    assert len(mover.peers["owner"].copies) == 2

    async def are_back() -> bool:
        return await left(mover) == ["b", "c"]

    await until(are_back)
    assert await copies(owner) == ["a"]


async def begin(owner: Harness, source: str = "persistent://public/default/t/s", **fields: Any) -> dict[str, Any]:
    body = {"source": source, "subscription": "keeper", **fields}
    answer = await owner.post(f"{PATH}/moves", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def store(owner: Harness, epoch: str, body: bytes, source: str = "persistent://public/default/t/s") -> Any:
    return await owner.client.post(f"{PATH}/moves/copies", params={"source": source, "epoch": epoch}, content=body)


async def test_an_epoch_ends_only_those_of_its_source(owner):
    frame = b"".join(encode_copies([OutgoingMessage(payload=b"x")]))
    mine, others = await begin(owner), await begin(owner, "persistent://public/default/t/other")
    assert (await store(owner, others["epoch"], frame, "persistent://public/default/t/other")).status_code == 200
    assert (await store(owner, mine["epoch"], frame)).status_code == 200
    problem(await store(owner, others["epoch"], frame), status=503, code="try_again")
    again = await begin(owner)
    assert again["end"] > mine["end"]
    problem(await store(owner, mine["epoch"], frame), status=503, code="try_again")
    assert len(await copies(owner)) == 2


@pytest.mark.parametrize("body", [b"", b"\0\0\0", b"\0\0\0\x05abc", b"\0\0\0\x03abc", b"\xff\xff\xff\xffabc"])
async def test_bad_copies_are_refused(owner, body):
    begun = await begin(owner)
    problem(await store(owner, begun["epoch"], body), status=400, code="bad_request")
    assert await copies(owner) == []


async def test_a_missing_target_is_created_only_if_wanted(owner):
    body = {"source": "persistent://public/default/t/s", "subscription": "keeper"}
    path = "/v1/topics/public/default/none"
    problem(await owner.post(f"{path}/moves", body), status=404, code="no_such_topic")
    assert (await owner.post(f"{path}/moves", {**body, "create": True})).status_code == 200
    assert (await owner.client.get(f"{path}/subscriptions/keeper/explain")).status_code == 200


async def test_web_pages_can_begin_no_move(owner):
    body = b'{"source": "s", "subscription": "keeper"}'
    answer = await owner.client.post(f"{PATH}/moves", content=body, headers={"content-type": "text/plain"})
    problem(answer, status=415, code="unsupported_media_type")


async def test_an_answer_of_a_proxy_says_nothing_about_the_copies(owner, mover):
    message_ids = await held(mover, "a")

    async def upset(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        await send()
        return httpx.Response(503, text="upstream reset")

    mover.peers["owner"].on_copies = upset
    problem(await bury(mover, message_ids), status=504, code="outcome_unknown")

    async def is_settled() -> bool:
        return not await intents(mover)

    await until(is_settled)
    assert (await left(mover), await copies(owner)) == ([], ["a"])
