"""A broker whose topic is compacted, and the model that says what a reader must find."""

import json
from typing import Any

from broker_harness import TOPIC, Harness

Message = dict[str, Any]


class KeyModel:
    """What was published: for each key its last value, as a table of the topic has it."""

    def __init__(self) -> None:
        self.published: list[tuple[str | None, str]] = []

    def publish(self, messages: list[tuple[str | None, str]]) -> None:
        self.published += messages

    def table(self) -> dict[str, str]:
        """The last value of each key; keys whose last message is a tombstone are missing."""
        return table_of(self.published)


def table_of(messages: list[tuple[str | None, str]], table: dict[str, str] | None = None) -> dict[str, str]:
    """Apply messages to a table: a value replaces that of its key, a tombstone removes the key."""
    table = dict(table or {})
    for key, value in messages:
        if key is None:
            continue
        table.pop(key, None)
        if value:
            table[key] = value
    return table


async def publish(
    broker: Harness, *messages: tuple[str | None, str], batch: bool = True, topic: str = TOPIC
) -> list[str]:
    """Publish (key, value) in one request; an empty value is a tombstone. Returns the ids."""
    lines = [
        json.dumps({"payload": value} if key is None else {"payload": value, "key": key}) for key, value in messages
    ]
    query = "" if batch else "?batch=false"
    answer = await broker.client.post(
        f"{topic}/messages{query}", content="\n".join(lines), headers={"content-type": "application/x-ndjson"}
    )
    assert answer.status_code == 200, answer.text
    return list(answer.json()["message_ids"])


async def compact(broker: Harness, *, topic: str = TOPIC, status: str = "SUCCESS") -> dict[str, Any]:
    """Compact, wait for the end, and return the answer."""
    answer = await broker.client.put(f"{topic}/compaction")
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "RUNNING"
    for loaded in list(broker.broker.topics):
        await loaded.compaction.wait()
    found: dict[str, Any] = (await broker.client.get(f"{topic}/compaction")).json()
    assert found["status"] == status, found
    return found


async def read(
    broker: Harness, *, start: str = "earliest", topic: str = TOPIC, **params: Any
) -> tuple[list[Message], str]:
    """Read one page of the compacted topic."""
    answer = await broker.client.get(f"{topic}/messages", params={"start": start, "compacted": "true", **params})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["messages"], found["next"]


async def read_all(broker: Harness, *, page: int = 100, topic: str = TOPIC) -> list[Message]:
    found: list[Message] = []
    start = "earliest"
    while True:
        messages, start = await read(broker, start=start, max=page, topic=topic)
        if not messages:
            return found
        found += messages


def pairs(messages: list[Message]) -> list[tuple[str | None, str]]:
    return [(one.get("key"), one.get("payload", "")) for one in messages]
