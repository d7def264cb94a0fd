"""Adding: order, pipelining, rollover, and what happens when the ledger fails."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    BookieUnavailable,
    LedgerFenced,
    MetadataUnavailable,
    NoSuchTopic,
    NotEnoughBookies,
    TooLarge,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import BookieId
from bindery_metadata.stores.store import Op, Stat
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_id import Position
from managed_ledger_cluster import TOPIC, Cluster, read_all


async def add_ten(topic: ManagedLedger) -> list[Position]:
    return await topic.add_many([b"%d" % i for i in range(10)])


async def test_entries_get_dense_positions_in_the_order_of_the_calls(cluster: Cluster) -> None:
    topic = await cluster.open()
    calls = [topic.add_many([b"%d-%d" % (call, i) for i in range(3)]) for call in range(20)]
    positions = [position for answer in await asyncio.gather(*calls) for position in answer]
    assert positions == [Position(0, i) for i in range(60)]
    assert list((await read_all(topic)).values()) == [b"%d-%d" % (call, i) for call in range(20) for i in range(3)]
    assert topic.last_confirmed == Position(0, 59)


async def test_calls_in_one_turn_of_the_event_loop_are_sent_as_one_group(cluster: Cluster) -> None:
    topic = await cluster.open()
    cluster.ledgers.fail_next("add", AddTimeout("made up"), count=1)
    await asyncio.gather(*[topic.add_many([b"x"]) for _ in range(100)])
    # The fault hits one call to the ledger. As that call has all entries, all of them go to the next ledger.
    assert topic.last_confirmed == Position(1, 99)


async def test_nothing_is_answered_before_it_is_durable(cluster: Cluster) -> None:
    topic = await cluster.open()
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"x"]))
    assert (await asyncio.wait([adding], timeout=0.02))[0] == set()
    assert topic.last_confirmed == Position(0, -1)
    assert await topic.read(topic.first_position, entries_max=1, size_max=100) == []
    cluster.ledgers.release_adds()
    assert await adding == [Position(0, 0)]


async def test_an_empty_add_is_answered_at_once(cluster: Cluster) -> None:
    topic = await cluster.open()
    assert await topic.add_many([]) == []


async def test_an_entry_over_the_limit_is_refused_with_the_limit(cluster: Cluster) -> None:
    topic = await cluster.open()
    with pytest.raises(TooLarge, match=str(ENTRY_SIZE_MAX)):
        await topic.add_many([b"x", bytes(ENTRY_SIZE_MAX + 1)])
    assert topic.entries_count == 0
    assert len(await topic.add_many([bytes(ENTRY_SIZE_MAX)])) == 1


async def test_more_than_the_pending_budget_is_refused_until_adds_complete(cluster: Cluster) -> None:
    topic = await cluster.open(pending_size_max=1000)
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([bytes(900)]))
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="size_max=1000"):
        await topic.add_many([bytes(101)])
    cluster.ledgers.release_adds()
    await adding
    assert len(await topic.add_many([bytes(1001)])) == 1  # alone it may be larger


async def test_entries_of_a_call_cancelled_before_sending_are_not_stored(cluster: Cluster) -> None:
    topic = await cluster.open()
    left = asyncio.ensure_future(topic.add_many([b"left"]))
    await asyncio.sleep(0)
    left.cancel()
    assert await topic.add_many([b"stayed"]) == [Position(0, 0)]


@pytest.mark.parametrize(
    ("settings", "ledgers"),
    [
        ({"entries_max": 10}, 4),
        ({"size_max": 10}, 4),
        ({"entries_max": 1000}, 1),
        ({"entries_max": 10, "age_s_min": 60}, 1),
    ],
)
async def test_a_full_ledger_is_followed_by_another(cluster: Cluster, settings: dict[str, int], ledgers: int) -> None:
    topic = await cluster.open(**settings)
    positions = []
    for _ in range(3):
        positions += await add_ten(topic)
        if ledgers > 1:
            await topic.roll()  # waits for the roll in progress
    assert len({position.ledger_id for position in positions}) == min(ledgers, 3)
    assert all(a < b for a, b in pairwise(positions))
    assert list(await read_all(topic)) == positions
    assert len(topic.internal_stats()["ledgers"]) == ledgers


async def test_an_old_ledger_is_rolled_unless_it_is_empty(cluster: Cluster) -> None:
    topic = await cluster.open_with_ledger(age_s_max=0.03)
    await asyncio.sleep(0.08)
    assert topic.last_confirmed == Position(0, -1)
    assert len(cluster.ledgers.ledgers) == 1
    await add_ten(topic)
    async with asyncio.timeout(30):
        while topic.internal_stats()["currentLedgerEntries"]:
            await asyncio.sleep(0.01)
    assert [ledger["entries"] for ledger in topic.internal_stats()["ledgers"]] == [10, 0]
    assert (await topic.add_many([b"x"]))[0].entry_id == 0


async def test_adds_continue_while_the_next_ledger_cannot_be_created(cluster: Cluster) -> None:
    topic = await cluster.open_with_ledger(entries_max=5)
    bookies = dict(cluster.ledgers.bookies)
    for bookie in bookies:
        cluster.ledgers.bookies[bookie] = False
    for _ in range(5):
        await add_ten(topic)
    assert topic.last_confirmed == Position(0, 49)


async def test_a_failed_ledger_is_recovered_and_missing_entries_are_sent_again(cluster: Cluster) -> None:
    """A: stored and confirmed. B: in flight and stored, as recovery finds. C: in flight and not stored."""
    topic = await cluster.open()
    assert await topic.add_many([b"a"]) == [Position(0, 0)]
    cluster.ledgers.hold_adds()
    b = asyncio.ensure_future(topic.add_many([b"b1", b"b2"]))
    await asyncio.sleep(0.01)
    c = asyncio.ensure_future(topic.add_many([b"c1", b"c2"]))
    await asyncio.sleep(0.01)
    cluster.ledgers.fail_next("add", BookieUnavailable("made up"), stored=True)
    cluster.ledgers.release_adds()
    assert await b == [Position(0, 1), Position(0, 2)]
    assert await c == [Position(1, 0), Position(1, 1)]
    assert list((await read_all(topic)).values()) == [b"a", b"b1", b"b2", b"c1", b"c2"]
    assert (await cluster.ledgers_client().metadata(0)).last_entry_id == 2


async def test_an_add_that_is_partly_stored_continues_in_the_next_ledger(cluster: Cluster) -> None:
    topic = await cluster.open_with_ledger()
    ledger = cluster.ledgers.ledgers[0]
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"1", b"2", b"3"]))
    await asyncio.sleep(0.01)
    ledger.store([b"1"])  # what one bookie got before all failed
    ledger.writer.break_with(AddTimeout("made up"))
    cluster.ledgers.release_adds()
    assert await adding == [Position(0, 0), Position(1, 0), Position(1, 1)]
    assert list((await read_all(topic)).values()) == [b"1", b"2", b"3"]


async def test_an_empty_failed_ledger_is_removed_from_the_list_and_deleted(cluster: Cluster) -> None:
    topic = await cluster.open()
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    assert await topic.add_many([b"x"]) == [Position(1, 0)]
    await asyncio.sleep(0.01)
    assert list(cluster.ledgers.ledgers) == [1]
    assert len(topic.internal_stats()["ledgers"]) == 1


async def test_adds_wait_while_the_ledger_cannot_be_recovered(cluster: Cluster) -> None:
    topic = await cluster.open()
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.fail_next("open", BookieUnavailable("made up"), count=3)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"), count=3)
    assert await asyncio.gather(topic.add_many([b"x"]), topic.add_many([b"y"])) == [[Position(1, 0)], [Position(1, 1)]]


async def test_the_error_of_an_expired_add_shows_whether_it_may_be_stored(cluster: Cluster) -> None:
    topic = await cluster.open(add_timeout_s=0.05)
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.fail_next("open", BookieUnavailable("no recovery now"), count=10**6)
    sent = asyncio.ensure_future(topic.add_many([b"sent"]))
    await asyncio.sleep(0.01)
    queued = asyncio.ensure_future(topic.add_many([b"queued"]))
    with pytest.raises(AddTimeout, match="no recovery now"):
        await sent
    with pytest.raises(BookieUnavailable, match="no recovery now"):
        await queued
    assert topic.is_open


async def test_entries_that_are_certainly_not_stored_fail_as_not_stored(cluster: Cluster) -> None:
    """The ledger is recovered without the entries, and then no other ledger can be created."""
    topic = await cluster.open(add_timeout_s=0.05)
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.bookies[BookieId("bookie-0:3181")] = False
    cluster.ledgers.bookies[BookieId("bookie-1:3182")] = False
    with pytest.raises(NotEnoughBookies):
        await topic.add_many([b"x"])
    cluster.ledgers.bookies[BookieId("bookie-0:3181")] = True
    assert (await topic.add_many([b"y"]))[0].entry_id == 0
    assert list((await read_all(topic)).values()) == [b"y"]


async def test_an_add_that_is_partly_stored_is_unknown_if_the_rest_cannot_be_stored(cluster: Cluster) -> None:
    """Its first entry was recovered: "not stored" would make the producer send that entry again."""
    topic = await cluster.open_with_ledger(add_timeout_s=0.05)
    ledger = cluster.ledgers.ledgers[0]
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"1", b"2", b"3"]))
    await asyncio.sleep(0.01)
    ledger.store([b"1"])
    ledger.writer.break_with(AddTimeout("made up"))
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"), count=10**6)
    cluster.ledgers.release_adds()
    with pytest.raises(AddTimeout, match="not known"):
        await adding
    assert topic._writer is not None
    assert topic._writer.pending_size == 0
    assert list((await read_all(topic)).values()) == [b"1"]


class HangingClient:
    """A client on which the calls named in `hangs` never return."""

    def __init__(self, inner: MemoryLedgerClient) -> None:
        self._inner = inner
        self.hangs: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name not in self.hangs:
            return getattr(self._inner, name)

        def hang(*args: Any, **kwargs: Any) -> Any:
            return asyncio.get_running_loop().create_future()

        return hang


@pytest.mark.parametrize("hangs", ["open", "create"])
async def test_an_add_fails_at_its_deadline_while_another_call_hangs(cluster: Cluster, hangs: str) -> None:
    client = HangingClient(cluster.ledgers_client())
    topic = await cluster.open(client=client, add_timeout_s=1, operation_timeout_s=5)
    client.hangs.add(hangs)
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def add(after_s: float) -> tuple[type[BaseException], float]:
        await asyncio.sleep(after_s)
        with pytest.raises(BinderyError) as raised:
            await topic.add_many([b"x"])
        return raised.type, loop.time() - began

    first, *later = await asyncio.gather(*[add(after_s) for after_s in (0, 0.3, 0.31, 2.5)])
    # Once the ledger is recovered, it is certain that even the first add was not stored.
    assert first == (AddTimeout if hangs == "open" else TryAgain, pytest.approx(1.0, abs=0.1))
    assert later == [(TryAgain, pytest.approx(1 + after_s, abs=0.1)) for after_s in (0.3, 0.31, 2.5)]
    client.hangs.clear()
    await asyncio.sleep(2)  # the hanging call ends
    assert len(await topic.add_many([b"y"])) == 1
    assert list((await read_all(topic)).values()) == [b"y"]
    assert topic._writer is not None
    assert topic._writer.pending_size == 0


async def test_a_slow_roll_fails_queued_adds_but_not_adds_in_flight(cluster: Cluster) -> None:
    topic = await cluster.open(add_timeout_s=1)
    await add_ten(topic)
    cluster.ledgers.hold_adds()
    in_flight = asyncio.ensure_future(topic.add_many([b"in flight"]))
    await asyncio.sleep(0.01)
    rolling = asyncio.ensure_future(topic.roll())
    await asyncio.sleep(0.01)
    with pytest.raises(TryAgain, match="no ledger"):
        await topic.add_many([b"behind"])
    cluster.ledgers.release_adds()
    assert await in_flight == [Position(0, 10)]
    await rolling
    assert await topic.add_many([b"x"]) == [Position(1, 0)]


async def test_the_state_has_pulsars_names(cluster: Cluster) -> None:
    topic = await cluster.open(add_timeout_s=1)

    def state() -> object:
        return topic.internal_stats()["state"]

    assert state() == "ClosedLedger"
    await topic.add_many([b"w"])
    assert state() == "LedgerOpened"
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"x"]))
    await asyncio.sleep(0.01)
    rolling = asyncio.ensure_future(topic.roll())
    await asyncio.sleep(0.01)
    assert state() == "ClosingLedger"
    cluster.ledgers.release_adds()
    await asyncio.gather(adding, rolling)
    assert state() == "LedgerOpened"
    cluster.ledgers.fail_next("add", AddTimeout("made up"))
    cluster.ledgers.fail_next("open", BookieUnavailable("made up"), count=10**6)
    with pytest.raises(AddTimeout):
        await topic.add_many([b"y"])
    assert state() == "CreatingLedger"
    await topic.crash()
    assert state() == "Closed"
    cluster.ledgers._faults.clear()
    topic = await cluster.open()
    cluster.ledgers.fail_next("add", LedgerFenced("made up"))
    with pytest.raises(TopicFenced):
        await topic.add_many([b"x"])
    assert state() == "Fenced"


async def test_a_ledger_prepared_for_a_roll_that_fails_is_deleted(cluster: Cluster) -> None:
    """The current ledger of the topic is missing when the roll closes it."""
    topic = await cluster.open()
    await add_ten(topic)
    del cluster.ledgers.ledgers[0]
    cluster.ledgers.fail_next("close", MetadataUnavailable("made up"))
    with pytest.raises(TopicFenced):
        await topic.roll()
    await asyncio.sleep(0.01)
    assert not cluster.ledgers.ledgers


@pytest.mark.parametrize("end", ["close", "delete", "crash"])
async def test_a_topic_that_ends_during_a_roll_deletes_the_prepared_ledger_unless_it_crashes(
    cluster: Cluster, end: str
) -> None:
    topic = await cluster.open(add_timeout_s=0.1)
    await add_ten(topic)
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"x"]))
    await asyncio.sleep(0.01)
    rolling = asyncio.ensure_future(topic.roll())
    await asyncio.sleep(0.01)
    assert list(cluster.ledgers.ledgers) == [0, 1]
    await getattr(topic, end)()
    await asyncio.gather(adding, rolling, return_exceptions=True)
    assert list(cluster.ledgers.ledgers) == {"close": [0], "delete": [], "crash": [0, 1]}[end]


async def test_a_ledger_that_the_znode_may_name_is_kept(cluster: Cluster) -> None:
    store = cluster.tree.connect()
    topic = await cluster.open(store=store, add_timeout_s=0.1)
    await add_ten(topic)
    multi = store.multi

    async def silent(ops: Sequence[Op]) -> list[str | Stat | None]:
        await multi(ops)
        return await asyncio.get_running_loop().create_future()

    store.multi = silent  # type: ignore[method-assign]
    rolling = asyncio.ensure_future(topic.roll())
    await asyncio.sleep(0.01)
    await topic.close()
    await asyncio.gather(rolling, return_exceptions=True)
    assert list(cluster.ledgers.ledgers) == [0, 1]
    again = await cluster.open()
    assert again.entries_count == 10


async def test_a_fenced_topic_refuses_all_calls_permanently(cluster: Cluster) -> None:
    topic = await cluster.open()
    calls = []
    topic.on_fenced(lambda: calls.append(1))
    cluster.ledgers.fail_next("add", LedgerFenced("made up"))
    results = await asyncio.gather(*[topic.add_many([b"x"]) for _ in range(3)], return_exceptions=True)
    assert all(isinstance(result, TopicFenced) for result in results)
    for call in (topic.add_many([b"x"]), topic.read(topic.first_position, entries_max=1, size_max=1), topic.trim()):
        with pytest.raises(TopicFenced):
            await call
    assert calls == [1]
    assert not topic.is_open


async def test_a_roll_fences_the_topic_and_deletes_its_ledger_if_another_broker_wrote_the_znode(
    cluster: Cluster,
) -> None:
    topic = await cluster.open()
    await add_ten(topic)
    await cluster.tree.connect().set(f"/managed-ledgers/{TOPIC}", b"", version=None)
    with pytest.raises(TopicFenced):
        await topic.roll()
    assert list(cluster.ledgers.ledgers) == [0]


@pytest.mark.parametrize("applied", [False, True])
async def test_a_roll_resolves_an_unknown_outcome_of_its_znode_write(cluster: Cluster, applied: bool) -> None:
    store = cluster.tree.connect()
    topic = await cluster.open(store=store)
    await add_ten(topic)
    store.lose_next_write(applied=applied)
    await topic.roll()
    assert await topic.add_many([b"x"]) == [Position(1, 0)]
    assert (await store.get(f"/managed-ledgers/{TOPIC}")).stat.version == 3  # the open, the start, and the roll


async def test_a_roll_waits_for_metadata_and_adds_wait_with_it(cluster: Cluster) -> None:
    store = cluster.tree.connect()
    topic = await cluster.open(store=store)
    await add_ten(topic)
    for _ in range(4):
        store.fail_next(MetadataUnavailable("made up"))
    rolling = asyncio.ensure_future(topic.roll())
    assert (await topic.add_many([b"x"]))[0].ledger_id in (0, 1)
    await rolling
    assert topic.is_open


async def test_closing_completes_pending_adds_and_closes_the_ledger(cluster: Cluster) -> None:
    topic = await cluster.open()
    adding = asyncio.ensure_future(topic.add_many([b"x"]))
    await asyncio.sleep(0)
    await topic.close()
    assert await adding == [Position(0, 0)]
    assert cluster.ledgers.ledgers[0].is_closed
    with pytest.raises(TryAgain, match="closed here"):
        await topic.add_many([b"y"])
    await topic.close()


async def test_opening_a_missing_topic_without_create_fails(cluster: Cluster) -> None:
    with pytest.raises(NoSuchTopic):
        await cluster.open(create=False)
    assert not cluster.ledgers.ledgers


async def test_an_empty_last_ledger_is_dropped_and_deleted_by_the_first_add(cluster: Cluster) -> None:
    await (await cluster.open_with_ledger()).crash()
    topic = await cluster.open()
    assert topic.first_position == Position(0, 0)
    assert cluster.ledgers.ledgers[0].is_closed
    assert await topic.add_many([b"x"]) == [Position(1, 0)]
    await asyncio.sleep(0.01)
    assert list(cluster.ledgers.ledgers) == [1]
    assert topic.first_position == Position(1, 0)


async def test_opening_removes_a_missing_last_ledger_from_the_list(cluster: Cluster) -> None:
    first = await cluster.open()
    await add_ten(first)
    await first.roll()
    await first.add_many([b"gone"])
    await first.crash()
    del cluster.ledgers.ledgers[1]
    topic = await cluster.open()
    assert topic.entries_count == 10
    assert len(await read_all(topic)) == 10


async def test_ledgers_have_their_purpose_in_their_metadata(cluster: Cluster) -> None:
    topic = await cluster.open_with_ledger()
    assert cluster.ledgers.ledgers[0].metadata.custom == {
        "application": b"pulsar",
        "component": b"managed-ledger",
        "pulsar/managed-ledger": TOPIC.encode(),
    }
    assert topic.name == TOPIC


async def test_whether_an_add_was_stored_is_decided_once_its_ledger_was_replaced(cluster: Cluster) -> None:
    topic = await cluster.open(add_timeout_s=1.0)
    await topic.decided()
    cluster.ledgers.fail_next("add", AddTimeout("made up"), stored=True)
    cluster.ledgers.fail_next("open", BookieUnavailable("no recovery now"), count=10_000)
    with pytest.raises(AddTimeout):
        await topic.add_many([b"x"])
    with pytest.raises(TryAgain, match="is being replaced"):
        await topic.decided()
    assert topic.entries_count == 0
    cluster.ledgers._faults.clear()
    await asyncio.sleep(20)
    await topic.decided()
    assert topic.entries_count == 1
    await topic.close()
    with pytest.raises(TryAgain):
        await topic.decided()
