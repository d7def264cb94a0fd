"""Run random producers and consumers over HTTP while brokers are killed, and check these invariants.

1. Every message whose id was answered is delivered, until it is acknowledged.
2. A message whose acknowledgement was answered 200 is never delivered again, by any broker.
3. At any time at most one consumer holds a lease on a message (within one broker's life).
4. An exclusive consumer receives ascending ids over all answers, unless messages were returned (negative
   acknowledgement, timeout, death of the owner). No message is delivered while an earlier one is neither acknowledged
   nor leased.
"""

import random

import httpx
import pytest
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Harness

SEEDS = 12
STEPS = 120


class World:
    def __init__(self, seed: int, kind: str, *, tree, ledgers, clock) -> None:
        self.lots = random.Random(seed)
        self.kind = kind
        self.tree, self.ledgers, self.clock = tree, ledgers, clock
        self.brokers: list[Harness] = []
        self.born = 0
        self.produced: dict[str, str] = {}
        self.acked: set[str] = set()
        self.leases: dict[str, tuple[str, float]] = {}
        """Holder and end of the lease of each message, as the current owner must have them."""
        self.last: MessageId | None = None
        """Last message that an exclusive consumer received; None: messages may have been returned since."""

    def spawn(self) -> None:
        self.born += 1
        url = f"http://broker{self.born}"
        new = Harness(tree=self.tree, ledgers=self.ledgers, clock=self.clock, url=url)
        for other in self.brokers:
            other.peers[new.client.base_url.host] = httpx.ASGITransport(app=new.app)
            new.peers[other.client.base_url.host] = httpx.ASGITransport(app=other.app)
        self.brokers.append(new)

    async def step(self) -> None:
        live = {m: lease for m, lease in self.leases.items() if lease[1] > self.clock.now()}
        if len(live) < len(self.leases):  # the owner detects this at its next call
            self.last = None
        self.leases = live
        act = self.lots.choices(
            [self.produce, self.receive, self.ack, self.nack, self.wait, self.die, self.leave],
            [4, 6, 5, 2, 2, 0.4, 0.5],
        )[0]
        await act()

    @property
    def broker(self) -> Harness:
        return self.lots.choice(self.brokers)

    def consumer(self) -> str:
        return "c" if self.kind == "exclusive" else self.lots.choice("abc")

    async def produce(self) -> None:
        payloads = [f"p{len(self.produced)}-{n}" for n in range(self.lots.randint(1, 5))]
        if self.lots.random() < 0.5:
            ids = await self.broker.produce_batch(*payloads)
        else:
            ids = await self.broker.produce(*payloads)
        assert not self.produced.keys() & set(ids)
        self.produced.update(zip(ids, payloads, strict=True))

    async def receive(self) -> None:
        consumer, now = self.consumer(), self.clock.now()
        timeout_s = self.lots.choice([1, 5, 20])
        messages = await self.broker.receive(
            consumer,
            type=self.kind,
            max=self.lots.randint(1, 8),
            ack_timeout_ms=timeout_s * 1000,
            session_ttl_ms=self.lots.choice([1_000, 60_000]),
        )
        live = {m: lease for m, lease in self.leases.items() if lease[1] > now}
        if len(live) < len(self.leases):
            self.last = None
        self.leases = live
        ids = [message["message_id"] for message in messages]
        assert [MessageId.parse(i) for i in ids] == sorted(MessageId.parse(i) for i in ids)
        if ids and self.kind == "exclusive":
            end = MessageId.parse(ids[-1])
            before = {m for m in self.produced if MessageId.parse(m) < end}
            assert not before - self.acked - self.leases.keys() - set(ids), "messages were skipped"
            first = MessageId.parse(ids[0])
            assert self.last is None or self.last < first, "out of order"
            self.last = MessageId.parse(ids[-1])
        for message in messages:
            message_id = message["message_id"]
            assert self.produced[message_id] == message["payload"]
            assert message_id not in self.acked, "delivered after its acknowledgement was answered"
            if self.kind == "shared":
                assert message_id not in self.leases, "two live leases"
            self.leases[message_id] = (consumer, now + timeout_s)

    def some(self, of: list[str]) -> list[str]:
        return self.lots.sample(of, self.lots.randint(0, min(4, len(of))))

    async def ack(self) -> None:
        chosen = self.some(sorted(self.leases) if self.lots.random() < 0.8 else sorted(self.produced))
        if chosen:
            answer = await self.broker.ack(chosen)
            if answer.status_code == 200:
                self.acked.update(chosen)
                for message_id in chosen:
                    self.leases.pop(message_id, None)
            else:
                assert answer.json()["code"] == "no_such_subscription", answer.text

    async def nack(self) -> None:
        chosen = self.some(sorted(self.leases))
        if chosen:
            body = {"message_ids": chosen, "delay_ms": self.lots.choice([0, 3_000])}
            answer = await self.broker.post(f"{TOPIC}/subscriptions/s/nack", body)
            for message_id in answer.json()["returned"]:
                self.leases.pop(message_id, None)
                self.last = None

    async def leave(self) -> None:
        consumer = self.consumer()
        await self.broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/{consumer}")
        self.leases = {m: lease for m, lease in self.leases.items() if lease[0] != consumer}
        self.last = None

    async def wait(self) -> None:
        self.clock.advance(self.lots.choice([0.5, 2, 10]))

    async def die(self) -> None:
        victim = self.lots.choice(self.brokers)
        was_owner = any(topic.is_open for topic in victim.broker.topics)
        self.brokers.remove(victim)
        await victim.die()
        for other in self.brokers:
            other.peers.pop(victim.client.base_url.host)
        if was_owner:  # otherwise the owner keeps its leases
            self.leases.clear()
            self.last = None
        self.spawn()

    async def finish(self) -> None:
        """Check that every message that is not acknowledged is delivered, and no other."""
        self.clock.advance(1_000)
        self.leases.clear()
        left = set(self.produced) - self.acked
        for _ in range(200):
            messages = await self.broker.receive("z", type=self.kind, max=100)
            if not messages:
                break
            ids = [message["message_id"] for message in messages]
            assert set(ids) <= left
            assert (await self.broker.ack(ids)).status_code == 200
            left.difference_update(ids)
        assert not left
        stats = (await self.broker.client.get(TOPIC)).json()
        assert stats["subscriptions"]["s"]["backlog_entries"] == 0

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.close()


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_acknowledged_messages_are_not_delivered_again_and_no_other_message_is_lost(
    seed, kind, tree, ledgers, clock
):
    world = World(seed, kind, tree=tree, ledgers=ledgers, clock=clock)
    world.spawn()
    world.spawn()
    await world.produce()
    await world.receive()
    for _ in range(STEPS):
        await world.step()
    await world.finish()
    await world.close()
