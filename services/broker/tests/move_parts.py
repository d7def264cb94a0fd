"""Calls that move messages over HTTP, and targets that wait or fail, for tests of moves."""

from collections.abc import Awaitable, Callable
from typing import Any

from bindery_broker.retries.intents import names_of_intents
from bindery_broker.topics.topic import Topic
from bindery_client.memory.memory import MemoryLedgers
from bindery_core.errors import AddTimeout, BookieUnavailable
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads

RETRY = f"{TOPIC}-s-RETRY"
SUB = f"{TOPIC}/subscriptions/s"
LONG_MS = 3_600_000
"""Lease and session of consumers, in milliseconds."""
Results = list[Any]


async def held(broker: Harness, *texts: str, **fields: Any) -> list[str]:
    """Produce messages, and let a consumer hold them. Returns their ids."""
    await broker.produce(*texts)
    return ids(await broker.receive(ack_timeout_ms=LONG_MS, session_ttl_ms=LONG_MS, **fields))


async def retry(broker: Harness, message_ids: list[str], **fields: Any) -> Any:
    return await broker.post(f"{SUB}/retry", {"message_ids": message_ids, **fields})


async def texts(broker: Harness, topic: str = TOPIC, **fields: Any) -> list[str]:
    fields = {"ack_timeout_ms": LONG_MS, "session_ttl_ms": LONG_MS, **fields}
    return payloads(await broker.receive("z", topic=topic, **fields))


def intents(broker: Harness) -> list[str]:
    topic = broker.broker.topics.loaded(TopicName.parse("t"))
    assert topic is not None
    return names_of_intents(topic.ledger.cursors["s"].blobs)


def before(topic: Topic, action: Callable[[], Any], *, wait: Awaitable[Any] | None = None) -> None:
    """Run `action` when the next message is published to the topic, then wait for `wait`, then publish it."""
    publish = topic.publish

    async def hooked(*arguments: Any, **options: Any) -> Results:
        topic.publish = publish  # type: ignore[method-assign]
        action()
        if wait is not None:
            await wait
        return list(await publish(*arguments, **options))

    topic.publish = hooked  # type: ignore[method-assign]


def fail_add(ledgers: MemoryLedgers, *, stored: bool = True) -> None:
    """Let the next add fail, so that nobody can find out whether it is stored."""
    ledgers.fail_next("add", AddTimeout("made up"), stored=stored)
    for operation in ("open", "close", "create"):
        ledgers.fail_next(operation, BookieUnavailable("made up"), count=1_000_000)
