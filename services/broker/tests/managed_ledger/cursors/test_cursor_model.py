"""A cursor compared with a model of sets, while its broker fails at any step and others take over.

The model knows each message as (position, index). After every call the cursor in memory equals the model. A new broker
finds the state after the last call that returned, or after one of the later calls, which failed or were in progress.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger, Redelivered
from bindery_core.errors import BinderyError
from bindery_pulsar import subscription_log
from bindery_pulsar.message_id import EARLIEST, Position
from managed_ledger_cluster import Cluster
from managed_ledger_faults import FaultyClient, FaultyStore, Plan

BATCH_SIZE = 4
KEEP_ALL = {"retention_acked_s": 10**9, "retention_unsubscribed_s": 10**9}
Message = tuple[Position, int]


@dataclass(frozen=True)
class Model:
    """The naive state. Every third entry is a batch of four, the others have one message."""

    entries: tuple[Position, ...]
    acked: frozenset[Message] = frozenset()
    counts: dict[Message, int] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def size(self, position: Position) -> int:
        return BATCH_SIZE if self.entries.index(position) % 3 == 0 else 1

    def messages(self, position: Position) -> list[Message]:
        return [(position, index) for index in range(self.size(position))]

    def acknowledged(self, messages: list[Message]) -> "Model":
        acked = self.acked | set(messages)
        return replace(self, acked=acked, counts={at: n for at, n in self.counts.items() if at not in acked})

    def upto(self, position: Position) -> "Model":
        return self.acknowledged([each for at in self.entries if at <= position for each in self.messages(at)])

    def is_done(self, position: Position) -> bool:
        return self.acked.issuperset(self.messages(position))

    def matches(self, cursor: ManagedCursor) -> bool:
        found = {
            (at, index): count
            for at, levels in cursor.redelivery_counts()
            for count, bits in levels
            for index in range(BATCH_SIZE)
            if bits >> index & 1
        }
        for at in self.entries:
            rest = sum(1 << index for _, index in set(self.messages(at)) - self.acked)
            whole = (1 << self.size(at)) - 1
            if cursor.is_acked(at) != (rest == 0) or cursor.remaining(at) != (rest if 0 < rest < whole else None):
                return False
        return found == self.counts and cursor.blobs == self.blobs


class Run:
    """One cursor, its model, and what a new broker may find."""

    def __init__(self, chance: random.Random, entries: list[Position]) -> None:
        self.chance = chance
        self.model = Model(tuple(entries))
        self.possible = [self.model]
        self.cursor: ManagedCursor

    def pick(self, count: int) -> list[Position]:
        return self.chance.sample(self.model.entries, count)

    def change(self) -> Any:
        """Choose a change, apply it to the model, and return the call that makes it."""
        chance, model, cursor = self.chance, self.model, self.cursor
        kind = chance.choice(["ack", "ack", "ack", "batch", "batch", "upto", "skip", "counts", "counts", "blobs"])
        if kind == "ack":
            chosen = self.pick(chance.choice([1, 1, 3, 8]))
            self.model = model.acknowledged([each for at in chosen for each in model.messages(at)])
            return cursor.ack_many(chosen)
        if kind == "batch":
            at = chance.choice(model.entries[::3])
            indexes = chance.sample(range(BATCH_SIZE), chance.randint(1, 3))
            self.model = model.acknowledged([(at, index) for index in indexes])
            return cursor.ack_many([], batches=[BatchAck(at, BATCH_SIZE, indexes)])
        if kind == "upto":
            at = chance.choice(model.entries[: len(model.entries) // 3])
            self.model = model.upto(at)
            return cursor.ack_cumulative(at)
        if kind == "skip":
            count = chance.randint(1, 3)
            rest = [at for at in model.entries if not model.is_done(at)]
            self.model = model.upto(rest[:count][-1] if rest else model.entries[-1])
            return cursor.skip(count)
        if kind == "blobs":
            names = ["a", "b", "c", "d"]
            put = {name: chance.randbytes(chance.choice([0, 20, 300])) for name in chance.sample(names, 2)}
            remove = [name for name in names if name not in put and chance.random() < 0.5]
            kept = {name: value for name, value in model.blobs.items() if name not in remove}
            self.model = replace(model, blobs=kept | put)
            return cursor.put_blobs(put, remove)
        changes, counts = [], dict(model.counts)
        for at in self.pick(chance.choice([1, 4])):
            count = chance.randint(1, 5)
            bits = chance.randrange(1, 1 << model.size(at))
            changes.append(Redelivered(at, bits, count))
            for message in model.messages(at):
                if bits >> message[1] & 1 and message not in model.acked:
                    counts[message] = max(counts.get(message, 0), count)
        self.model = replace(model, counts=counts)
        return cursor.record_redeliveries(changes)

    async def changes(self) -> None:
        """Make some changes at once, which share records."""
        calls = []
        for _ in range(self.chance.choice([1, 1, 2, 4])):
            calls.append(self.change())
            self.possible.append(self.model)
        results = await asyncio.gather(*calls, return_exceptions=True)
        self.check(results)

    async def seek(self) -> None:
        former, at = self.model, self.chance.choice(self.model.entries)
        before = [each for other in former.entries if other < at for each in former.messages(other)]
        sought = Model(former.entries, frozenset(before))
        self.possible.append(sought)
        seeking = asyncio.ensure_future(self.cursor.seek(at))
        if self.chance.random() < 0.3:
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.003), seeking.cancel)
        [result] = await asyncio.gather(seeking, return_exceptions=True)
        if not isinstance(result, BaseException):
            self.model = sought
        self.check([result])

    def check(self, results: list[Any]) -> None:
        assert self.model.matches(self.cursor)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, BinderyError | asyncio.CancelledError):
                raise result
        if not any(isinstance(result, BaseException) for result in results):
            self.possible = [self.model]


async def live(run: Run, topic: ManagedLedger) -> None:
    """Change the cursor until the broker stops, or closes the topic."""
    chance = run.chance
    for _ in range(chance.randint(1, 40)):
        await (run.seek() if chance.random() < 0.08 else run.changes())
    with contextlib.suppress(BinderyError):
        await topic.close()


@pytest.mark.parametrize("seed", range(60))
async def test_a_new_broker_finds_the_state_after_the_last_call_that_returned(
    cluster: Cluster, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay one: pytest -k 'last_call_that_returned and [SEED]'"""
    chance = random.Random(seed)
    monkeypatch.setattr(subscription_log, "PART_SIZE_MAX", chance.choice([1, 100, 400, 2**20]))
    monkeypatch.setattr(subscription_log, "_SLICE_BLOCKS_MAX", chance.choice([1, 4096]))
    sizes: dict[str, Any] = KEEP_ALL | {
        "cursor_entries_max": chance.choice([1, 6, 20, 50_000]),
        "cursor_changes_size_max": chance.choice([1, 400, 2000]),
        "cursor_size_max": chance.choice([1, 3000, 10**6]),
        "cursor_inline_size_max": chance.choice([256, 700, 32_768]),
    }
    topic = await cluster.open(**sizes)
    entries: list[Position] = []
    for _ in range(3):
        entries += await topic.add_many([b""] * 12)
        await topic.roll()
    await topic.open_cursor("s", start=EARLIEST)
    await topic.crash()
    cluster.forget(topic)
    run = Run(chance, entries)
    for _ in range(6):
        plan = Plan(chance.randrange(2**32), die_at=None, fault_rate=0)
        client, store = FaultyClient(cluster.ledgers, plan), FaultyStore(cluster.tree.connect(), plan)
        cluster.ledgers.add_delay_s = 0.001
        topic = await cluster.open(client=client, store=store, **sizes)
        cluster.forget(topic)
        run.cursor = topic.cursors["s"]
        matching = [model for model in run.possible if model.matches(run.cursor)]
        assert matching, "the new broker has a state that no call explains"
        run.model, run.possible = matching[0], matching[:1]
        plan._fault_rate = chance.choice([0, 0, 0.1, 0.5])
        plan._die_at = plan.steps + chance.randint(1, 150)
        living = asyncio.ensure_future(live(run, topic))
        died = asyncio.ensure_future(plan.died.wait())
        await asyncio.wait([living, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        plan.died.set()
        possible = list(run.possible)
        living.cancel()
        [result] = await asyncio.gather(living, return_exceptions=True)
        if isinstance(result, Exception):
            raise result
        run.possible = possible
        plan._fault_rate = 0
        await asyncio.wait([asyncio.ensure_future(topic.crash())], timeout=10)
