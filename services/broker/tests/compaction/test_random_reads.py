"""Readers of a compacted topic always get the table that the model has, whatever happens between two of their pages.

A seed chooses among: publish (single messages and batches, tombstones, messages without a key, repeated keys), compact,
stop the broker in the middle of a compaction, acknowledge and trim, unload, move to a new broker, and read a page with
one of several readers. The model is the rule of Pulsar:

| read                   | from position P the reader gets                                                            |
|------------------------|--------------------------------------------------------------------------------------------|
| compacted, up to the   | the messages that are the last of their key up to the horizon and have a payload, in their |
| horizon                | order                                                                                      |
| compacted, after it    | every message                                                                              |
| plain                  | every message that is not trimmed                                                          |

Trimming never changes what a compacted read returns.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Final

import pytest
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Clock, Harness
from compaction_parts import Message, compact, publish, read, table_of
from managed_ledger_faults import Plan

KEYS: Final = ["a", "b", "c", "d", "e", None]
STEPS: Final = 60
SEEDS: Final = 20
SEEDS_PER_TEST: Final = 5
SETTINGS = {"ledger": {"entries_max": 3, "age_s_min": 0, "operation_timeout_s": 5}}

Order = tuple[int, int, int]
Stored = tuple[Order, str | None, str]
"""Place, key and value; an empty value is a tombstone."""


def stored(message: Message) -> Stored:
    return order(message["message_id"]), message.get("key"), message.get("payload", "")


def order(message_id: str) -> Order:
    parsed = MessageId.parse(message_id)
    return parsed.ledger_id, parsed.entry_id, parsed.batch_index


@dataclass
class Reader:
    compacted: bool
    start: str = "earliest"


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tree, self.ledgers, self.clock = MemoryTree(), MemoryLedgers(), Clock()
        self.born = 0
        self.stored: list[Stored] = []
        self.ids: list[str] = []
        self.readers = [Reader(compacted=True), Reader(compacted=True), Reader(compacted=False)]
        self.horizon: Order | None = None
        """The last entry that was compacted, as the broker reports it; None: no compaction was completed."""
        self.serial = 0
        self.plan = Plan(seed, die_at=None, fault_rate=0)
        self.broker = self.start()
        self.dead: list[Harness] = []
        self.crashes = self.compactions = self.pages = self.trims = 0

    def start(self) -> Harness:
        self.born += 1
        self.plan = Plan(self.born, die_at=None, fault_rate=0)
        return Harness(
            tree=self.tree,
            ledgers=self.ledgers,
            clock=self.clock,
            url=f"http://b{self.born}",
            plan=self.plan,
            **SETTINGS,
        )

    # --- the model

    def up_to_horizon(self) -> list[Stored]:
        """The compacted part: the last message of each key up to the horizon."""
        if self.horizon is None:
            return []
        before = [one for one in self.stored if one[0][:2] <= self.horizon[:2]]
        last = {key: at for at, key, _ in before if key is not None}
        return [one for one in before if one[1] is not None and last[one[1]] == one[0] and one[2]]

    def expected(self, *, compacted: bool) -> list[Stored]:
        if not compacted or self.horizon is None:
            return self.stored
        return self.up_to_horizon() + [one for one in self.stored if one[0][:2] > self.horizon[:2]]

    # --- the steps

    async def publish(self) -> None:
        messages: list[tuple[str | None, str]] = []
        for _ in range(self.random.choice((1, 1, 3, 6))):
            self.serial += 1
            messages.append((self.random.choice(KEYS), self.random.choice((f"v{self.serial}", f"v{self.serial}", ""))))
        found = await publish(self.broker, *messages, batch=self.random.random() < 0.5)
        for message_id, (key, value) in zip(found, messages, strict=True):
            self.stored.append((order(message_id), key, value))
            self.ids.append(message_id)

    async def compact(self) -> None:
        await compact(self.broker)
        await self.learn_horizon()
        self.compactions += 1

    async def crash_in_compaction(self) -> None:
        """Stop the broker like kill -9 at a random step of a compaction, and go on with another one."""
        self.plan._die_at = self.plan.steps + self.random.randint(1, 12)
        broker = self.broker
        await broker.client.put(f"{TOPIC}/compaction")
        waits = [
            asyncio.ensure_future(one)
            for one in (self.plan.died.wait(), *(topic.compaction.wait() for topic in broker.broker.topics))
        ]
        async with asyncio.timeout(30):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.crashes += self.plan.died.is_set()
        self.plan.died.set()  # also if the compaction ended before the step
        await broker.die()
        self.dead.append(broker)
        self.broker = self.start()
        await self.learn_horizon()

    async def learn_horizon(self) -> None:
        """Ask for the horizon. It never goes back, and it is one of the entries."""
        answer = await self.broker.client.get(f"{TOPIC}/compaction")
        assert answer.status_code == 200, answer.text
        found = answer.json().get("horizon")
        horizon = None if found is None else order(found)
        if self.horizon is not None:
            assert horizon is not None
            assert horizon[:2] >= self.horizon[:2]
        if answer.json().get("ledger_id") is not None:
            self.horizon = horizon

    async def trim(self) -> None:
        answer = await self.broker.client.put(f"{TOPIC}/subscriptions/s", json={"initial": "earliest"})
        assert answer.is_success, answer.text
        (topic,) = self.broker.broker.topics
        await topic.subscriptions["s"].cursor.clear_backlog()
        self.trims += await topic.ledger.trim()

    async def unload(self) -> None:
        for topic in list(self.broker.broker.topics):
            await topic.close()

    async def move(self) -> None:
        await self.broker.close()
        self.broker = self.start()

    async def read(self, reader: Reader) -> None:
        """Read one page, and compare it with the model."""
        if self.random.random() < 0.1 and self.ids:
            reader.start = self.random.choice(self.ids)
        size = self.random.choice((1, 2, 5, 100))
        params = {"start": reader.start, "max": size, **({"compacted": "true"} if reader.compacted else {})}
        answer = await self.broker.client.get(f"{TOPIC}/messages", params=params)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found = [stored(one) for one in page["messages"]]
        wanted = self.expected(compacted=reader.compacted)
        if reader.start != "earliest":
            wanted = [one for one in wanted if one[0] >= order(reader.start)]
        if not reader.compacted:  # the oldest may be trimmed
            (topic,) = self.broker.broker.topics
            first = topic.ledger.first_position
            wanted = [one for one in wanted if one[0][:2] >= (first.ledger_id, first.entry_id)]
        assert found == wanted[: len(found)], reader
        assert len(found) <= size
        assert found or not wanted, f"{reader} stops before {wanted[0]}"
        reader.start = page["next"]
        self.pages += 1

    async def check_table(self) -> None:
        """Read the compacted topic to its end: the table is that of all messages, also of those that were trimmed."""
        found: list[Stored] = []
        start = "earliest"
        while True:
            page, start = await read(self.broker, start=start, max=self.random.choice((1, 3, 100)))
            if not page:
                break
            found += map(stored, page)
        assert found == self.expected(compacted=True)
        table = table_of([(key, value) for _, key, value in found])
        assert table == table_of([(key, value) for _, key, value in self.stored])

    async def step(self) -> None:
        kind = self.random.random()
        if not self.stored:  # what is trimmed before the first compaction is in no table
            await self.publish()
            await self.compact()
        elif kind < 0.3:
            await self.publish()
        elif kind < 0.4:
            await self.compact()
        elif kind < 0.45:
            await self.crash_in_compaction()
        elif kind < 0.55:
            await self.trim()
        elif kind < 0.6:
            await self.unload()
        elif kind < 0.63:
            await self.move()
        elif kind < 0.66:
            await self.check_table()
        else:
            await self.read(self.random.choice(self.readers))

    async def close(self) -> None:
        await self.broker.close()
        for broker in self.dead:
            for topic in list(broker.broker.topics):
                topic.compaction.cancel()


async def run(seed: int) -> World:
    world = World(seed)
    try:
        for _ in range(STEPS):
            await world.step()
        await world.check_table()
        await world.compact()
        await world.check_table()
    finally:
        await world.close()
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
async def test_readers_get_what_the_model_has_over_compactions_crashes_and_trimming(first: int) -> None:
    worlds = []
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            worlds.append(await run(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert sum(world.crashes for world in worlds) > 0
    assert sum(world.trims for world in worlds) > 0
    assert sum(world.compactions for world in worlds) > SEEDS_PER_TEST
    assert sum(world.pages for world in worlds) > 10 * SEEDS_PER_TEST
