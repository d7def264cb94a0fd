"""Dead letters over HTTP: list them, move them back, discard them."""

import asyncio
import json

import httpx
import pytest
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

DEAD = f"{TOPIC}-s-DLQ"
RETRY = f"{TOPIC}-s-RETRY"
SUB = f"{TOPIC}/subscriptions/s"
LETTERS = f"{SUB}/dead-letters"


async def bury(broker, *sent: str, **fields) -> list[str]:
    """Make dead letters of new messages. Returns their ids in the dead-letter topic."""
    made = []
    for payload in sent:
        await broker.produce(payload, params={"key": f"k-{payload}"})
        (message,) = await broker.receive()
        answer = await broker.post(
            f"{SUB}/retry", {"message_ids": [message["message_id"]], "max_redeliver": 0, **fields}
        )
        assert answer.status_code == 200, answer.text
        made += [one["copy_id"] for one in answer.json()["moved"]]
    return made


async def listed(broker, **params):
    answer = await broker.client.get(LETTERS, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def redrive(broker, **body):
    answer = await broker.post(f"{LETTERS}/redrive", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def purge(broker, **body):
    answer = await broker.post(f"{LETTERS}/purge", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_dead_letter_is_listed_with_its_origin(broker, clock):
    (origin,) = await broker.produce("bad", params={"key": "k", "event_time": 7})
    await broker.receive()
    await broker.post(f"{SUB}/retry", {"message_ids": [origin], "max_redeliver": 0})
    answer = await listed(broker)
    (letter,) = answer["messages"]
    assert answer["topic"] == "public/default/t-s-DLQ"
    assert "next" not in answer
    properties = letter.pop("properties")
    assert properties["REAL_TOPIC"] == letter.pop("origin_topic") == "persistent://public/default/t"
    assert origin.startswith(letter.pop("origin_message_id"))
    assert letter.pop("message_id")
    assert letter == {
        "reconsume_times": 1,
        "redelivery_count": 0,
        "publish_time": clock.now_ms(),
        "event_time": 7,
        "key": "k",
        "size": 3,
    }


async def test_a_list_is_paged_and_leaves_out_what_is_acknowledged(broker):
    made = await bury(broker, *"abcdef")
    await broker.ack(made[1:3], sub="dead-letters", topic=DEAD)
    found, after = [], {}
    for _ in range(10):
        page = await listed(broker, limit=2, **after)
        found += ids(page["messages"])
        if "next" not in page:
            break
        after = {"after": page["next"]}
    assert found == [made[0], *made[3:]]


async def test_a_list_ends_at_its_size_but_has_one_message(broker):
    await broker.receive()
    for _ in range(20):
        await broker.produce("x", topic=DEAD, headers={"Bindery-Property-big": "v" * 60_000})
    first = await listed(broker)
    assert len(first["messages"]) == 18
    assert len((await listed(broker, after=first["next"]))["messages"]) == 2


@pytest.mark.parametrize("path", ["redrive", "purge", ""])
async def test_without_a_dead_letter_topic_there_are_none(broker, path):
    await broker.receive()
    if not path:
        assert await listed(broker) == {"topic": "public/default/t-s-DLQ", "messages": []}
        return
    answer = (await broker.post(f"{LETTERS}/{path}", {})).json()
    assert answer.get("moved", answer.get("purged")) == 0


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/redrive"), ("POST", "/purge")])
async def test_a_missing_subscription_or_named_topic_is_not_found(broker, method, path):
    await broker.produce("x")
    body = None if method == "GET" else {}
    answer = await broker.client.request(method, LETTERS + path, json=body)
    problem(answer, status=404, code="no_such_subscription")
    await broker.receive()
    named = {"topic": "public/default/other"}
    answer = await broker.client.request(
        method, LETTERS + path, params=named if method == "GET" else {}, json=None if method == "GET" else named
    )
    problem(answer, status=404, code="no_such_topic")


async def test_redriven_messages_come_back_once_with_a_new_count(broker):
    await bury(broker, "a", "b")
    assert await redrive(broker) == {
        "topic": "public/default/t-s-RETRY",
        "moved": 2,
        "skipped": 0,
        "failed": 0,
        "dry_run": False,
    }
    got = await broker.receive()
    assert payloads(got) == ["a", "b"]
    assert [message["key"] for message in got] == ["k-a", "k-b"]
    for message in got:
        assert not {"RECONSUMETIMES", "DELAY_TIME"} & message["properties"].keys()
        assert message["properties"]["REAL_TOPIC"] == "persistent://public/default/t"
        assert message["properties"]["REAL_SUBSCRIPTION"] == "s"
    assert (await listed(broker))["messages"] == []
    answer = await broker.post(f"{SUB}/retry", {"message_ids": ids(got), "max_redeliver": 1})
    assert [one["reconsume_times"] for one in answer.json()["moved"]] == [1, 1]
    assert {one["topic"] for one in answer.json()["moved"]} == {"public/default/t-s-RETRY"}


async def test_redriving_twice_moves_each_once(broker):
    made = await bury(broker, *"abcde")
    answers = await asyncio.gather(*(redrive(broker) for _ in range(3)), redrive(broker, message_ids=made))
    assert sum(answer["moved"] for answer in answers) == 5
    assert sum(answer["failed"] for answer in answers) == 0
    assert (await redrive(broker, message_ids=made))["skipped"] == 5
    assert payloads(await broker.receive()) == list("abcde")


async def test_redrive_of_some(broker):
    made = await bury(broker, *"abcd")
    assert (await redrive(broker, message_ids=[made[2]]))["moved"] == 1
    page = await redrive(broker, max=2)
    assert (page["moved"], page["next"]) == (2, made[1])
    assert (await redrive(broker, max=2, after=page["next"]))["moved"] == 1
    assert payloads(await broker.receive()) == ["c", "a", "b", "d"]


async def test_a_dry_run_moves_nothing(broker):
    made = await bury(broker, "a", "b")
    assert (await redrive(broker, dry_run=True))["moved"] == 2
    assert (await redrive(broker, dry_run=True, message_ids=made[:1]))["moved"] == 1
    assert len((await listed(broker))["messages"]) == 2
    assert await broker.receive() == []


@pytest.mark.parametrize("path", ["redrive", "purge"])
async def test_an_unknown_id_changes_nothing(broker, path):
    made = await bury(broker, "a")
    for body in ({"message_ids": [*made, "999:0"]}, {"message_ids": ["999:0"], "dry_run": True}):
        if path == "purge":
            body.pop("dry_run", None)
        problem(await broker.post(f"{LETTERS}/{path}", body), status=400, code="unknown_messages")
    assert len((await listed(broker))["messages"]) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("redrive", {"message_ids": []}),
        ("redrive", {"message_ids": ["5:0"], "after": "5:0"}),
        ("redrive", {"max": 0}),
        ("redrive", {"max": 1_001}),
        ("purge", {"message_ids": []}),
        ("purge", {"message_ids": ["5:0"], "before": 1}),
        ("purge", {"before": -1}),
    ],
)
async def test_wrong_requests_are_refused(broker, path, body):
    await broker.receive()
    problem(await broker.post(f"{LETTERS}/{path}", body), status=400, code="bad_request")


async def test_all_some_or_old_dead_letters_are_purged(broker, clock):
    made = await bury(broker, "a", "b")
    clock.advance(10)
    since = clock.now_ms()
    made += await bury(broker, "c", "d")
    assert await purge(broker, message_ids=[made[0], made[3]]) == {"topic": "public/default/t-s-DLQ", "purged": 2}
    assert (await purge(broker, message_ids=[made[0]]))["purged"] == 0
    assert (await purge(broker, before=since))["purged"] == 1
    assert ids((await listed(broker))["messages"]) == [made[2]]
    assert (await purge(broker))["purged"] == 1
    assert (await listed(broker))["messages"] == []


async def test_of_a_topic_for_several_subscriptions_only_the_own_dead_letters_count(broker):
    shared = {"dead_letter_topic": "public/default/graves"}
    await bury(broker, "mine", **shared)
    await broker.produce("other")
    other = await broker.receive(sub="other")
    await broker.post(f"{TOPIC}/subscriptions/other/retry", {"message_ids": ids(other), "max_redeliver": 0, **shared})
    named = {"topic": "public/default/graves"}
    (letter,) = (await listed(broker, **named))["messages"]
    assert letter["properties"]["REAL_SUBSCRIPTION"] == "s"
    assert (await redrive(broker, dry_run=True, **named))["moved"] == 1
    assert (await purge(broker, **named))["purged"] == 1
    assert (await listed(broker, **named))["messages"] == []
    answer = await broker.client.get(f"{TOPIC}/subscriptions/other/dead-letters", params=named)
    assert len(answer.json()["messages"]) == 2


async def test_without_its_subscription_stored_dead_letters_are_listed_and_can_be_redriven(broker):
    """A client that made the topic without a subscription."""
    await broker.receive()
    await broker.produce("a", topic=DEAD)
    assert len((await listed(broker))["messages"]) == 1
    assert (await redrive(broker, dry_run=True))["moved"] == 1
    problem(
        await broker.post(f"{LETTERS}/redrive", {"message_ids": ["999:0"], "dry_run": True}),
        status=400,
        code="unknown_messages",
    )
    assert (await broker.client.get(f"{DEAD}/subscriptions")).json()["subscriptions"] == []
    assert (await redrive(broker))["moved"] == 1
    assert payloads(await broker.receive()) == ["a"]


async def test_dead_letters_of_a_batch_are_listed_and_redriven_singly(broker):
    await broker.receive()
    made = await broker.produce_batch("a", "b", "c", topic=DEAD)
    assert ids((await listed(broker))["messages"]) == made
    assert ids((await listed(broker, after=made[0], limit=1))["messages"]) == [made[1]]
    assert ids((await listed(broker, after=made[2]))["messages"]) == []
    assert (await redrive(broker, message_ids=[made[1]]))["moved"] == 1
    assert ids((await listed(broker))["messages"]) == [made[0], made[2]]
    assert (await redrive(broker))["moved"] == 2
    assert payloads(await broker.receive()) == ["b", "a", "c"]


async def test_a_keeper_of_another_name(broker):
    await broker.receive()
    await broker.client.put(f"{DEAD}/subscriptions/graves", json={})
    await broker.produce("a", topic=DEAD)
    named = {"initial_subscription": "graves"}
    assert (await purge(broker, **named))["purged"] == 1
    assert (await listed(broker, **named))["messages"] == []


async def test_a_keeper_that_does_not_exist_is_refused_also_for_the_default_topic(broker):
    """Else all messages of the topic would count as dead letters that nobody has moved."""
    await broker.receive()
    await broker.client.put(f"{DEAD}/subscriptions/dead-letters", json={})
    await broker.produce("a", topic=DEAD)
    assert (await redrive(broker))["moved"] == 1
    await refused(broker, initial_subscription="typo", status=404, code="no_such_subscription")
    assert payloads(await broker.receive()) == ["a"]


@pytest.fixture
async def pair(tree, ledgers, clock):
    """The first broker owns the topic, the second one the dead-letter topic with two messages."""
    first = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b1")
    second = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b2")
    first.peers["b2"] = httpx.ASGITransport(app=second.app)
    second.peers["b1"] = httpx.ASGITransport(app=first.app)
    await second.client.put(f"{DEAD}/subscriptions/dead-letters", json={})
    await first.receive()
    await second.produce("a", "b", topic=DEAD)
    yield first, second
    await first.close()
    await second.close()


async def test_the_owner_of_the_dead_letter_topic_lists_redrives_and_purges(pair):
    first, second = pair
    letters = await listed(first)
    assert letters["topic"] == "public/default/t-s-DLQ"
    one, two = ids(letters["messages"])
    assert (await redrive(first, message_ids=[one])) | {"topic": ""} == {
        "topic": "", "moved": 1, "skipped": 0, "failed": 0, "dry_run": False,
    }  # fmt: skip
    assert payloads(await first.receive()) == ["a"]
    assert (await purge(first, message_ids=[two]))["purged"] == 1
    assert (await listed(first))["messages"] == []
    assert (await second.client.get(DEAD)).json()["subscriptions"]["dead-letters"]["backlog_entries"] == 0


async def test_the_broker_of_the_topic_checks_the_subscription_of_the_request(pair):
    first, _ = pair
    for method, path in (("GET", ""), ("POST", "/redrive"), ("POST", "/purge")):
        unknown = f"{TOPIC}/subscriptions/none/dead-letters{path}"
        answer = await first.client.request(
            method, unknown, params={"topic": "public/default/t-s-DLQ"} if not path else {}, json={} if path else None
        )
        problem(answer, status=404, code="no_such_subscription")
    await first.client.delete(f"{SUB}/consumers/c1")
    await first.receive(type="failover")
    answer = await first.post(f"{LETTERS}/redrive", {})
    problem(answer, status=400, code="bad_request")


async def test_errors_of_the_owner_of_the_dead_letter_topic_are_passed_on(pair):
    first, _ = pair
    answer = await first.client.get(LETTERS, params={"initial_subscription": "none"})
    problem(answer, status=404, code="no_such_subscription")
    answer = await first.post(f"{LETTERS}/redrive", {"message_ids": ["7:7:-1:-1"]})
    problem(answer, status=400, code="unknown_messages")


async def test_an_owner_of_the_dead_letter_topic_that_does_not_answer_is_named(pair):
    first, _ = pair
    del first.peers["b2"]
    answer = await first.client.get(LETTERS)
    assert "owner=http://b2" in problem(answer, status=503, code="try_again")["detail"]


async def refused(broker, *, sub: str = SUB, status: int, code: str, **named) -> list[str]:
    """Check that list, redrive and purge are refused. Returns the details."""
    details = []
    for method, path, body in (("GET", "", None), ("POST", "/redrive", {"dry_run": True}), ("POST", "/purge", {})):
        fields = {"params": named} if body is None else {"json": {**body, **named}}
        answer = await broker.client.request(method, f"{sub}/dead-letters{path}", **fields)
        details.append(problem(answer, status=status, code=code)["detail"])
    return details


async def test_the_topics_of_the_subscription_are_no_dead_letter_topics(broker):
    await broker.produce("a")
    await broker.receive()
    for topic in ("public/default/t", "public/default/t-s-RETRY"):
        for detail in await refused(broker, topic=topic, status=400, code="bad_request"):
            assert detail.startswith("the dead-letter topic must not be the topic of the subscription")
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["backlog_entries"] == 1


async def test_a_named_topic_gets_no_subscription(broker):
    await broker.receive()
    await broker.produce("a", topic="/v1/topics/public/default/graves")
    for detail in await refused(broker, topic="public/default/graves", status=404, code="no_such_subscription"):
        assert "topic public/default/graves has no subscription dead-letters; pass initial_subscription" in detail
    answer = await broker.client.get("/v1/topics/public/default/graves/subscriptions")
    assert answer.json()["subscriptions"] == []
    await broker.client.put("/v1/topics/public/default/graves/subscriptions/kept", json={})
    named = {"topic": "public/default/graves", "initial_subscription": "kept"}
    assert (await listed(broker, **named))["messages"] == []


async def test_in_a_named_topic_messages_without_an_origin_do_not_count(broker):
    named = {"topic": "public/default/graves"}
    (mine,) = await bury(broker, "mine", dead_letter_topic="public/default/graves")
    (foreign,) = await broker.produce("x", topic="/v1/topics/public/default/graves")
    headers = {"Bindery-Property-REAL_SUBSCRIPTION": "s", "Bindery-Property-REAL_TOPIC": "public/default/other"}
    (other,) = await broker.produce("y", topic="/v1/topics/public/default/graves", headers=headers)
    assert ids((await listed(broker, **named))["messages"]) == [mine]
    for path in ("redrive", "purge"):
        for one in (foreign, other):
            answer = await broker.post(f"{LETTERS}/{path}", {"message_ids": [mine, one], **named})
            assert problem(answer, status=400, code="unknown_messages")["facts"]["message_ids"] == [one]
    assert (await purge(broker, **named))["purged"] == 1
    keeper = (await broker.client.get("/v1/topics/public/default/graves")).json()["subscriptions"]["dead-letters"]
    assert keeper["backlog_entries"] == 2


async def test_two_subscriptions_whose_default_names_are_equal_keep_their_dead_letters_apart(broker):
    """`a` with `b-c`, and `a-b` with `c`."""
    made = {}
    for topic, name in (("a", "b-c"), ("a-b", "c")):
        path = f"/v1/topics/public/default/{topic}"
        await broker.produce(topic, topic=path)
        held = ids(await broker.receive(topic=path, sub=name))
        answer = await broker.post(f"{path}/subscriptions/{name}/retry", {"message_ids": held, "max_redeliver": 0})
        (moved,) = answer.json()["moved"]
        assert moved["topic"] == "public/default/a-b-c-DLQ"
        made[f"{path}/subscriptions/{name}/dead-letters"] = moved["copy_id"]
    (client_made,) = await broker.produce("x", topic="/v1/topics/public/default/a-b-c-DLQ")
    (first, mine), (second, other) = made.items()
    for path, one in made.items():
        assert ids((await broker.client.get(path)).json()["messages"]) == [one, client_made]
    for dry_run in (True, False):
        answer = await broker.post(f"{first}/redrive", {"message_ids": [mine, other], "dry_run": dry_run})
        detail = problem(answer, status=400, code="unknown_messages")["detail"]
        assert detail.startswith("1 of 2 message ids name no dead letter of this subscription; nothing was done")
    problem(await broker.post(f"{first}/purge", {"message_ids": [other]}), status=400, code="unknown_messages")
    assert (await broker.post(f"{first}/redrive", {})).json()["moved"] == 2
    assert (await broker.post(f"{second}/purge", {})).json()["purged"] == 1
    assert ids((await broker.client.get(second)).json()["messages"]) == []


async def test_dead_letters_of_redriven_and_of_marked_messages_belong_to_the_subscription(broker):
    """A producer may set REAL_TOPIC, and a client may store a dead letter without any origin."""
    await broker.produce("a", headers={"Bindery-Property-REAL_TOPIC": "persistent://public/default/other"})
    await broker.receive()
    await broker.produce("b", topic=DEAD)
    assert (await redrive(broker))["moved"] == 1
    held = await broker.receive(redeliver=True)
    assert sorted(payloads(held)) == ["a", "b"]
    await broker.post(f"{SUB}/retry", {"message_ids": ids(held), "max_redeliver": 0})
    letters = (await listed(broker))["messages"]
    assert len(letters) == 2
    for letter in letters:
        assert letter["origin_topic"] == "persistent://public/default/t"
        assert letter["properties"]["REAL_SUBSCRIPTION"] == "s"
        assert "REDRIVEN_FROM" not in letter["properties"]


async def test_a_batch_that_others_share_is_named_message_by_message(broker):
    await broker.receive()
    lines = [{"payload": "a"}, {"payload": "b", "properties": {"REAL_SUBSCRIPTION": "other"}}]
    headers = {"content-type": "application/x-ndjson"}
    content = "\n".join(map(json.dumps, lines))
    answer = await broker.client.post(f"{DEAD}/messages", content=content, headers=headers, params={"batch": True})
    first, second = answer.json()["message_ids"]
    assert first.rpartition(":")[0] == second.rpartition(":")[0]
    for one in (second, first.rpartition(":")[0]):
        problem(await broker.post(f"{LETTERS}/purge", {"message_ids": [one]}), status=400, code="unknown_messages")
    assert (await purge(broker, message_ids=[first]))["purged"] == 1


async def test_damaged_dead_letters_are_not_listed_and_can_be_purged(broker):
    await broker.receive()
    made = await broker.produce("a", topic=DEAD)
    topic = await broker.broker.topic(TopicName.parse("t-s-DLQ"))
    damaged = [str(position) for position in await topic.ledger.add_many([b"x", b"y"])]
    made += await broker.produce("b", topic=DEAD)
    assert (await purge(broker, message_ids=damaged[:1]))["purged"] == 1
    assert ids((await listed(broker))["messages"]) == made
    assert (await purge(broker, before=0))["purged"] == 0
    assert (await purge(broker))["purged"] == 3
    assert topic.subscription("dead-letters").cursor.backlog_entries == 0
