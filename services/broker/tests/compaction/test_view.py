"""A compacted topic against a model: any order of publishing, compaction, trimming, unloading and reading."""

import asyncio
from typing import Any

from bindery_broker.compaction import raw_message
from bindery_broker.compaction.compacted_ledger import CompactedLedger
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_id import Position
from broker_harness import Clock, Harness
from compaction_parts import KeyModel, Message, compact, pairs, publish, read, read_all, table_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

SETTINGS: dict[str, Any] = {"ledger": {"entries_max": 3, "age_s_min": 0}}
KEYS = st.sampled_from("abcdef")
VALUES = st.sampled_from(["", "1", "2", "3"])
MESSAGES = st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), MESSAGES),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("trim"), st.none()),
        st.tuples(st.just("unload"), st.none()),
        st.tuples(st.just("read"), st.integers(1, 4)),
    ),
    min_size=3,
    max_size=14,
)


class Reader:
    """A table that is fed by reads that continue where the last one ended."""

    def __init__(self) -> None:
        self.start = "earliest"
        self.table: dict[str, str] = {}
        self.ids: list[tuple[int, ...]] = []

    def take(self, messages: list[Message], following: str) -> None:
        self.table = table_of(pairs(messages), self.table)
        self.ids += [tuple(int(part) for part in one["message_id"].split(":")) for one in messages]
        self.start = following


async def run(steps: list[tuple[str, Any]]) -> None:
    harness = Harness(tree=MemoryTree(), ledgers=MemoryLedgers(), clock=Clock(), url="http://one", **SETTINGS)
    model, reader = KeyModel(), Reader()
    forgotten: set[str] = set()
    """Keys of which a tombstone was compacted before the reader came to it: it may keep the former value."""
    try:
        await publish(harness, ("a", "0"), batch=False)
        model.publish([("a", "0")])
        await compact(harness)  # from now on nothing is trimmed before it is compacted
        for step, argument in [*steps, ("read", 100), ("read", 100), ("read", 100)]:
            if step == "publish":
                await publish(harness, *argument, batch=len(argument) % 2 == 0)
                model.publish(argument)
            elif step == "compact":
                await compact(harness)
                forgotten |= reader.table.keys() - model.table().keys()
            elif step == "trim":
                for topic in list(harness.broker.topics):
                    subscription, _ = await topic.subscribe("s")
                    await subscription.cursor.clear_backlog()
                    await topic.ledger.trim()
            elif step == "unload":
                for topic in list(harness.broker.topics):
                    await topic.close()
            else:
                reader.take(*await read(harness, start=reader.start, max=argument))
        whole = await read_all(harness, page=2)
        assert table_of(pairs(whole)) == model.table()
        extra = reader.table.keys() - model.table().keys()
        assert {key: value for key, value in reader.table.items() if key not in extra} == model.table()
        assert extra <= forgotten
        assert reader.ids == sorted(set(reader.ids)), "each message once, in order"
        await compact(harness)
        compacted = pairs(await read_all(harness))
        assert dict(compacted) == model.table()
        assert len(compacted) == len(model.table())
    finally:
        await harness.close()


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(STEPS)
def test_every_reader_has_the_last_value_of_every_key(steps):
    asyncio.run(run(steps))


async def test_entries_are_found_by_position_and_read_within_their_sizes():
    client = MemoryLedgerClient(MemoryLedgers())
    handle = await client.create()
    positions = [Position(ledger, entry) for ledger in (3, 5) for entry in range(0, 40, 4)]
    sizes = [10] * 15 + [10_000] * 5
    await handle.add_many(
        [raw_message.encode(at, b"x" * size, partition=-1) for at, size in zip(positions, sizes, strict=True)]
    )
    await handle.close()
    ledger = CompactedLedger(client, handle.ledger_id, timeout_s=5)
    for wanted in [Position(-1, -1), *positions, *(Position(at.ledger_id, at.entry_id + 1) for at in positions)]:
        expected = next((number for number, at in enumerate(positions) if at >= wanted), None)
        assert await ledger.find(wanted) == expected, wanted
    assert [at for at, _ in await ledger.read(0, entries_max=7, size_max=10**6)] == positions[:7]
    found = await ledger.read(0, entries_max=100, size_max=15_000)
    assert len(found) >= 10
    assert sum(len(entry) for _, entry in found) < 25_000
    assert [at for at, _ in found] == positions[: len(found)]
    assert len(await ledger.read(15, entries_max=100, size_max=1)) == 1
    assert len(await ledger.read(19, entries_max=100, size_max=1)) == 1
    await ledger.release()
