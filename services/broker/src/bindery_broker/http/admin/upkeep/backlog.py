"""The call that reads the backlog of a subscription, to count its messages.

Counted are the entries that are not acknowledged, from the position in the body on, or from the first one, and their
messages; of a batch, all messages. Filters do not exist here, so that all of them count as accepted. The call ends
early, and says so (`aborted`), after ENTRIES_MAX entries or TIME_S_MAX seconds.
Source: Pulsar AnalyzeBacklogResult; `subscriptionBacklogScanMaxEntries`, `subscriptionBacklogScanMaxTimeMs`.
"""

import asyncio
from typing import Any, Final

from bindery_core.errors import Corrupt
from bindery_pulsar.message_codec import read_head
from bindery_pulsar.message_id import Position
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import RESPONSES_FULL, ResponsesFull
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import SUBSCRIPTION, answer, call, param, topic_of
from bindery_broker.http.admin.topics import position_of
from bindery_broker.http.exchange import Exchange
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger

router: Final = APIRouter()
ENTRIES_MAX: Final = 10_000
"""Source: Pulsar's default."""
TIME_S_MAX: Final = 20.0
"""Shorter than Pulsar's two minutes, after which most proxies have given up."""
READ_ENTRIES: Final = 100
"""Maximum number of entries of one read."""
READ_SIZE: Final = 2**20
"""Bytes of one read, unless its first entry is larger."""
READ_SIZE_MAX: Final = 8 * 2**20
"""What one read may take in memory: an entry has at most 5 MiB."""


class _Counts:
    def __init__(self) -> None:
        self.entries = 0
        self.messages = 0
        self.is_complete = False

    def json(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "messages": self.messages,
            "filterAcceptedEntries": self.entries,
            "filterAcceptedMessages": self.messages,
            "filterRejectedEntries": 0,
            "filterRejectedMessages": 0,
            "filterRescheduledEntries": 0,
            "filterRescheduledMessages": 0,
            "aborted": not self.is_complete,
        }


@call(router, "POST", SUBSCRIPTION + "/analyzeBacklog", "adminAnalyzeBacklog")
async def analyze(exchange: Exchange) -> Response:
    """The body is the message id to begin with, or empty."""
    wanted = await calls.body(exchange, dict[str, Any], missing={})
    start = position_of(wanted) if wanted else None
    topic = await topic_of(exchange)
    subscription = topic.subscription(param(exchange, "subscription"))
    if not exchange.charge.take(least=READ_SIZE_MAX, most=READ_SIZE_MAX):
        raise ResponsesFull(RESPONSES_FULL)
    counts = _Counts()
    try:
        async with asyncio.timeout(TIME_S_MAX):
            await _count(topic.ledger, subscription.cursor, start, counts)
    except TimeoutError:
        pass
    return answer(counts.json())


async def _count(ledger: ManagedLedger, cursor: ManagedCursor, start: Position | None, counts: _Counts) -> None:
    position = ledger.clamp(cursor.mark_delete if start is None else start)
    while counts.entries < ENTRIES_MAX:
        position = cursor.next_unacked(ledger.clamp(position))  # what was trimmed meanwhile does not exist
        if not ledger.contains(position):
            counts.is_complete = True
            return
        count = min(READ_ENTRIES, ENTRIES_MAX - counts.entries)
        found = await ledger.read(position, entries_max=count, size_max=READ_SIZE)
        for at, entry in found:
            if not cursor.is_acked(at):
                counts.entries += 1
                counts.messages += _messages(entry)
        if found:
            position = ledger.next_position(found[-1][0])
        await asyncio.sleep(0)


def _messages(entry: bytes) -> int:
    """Return the number of messages in an entry; 1 for a damaged one."""
    try:
        return read_head(entry).messages_count
    except Corrupt:
        return 1
