"""Acknowledgements and seeks of a cursor: durable when they return, in one order, never undone by a later record."""

import asyncio
import contextlib
import random
from typing import Any

import pytest
from bindery_broker.managed_ledger import BatchAck, Redelivered
from bindery_core.errors import (
    AddTimeout,
    BadRequest,
    MetadataUnavailable,
    NotEnoughBookies,
    OutcomeUnknown,
    TooLarge,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_pulsar.managed_ledger_codec import decode_cursor, decode_topic
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from managed_ledger_cluster import SUB, TOPIC, Cluster, at, topic_of, unacked
from managed_ledger_faults import FaultyClient, FaultyStore, Plan


@pytest.mark.parametrize("clean", [False, True])
async def test_acknowledgements_survive_the_end_of_the_broker(cluster: Cluster, clean: bool) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(
        at(0, 1, 4, 5, 8), batches=[BatchAck(Position(0, 3), 100, [0, 99]), BatchAck(Position(0, 6), 2, [1])]
    )
    await cursor.set_position_properties({"n": 7})
    await (topic.close() if clean else topic.crash())
    named = decode_cursor((await cluster.tree.connect().get(SUB)).data).ledger_id
    assert (named == -1) == clean
    assert len(cluster.ledgers.ledgers) == (1 if clean else 2)
    _, cursor = await topic_of(cluster)
    assert cursor.mark_delete == Position(0, 1)
    assert cursor.individually_acked() == "[(0:3..0:5],(0:7..0:8]]"
    assert cursor.remaining(Position(0, 3)) == (1 << 100) - 2 - (1 << 99)
    assert cursor.remaining(Position(0, 6)) == 1
    assert cursor.position_properties == {"n": 7}
    assert cursor.backlog_entries == 5
    assert await unacked(cursor) == [2, 3, 6, 7, 9]


async def test_an_acknowledgement_is_answered_when_it_is_durable_and_not_before(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(1)))
    assert (await asyncio.wait([acking], timeout=0.02))[0] == set()
    assert cursor.is_acked(Position(0, 1))
    assert cursor.durable_mark_delete == Position(0, 0)
    repeated = asyncio.ensure_future(cursor.ack_many(at(1)))
    assert (await asyncio.wait([repeated], timeout=0.02))[0] == set()
    cluster.ledgers.release_adds()
    assert await acking == at(1)
    assert await repeated == []
    assert cursor.durable_mark_delete == Position(0, 1)


async def test_many_acknowledgements_share_a_record(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster, entries=200)
    await cursor.ack_many(at(0))
    before = cursor.commits
    await asyncio.gather(*[cursor.ack_many(at(i)) for i in range(1, 200)])
    assert cursor.commits - before <= 2
    assert cursor.backlog_entries == 0


async def test_an_acknowledgement_with_an_unknown_entry_changes_nothing(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    for wrong in (Position(0, 10), Position(5, 0), LATEST):
        with pytest.raises(BadRequest, match="no such message"):
            await cursor.ack_many([*at(3), wrong])
        with pytest.raises(BadRequest, match="no such message"):
            await cursor.ack_cumulative(wrong)
    for index in (-1, 3):
        with pytest.raises(BadRequest, match="batch"):
            await cursor.ack_many(at(3), batches=[BatchAck(Position(0, 1), 3, [index])])
    assert cursor.backlog_entries == 10
    assert cursor.individually_acked() == "[]"


async def test_the_last_index_of_a_batch_completes_its_entry(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [0, 1])]) == []
    assert cursor.remaining(Position(0, 0)) == 0b100
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [0])]) == []
    assert await cursor.ack_many([], batches=[BatchAck(Position(0, 0), 3, [2])]) == at(0)
    assert cursor.mark_delete == Position(0, 0)
    assert cursor.remaining(Position(0, 0)) is None


async def test_a_cumulative_acknowledgement_may_point_into_a_batch(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(3))
    await cursor.ack_cumulative(Position(0, 5), batch=BatchAck(Position(0, 5), 4, [0, 1, 2]))
    assert cursor.mark_delete == Position(0, 4)
    assert cursor.remaining(Position(0, 5)) == 0b1000
    await cursor.ack_cumulative(Position(0, 7))
    assert cursor.mark_delete == Position(0, 7)
    await cursor.ack_cumulative(Position(0, 2))
    assert cursor.mark_delete == Position(0, 7)


async def test_mark_delete_moves_across_ledger_boundaries(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10", b"11"])
    await cursor.ack_many([*at(*range(1, 10)), *at(0, ledger=1)])
    assert cursor.mark_delete == Position(0, -1)
    await cursor.ack_many(at(0))
    assert cursor.mark_delete == Position(1, 0)
    assert cursor.individually_acked() == "[]"


@pytest.mark.parametrize(("target", "rest"), [(EARLIEST, 10), (LATEST, 0), (Position(0, 7), 3), (Position(0, 99), 0)])
async def test_seek_forgets_acknowledgements_durably(cluster: Cluster, target: Position, rest: int) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 1, 5, 8), batches=[BatchAck(Position(0, 9), 2, [0])])
    assert await cursor.seek(target) == Position(0, 10 - rest)
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert cursor.backlog_entries == rest
    assert await unacked(cursor) == list(range(10 - rest, 10))
    assert cursor.remaining(Position(0, 9)) is None


async def test_seek_into_a_batch_is_one_record(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 1, 2))
    before = cursor.commits
    await cursor.seek(Position(0, 1), passed=BatchAck(Position(0, 1), 3, [0, 1]))
    assert cursor.commits == before + 1
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert (cursor.mark_delete, cursor.remaining(Position(0, 1))) == (Position(0, 0), 0b100)


async def test_a_seek_into_a_trimmed_batch_continues_after_it(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(*range(10)))
    await topic.trim()
    assert await cursor.seek(Position(0, 1), passed=BatchAck(Position(0, 1), 3, [0, 1])) == Position(1, 0)
    assert cursor.remaining(Position(1, 0)) is None


@pytest.mark.parametrize("target", [EARLIEST, LATEST, Position(0, 3)])
@pytest.mark.parametrize("with_ledger", [False, True])
async def test_a_seek_that_failed_is_not_stored_by_a_later_acknowledgement(
    cluster: Cluster, target: Position, with_ledger: bool
) -> None:
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    if with_ledger:
        await cursor.ack_many(at(0, 1, 4))
    else:
        await topic.delete_cursor("s")
        cursor = await topic.open_cursor("s", start=Position(0, 2))
    rest = await unacked(cursor)
    cluster.ledgers.fail_next("create", NotEnoughBookies("made up"))
    if with_ledger:
        cluster.ledgers.fail_next("add", AddTimeout("made up"))
    store = cluster.stores[-1]
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(OutcomeUnknown if with_ledger else MetadataUnavailable):
        await cursor.seek(target)
    store._faults.clear()
    assert await unacked(cursor) == rest
    assert cursor.durable_mark_delete <= cursor.mark_delete
    await cursor.ack_many(at(6))
    rest.remove(6)
    assert cursor.durable_mark_delete == cursor.mark_delete
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == rest


async def test_a_seek_of_unknown_outcome_keeps_the_entries_after_its_target(cluster: Cluster) -> None:
    """The record may be stored: messages after its target must not be trimmed until another record is stored."""
    topic, cursor = await topic_of(cluster, operation_timeout_s=0.3)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(*range(9)))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    seeking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seeking
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, 8), Position(0, -1))
    acking = asyncio.ensure_future(cursor.ack_many([*at(9), Position(1, 0)]))
    await asyncio.sleep(0.01)
    assert topic.contains(Position(0, 0))
    cluster.ledgers.release_adds()
    await acking
    assert cursor.durable_mark_delete == Position(1, 0)
    await asyncio.sleep(0.01)
    assert not topic.contains(Position(0, 0))


async def test_entries_after_the_target_of_a_seek_are_kept_while_it_is_stored(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(*range(9)))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, -1), Position(0, -1))
    cluster.ledgers.release_adds()
    await seeking
    assert cursor.durable_mark_delete == Position(0, -1)
    cluster.ledgers.hold_adds()
    acking = asyncio.ensure_future(cursor.ack_many(at(0)))
    await asyncio.sleep(0.01)
    assert (cursor.mark_delete, cursor.durable_mark_delete) == (Position(0, 0), Position(0, -1))
    cluster.ledgers.release_adds()
    await acking


@pytest.mark.parametrize("sharing", [False, True])
async def test_the_record_of_an_undone_seek_answers_no_acknowledgement(cluster: Cluster, sharing: bool) -> None:
    """This holds for an acknowledgement that shares the seek's record, and for a repeated one that changes nothing."""
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    acking = [asyncio.ensure_future(cursor.ack_many(at(1)))]
    await asyncio.sleep(0.01)
    if sharing:
        acking.append(asyncio.ensure_future(cursor.ack_many(at(2))))
        await asyncio.sleep(0.01)
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    cluster.ledgers.hold_adds()
    await asyncio.sleep(0.01)
    seeking.cancel()
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(*acking)
    if not sharing:
        await asyncio.sleep(0.01)
        await cursor.ack_many(at(1))
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == list(range(2 + sharing, 10))


async def test_a_seek_that_is_cancelled_after_it_was_stored_takes_effect(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    first = asyncio.ensure_future(cursor.ack_many(at(1)))
    await asyncio.sleep(0.01)

    async def ack_and_cancel() -> None:
        await cursor.ack_many(at(2))
        seeking.cancel()

    sharing = asyncio.ensure_future(ack_and_cancel())
    await asyncio.sleep(0.01)
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await asyncio.gather(first, sharing)
    with pytest.raises(asyncio.CancelledError):
        await seeking
    assert await unacked(cursor) == list(range(10))
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == list(range(10))


@pytest.mark.parametrize("seed", range(30))
async def test_acknowledgements_survive_seeks_that_fail_or_are_cancelled(cluster: Cluster, seed: int) -> None:
    """Replay one: pytest -k 'fail_or_are_cancelled and [SEED]'"""
    chance = random.Random(seed)
    plan = Plan(seed, die_at=None, fault_rate=0)
    client, store = FaultyClient(cluster.ledgers, plan), FaultyStore(cluster.tree.connect(), plan)
    settings: dict[str, Any] = {"operation_timeout_s": 0.05, "cursor_entries_max": 4}
    topic = await cluster.open(client=client, store=store, **settings)
    await topic.add_many([b"%d" % i for i in range(40)])
    cursor = await topic.open_cursor("s", start=EARLIEST)
    cluster.ledgers.add_delay_s = 0.001
    seeks = succeeded = unsure = 0
    answered: dict[Position, int] = {}
    """Acknowledged positions, each with the number of seeks that had begun before."""

    async def ack() -> None:
        await asyncio.sleep(chance.uniform(0, 0.01))
        nonlocal unsure
        began, chosen = seeks, at(*chance.sample(range(40), 3))
        with contextlib.suppress(TryAgain, OutcomeUnknown):
            await cursor.ack_many(chosen)
            answered.update(dict.fromkeys(chosen, began))
            if began >= unsure:  # a record was stored after the seek
                unsure = 0

    async def seek() -> None:
        nonlocal seeks, succeeded, unsure
        await asyncio.sleep(chance.uniform(0, 0.01))
        seeks += 1
        seeking = asyncio.ensure_future(cursor.seek(chance.choice([EARLIEST, LATEST, *at(*range(40))])))
        if chance.random() < 0.3:
            asyncio.get_running_loop().call_later(chance.uniform(0, 0.005), seeking.cancel)
        with contextlib.suppress(TryAgain):
            try:
                await seeking
                succeeded, unsure = seeks, 0
            except (OutcomeUnknown, asyncio.CancelledError):
                unsure = seeks

    for _ in range(10):
        plan._fault_rate = chance.choice([0, 0.3, 0.9])
        await asyncio.gather(*[ack() for _ in range(6)], seek())
        if chance.random() < 0.3:
            plan._fault_rate = 0
            succeeded = max(succeeded, unsure)
            await topic.crash()
            cluster.forget(topic)
            topic = await cluster.open(client=client, store=store, **settings)
            cursor = topic.cursors["s"]
        for position, began in answered.items():
            assert began < succeeded or cursor.is_acked(position)


async def test_an_acknowledgement_waits_for_a_seek_and_takes_effect_after_it(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(Position(0, 5)))
    await asyncio.sleep(0.01)
    acking = asyncio.ensure_future(cursor.ack_many(at(2, 6)))
    cumulative = asyncio.ensure_future(cursor.ack_cumulative(Position(0, 5)))
    await asyncio.sleep(0.01)
    assert not cursor.is_acked(Position(0, 6))
    cluster.ledgers.release_adds()
    assert await seeking == Position(0, 5)
    assert await acking == at(6)
    await cumulative
    assert cursor.mark_delete == Position(0, 6)
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == [7, 8, 9]


async def test_entries_acknowledged_during_a_read_are_not_returned(cluster: Cluster) -> None:
    """Acknowledged entries between the others split one read into several reads from bookies."""
    topic, cursor = await topic_of(cluster, cache_size_max=0)
    await cursor.ack_many(at(1, 3, 5))
    read, reads = topic.read, 0

    async def slow(position: Position, **limits: int) -> list[tuple[Position, bytes]]:
        nonlocal reads
        reads += 1
        found = await read(position, **limits)
        if reads == 2:
            await cursor.ack_many(at(0, 6), batches=[BatchAck(Position(0, 2), 2, [1])])
        return found

    topic.read = slow  # type: ignore[method-assign]
    found = await cursor.read_unacked(EARLIEST, entries_max=4, size_max=10**6)
    assert reads > 1
    assert [(int(entry.payload), entry.remaining) for entry in found.entries] == [(2, 0b01), (4, None), (7, None)]


async def test_a_read_skips_acknowledged_entries_and_returns_the_next_position(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10"])
    await cursor.ack_many(at(0, 1, 3, 9))
    read = await cursor.read_unacked(EARLIEST, entries_max=3, size_max=10**6)
    assert [int(entry.payload) for entry in read.entries] == [2, 4, 5]
    assert read.next_position == Position(0, 6)
    read = await cursor.read_unacked(read.next_position, entries_max=100, size_max=2)
    assert [int(entry.payload) for entry in read.entries] == [6, 7]
    read = await cursor.read_unacked(read.next_position, entries_max=100, size_max=10**6)
    assert [int(entry.payload) for entry in read.entries] == [8, 10]
    assert read.next_position == Position(1, 1)
    assert await cursor.read_unacked(read.next_position, entries_max=1, size_max=1) == ([], Position(1, 1))


async def test_the_loss_of_the_topic_answers_acknowledgements_whose_record_is_in_flight(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    cluster.ledgers.hold_adds()
    acknowledging = asyncio.ensure_future(cursor.ack_many(at(1)))
    await asyncio.sleep(0.01)
    cursor.end(TopicFenced("made up"))
    with pytest.raises(TopicFenced):
        async with asyncio.timeout(0.001):
            await acknowledging
    cluster.ledgers.release_adds()


async def test_a_seek_waits_for_a_trim_and_names_an_entry_that_exists(cluster: Cluster) -> None:
    """Otherwise its answer names an entry that is deleted, and acknowledged entries are not delivered again."""
    topic, cursor = await topic_of(cluster, entries=3)
    await cursor.ack_many(at(0, 1, 2))
    store: Any = cluster.stores[-1]
    is_trimmed, may_answer = asyncio.Event(), asyncio.Event()
    multi = store.multi

    async def slow(ops: Any) -> Any:
        answer = await multi(ops)
        written = ops[-1]
        if written.path == f"/managed-ledgers/{TOPIC}" and decode_topic(written.data).ledgers[0].ledger_id > 0:
            is_trimmed.set()
            await may_answer.wait()
        return answer

    store.multi = slow
    await topic.roll()
    await topic.add_many([b"3"])
    await is_trimmed.wait()
    seeking = asyncio.ensure_future(cursor.seek(EARLIEST))
    await asyncio.sleep(0.01)
    may_answer.set()
    assert topic.contains(await seeking)
    assert await unacked(cursor) == [3]


# --- redelivery counts and blobs


@pytest.mark.parametrize("end", ["crash", "close", "two closes", "close without znode"])
async def test_redelivery_counts_and_blobs_survive_the_end_of_the_broker(cluster: Cluster, end: str) -> None:
    settings = {"cursor_inline_size_max": 256} if end == "close without znode" else {}
    topic, cursor = await topic_of(cluster, **settings)
    await cursor.ack_many(at(0), batches=[BatchAck(Position(0, 4), 3, [0])])
    await cursor.record_redeliveries([Redelivered(Position(0, 3), 1, 2), Redelivered(Position(0, 4), 0b111, 5)])
    await cursor.record_redeliveries([Redelivered(Position(0, 4), 0b100, 6), Redelivered(Position(0, 7), 1, 1)])
    await cursor.put_blobs({"bucket 1": b"1" * 300, "bucket 2": b"2"})
    await cursor.put_blobs({"bucket 3": b""}, remove=["bucket 2", "no such"])
    await cursor.ack_many(at(7))
    for _ in range(2 if end == "two closes" else 1):
        await (topic.crash() if end == "crash" else topic.close())
        topic, cursor = await topic_of(cluster)
    assert list(cursor.redelivery_counts()) == [
        (Position(0, 3), ((2, 1),)),
        (Position(0, 4), ((5, 0b010), (6, 0b100))),
    ]
    assert [cursor.redelivery_count(Position(0, 4), index) for index in range(4)] == [0, 5, 6, 0]
    assert cursor.redelivery_count(Position(0, 3)) == 2
    assert cursor.redelivery_count(Position(0, 9)) == 0
    assert cursor.blobs == {"bucket 1": b"1" * 300, "bucket 3": b""}
    assert await unacked(cursor) == [1, 2, 3, 4, 5, 6, 8, 9]


async def test_redelivery_counts_never_go_down_and_are_forgotten_with_the_message(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.record_redeliveries([Redelivered(Position(0, entry), 1, 3) for entry in range(5)])
    commits = cursor.commits
    await cursor.record_redeliveries([Redelivered(Position(0, 1), 1, 2), Redelivered(Position(0, 1), 1, 3)])
    assert cursor.commits == commits, "nothing to write"
    assert cursor.redelivery_count(Position(0, 1)) == 3
    await cursor.ack_many(at(2))
    await cursor.ack_cumulative(Position(0, 0))
    await cursor.record_redeliveries([Redelivered(position, 1, 9) for position in at(0, 2)])
    assert [position.entry_id for position, _ in cursor.redelivery_counts()] == [1, 3, 4]
    await cursor.seek(EARLIEST)
    assert list(cursor.redelivery_counts()) == []
    await topic.crash()
    assert list((await topic_of(cluster))[1].redelivery_counts()) == []


async def test_counts_acknowledgements_and_blobs_share_a_record(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0))
    commits = cursor.commits
    cluster.ledgers.hold_adds()
    waiting = [asyncio.ensure_future(cursor.ack_many(at(1)))]
    await asyncio.sleep(0.01)
    waiting += [
        asyncio.ensure_future(cursor.ack_many(at(5))),
        asyncio.ensure_future(cursor.record_redeliveries([Redelivered(Position(0, 7), 1, 1)])),
        asyncio.ensure_future(cursor.put_blobs({"a": b"1"})),
    ]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in waiting)
    cluster.ledgers.release_adds()
    await asyncio.gather(*waiting)
    assert cursor.commits == commits + 2


@pytest.mark.parametrize(
    "wrong",
    [
        Redelivered(Position(0, 1), 0, 1),
        Redelivered(Position(0, 1), 1 << 2**20, 1),
        Redelivered(Position(0, 1), 1, 0),
        Redelivered(Position(0, 1), 1, 2**31),
        Redelivered(Position(0, 10), 1, 1),
    ],
)
async def test_invalid_redelivery_counts_are_refused_and_change_nothing(cluster: Cluster, wrong: Redelivered) -> None:
    _, cursor = await topic_of(cluster)
    with pytest.raises(BadRequest):
        await cursor.record_redeliveries([Redelivered(Position(0, 2), 1, 1), wrong])
    assert list(cursor.redelivery_counts()) == []
    assert cursor.commits == 0


async def test_the_number_of_redelivery_counts_is_limited(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_broker.managed_ledger.cursors.ack_state.COUNTED_ENTRIES_MAX", 2)
    _, cursor = await topic_of(cluster)
    await cursor.record_redeliveries([Redelivered(position, 1, 1) for position in at(0, 1)])
    with pytest.raises(TooManyRequests, match="count_max=2"):
        await cursor.record_redeliveries([Redelivered(Position(0, 2), 1, 1)])
    await cursor.ack_many(at(0))
    await cursor.record_redeliveries([Redelivered(Position(0, 2), 1, 1)])


async def test_invalid_blobs_are_refused_and_change_nothing(cluster: Cluster) -> None:
    _, cursor = await topic_of(cluster)
    await cursor.put_blobs({str(i): b"" for i in range(64)})
    commits = cursor.commits
    for put, remove in (({"": b""}, ()), ({"\u20ac" * 86: b""}, ()), ({"1": b""}, ("1",))):
        with pytest.raises(BadRequest, match="name"):
            await cursor.put_blobs(put, remove)
    for put, remove in (({"64": b""}, ()), ({"1": bytes(2**20 + 1)}, ())):
        with pytest.raises(TooLarge):
            await cursor.put_blobs(put, remove)
    assert cursor.commits == commits
    await cursor.put_blobs({"64": bytes(2**20)}, ["0"])
    assert len(cursor.blobs) == 64
    await cursor.seek(EARLIEST)
    assert not cursor.blobs


async def test_blobs_and_counts_that_make_the_state_too_large_are_refused_and_change_nothing(cluster: Cluster) -> None:
    """Otherwise every later acknowledgement would fail, too, because of the state in memory."""
    _, cursor = await topic_of(cluster, cursor_state_size_max=1024, cursor_inline_size_max=512)
    await cursor.put_blobs({"a": bytes(500), "b": bytes(300)})
    commits = cursor.commits
    with pytest.raises(TooManyRequests, match="size_max=1024"):
        await cursor.put_blobs({"b": bytes(525)})
    with pytest.raises(TooManyRequests, match="size_max=1024"):
        await cursor.put_blobs({"c": bytes(725)}, ["a"])
    with pytest.raises(TooManyRequests, match="size_max=1024"):
        await cursor.record_redeliveries([Redelivered(Position(0, n), 1 << 640, 1) for n in (1, 2)])
    assert {name: len(value) for name, value in cursor.blobs.items()} == {"a": 500, "b": 300}
    assert (list(cursor.redelivery_counts()), cursor.commits) == ([], commits)
    await cursor.ack_many(at(0))
    await cursor.put_blobs({"b": bytes(524)})
    await cursor.put_blobs({"c": bytes(524)}, ["b"])


async def test_a_failed_seek_brings_back_counts_and_blobs(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.record_redeliveries([Redelivered(Position(0, 2), 1, 3)])
    await cursor.put_blobs({"a": b"1"})
    cluster.ledgers.fail_next("add", AddTimeout("made up"), count=10)
    cluster.tree.suspend(cluster.stores[-1])
    with pytest.raises((TryAgain, OutcomeUnknown)):
        await cursor.seek(LATEST)
    cluster.tree.resume(cluster.stores[-1])
    cluster.ledgers._faults.clear()
    assert cursor.redelivery_count(Position(0, 2)) == 3
    assert cursor.blobs == {"a": b"1"}
    await cursor.ack_many(at(4))
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert (cursor.redelivery_count(Position(0, 2)), dict(cursor.blobs)) == (3, {"a": b"1"})
    assert await unacked(cursor) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


async def test_a_seek_that_is_cancelled_while_its_record_is_written_is_undone_by_the_next_record(
    cluster: Cluster,
) -> None:
    topic, cursor = await topic_of(cluster)
    await cursor.ack_many(at(0, 3))
    cluster.ledgers.hold_adds()
    seeking = asyncio.ensure_future(cursor.seek(LATEST))
    await asyncio.sleep(0.01)
    seeking.cancel()
    await asyncio.sleep(0.01)
    acking = asyncio.ensure_future(cursor.ack_many(at(5)))
    await asyncio.sleep(0.01)
    cluster.ledgers.release_adds()
    await acking
    await topic.crash()
    _, cursor = await topic_of(cluster)
    assert await unacked(cursor) == [1, 2, 4, 6, 7, 8, 9]


async def test_the_backlog_can_be_skipped_and_cleared(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    await topic.roll()
    await topic.add_many([b"10", b"11"])
    await cursor.ack_many(at(1, 2, 8, 9))
    await cursor.skip(2)
    assert await unacked(cursor) == [4, 5, 6, 7, 10, 11]
    await cursor.skip(4)
    assert await unacked(cursor) == [10, 11]
    with pytest.raises(BadRequest):
        await cursor.skip(0)
    await topic.crash()
    topic, cursor = await topic_of(cluster)
    assert await unacked(cursor) == [10, 11]
    await cursor.skip(100)
    assert await unacked(cursor) == []
    await cursor.skip(1)
    await topic.add_many([b"12"])
    await cursor.clear_backlog()
    await cursor.clear_backlog()
    await topic.add_many([b"13"])
    assert await unacked(cursor) == [13]
    await topic.crash()
    assert await unacked((await topic_of(cluster))[1]) == [13]
