"""The partition of a row: that of a broker for its key, and the same for each attempt."""

import json

from bindery_pulsar.murmur3 import murmur3_hash
from bindery_pulsar.topic_name import TopicName
from bindery_spark.sources.sink.routing import ROWS_TOGETHER, Router

TOPIC = TopicName.parse("t")


def routed(partitions: int, lines: list[dict[str, str]], first: int = 0) -> list[str]:
    asked = []

    def count(topic: TopicName) -> int:
        asked.append(topic)
        return partitions

    router = Router(count, first=first)
    found = [router.route(TOPIC, json.dumps(line).encode(), row=row)[0].local for row, line in enumerate(lines)]
    assert len(asked) <= 1
    return found


def test_a_topic_without_partitions_is_its_own() -> None:
    assert routed(0, [{"payload": "a"}, {"payload": "b", "key": "k"}]) == ["t", "t"]


def test_a_key_has_the_partition_of_brokers() -> None:
    keys = ["a", "b", "c", "", "ä"]
    found = routed(7, [{"payload": "x", "key": key} for key in keys])
    assert found == [f"t-partition-{murmur3_hash(key.encode()) % 7}" for key in keys]


def test_rows_without_a_key_take_turns_by_their_number() -> None:
    lines = [{"payload": str(n)} for n in range(3 * ROWS_TOGETHER)]
    found = routed(3, lines, first=2)
    assert found == [f"t-partition-{(2 + n // ROWS_TOGETHER) % 3}" for n in range(len(lines))]
    assert routed(3, lines, first=2) == found
