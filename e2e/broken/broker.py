"""A broker with the defect that BINDERY_DEFECT selects. Only for the test that validators detect errors.

| defect  | effect                                                                        | required finding |
|---------|-------------------------------------------------------------------------------|------------------|
| forgets | acknowledges every 500th message without writing it                           | lost             |
| swaps   | writes every 500th message after the next message of the same request         | reordered        |
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from bindery_broker import main
from bindery_broker.topics.topic import Topic
from bindery_pulsar.message_id import MessageId, Position

EVERY: Final = 500
NOWHERE: Final = 10**9
"""Offset of entry ids beyond those of any ledger."""
_publish = Topic.publish
_counts: dict[str, int] = {}


def _positions(topic: Topic, count: int) -> list[int]:
    """Indexes, in a request of `count` messages, of those whose number in the topic is a multiple of EVERY."""
    before = _counts.get(topic.name.short, 0)
    _counts[topic.name.short] = before + count
    return [index for index in range(count) if (before + index + 1) % EVERY == 0]


async def _forgets(self: Topic, messages: Sequence[Any], **options: Any) -> list[Any]:
    dropped = set(_positions(self, len(messages)))
    kept = [message for index, message in enumerate(messages) if index not in dropped]
    results = list(await _publish(self, kept, **options)) if kept else []
    for index in sorted(dropped):
        last = self.ledger.last_confirmed
        nowhere = Position(last.ledger_id, last.entry_id + _counts[self.name.short] + NOWHERE)
        results.insert(index, MessageId.of(nowhere, partition=self.partition))
    return results


async def _swaps(self: Topic, messages: Sequence[Any], **options: Any) -> list[Any]:
    order = list(range(len(messages)))
    for index in _positions(self, len(messages)):
        other = index + 1 if index + 1 < len(messages) else index - 1
        if other >= 0:
            order[index], order[other] = order[other], order[index]
    results = await _publish(self, [messages[index] for index in order], **options)
    restored: list[Any] = [None] * len(messages)
    for index, result in zip(order, results, strict=True):
        restored[index] = result
    return restored


DEFECTS: Final[dict[str, Callable[..., Any]]] = {"forgets": _forgets, "swaps": _swaps}

if __name__ == "__main__":
    defect = os.environ.get("BINDERY_DEFECT", "")
    if defect not in DEFECTS:
        sys.exit(f"BINDERY_DEFECT must be one of {', '.join(DEFECTS)}; this image is for tests of the tests only")
    Topic.publish = DEFECTS[defect]  # type: ignore[method-assign]
    sys.exit(main.main(sys.argv[1:]))
