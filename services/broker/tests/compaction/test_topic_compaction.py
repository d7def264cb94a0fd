"""A compacted topic has the last value of every key, whatever happens between two reads."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import BookieUnavailable
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import TOPIC, Clock, Harness, problem, settle
from compaction_parts import KeyModel, compact, pairs, publish, read, read_all, table_of

SETTINGS = {"ledger": {"entries_max": 3, "age_s_min": 0}}


@pytest.fixture
async def broker(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> AsyncIterator[Harness]:
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SETTINGS)
    yield harness
    await harness.close()


async def test_the_last_value_of_each_key_stays_under_its_id(broker):
    ids = await publish(broker, ("a", "1"), ("b", "1"), ("a", "2"), ("c", "1"), batch=False)
    ids += await publish(broker, ("b", ""), (None, "x"), ("d", "1"), batch=False)
    found = await compact(broker)
    assert (found["entries_read"], found["keys"], found["entries_written"]) == (7, 3, 3)
    messages = await read_all(broker)
    assert pairs(messages) == [("a", "2"), ("c", "1"), ("d", "1")]
    assert [one["message_id"] for one in messages] == [ids[2], ids[3], ids[6]]


async def test_entries_after_the_horizon_follow_as_they_are(broker):
    await publish(broker, ("a", "1"), ("a", "2"), batch=False)
    await compact(broker)
    await publish(broker, ("a", "3"), ("a", "4"), ("b", ""), batch=False)
    assert pairs(await read_all(broker)) == [("a", "2"), ("a", "3"), ("a", "4"), ("b", "")]
    await compact(broker)
    assert pairs(await read_all(broker)) == [("a", "4")]


async def test_batches_keep_the_indexes_of_the_messages_that_stay(broker):
    ids = await publish(broker, ("a", "1"), ("a", "2"), ("a", "3"))
    assert ids[1].endswith(":1")
    await publish(broker, ("b", "1"), ("b", "2"))
    await compact(broker)
    messages = await read_all(broker)
    assert pairs(messages) == [("a", "3"), ("b", "2")]
    assert messages[0]["message_id"] == ids[2]
    assert pairs((await read(broker, start=ids[1]))[0]) == [("a", "3"), ("b", "2")]


async def test_a_topic_without_new_entries_is_not_written_again(broker):
    await publish(broker, ("a", "1"))
    first = await compact(broker)
    second = await compact(broker)
    assert second["ledger_id"] == first["ledger_id"]
    assert second["entries_read"] == 0


async def test_an_empty_topic_and_one_of_tombstones(broker):
    await broker.client.put(TOPIC)
    found = await compact(broker)
    assert (found["ledger_id"], found["horizon"]) == (None, None)
    assert await read_all(broker) == []
    await publish(broker, ("a", "1"), ("a", ""))
    assert (await compact(broker))["entries_written"] == 0
    assert await read_all(broker) == []
    await publish(broker, ("a", "2"))
    assert pairs(await read_all(broker)) == [("a", "2")]


async def test_the_compacted_ledger_is_that_of_pulsar_and_replaces_the_former(broker, ledgers):
    await publish(broker, ("a", "1"), batch=False)
    first = (await compact(broker))["ledger_id"]
    await publish(broker, ("a", "2"), batch=False)
    found = await compact(broker)
    client = MemoryLedgerClient(ledgers)
    metadata = await client.metadata(found["ledger_id"])
    assert metadata.digest_type.name == "CRC32"
    assert (metadata.custom["application"], metadata.custom["component"]) == (b"pulsar", b"compacted-ledger")
    assert metadata.custom["pulsar/compactedTopic"] == b"persistent://public/default/t"
    assert first not in ledgers.ledgers
    (cursor,) = (topic.ledger.system_cursor("__compaction") for topic in broker.broker.topics)
    assert cursor.position_properties == {"CompactedTopicLedger": found["ledger_id"]}
    assert str(cursor.mark_delete) == found["horizon"]


async def test_a_page_is_not_empty_although_the_first_messages_of_a_batch_were_removed(broker):
    await publish(broker, *((f"k{n}", "1") for n in range(20)), ("last", "1"))
    await publish(broker, *((f"k{n}", "2") for n in range(20)))
    await compact(broker)
    for page in (1, 2, 3):
        messages, following = await read(broker, max=page)
        assert pairs(messages)[0] == ("last", "1")
        more, _ = await read(broker, start=following, max=1)
        assert pairs(more) == [(f"k{page - 1}", "2")]


async def test_a_read_goes_on_behind_a_ledger_that_is_trimmed_meanwhile(broker, monkeypatch):
    for n in range(8):
        await publish(broker, (f"k{n}", "1"), batch=False)
    (topic,) = broker.broker.topics
    read_entries = topic.ledger.read

    async def trim_first(*args, **options):
        monkeypatch.undo()
        await trim(broker)
        return await read_entries(*args, **options)

    monkeypatch.setattr(topic.ledger, "read", trim_first)
    answer = await broker.client.get(f"{TOPIC}/messages?start=earliest")
    assert answer.status_code == 200, answer.text
    assert topic.ledger.first_position.ledger_id > 0
    assert len(answer.json()["messages"]) == topic.ledger.entries_count


async def trim(broker: Harness) -> None:
    """Acknowledge everything and let the ledgers be deleted."""
    (topic,) = broker.broker.topics
    if "s" not in topic.subscriptions:
        await topic.subscribe("s")
    await topic.subscriptions["s"].cursor.clear_backlog()
    await topic.ledger.trim()


async def test_trimmed_keys_are_read_from_the_compacted_ledger_and_uncompacted_ones_are_not_trimmed(broker):
    for n in range(10):
        await publish(broker, (f"k{n}", "1"), batch=False)
    await compact(broker)
    await trim(broker)
    (topic,) = broker.broker.topics
    assert topic.ledger.entries_count < 4
    assert pairs(await read_all(broker, page=3)) == [(f"k{n}", "1") for n in range(10)]
    for n in range(10):
        await publish(broker, (f"k{n}", "2"), ("x", str(n)), batch=False)
    await trim(broker)
    assert topic.ledger.entries_count >= 20
    await compact(broker)
    await trim(broker)
    assert topic.ledger.entries_count < 4
    assert table_of(pairs(await read_all(broker, page=1))) == {f"k{n}": "2" for n in range(10)} | {"x": "9"}


async def test_a_reader_continues_over_a_compaction_trimming_and_an_unload(broker, tree, ledgers, clock):
    model = KeyModel()

    async def add(*messages: tuple[str, str]) -> None:
        model.publish(list(messages))
        await publish(broker, *messages, batch=False)

    await add(*((f"k{n}", "1") for n in range(8)))
    await compact(broker)
    messages, start = await read(broker, max=3)
    await add(("k0", "2"), ("k5", "2"), ("k7", "2"), ("new", "1"))
    await compact(broker)
    await trim(broker)
    found, start = await read(broker, start=start, max=2)
    messages += found
    (topic,) = broker.broker.topics
    await topic.close()
    while found:
        found, start = await read(broker, start=start, max=2)
        messages += found
    assert table_of(pairs(messages)) == model.table()


async def test_the_state_survives_an_unload_and_a_crash(broker, tree, ledgers, clock):
    await publish(broker, ("a", "1"), ("a", "2"), ("b", "1"))
    before = await compact(broker)
    (topic,) = broker.broker.topics
    await topic.close()
    after = (await broker.client.get(f"{TOPIC}/compaction")).json()
    assert (after["status"], after["horizon"], after["ledger_id"]) == (
        "NOT_RUN", before["horizon"], before["ledger_id"],
    )  # fmt: skip
    assert pairs(await read_all(broker)) == [("a", "2"), ("b", "1")]
    await broker.die()
    second = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two", **SETTINGS)
    try:
        assert pairs(await read_all(second)) == [("a", "2"), ("b", "1")]
        await publish(second, ("b", "2"))
        await compact(second)
        assert pairs(await read_all(second)) == [("a", "2"), ("b", "2")]
    finally:
        await second.close()


async def test_a_waiting_read_of_the_compacted_topic_gets_the_next_message(broker):
    await publish(broker, ("a", "1"))
    await compact(broker)
    _, start = await read(broker)
    task = asyncio.create_task(read(broker, start=start, wait_ms=30_000))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    await publish(broker, ("a", "2"))
    async with asyncio.timeout(30):
        assert pairs((await task)[0]) == [("a", "2")]


async def test_one_compaction_at_a_time(broker, ledgers):
    await publish(broker, ("a", "1"))
    ledgers.hold_adds()
    assert (await broker.client.put(f"{TOPIC}/compaction")).json()["status"] == "RUNNING"
    problem(await broker.client.put(f"{TOPIC}/compaction"), status=409, code="conflict")
    assert (await broker.client.get(f"{TOPIC}/compaction")).json()["status"] == "RUNNING"
    problem(await broker.client.delete(f"{TOPIC}/subscriptions/__compaction"), status=409, code="conflict")
    ledgers.release_adds()
    (topic,) = broker.broker.topics
    await topic.compaction.wait()
    assert (await broker.client.get(f"{TOPIC}/compaction")).json()["status"] == "SUCCESS"


async def test_the_cursor_is_no_subscription(broker):
    await publish(broker, ("a", "1"))
    await compact(broker)
    assert (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"] == []
    assert "__compaction" in (await broker.client.get(f"{TOPIC}/internal")).json()["cursors"]
    found = await broker.client.put(f"{TOPIC}/subscriptions/__compaction", json={})
    problem(found, status=400, code="bad_request")
    problem(await broker.receive_raw(sub="__compaction"), status=400, code="bad_request")
    problem(await broker.receive_raw(sub="pulsar.dedup"), status=400, code="bad_request")


async def test_deleting_the_cursor_forgets_the_compacted_ledger(broker, ledgers):
    await publish(broker, ("a", "1"), ("a", "2"))
    found = await compact(broker)
    assert (await broker.client.delete(f"{TOPIC}/subscriptions/__compaction")).status_code == 200
    assert found["ledger_id"] not in ledgers.ledgers
    assert pairs(await read_all(broker)) == [("a", "1"), ("a", "2")]
    assert (await compact(broker))["entries_read"] == 1


async def test_deleting_the_topic_deletes_the_compacted_ledger(broker, ledgers):
    await publish(broker, ("a", "1"))
    await compact(broker)
    assert (await broker.client.delete(TOPIC)).status_code == 200
    assert ledgers.ledgers == {}


async def test_a_lost_compacted_ledger_is_reported_and_the_topic_still_serves(broker, ledgers):
    await publish(broker, ("a", "1"))
    found = await compact(broker)
    await broker.broker.topics.client.delete(found["ledger_id"])
    (topic,) = broker.broker.topics
    await topic.close()
    await publish(broker, ("a", "2"))
    answer = await broker.client.get(f"{TOPIC}/messages?compacted=true")
    assert "delete the subscription __compaction" in problem(answer, status=500, code="corrupt")["detail"]
    assert (await broker.client.get(f"{TOPIC}/messages")).status_code == 200
    failed = await compact(broker, status="ERROR")
    assert "__compaction" in failed["last_error"]
    await broker.client.delete(f"{TOPIC}/subscriptions/__compaction")
    await compact(broker)
    assert pairs(await read_all(broker)) == [("a", "2")]


@pytest.mark.parametrize("operation", ["create", "add", "close", "read"])
async def test_a_failed_compaction_leaves_the_former_state_and_no_ledger(broker, ledgers, operation):
    await publish(broker, ("a", "1"), batch=False)
    before = await compact(broker)
    (topic,) = broker.broker.topics
    await publish(broker, ("a", "2"), batch=False)
    existing = set(ledgers.ledgers)
    ledgers.fail_next(operation, BookieUnavailable("away"), count=3 if operation == "add" else 1)
    failed = await compact(broker, status="ERROR")
    assert "away" in failed["last_error"]
    assert (failed["ledger_id"], failed["horizon"]) == (before["ledger_id"], before["horizon"])
    assert pairs(await read_all(broker)) == [("a", "1"), ("a", "2")]
    await compact(broker)
    assert pairs(await read_all(broker)) == [("a", "2")]
    assert topic.compaction.last_run.error is None
    assert before["ledger_id"] in existing


async def test_closing_a_topic_ends_its_compaction_and_deletes_what_it_wrote(broker, ledgers):
    await publish(broker, ("a", "1"))
    await broker.client.put(f"{TOPIC}/compaction")
    (topic,) = broker.broker.topics
    while len(ledgers.ledgers) < 3:  # topic, cursor, compacted
        await asyncio.sleep(0)
    await topic.close()
    assert topic.compaction.last_run.status.value == "ERROR"
    custom = [ledger.metadata.custom.get("component") for ledger in ledgers.ledgers.values()]
    assert b"compacted-ledger" not in custom
    assert pairs(await read_all(broker)) == [("a", "1")]


async def test_deleting_a_topic_while_its_compacted_ledger_is_created_leaves_no_ledger(broker, ledgers, monkeypatch):
    await publish(broker, ("a", "1"))
    await compact(broker)
    client = broker.broker.topics.client
    create, created, answered = client.create, asyncio.Event(), asyncio.Event()

    async def create_slowly(**options):
        handle = await create(**options)
        created.set()
        await answered.wait()
        return handle

    await publish(broker, ("a", "2"))
    monkeypatch.setattr(client, "create", create_slowly)
    await broker.client.put(f"{TOPIC}/compaction")
    await created.wait()
    deletion = asyncio.create_task(broker.client.delete(TOPIC))
    await settle()
    answered.set()
    assert (await deletion).status_code == 200
    assert ledgers.ledgers == {}


async def test_a_time_is_no_start_of_a_compacted_read(broker):
    await publish(broker, ("a", "1"))
    answer = await broker.client.get(f"{TOPIC}/messages?compacted=true&start=2020-01-01T00:00:00Z")
    problem(answer, status=400, code="bad_request")
