"""Replication workers recover open ledgers of a topic that a broker owns: its users see no error.

`heal` recovers an open ledger as a replication worker does. `owner`: the metadata store names this broker as the owner.
"""

import asyncio
import random
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.managed_ledger.writing.switch import FENCES_MAX
from bindery_core.errors import AddTimeout, BinderyError, LedgerFenced, MetadataUnavailable, TopicFenced
from bindery_core.ids import LedgerId
from bindery_pulsar.message_id import EARLIEST, Position
from managed_ledger_cluster import Cluster, read_all


async def owner() -> bool:
    return True


async def replaced() -> bool:
    return False


def in_flight(cluster: Cluster, ledger_id: int) -> list[bytes]:
    writer = cluster.ledgers.ledgers[LedgerId(ledger_id)].writer
    assert writer is not None
    return [payload for payloads, _first, _future in writer._in_flight for payload in payloads]


async def heal(cluster: Cluster, ledger_id: int, *, stored: int = 0) -> None:
    """Fence and close a ledger. Recovery finds the first `stored` of the entries in flight."""
    ledger = cluster.ledgers.ledgers[LedgerId(ledger_id)]
    assert ledger.writer is not None
    ledger.store(in_flight(cluster, ledger_id)[:stored])
    ledger.writer.break_with(LedgerFenced("made up"))
    await cluster.ledgers_client().open(LedgerId(ledger_id))
    assert ledger.is_closed


async def test_an_idle_topic_with_a_closed_ledger_continues_in_the_next_one(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    assert await topic.add_many([b"a"]) == [Position(0, 0)]
    await heal(cluster, 0)
    assert await topic.add_many([b"b", b"c"]) == [Position(1, 0), Position(1, 1)]
    assert list((await read_all(topic)).values()) == [b"a", b"b", b"c"]
    assert [entry["entries"] for entry in topic.internal_stats()["ledgers"]] == [1, 2]
    await topic.crash()
    assert list((await read_all(await cluster.open())).values()) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("stored", range(6))
async def test_entries_in_the_closed_ledger_are_confirmed_and_the_rest_is_written_again(
    cluster: Cluster, stored: int
) -> None:
    topic = await cluster.open(is_owner=owner)
    await topic.add_many([b"0"])
    cluster.ledgers.hold_adds()
    adding = []
    for payloads in ([b"1", b"2"], [b"3"], [b"4", b"5"]):
        adding.append(asyncio.ensure_future(topic.add_many(payloads)))
        await asyncio.sleep(0.01)
    await heal(cluster, 0, stored=stored)
    late = asyncio.ensure_future(topic.add_many([b"6"]))
    cluster.ledgers.release_adds()
    answered = [position for positions in await asyncio.gather(*adding, late) for position in positions]
    assert answered == [Position(0, i) for i in range(1, stored + 1)] + [Position(1, i) for i in range(6 - stored)]
    found = await read_all(topic)
    assert list(found.values()) == [b"%d" % i for i in range(7)]
    assert list(found)[1:] == answered


async def test_an_empty_closed_ledger_is_removed_from_the_list(cluster: Cluster) -> None:
    topic = await cluster.open_with_ledger(is_owner=owner)
    await heal(cluster, 0)
    assert await topic.add_many([b"a"]) == [Position(1, 0)]
    await asyncio.sleep(0.01)
    assert list(cluster.ledgers.ledgers) == [1]


async def test_a_roll_continues_after_a_ledger_that_was_closed(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    await topic.add_many([b"a"])
    await heal(cluster, 0)
    await topic.roll()
    assert topic.is_open
    assert await topic.add_many([b"b"]) == [Position(1, 0)]
    assert sorted(cluster.ledgers.ledgers) == [0, 1]
    assert list((await read_all(topic)).values()) == [b"a", b"b"]


async def test_a_topic_with_a_closed_ledger_closes_cleanly(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    await topic.add_many([b"a"])
    await heal(cluster, 0)
    await topic.close()
    assert list((await read_all(await cluster.open())).values()) == [b"a"]


async def test_a_broker_that_is_not_the_owner_in_the_store_writes_nothing(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=replaced)
    await topic.add_many([b"a"])
    cluster.ledgers.hold_adds()
    adding = asyncio.ensure_future(topic.add_many([b"b"]))
    await asyncio.sleep(0.01)
    await heal(cluster, 0, stored=1)
    with pytest.raises(TopicFenced):
        await adding
    assert not topic.is_open
    assert list(cluster.ledgers.ledgers) == [0]
    assert (
        await cluster.tree.connect().get("/managed-ledgers/" + topic.name)
    ).stat.version == 2  # the open, and the first add


async def test_the_znode_stops_a_stale_owner_that_considers_itself_the_owner(cluster: Cluster) -> None:
    old = await cluster.open(is_owner=owner)
    await old.add_many([b"a"])
    cluster.ledgers.hold_adds()
    adding = [asyncio.ensure_future(old.add_many([payload])) for payload in (b"stored", b"not stored")]
    await asyncio.sleep(0.01)
    ledger = cluster.ledgers.ledgers[LedgerId(0)]
    ledger.store(in_flight(cluster, 0)[:1])
    new = await cluster.open(is_owner=owner)
    cluster.ledgers.release_adds()
    # The first entry is durable, whichever broker owns the topic. The second must not be written any more.
    assert await adding[0] == [Position(0, 1)]
    with pytest.raises(TopicFenced):
        await adding[1]
    assert not old.is_open
    assert [(await new.add_many([b"b"]))[0].entry_id, len(new.internal_stats()["ledgers"])] == [0, 2]
    await asyncio.sleep(0.01)
    named = [ledger["ledgerId"] for ledger in new.internal_stats()["ledgers"]]
    assert list(cluster.ledgers.ledgers) == named, "the ledger that the old one prepared is gone"
    assert list((await read_all(new)).values()) == [b"a", b"stored", b"b"]


async def test_adds_wait_while_the_owner_of_the_topic_cannot_be_determined(cluster: Cluster) -> None:
    refused = 0

    async def asked() -> bool:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise MetadataUnavailable("made up")
        return True

    topic = await cluster.open(is_owner=asked)
    await topic.add_many([b"a"])
    await heal(cluster, 0)
    answers = await asyncio.gather(topic.add_many([b"b"]), topic.add_many([b"c"]))
    assert list(answers) == [[Position(1, 0)], [Position(1, 1)]]
    assert refused == 3


async def test_an_add_is_unknown_if_the_owner_is_not_determined_in_time_and_the_topic_continues(
    cluster: Cluster,
) -> None:
    reachable = False

    async def asked() -> bool:
        if not reachable:
            raise MetadataUnavailable("no connection to ZooKeeper")
        return True

    topic = await cluster.open(is_owner=asked, add_timeout_s=0.05)
    await topic.add_many([b"a"])
    await heal(cluster, 0)
    with pytest.raises(AddTimeout, match="no connection to ZooKeeper"):
        await topic.add_many([b"b"])
    assert topic.is_open
    reachable = True
    assert await topic.add_many([b"c"]) == [Position(1, 0)]
    assert list((await read_all(topic)).values()) == [b"a", b"c"]


async def test_an_ownership_check_without_an_answer_is_repeated(cluster: Cluster) -> None:
    asked = 0

    async def silent() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.get_running_loop().create_future()
        return True

    topic = await cluster.open(is_owner=silent, operation_timeout_s=0.1)
    await topic.add_many([b"a"])
    await heal(cluster, 0)
    assert await topic.add_many([b"b"]) == [Position(1, 0)]
    assert asked == 2


async def test_a_topic_is_lost_if_every_new_ledger_is_fenced(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    cluster.ledgers.fail_next("add", LedgerFenced("made up"), count=10**6)
    with pytest.raises(TopicFenced):
        await topic.add_many([b"a"])
    assert not topic.is_open
    assert cluster.ledgers._next_ledger_id == FENCES_MAX + 1


async def test_only_consecutive_fenced_ledgers_are_counted(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    for i in range(3 * FENCES_MAX):
        await topic.add_many([b"%03d" % i])
        await heal(cluster, topic.last_confirmed.ledger_id)
    assert list((await read_all(topic)).values()) == [b"%03d" % i for i in range(3 * FENCES_MAX)]


async def cursor_ledger(topic: ManagedLedger) -> int:
    ledger_id = topic.cursors["s"].store.ledger_id
    assert ledger_id >= 0
    return ledger_id


async def test_acknowledgements_continue_in_a_new_cursor_ledger(cluster: Cluster) -> None:
    topic = await cluster.open(is_owner=owner)
    positions = await topic.add_many([b"a", b"b", b"c", b"d"])
    cursor = await topic.open_cursor("s", start=EARLIEST)
    await cursor.ack_many(positions[:1])
    before = await cursor_ledger(topic)
    await heal(cluster, before)
    await asyncio.gather(cursor.ack_many(positions[2:3]), cursor.ack_many(positions[3:]))
    assert await cursor_ledger(topic) != before
    await topic.crash()
    again = (await cluster.open()).cursors["s"]
    assert [again.is_acked(position) for position in positions] == [True, False, True, True]


async def test_acknowledgements_of_a_replaced_owner_are_refused(cluster: Cluster) -> None:
    """The metadata store reports the replacement. If its answer is outdated, the znode's version stops the owner."""
    for is_owner in (replaced, owner):
        old = await cluster.open(is_owner=is_owner)
        await old.add_many([b"a", b"b"])
        cursor = await old.open_cursor("s", start=EARLIEST)
        await cursor.ack_many([cursor.next_unacked(EARLIEST)])
        new = await cluster.open()
        with pytest.raises(TopicFenced):
            await cursor.ack_many([old.last_confirmed])
        assert not old.is_open
        assert not new.cursors["s"].is_acked(old.last_confirmed)
        await new.cursors["s"].ack_many([new.last_confirmed])
        await new.crash()


async def test_an_acknowledgement_fails_and_can_be_repeated_while_the_owner_cannot_be_determined(
    cluster: Cluster,
) -> None:
    reachable = False

    async def asked() -> bool:
        if not reachable:
            raise MetadataUnavailable("no connection to ZooKeeper")
        return True

    topic = await cluster.open(is_owner=asked)
    positions = await topic.add_many([b"a", b"b"])
    cursor = await topic.open_cursor("s", start=EARLIEST)
    await cursor.ack_many(positions[:1])
    await heal(cluster, await cursor_ledger(topic))
    with pytest.raises(MetadataUnavailable):
        await cursor.ack_many(positions[1:])
    assert topic.is_open
    reachable = True
    await cursor.ack_many(positions[1:])
    await topic.crash()
    assert (await cluster.open()).cursors["s"].is_acked(positions[1])


async def healer(cluster: Cluster, topic: ManagedLedger, chance: random.Random) -> None:
    """Close open ledgers of the topic and of its cursor at random times."""
    while True:
        await asyncio.sleep(chance.uniform(0.001, 0.03))
        found = [int(record["ledgerId"]) for record in topic.internal_stats()["ledgers"][-1:]]
        if "s" in topic.cursors and topic.cursors["s"].store.ledger_id >= 0:
            found.append(topic.cursors["s"].store.ledger_id)
        ledger_id = chance.choice(found)
        ledger = cluster.ledgers.ledgers.get(LedgerId(ledger_id))
        if ledger is not None and not ledger.is_closed:
            await heal(cluster, ledger_id, stored=chance.randint(0, len(in_flight(cluster, ledger_id))))


@pytest.mark.parametrize("seed", range(40))
async def test_healing_under_load_causes_no_error_and_no_loss(cluster: Cluster, seed: int) -> None:
    """Every call is answered. Answered entries are stored once, at their positions, and are delivered in order.

    Replay one: pytest -k 'healing_under_load and [SEED]'
    """
    chance = random.Random(seed)
    cluster.ledgers.add_delay_s = 0.002
    hiccups = chance.choice([0.0, 0.3])

    async def is_owner() -> bool:
        await asyncio.sleep(chance.choice([0, 0.001]))
        if chance.random() < hiccups:
            raise MetadataUnavailable("made up")
        return True

    settings: dict[str, Any] = {"cursor_entries_max": 5, "entries_max": chance.choice([7, 10_000])}
    topic = await cluster.open(is_owner=is_owner, add_timeout_s=30, **settings)
    told: dict[Position, bytes] = {}
    delivered: list[tuple[Position, bytes]] = []
    acked: set[Position] = set()
    await topic.open_cursor("keeper", start=EARLIEST)  # nothing is trimmed

    async def produce(name: int) -> None:
        """Send several calls at once, like a pipelining producer."""
        sent = 0
        while sent < 60:
            calls: list[list[bytes]] = []
            for _ in range(chance.randint(1, 4)):
                calls.append([b"%d/%04d" % (name, sent + i) for i in range(chance.randint(1, 4))])
                sent += len(calls[-1])
            for payloads, positions in zip(
                calls, await asyncio.gather(*(topic.submit_many(call) for call in calls)), strict=True
            ):
                assert len(positions) == len(payloads)
                for position, payload in zip(positions, payloads, strict=True):
                    assert told.setdefault(position, payload) == payload, f"{position} was returned for two entries"
            await asyncio.sleep(chance.choice([0, 0, 0.01]))

    async def consume() -> None:
        cursor = await topic.open_cursor("s", start=EARLIEST)
        position = topic.first_position
        while True:
            try:
                found = await cursor.read_unacked(position, entries_max=5, size_max=10**6)
                position = found.next_position
                delivered.extend((entry.position, entry.payload) for entry in found.entries)
                chosen = [entry.position for entry in found.entries if chance.random() < 0.7]
                while chosen:
                    try:
                        await cursor.ack_many(chosen)
                    except MetadataUnavailable:
                        continue
                    acked.update(chosen)
                    break
            except BinderyError as error:
                raise AssertionError("a call of the consumer failed") from error
            await asyncio.sleep(0.003)

    background = [asyncio.ensure_future(consume()), asyncio.ensure_future(healer(cluster, topic, chance))]
    await asyncio.gather(*(produce(name) for name in range(3)))
    async with asyncio.timeout(30):
        while len(delivered) < topic.entries_count:
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in background), background
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)

    assert topic.is_open
    await topic.crash()
    survivor = await cluster.open()
    found = await read_all(survivor)
    assert found == told
    assert delivered == list(found.items())
    for name in range(3):
        sent = [payload for payload in found.values() if payload.startswith(b"%d/" % name)]
        assert sent == [b"%d/%04d" % (name, i) for i in range(len(sent))]
        assert len(sent) >= 60
    assert acked
    for position in acked:
        assert survivor.cursors["s"].is_acked(position)
