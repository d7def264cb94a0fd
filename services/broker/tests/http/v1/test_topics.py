"""Topics: reading without a subscription, statistics, lists, deletion, and errors of their operations."""

import asyncio
from urllib.parse import quote

import pytest
from broker_harness import TOPIC, Harness, ids, make_namespaces, payloads, problem


async def read(broker: Harness, **params: object) -> dict:
    answer = await broker.client.get(f"{TOPIC}/messages", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_reading_continues_where_the_last_answer_ended(broker):
    await broker.produce("a")
    await broker.produce_batch("b", "c", "d")
    await broker.produce("e")
    start, got = "earliest", []
    for _ in range(3):
        answer = await read(broker, start=start, max=2)
        got += payloads(answer["messages"])
        start = answer["next"]
    assert got == ["a", "b", "c", "d", "e"]
    assert (await read(broker, start=start))["messages"] == []
    await broker.produce("f")
    assert payloads((await read(broker, start=start))["messages"]) == ["f"]


async def test_reading_begins_inside_a_batch_or_at_the_ends(broker):
    batch = await broker.produce_batch("a", "b", "c")
    assert payloads((await read(broker, start=batch[1]))["messages"]) == ["b", "c"]
    latest = await read(broker, start="latest")
    assert latest["messages"] == []
    await broker.produce("d")
    assert payloads((await read(broker, start=latest["next"]))["messages"]) == ["d"]


async def test_reading_begins_at_a_publish_time(broker):
    await broker.produce("a")
    broker.clock.advance(10)
    at = broker.clock.wall_ms
    await broker.produce_batch("b", "c")
    await next(iter(broker.broker.topics)).ledger.roll()
    broker.clock.advance(10)
    await broker.produce("d")
    assert payloads((await read(broker, start=f"@{at}"))["messages"]) == ["b", "c", "d"]
    assert payloads((await read(broker, start=f"@{at + 1}"))["messages"]) == ["d"]
    assert payloads((await read(broker, start="@0", max=1))["messages"]) == ["a"]
    latest = await read(broker, start=f"@{at + 60_000}")
    assert latest["messages"] == []
    await broker.produce("e")
    assert payloads((await read(broker, start=latest["next"]))["messages"]) == ["e"]


async def test_max_bytes_limits_a_read_that_returns_at_least_one_message(broker):
    await broker.produce("x" * 100, "y" * 100, "z" * 100)
    assert len((await read(broker, max_bytes=1))["messages"]) == 1
    assert len((await read(broker, max_bytes=250))["messages"]) == 2


async def test_a_read_waits_for_a_message(broker):
    await broker.produce("a")
    start = (await read(broker, start="latest"))["next"]
    task = asyncio.create_task(read(broker, start=start, wait_ms=30_000))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    await broker.produce("b")
    async with asyncio.timeout(30):
        assert payloads((await task)["messages"]) == ["b"]


async def test_reading_does_not_change_subscriptions(broker):
    await broker.produce("a")
    await read(broker)
    assert payloads(await broker.receive()) == ["a"]


async def test_one_message_is_shown_with_its_ledger_and_bookies(broker):
    await broker.produce("zero", "one", headers={"Bindery-Property-A": "1"})
    answer = (await broker.client.get(f"{TOPIC}/messages/0:1")).json()
    assert (answer["message"]["payload"], answer["message"]["properties"]) == ("one", {"a": "1"})
    ledger = answer["ledger"]
    assert (ledger["ledger_id"], ledger["entry_id"], ledger["state"]) == (0, 1, "open")
    assert len(ledger["ensemble"]) == 3
    # Entry 1 of an ensemble of three begins at its second bookie.
    assert ledger["write_set"] == [ledger["ensemble"][i] for i in (1, 2, 0)]


async def test_one_message_of_a_batch_is_shown(broker):
    batch = await broker.produce_batch("a", "b")
    answer = (await broker.client.get(f"{TOPIC}/messages/{batch[1]}")).json()
    assert (answer["message"]["payload"], answer["batch_size"]) == ("b", 2)


@pytest.mark.parametrize("message_id", ["0:5", "9:0", "0:0:0:-1", "0:0:-1:1"])
async def test_a_missing_message_is_answered_with_404(broker, message_id):
    await broker.produce("a")
    problem(await broker.client.get(f"{TOPIC}/messages/{message_id}"), status=404, code="no_such_message")


@pytest.mark.parametrize("message_id", ["x", "0", "-1:-1", "1:2:3:4:5", "%FF"])
async def test_an_invalid_message_id_is_refused(broker, message_id):
    await broker.produce("a")
    problem(await broker.client.get(f"{TOPIC}/messages/{message_id}"), status=400, code="bad_request")


@pytest.mark.parametrize(
    "query",
    [
        "start=soon",
        "start=@",
        "start=@x",
        "start=@999999999999999",
        "max=0",
        "max=1001",
        "max_bytes=0",
        "wait_ms=30001",
        "colour=red",
    ],
)
async def test_an_invalid_read_query_is_refused(broker, query):
    await broker.produce("a")
    problem(await broker.client.get(f"{TOPIC}/messages?{query}"), status=400, code="bad_request")


async def test_topic_statistics_count_entries_messages_and_consumers(broker):
    await broker.produce("a", "b")
    await broker.receive(max=1)
    stats = (await broker.client.get(TOPIC)).json()
    assert (stats["topic"], stats["owner"], stats["entries"], stats["ledgers"]) == (
        "public/default/t",
        "http://one",
        2,
        1,
    )
    assert (stats["messages_in"], stats["messages_out"], stats["first"], stats["last"]) == (2, 1, "0:0", "0:1")
    expected = {"type": "shared", "backlog_entries": 2, "unacked": 1, "consumers": 1, "mark_delete": "0:-1"}
    assert stats["subscriptions"]["s"].items() >= expected.items()
    internal = (await broker.client.get(f"{TOPIC}/internal")).json()
    assert internal["lastConfirmedEntry"] == "0:1"


async def test_creating_a_topic_is_idempotent(broker):
    answer = await broker.client.put(TOPIC)
    assert (answer.status_code, answer.json()) == (201, {"topic": "public/default/t", "created": True})
    answer = await broker.client.put(TOPIC)
    assert (answer.status_code, answer.json()["created"]) == (200, False)


async def test_lists_are_sorted_filtered_and_paged(broker):
    make_namespaces(broker.tree, "a/x", "a/y", "b/x")
    for name in ("a/x/2", "a/x/1", "a/y/3", "b/x/4"):
        await broker.client.put(f"/v1/topics/{name}")
    listed = (await broker.client.get("/v1/topics")).json()
    assert listed == {"topics": ["a/x/1", "a/x/2", "a/y/3", "b/x/4"]}
    assert (await broker.client.get("/v1/topics?namespace=a/x")).json() == {"topics": ["a/x/1", "a/x/2"]}
    page = (await broker.client.get("/v1/topics?max=3")).json()
    assert page == {"topics": ["a/x/1", "a/x/2", "a/y/3"], "next": "a/y/3"}
    assert (await broker.client.get(f"/v1/topics?after={page['next']}")).json() == {"topics": ["b/x/4"]}
    problem(await broker.client.get("/v1/topics?namespace=a"), status=400, code="bad_request")


async def test_a_topic_is_deleted_with_its_subscriptions_and_ledgers(broker, ledgers):
    await broker.produce("a")
    await broker.receive()
    problem(await broker.client.delete(TOPIC), status=409, code="topic_in_use")
    assert (await broker.client.delete(f"{TOPIC}?force=true")).json() == {"deleted": "public/default/t"}
    problem(await broker.client.get(TOPIC), status=404, code="no_such_topic")
    assert (await broker.client.get("/v1/topics")).json() == {"topics": []}
    assert not [ledger for ledger in ledgers.ledgers.values() if not ledger.deleted]
    assert (await broker.client.put(TOPIC)).status_code == 201
    await broker.produce("anew")
    assert payloads((await read(broker))["messages"]) == ["anew"]


async def test_no_topic_is_created_if_auto_creation_is_off(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", auto_create_topics=False)
    answer = await harness.client.post(f"{TOPIC}/messages", content=b"x")
    problem(answer, status=404, code="no_such_topic")
    problem(await harness.receive_raw(), status=404, code="no_such_topic")
    await harness.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", ""),
        ("GET", ""),
        ("GET", "/messages"),
        ("GET", "/messages/0:0"),
        ("GET", "/internal"),
        ("GET", "/subscriptions"),
        ("GET", "/subscriptions/s/explain"),
        ("DELETE", "/subscriptions/s"),
        ("DELETE", "/subscriptions/s/consumers/c"),
    ],
)
async def test_the_error_names_an_unknown_topic_and_its_bundle_is_not_acquired(broker, method, path):
    answer = await broker.client.request(method, f"{TOPIC}{path}")
    assert problem(answer, status=404, code="no_such_topic")["facts"] == {"topic": "public/default/t"}
    assert broker.broker.ownership.held == []


async def test_any_printable_name_works_percent_encoded(broker):
    name = "order 🙂 %2F?#+&"
    sub = "a/b c"
    topic = f"/v1/topics/public/default/{quote(name, safe='')}"
    await broker.produce("x", topic=topic)
    messages = await broker.receive(sub=quote(sub, safe=""), topic=topic)
    assert payloads(messages) == ["x"]
    assert (await broker.client.get("/v1/topics")).json() == {"topics": [f"public/default/{name}"]}
    assert list((await broker.client.get(topic)).json()["subscriptions"]) == [sub]
    assert (await broker.ack(ids(messages), sub=quote(sub, safe=""), topic=topic)).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/topics/pub%20lic/default/t", 400),
        ("/v1/topics/public/../t", 404),
        ("/v1/topics/public/default/a%2Fb", 400),
        ("/v1/topics/public/default/%00", 400),
        ("/v1/topics/public/default/%FF", 400),
        ("/v1/topics/public/default/" + "x" * 300, 413),
        ("/v1/topics/public//t", 400),
        ("/v1/topics/" + "x" * 200 + "/default/t", 413),
    ],
)
async def test_invalid_names_are_refused(broker, path, status):
    answer = await broker.client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


# -- errors and metrics


async def test_the_error_for_an_unsupported_method_lists_the_supported_ones(broker):
    answer = await broker.client.patch(f"{TOPIC}/messages")
    problem(answer, status=405, code="method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    answer = await broker.client.get(f"{TOPIC}/subscriptions/s/ack")
    problem(answer, status=405, code="method_not_allowed")


async def test_head_of_an_endless_answer_is_refused(broker):
    answer = await broker.client.head(f"{TOPIC}/subscriptions/s/stream?consumer=c")
    assert answer.status_code == 405


async def test_unavailable_metadata_is_answered_with_503_and_retry_after(broker, monkeypatch):
    from bindery_core.errors import MetadataUnavailable

    async def away(*_args, **_kwargs):
        raise MetadataUnavailable("no connection")

    monkeypatch.setattr(broker.store, "exists", away)
    answer = await broker.client.get(TOPIC)
    problem(answer, status=503, code="metadata_unavailable")
    assert answer.headers["retry-after"]


async def test_metrics_have_pulsars_names(broker):
    await broker.produce("a", "b")
    await broker.receive(max=1)
    text = (broker.metrics.render() + await broker.topic_page()).decode()
    labels = 'cluster="bindery",namespace="public/default",topic="persistent://public/default/t"'
    assert f"pulsar_in_messages_total{{{labels}}} 2\n" in text
    (unacked,) = [row for row in text.splitlines() if row.startswith("pulsar_subscription_unacked_messages{")]
    assert 'subscription="s"' in unacked
    assert unacked.endswith(" 1")
    assert 'pulsar_broker_topics_count{cluster="bindery"} 1\n' in text
    assert 'bindery_broker_http_requests_total{operation="produce",status="200"} 2.0' in text
