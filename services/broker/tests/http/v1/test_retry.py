"""POST .../retry, and the dead letters of POST .../receive, over HTTP."""

from typing import Any

from broker_harness import TOPIC, Harness, ids, payloads

RETRY = f"{TOPIC}-s-RETRY"
DLQ = f"{TOPIC}-s-DLQ"


async def retry(broker: Harness, message_ids: list[str], *, topic: str = TOPIC, **fields: Any) -> dict[str, Any]:
    answer = await broker.post(f"{topic}/subscriptions/s/retry", {"message_ids": message_ids, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_messages_are_moved_to_the_retry_topic_in_the_order_of_the_call(broker):
    first, second, third = await broker.produce("a", "b", "c")
    await broker.receive(ack_timeout_ms=1_000)
    answer = await retry(broker, [third, first])
    assert answer == {
        "moved": [
            {"message_id": third, "topic": "public/default/t-s-RETRY", "copy_id": "1:0:-1:-1", "reconsume_times": 1},
            {"message_id": first, "topic": "public/default/t-s-RETRY", "copy_id": "1:1:-1:-1", "reconsume_times": 1},
        ],
        "acknowledged": [],
        "failed": [],
    }
    broker.clock.advance(2)
    assert ids(await broker.receive()) == [second]
    copies = await broker.receive(topic=RETRY)
    assert payloads(copies) == ["c", "a"]
    assert copies[0]["properties"] == {
        "REAL_TOPIC": "persistent://public/default/t",
        "REAL_SUBSCRIPTION": "s",
        "ORIGIN_MESSAGE_ID": third.removesuffix(":-1"),
        "ORIGIN_MESSAGE_IDY_TIME": third.removesuffix(":-1"),
        "RECONSUMETIMES": "1",
        "DELAY_TIME": "0",
    }
    assert await retry(broker, [first]) == {"moved": [], "acknowledged": [first], "failed": []}
    assert await broker.receive(topic=RETRY, consumer="other") == []
