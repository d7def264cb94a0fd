"""Assign rows to the partitions of partitioned topics. Each partition is a topic of its own for the sequence ids.

| row           | partition                                                                                     |
|---------------|-----------------------------------------------------------------------------------------------|
| with a key    | Murmur3 hash of the key, modulo the number of partitions, as brokers and Pulsar's clients do  |
| without a key | in turn by the number of the row: ROWS_TOGETHER rows to one, the next ones to the next        |

So a repeated task assigns each row as before, as long as the topic has the same number of partitions. The number is
read once for each topic of a task. If the topic is enlarged while a micro-batch is unfinished, its repetition assigns
the rows to other partitions: the checksum of the sequence ids detects this in partitions that have rows of it.
"""

import json
from collections.abc import Callable
from typing import Final

from bindery_pulsar.murmur3 import murmur3_hash
from bindery_pulsar.topic_name import TopicName

ROWS_TOGETHER: Final = 128
"""Number of rows without a key that go to one partition before the next one gets some."""


class Router:
    """The topics of one task."""

    def __init__(self, partitions: Callable[[TopicName], int], *, first: int) -> None:
        """`partitions`: returns the number of partitions of a topic, 0: not partitioned. `first`: number of the task,
        with whose partition the rows without a key begin."""
        self._partitions = partitions
        self._first = first
        self._known: dict[TopicName, list[TopicName]] = {}

    def route(self, topic: TopicName, line: bytes, *, row: int) -> tuple[TopicName, bytes]:
        """Return the topic that stores a row, and its message, JSON, unchanged."""
        names = self._known.get(topic)
        if names is None:
            names = [topic.with_partition(index) for index in range(self._partitions(topic))]
            self._known[topic] = names
        if not names:
            return topic, line
        key = json.loads(line).get("key")
        at = self._first + row // ROWS_TOGETHER if key is None else murmur3_hash(key.encode())
        return names[at % len(names)], line
