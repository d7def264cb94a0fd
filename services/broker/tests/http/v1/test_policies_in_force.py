"""Statistics and explanations say which policies stop or drop something, with value and level."""

from typing import Any

from broker_harness import TOPIC, Clock, Harness, ids, make_namespaces

TTL = "/v1/topics/public/limited/t"


async def explained(broker: Harness, topic: str = TOPIC, **query: str) -> dict[str, Any]:
    answer = await broker.client.get(f"{topic}/subscriptions/s/explain", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["policy"]: one for one in answer["policies"]}


async def test_expired_messages_are_explained_by_the_policy_of_the_namespace(broker: Harness, clock: Clock) -> None:
    make_namespaces(broker.tree, "public/limited", message_ttl_in_seconds=60)
    await broker.client.put(f"{TTL}/subscriptions/s", json={})
    await broker.produce("a", "b", topic=TTL)
    assert by_name(await explained(broker, TTL))["message_ttl_s"] == {
        "policy": "message_ttl_s",
        "value": 60,
        "source": "namespace",
        "effect": "drops",
        "detail": "messages are acknowledged 60 s after they were published, or became due "
        "(policy message_ttl_s of the namespace)",
        "acts": False,
        "dropped": 0,
    }
    clock.advance(61)
    await broker.broker.topics.enforce()
    for answer in (await explained(broker, TTL), (await broker.client.get(TTL)).json()):
        found = by_name(answer)["message_ttl_s"]
        assert (found["acts"], found["dropped"]) == (True, 2)


async def test_a_throttled_subscription_names_the_policy(broker: Harness) -> None:
    await broker.produce(*"abcd")
    set_ = await broker.client.put(
        f"{TOPIC}/policies", json={"subscription_dispatch_rate": {"messages": 1, "size": None}}
    )
    assert set_.status_code == 200, set_.text
    message_ids = await broker.produce("e")
    await broker.receive("c", max=1)
    await broker.receive("c", max=1)
    answer = await explained(broker, message_id=message_ids[0])
    assert answer["message"]["code"] == "dispatch_rate"
    assert answer["message"]["policy"] == "subscription_dispatch_rate"
    found = by_name(answer)["subscription_dispatch_rate"]
    assert (found["source"], found["effect"], found["acts"]) == ("topic", "slows", True)
    assert found["value"]["messages"] == 1
    assert any("rate of deliveries" in reason for reason in answer["blocked_by"])
    assert by_name((await broker.client.get(TOPIC)).json())["subscription_dispatch_rate"]["acts"] is True


async def test_a_full_consumer_names_the_policy_and_its_level(broker: Harness) -> None:
    await broker.produce(*"abc")
    (await broker.client.put(f"{TOPIC}/policies", json={"unacked_per_consumer_max": 2})).raise_for_status()
    received = await broker.receive("c", max=3)
    assert len(received) == 2
    answer = await explained(broker, message_id=(await broker.produce("d"))[0], consumer="c")
    assert (answer["message"]["code"], answer["message"]["policy"]) == ("unacked_max", "unacked_per_consumer_max")
    found = by_name(answer)["unacked_per_consumer_max"]
    assert (found["value"], found["source"], found["acts"]) == (2, "topic", True)
    assert by_name(answer)["unacked_per_subscription_max"]["source"] == "broker"
    await broker.ack(ids(received))
    assert by_name(await explained(broker))["unacked_per_consumer_max"]["acts"] is False


async def test_messages_in_the_retry_topic_are_not_called_acknowledged(broker: Harness) -> None:
    await broker.produce("a")
    received = await broker.receive("c")
    moved = await broker.post(f"{TOPIC}/subscriptions/s/retry", {"message_ids": ids(received), "delay_ms": 60_000})
    assert moved.status_code == 200, moved.text
    answer = await explained(broker)
    assert answer["summary"] == (
        "everything in the topic is acknowledged; 1 entries in its retry topic are not acknowledged"
    )
    assert answer["subscription"]["retry"]["backlog_entries"] == 1


async def test_without_retried_messages_everything_is_acknowledged(broker: Harness) -> None:
    await broker.produce("a")
    await broker.ack(ids(await broker.receive("c")))
    assert (await explained(broker))["summary"] == "everything is acknowledged"


async def test_a_wrong_dead_letter_topic_says_which_one_is_the_default(broker: Harness) -> None:
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    answer = await broker.client.get(f"{TOPIC}/subscriptions/s/dead-letters", params={"topic": "public/default/none"})
    assert answer.status_code == 404
    assert answer.json()["code"] == "no_such_topic"
    assert "leave topic out for the default public/default/t-s-DLQ" in answer.json()["detail"]


async def test_an_unknown_keeper_of_the_default_topic_says_to_pass_topic(broker: Harness) -> None:
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    await broker.client.put("/v1/topics/public/default/t-s-DLQ")
    query = {"initial_subscription": "other"}
    answer = await broker.client.get(f"{TOPIC}/subscriptions/s/dead-letters", params=query)
    assert answer.status_code == 404
    assert "pass topic, too" in answer.json()["detail"]
    named = await broker.client.get(
        f"{TOPIC}/subscriptions/s/dead-letters", params={"topic": "public/default/elsewhere", **query}
    )
    assert named.status_code == 404
    await broker.client.put("/v1/topics/public/default/elsewhere")
    named = await broker.client.get(
        f"{TOPIC}/subscriptions/s/dead-letters", params={"topic": "public/default/elsewhere", **query}
    )
    assert "pass initial_subscription" in named.json()["detail"]
