"""Random retries, acknowledgements, returns, expiries, seeks and deaths of brokers, several at a time.

In the end each message is in exactly one place: not acknowledged in the topic, in the retry topic or in the dead-letter
topic, or acknowledged by an answered call, in which case it is in none. A call without an answer may have acknowledged.
A message that a seek may have returned is in one place at least.
"""

import asyncio
import contextlib
import random
from collections import Counter

import httpx
import pytest
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Harness

SEEDS = 15
ROUNDS = 40
RETRY = f"{TOPIC}-s-RETRY"
DLQ = f"{TOPIC}-s-DLQ"


class World:
    def __init__(self, seed: int, *, seeks: bool, tree, ledgers, clock) -> None:
        self.lots = random.Random(seed)
        self.seeks = seeks
        self.kind = self.lots.choice(["shared", "key_shared"])
        self.tree, self.ledgers, self.clock = tree, ledgers, clock
        self.born = self.serial = 0
        self.payloads: dict[str, str] = {}
        """Payload by original id."""
        self.leased: dict[tuple[str, str], str] = {}
        """Payload by topic and id."""
        self.acked: set[str] = set()
        self.maybe_acked: set[str] = set()
        self.sought: set[str] = set()
        """Payloads that a seek may have returned."""
        self.retried: set[tuple[str, str]] = set()
        """Topics and ids."""
        self.skipped: set[str] = set()
        """Payloads that a seek may have acknowledged."""
        self.broker = self.spawn()

    def spawn(self) -> Harness:
        self.born += 1
        url = f"http://b{self.born}"
        return Harness(tree=self.tree, ledgers=self.ledgers, clock=self.clock, url=url)

    def some(self, topic: str) -> list[str]:
        """Choose leased messages of a topic, for one call only."""
        known = sorted(message_id for of, message_id in self.leased if of == topic)
        return self.lots.sample(known, self.lots.randint(0, min(4, len(known))))

    async def round(self) -> None:
        acts = self.lots.choices(
            [self.produce, self.receive, self.retry, self.ack, self.nack, self.wait, self.seek],
            [3, 5, 5, 2, 2, 1, 0.5 if self.seeks else 0],
            k=3,
        )
        tasks = [asyncio.create_task(act()) for act in acts]
        if self.lots.random() < 0.15:
            for _ in range(self.lots.randint(0, 60)):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()  # takes effect when `die` waits: the topics are gone by then
            await self.broker.die()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.broker = self.spawn()
            self.leased.clear()
        else:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (asyncio.CancelledError, httpx.HTTPError)):
                raise result

    async def produce(self) -> None:
        self.serial += 1
        texts = [f"{self.serial}-{number}" for number in range(self.lots.randint(1, 4))]
        if self.lots.random() < 0.5:
            ids = await self.broker.produce_batch(*texts)
        else:
            ids = await self.broker.produce(*texts, params={"key": self.lots.choice("kl")})
        self.payloads.update(zip(ids, texts, strict=True))

    async def receive(self) -> None:
        topic = self.lots.choice([TOPIC, TOPIC, RETRY])
        answer = await self.broker.receive_raw(
            self.lots.choice("abc"),
            topic=topic,
            type=self.kind,
            max=self.lots.randint(1, 10),
            ack_timeout_ms=self.lots.choice([1_000, 20_000]),
            dead_letter={"max_redeliver": 2},
        )
        if answer.status_code == 200:
            for message in answer.json()["messages"]:
                self.leased[topic, message["message_id"]] = message["payload"]

    def take(self) -> tuple[str, dict[str, str]]:
        """Return a topic, and messages of it, by id, that no other call of this round uses."""
        topic = self.lots.choice([TOPIC, RETRY])
        return topic, {message_id: self.leased.pop((topic, message_id)) for message_id in self.some(topic)}

    async def retry(self) -> None:
        topic, chosen = self.take()
        if chosen:
            body = {
                "message_ids": self.lots.sample(sorted(chosen), len(chosen)),
                "delay_ms": self.lots.choice([0, 0, 3_000]),
                "max_redeliver": 2,
            }
            self.retried.update((topic, message_id) for message_id in chosen)
            answer = await self.broker.post(f"{topic}/subscriptions/s/retry", body)
            if answer.status_code == 200 and not self.seeks:
                assert not answer.json()["failed"]

    async def ack(self) -> None:
        topic, chosen = self.take()
        if chosen:
            self.maybe_acked.update(chosen.values())
            answer = await self.broker.ack(list(chosen), topic=topic)
            if answer.status_code == 200:  # also for a late acknowledgement of what was moved meanwhile
                self.acked.update(text for one, text in chosen.items() if (topic, one) not in self.retried)

    async def nack(self) -> None:
        topic, chosen = self.take()
        if chosen:
            body = {"message_ids": list(chosen), "delay_ms": self.lots.choice([0, 2_000])}
            await self.broker.post(f"{topic}/subscriptions/s/nack", body)

    async def wait(self) -> None:
        self.clock.advance(self.lots.choice([0.5, 3, 30]))

    async def seek(self) -> None:
        if self.payloads:
            target = self.lots.choice(sorted(self.payloads))
            first = MessageId.parse(target)
            for one, text in self.payloads.items():
                (self.sought if MessageId.parse(one) >= first else self.skipped).add(text)
            await self.broker.post(f"{TOPIC}/subscriptions/s/seek", {"message_id": target})

    async def places(self, topic: str, sub: str) -> list[str]:
        found: list[str] = []
        for _ in range(100):
            answer = await self.broker.receive_raw("z", topic=topic, sub=sub, ack_timeout_ms=10_000_000, max=100)
            messages = answer.json()["messages"]
            if not messages:
                break
            found += [message["payload"] for message in messages]
        stats = (await self.broker.client.get(topic)).json()["subscriptions"][sub]
        assert stats["unacked"] == len(found)
        return found

    async def finish(self) -> None:
        self.clock.advance(10_000)
        await asyncio.sleep(60)
        found: Counter[str] = Counter()
        letters: set[str] = set()
        for topic, sub in ((TOPIC, "s"), (RETRY, "s"), (DLQ, "dead-letters")):
            await self.broker.client.put(f"{topic}/subscriptions/{sub}", json={})
            for consumer in "abc":
                await self.broker.client.delete(f"{topic}/subscriptions/{sub}/consumers/{consumer}")
            texts = await self.places(topic, sub)
            found.update(texts)
            letters = set(texts)
        for text in self.payloads.values():
            if text in self.skipped:
                continue
            if text in self.sought:
                assert found[text] or text in self.maybe_acked, (text, "lost")
            elif text in self.acked and text not in letters:
                assert found[text] == 0, (text, "acknowledged, and still there")
            elif text in self.maybe_acked or text in self.acked:
                assert found[text] <= 1, (text, found[text])
            else:
                assert found[text] == 1, (text, found[text])


@pytest.mark.parametrize("seeks", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_each_message_is_in_one_place(seed, seeks, tree, ledgers, clock):
    world = World(seed, seeks=seeks, tree=tree, ledgers=ledgers, clock=clock)
    for topic, sub in ((TOPIC, "s"), (RETRY, "s")):
        await world.broker.client.put(f"{topic}/subscriptions/{sub}", json={})
    for _ in range(ROUNDS):
        await world.round()
    await world.finish()
    with contextlib.suppress(Exception):
        await world.broker.close()
