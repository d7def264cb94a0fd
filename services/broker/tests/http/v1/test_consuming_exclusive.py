"""Exclusive subscriptions over HTTP: one consumer, in order, with cumulative acknowledgements."""

from broker_harness import TOPIC, payloads, problem

SUB = f"{TOPIC}/subscriptions/s"


async def test_a_second_exclusive_consumer_is_refused_and_the_error_names_the_first(broker):
    await broker.produce("a")
    await broker.receive("c1", type="exclusive")
    refused = await broker.receive_raw("c2", type="exclusive")
    assert problem(refused, status=409, code="consumer_busy")["facts"]["consumer"] == "c1"
    assert (await broker.receive_raw("c1", type="exclusive")).status_code == 200


async def test_another_consumer_may_connect_after_the_session_has_expired(broker):
    await broker.produce("a", "b")
    await broker.receive("c1", type="exclusive", max=1, session_ttl_ms=5_000, ack_timeout_ms=1_000)
    broker.clock.advance(4.9)
    problem(await broker.receive_raw("c2", type="exclusive"), status=409, code="consumer_busy")
    broker.clock.advance(0.1)
    assert payloads(await broker.receive("c2", type="exclusive")) == ["a", "b"]


async def test_messages_stay_in_order_after_a_return(broker):
    message_ids = await broker.produce("a", "b", "c", "d")
    await broker.receive(type="exclusive", max=3)
    await broker.ack(message_ids[1:2])
    await broker.post(f"{SUB}/nack", {"message_ids": message_ids[2:3]})
    again = await broker.receive(type="exclusive")
    assert payloads(again) == ["a", "c", "d"]
    assert [message["redelivery_count"] for message in again] == [0, 1, 0]


async def test_delivery_continues_at_the_lowest_unacknowledged_message_after_a_timeout(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive(type="exclusive", max=2, ack_timeout_ms=1_000)
    await broker.ack(message_ids[:1])
    broker.clock.advance(1)
    assert payloads(await broker.receive(type="exclusive")) == ["b", "c"]


async def test_a_consumer_that_restarts_gets_the_messages_it_held(broker):
    await broker.produce("a", "b")
    await broker.receive(type="exclusive")
    assert await broker.receive(type="exclusive") == []
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["a", "b"]


async def test_a_cumulative_acknowledgement_needs_an_exclusive_subscription(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive(type="exclusive", max=2)
    answer = await broker.post(f"{SUB}/ack", {"cumulative": message_ids[1]})
    assert answer.status_code == 200
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["c"]
    await broker.receive(sub="shared")
    answer = await broker.post(f"{TOPIC}/subscriptions/shared/ack", {"cumulative": message_ids[1]})
    problem(answer, status=400, code="bad_request")


async def test_a_cumulative_acknowledgement_may_name_a_message_inside_a_batch(broker):
    batch = await broker.produce_batch("a", "b", "c")
    await broker.receive(type="exclusive")
    await broker.post(f"{SUB}/ack", {"cumulative": batch[1]})
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["c"]


async def test_the_type_changes_only_while_no_consumer_is_connected(broker):
    await broker.produce("a")
    await broker.receive("c1", type="shared", ack_timeout_ms=1_000)
    problem(await broker.receive_raw("c2", type="exclusive"), status=409, code="subscription_type_conflict")
    broker.clock.advance(60)
    assert payloads(await broker.receive("c2", type="exclusive")) == ["a"]
