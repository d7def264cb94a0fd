"""A move that was interrupted is settled although another broker owns the topic to which its messages went."""

import itertools
from collections.abc import AsyncIterator

import httpx
import pytest
from bindery_broker.http.peers import moves
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.retries.copies import Identity
from bindery_broker.retries.intents import Intent, Planned, encode_intent
from bindery_broker.retries.targets import Destination
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, payloads, problem

SOURCE = TopicName.parse("public/default/t")
TARGET = next(
    name
    for number in itertools.count()
    if Bundle.of(name := TopicName.parse(f"public/default/dead{number}")) != Bundle.of(SOURCE)
)
PATH = f"/v1/topics/{TARGET.short}"


@pytest.fixture
async def owner(tree, ledgers, clock) -> AsyncIterator[Harness]:
    """The broker that owns the target."""
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://owner")
    yield broker
    await broker.close()


@pytest.fixture
async def successor(tree, ledgers, clock, owner) -> AsyncIterator[Harness]:
    """The broker that takes the source over."""
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://successor")
    broker.peers["owner"] = httpx.ASGITransport(app=owner.app)
    yield broker
    await broker.close()


def planned(message_id: str) -> Planned:
    one = MessageId.parse(message_id)
    origin = f"{one.ledger_id}:{one.entry_id}:-1"
    return Planned(one.position, -1, 1, Identity("s", origin, ""))


async def copy(owner: Harness, message_id: str) -> None:
    """Store the copy of a message in the target."""
    properties = {"REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": message_id.removesuffix(":-1")}
    answer = await owner.post(f"{PATH}/messages", {"payload": "copy", "properties": properties})
    assert answer.status_code == 200, answer.text


async def interrupted(tree, ledgers, clock, *, after: Position) -> list[str]:
    """Store three messages, and the intent to move the first two. Return the ids."""
    former = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://former")
    ids = await former.produce("a", "b", "c")
    await former.receive()
    cursor = (await former.broker.topic(SOURCE)).subscription("s").cursor
    intent = Intent(Destination(TARGET, "dead-letters"), after, tuple(map(planned, ids[:2])))
    await cursor.put_blobs({"move-1": encode_intent(intent)})
    await former.close()
    return ids


@pytest.mark.parametrize("others", [0, 250])
async def test_what_the_other_broker_has_is_acknowledged_and_what_it_has_not_is_delivered(
    tree, ledgers, clock, owner, successor, others
):
    (first,) = await owner.produce("before", topic=PATH)
    ids = await interrupted(tree, ledgers, clock, after=MessageId.parse(first).position)
    for _ in range(others):
        await owner.produce("other", topic=PATH)
    await copy(owner, ids[0])
    assert payloads(await successor.receive()) == ["b", "c"]
    assert dict((await successor.broker.topic(SOURCE)).subscription("s").cursor.blobs) == {}


async def test_copies_at_or_before_the_position_of_the_intent_are_older(tree, ledgers, clock, owner, successor):
    (first,) = await owner.produce("before", topic=PATH)
    at = MessageId.parse(first).position
    await copy(owner, "1:0:-1:-1")
    ids = await interrupted(tree, ledgers, clock, after=at._replace(entry_id=at.entry_id + 1))
    assert ids[0] == "1:0:-1:-1"
    assert payloads(await successor.receive()) == ["a", "b", "c"]


async def test_nothing_is_delivered_while_the_other_broker_does_not_answer(
    tree, ledgers, clock, owner, successor, monkeypatch
):
    monkeypatch.setattr(moves, "SILENT_S", 0.0)
    await owner.produce("before", topic=PATH)
    ids = await interrupted(tree, ledgers, clock, after=Position(-1, -1))
    await copy(owner, ids[0])
    reachable = successor.peers.pop("owner")
    answer = await successor.post(f"{TOPIC}/subscriptions/s/receive", {"consumer": "c", "wait_ms": 0})
    problem(answer, status=503, code="try_again")
    successor.peers["owner"] = reachable
    assert payloads(await successor.receive()) == ["b", "c"]


async def test_a_target_that_was_deleted_has_no_copy(tree, ledgers, clock, owner, successor):
    await owner.produce("before", topic=PATH)
    await interrupted(tree, ledgers, clock, after=Position(-1, -1))
    await owner.client.delete(f"{PATH}?force=true")
    assert payloads(await successor.receive()) == ["a", "b", "c"]


async def test_an_entry_that_cannot_be_decoded_is_no_copy(tree, ledgers, clock, owner, successor):
    await owner.produce("before", topic=PATH)
    ids = await interrupted(tree, ledgers, clock, after=Position(-1, -1))
    topic = await owner.broker.topic(TARGET)
    await topic.ledger.add_many([b"damaged", b"damaged, too"])
    await copy(owner, ids[0])
    await topic.ledger.add_many([b"damaged"])
    assert payloads(await successor.receive()) == ["b", "c"]


async def test_a_broker_that_did_not_answer_holds_up_other_moves_only_once(tree, ledgers, clock, owner, successor):
    await owner.produce("before", topic=PATH)
    message_ids = await successor.produce("a", "b", "c")
    await successor.receive(ack_timeout_ms=3_600_000)
    calls = []

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            calls.append(request.url.path)
            raise httpx.ReadTimeout("made up")

    successor.peers["owner"] = Silent()
    for message_id in message_ids:
        wanted = {"message_ids": [message_id], "max_redeliver": 0, "dead_letter_topic": TARGET.short}
        answer = await successor.post(f"{TOPIC}/subscriptions/s/retry", wanted)
        problem(answer, status=503, code="try_again")
    assert len(calls) == 1
