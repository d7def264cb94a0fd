"""Due messages are read into the cache while those before them are delivered."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.subscriptions.next_reads import ENTRIES_MIN, NextReads
from bindery_broker.subscriptions.reading import REPLAY_ENTRIES_MAX, STORED_BYTES_MAX
from bindery_core.errors import TryAgain
from bindery_pulsar.message_id import Position


class Reader:
    """Stands for a MessageReader whose bookies answer on request."""

    def __init__(self) -> None:
        self.asked: list[Sequence[Position]] = []
        self.answer = asyncio.Event()
        self.error: Exception | None = None

    async def prefetch(self, positions: Sequence[Position]) -> None:
        self.asked.append(positions)
        await self.answer.wait()
        if self.error is not None:
            raise self.error


def dispatcher_with(due: int, read_ahead: ReadAhead) -> SharedDispatcher[Any]:
    dispatcher: SharedDispatcher[Any] = SharedDispatcher(
        limits=DispatchLimits(unacked_max=10_000, unacked_per_consumer_max=10_000), read_ahead=read_ahead
    )
    dispatcher.replay_due(Position(1, entry_id) for entry_id in range(due))
    return dispatcher


def next_reads(reader: Reader, read_ahead: ReadAhead) -> NextReads:
    return NextReads(cast(Any, reader), read_ahead)


async def test_the_entries_after_those_that_are_read_now_are_asked_for() -> None:
    reader, read_ahead = Reader(), ReadAhead(8 * STORED_BYTES_MAX)
    dispatcher = dispatcher_with(3 * REPLAY_ENTRIES_MAX, read_ahead)
    reads = next_reads(reader, read_ahead)
    assert reads.is_useful(dispatcher)
    await reads.begin(dispatcher)
    (asked,) = reader.asked
    assert asked == [Position(1, at) for at in range(REPLAY_ENTRIES_MAX, 2 * REPLAY_ENTRIES_MAX)]
    assert read_ahead.used == STORED_BYTES_MAX
    now_read = dispatcher.replay(REPLAY_ENTRIES_MAX)
    assert [ref.position for ref in now_read] == [Position(1, at) for at in range(REPLAY_ENTRIES_MAX)]


async def test_a_read_waits_for_the_one_before_it() -> None:
    reader, read_ahead = Reader(), ReadAhead(8 * STORED_BYTES_MAX)
    dispatcher = dispatcher_with(4 * REPLAY_ENTRIES_MAX, read_ahead)
    reads = next_reads(reader, read_ahead)
    await reads.begin(dispatcher)
    dispatcher.replay(REPLAY_ENTRIES_MAX)
    following = asyncio.create_task(reads.begin(dispatcher))
    await asyncio.sleep(0.01)
    assert (following.done(), len(reader.asked)) == (False, 1)
    reader.answer.set()
    await following
    assert reader.asked[1][0] == Position(1, 2 * REPLAY_ENTRIES_MAX)
    await asyncio.sleep(0)
    assert read_ahead.used == 0


@pytest.mark.parametrize("due", [0, REPLAY_ENTRIES_MAX, REPLAY_ENTRIES_MAX + ENTRIES_MIN - 1])
async def test_few_entries_are_not_read_in_advance(due: int) -> None:
    reader, read_ahead = Reader(), ReadAhead(8 * STORED_BYTES_MAX)
    reads = next_reads(reader, read_ahead)
    assert not reads.is_useful(dispatcher_with(due, read_ahead))


async def test_nothing_is_read_without_room() -> None:
    reader, read_ahead = Reader(), ReadAhead(STORED_BYTES_MAX - 1)
    reads = next_reads(reader, read_ahead)
    await reads.begin(dispatcher_with(3 * REPLAY_ENTRIES_MAX, read_ahead))
    assert (reader.asked, read_ahead.used) == ([], 0)


async def test_an_error_is_left_to_the_read_that_needs_the_entries() -> None:
    reader, read_ahead = Reader(), ReadAhead(8 * STORED_BYTES_MAX)
    dispatcher = dispatcher_with(3 * REPLAY_ENTRIES_MAX, read_ahead)
    reads = next_reads(reader, read_ahead)
    reader.error = TryAgain("no bookie")
    await reads.begin(dispatcher)
    reader.answer.set()
    await asyncio.sleep(0.01)
    assert read_ahead.used == 0
    await reads.begin(dispatcher)
    assert len(reader.asked) == 2
