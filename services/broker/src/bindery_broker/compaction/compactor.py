"""Compact a topic: two passes over what it has, then one record that puts the result into force.

| step                                                  | after a crash                                              |
|-------------------------------------------------------|------------------------------------------------------------|
| 1 read up to the last entry: which messages stay      | the former state                                           |
| 2 create a ledger, record its id in the cursor        | the former state; the ledger may be left over              |
| 3 copy the messages that stay, close the ledger       | the former state; the next compaction deletes the ledger   |
| 4 one record of the cursor: the position of the last  | the new state; the next compaction deletes the former      |
|   entry, the new ledger, the former one as left over  | ledger                                                     |
| 5 delete the former ledger                            | the new state                                              |

Both passes read the compacted ledger in force, then the topic after its horizon. No payloads are kept in memory.

The cursor is the subscription `__compaction`. It keeps the entries after its position from being trimmed. Its position
property `CompactedTopicLedger` is the compacted ledger. Its blob `LEFT_OVER` lists ledgers, as JSON, that may exist and
are not in force.
Source: Pulsar AbstractTwoPhaseCompactor for the passes, the ledger and the cursor; it has no list of ledgers that are
left over.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bindery_client.ledger.api import LedgerClient, WriteHandle
from bindery_core.errors import BinderyError, Corrupt
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import LedgerId
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar.message_codec import CorruptMessage, UnreadableMessage
from bindery_pulsar.message_id import EARLIEST, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.compaction import raw_message
from bindery_broker.compaction.batches import keep_messages
from bindery_broker.compaction.survivors import Survivors
from bindery_broker.compaction.view import CompactedView
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited
from bindery_broker.subscriptions.decoding import EntryDecoder

LEDGER_PROPERTY: Final = "CompactedTopicLedger"
LEFT_OVER: Final = "bindery.compaction.left-over"
READ_ENTRIES_MAX: Final = 100
READ_SIZE_MAX: Final = 2**20
"""Bytes of one read, unless an entry is larger."""
WRITE_ENTRIES_MAX: Final = 500
WRITE_SIZE_MAX: Final = 2**20
"""Bytes of entries that are added at a time, unless one is larger."""

log = get_logger(__name__)


class CompactionTools(NamedTuple):
    """What the compactions of a broker share."""

    client: LedgerClient
    decoder: EntryDecoder
    settings: ManagedLedgerSettings
    """Quorums of compacted ledgers, and the limit of each call."""
    keys_bytes_max: int
    """Maximum bytes of memory that the keys of one compaction take, estimated."""
    slots: asyncio.Semaphore
    """Held while a topic is compacted."""
    clock: Callable[[], int]
    """Wall time in milliseconds."""
    hold: Callable[[TopicName], None]
    """Keeps the topic loaded, until `release`."""
    release: Callable[[TopicName], None]


@dataclass(slots=True)
class Progress:
    """What a compaction has done."""

    entries_read: int = 0
    """Entries of the first pass."""
    messages_read: int = 0
    keys: int = 0
    """Keys that have a message."""
    entries_written: int = 0


def left_over(cursor: ManagedCursor) -> list[int]:
    """Return the ledgers that may exist and are not in force."""
    data = cursor.blobs.get(LEFT_OVER)
    if data is None:
        return []
    found = json.loads(data)
    return [ledger_id for ledger_id in found if ledger_id != cursor.position_properties.get(LEDGER_PROPERTY)]


async def delete_left_over(tools: CompactionTools, cursor: ManagedCursor, *, topic: TopicName) -> list[int]:
    """Delete the ledgers that are left over, once it is durable that they are not in force.

    Returns those that could not be deleted. Raises what `ManagedCursor.put_blobs` raises.
    """
    await cursor.put_blobs({})  # waits for the records before
    return [one for one in left_over(cursor) if not await delete_ledger(tools, one, topic=topic)]


async def delete_ledger(tools: CompactionTools, ledger_id: int, *, topic: TopicName) -> bool:
    """Delete a compacted ledger, if it exists. Returns False, with a warning in the log, if that failed."""
    try:
        async with limited(tools.settings.operation_timeout_s, "delete a compacted ledger"):
            await tools.client.delete(LedgerId(ledger_id))
    except BinderyError as error:
        log.warning("compacted_ledger_not_deleted", topic=topic.short, ledger_id=ledger_id, **error_fields(error))
        return False
    return True


class Compactor:
    """One compaction of one topic."""

    def __init__(
        self, topic: TopicName, cursor: ManagedCursor, view: CompactedView, tools: CompactionTools, progress: Progress
    ) -> None:
        self._topic = topic
        self._cursor = cursor
        self._view = view
        self._tools = tools
        self._progress = progress

    async def run(self, last: Position) -> None:
        """Compact up to the entry `last`.

        Raises TooManyRequests for too many keys, NotCompactable, Corrupt if the former compacted ledger is lost,
        TopicFenced, and what reads and writes raise. After an error the former state is in force, or after
        OutcomeUnknown one of the two.
        """
        tools, cursor = self._tools, self._cursor
        others = await delete_left_over(tools, cursor, topic=self._topic)
        kept = (await self._first_pass(last)).kept()
        former = cursor.position_properties.get(LEDGER_PROPERTY)
        handle = await self._create(last)
        switching = False
        try:
            await cursor.put_blobs({LEFT_OVER: _encoded([*others, handle.ledger_id])})
            await self._second_pass(last, kept, handle)
            async with limited(tools.settings.operation_timeout_s, "close a compacted ledger"):
                await handle.close()
            switching = True
            await cursor.ack_cumulative_with(
                last,
                properties={**cursor.position_properties, LEDGER_PROPERTY: handle.ledger_id},
                put={LEFT_OVER: _encoded(others if former is None else [*others, former])},
            )
        except BaseException:
            if not switching:
                await self._discard(handle)
            raise
        if former is not None:
            await delete_ledger(tools, former, topic=self._topic)

    async def _first_pass(self, last: Position) -> Survivors:
        progress = self._progress
        survivors = Survivors(size_max=self._tools.keys_bytes_max)
        decoder = self._tools.decoder
        async for position, payload in self._entries(last):
            progress.entries_read += 1
            try:
                entry = decoder.open(payload)
                if not entry.is_marker:
                    survivors.add(position, await decoder.decode(entry, room=decoder.size_max))
            except (CorruptMessage, UnreadableMessage) as error:
                log.warning("compacting_unreadable_entry", topic=self._topic.short, **error_fields(error))
                survivors.add_unreadable(position)
            progress.messages_read, progress.keys = survivors.messages, survivors.keys
        return survivors

    async def _second_pass(self, last: Position, kept: Mapping[Position, Sequence[int]], handle: WriteHandle) -> None:
        pending: list[bytes] = []
        size = 0
        async for position, payload in self._entries(last):
            indexes = kept.get(position)
            if indexes is None:
                continue
            entry = payload
            if indexes:
                entry = await asyncio.to_thread(keep_messages, payload, frozenset(indexes))
            pending.append(raw_message.encode(position, entry, partition=self._topic.partition))
            size += len(entry)
            if size >= WRITE_SIZE_MAX or len(pending) >= WRITE_ENTRIES_MAX:
                await self._write(handle, pending)
                pending, size = [], 0
        if pending:
            await self._write(handle, pending)

    async def _entries(self, last: Position) -> AsyncIterator[tuple[Position, bytes]]:
        """Iterate over the entries up to `last`."""
        position = EARLIEST
        while position <= last:
            entries = await self._view.read(position, entries_max=READ_ENTRIES_MAX, size_max=READ_SIZE_MAX)
            if not entries:
                raise Corrupt("the topic ends before its last entry", topic=self._topic.short, last=str(last))
            for at, payload in entries:
                if at > last:
                    return
                yield at, payload
            position = self._view.next_position(entries[-1][0])
            await asyncio.sleep(0)

    async def _write(self, handle: WriteHandle, payloads: list[bytes]) -> None:
        async with limited(self._tools.settings.add_timeout_s, "write a compacted ledger"):
            await handle.add_many(payloads)
        self._progress.entries_written += len(payloads)

    async def _create(self, last: Position) -> WriteHandle:
        """Create the compacted ledger. If the compaction is cancelled meanwhile, the ledger is deleted again, because
        nothing names it yet."""
        creating = asyncio.get_running_loop().create_task(self._create_ledger(last))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(BinderyError):
                await self._discard(await creating)
            raise

    async def _discard(self, handle: WriteHandle) -> None:
        await handle.abandon()
        await delete_ledger(self._tools, handle.ledger_id, topic=self._topic)

    async def _create_ledger(self, last: Position) -> WriteHandle:
        settings = self._tools.settings
        async with limited(settings.operation_timeout_s, "create a compacted ledger"):
            return await self._tools.client.create(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                digest_type=DigestType.CRC32,
                password=b"",
                custom={
                    "application": b"pulsar",
                    "component": b"compacted-ledger",
                    "pulsar/compactedTopic": self._topic.full.encode(),
                    "pulsar/compactedTo": raw_message.encode_id(last, partition=self._topic.partition),
                },
            )


def _encoded(ledger_ids: list[int]) -> bytes:
    return json.dumps(ledger_ids).encode()
