"""EntryTurns: how many operations hold an entry at a time, and who waits."""

import asyncio
from typing import Any

from bindery_bookie.server.entry_turns import ENTRY_TURNS_MAX, EntryTurn, EntryTurns


class Reader:
    """A client that reads its responses while `is_reading` is set."""

    def __init__(self) -> None:
        self.is_reading = asyncio.Event()
        self.is_reading.set()

    @property
    def is_unsent(self) -> bool:
        return not self.is_reading.is_set()

    async def until_read(self) -> None:
        await self.is_reading.wait()


async def begun(turns: EntryTurns, peer: Any, count: int) -> list[tuple[EntryTurn, asyncio.Task[None]]]:
    found = [turns.turn(peer) for _ in range(count)]
    tasks = [(turn, asyncio.create_task(turn.begin())) for turn in found]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def test_a_few_turns_at_a_time() -> None:
    turns = EntryTurns()
    tasks = await begun(turns, Reader(), ENTRY_TURNS_MAX + 2)
    assert [task.done() for _, task in tasks] == [True] * ENTRY_TURNS_MAX + [False] * 2
    tasks[0][0].end()
    tasks[0][0].end()
    await tasks[ENTRY_TURNS_MAX][1]
    await asyncio.sleep(0)
    assert not tasks[-1][1].done(), "a turn ends once"
    tasks[1][0].end()
    await tasks[-1][1]


async def test_a_client_that_does_not_read_delays_only_itself() -> None:
    turns, stuck, quick = EntryTurns(), Reader(), Reader()
    stuck.is_reading.clear()
    waiting = await begun(turns, stuck, ENTRY_TURNS_MAX)
    assert not any(task.done() for _, task in waiting)
    ((_, done),) = await begun(turns, quick, 1)
    assert done.done()
    stuck.is_reading.set()
    await waiting[0][1]


async def test_a_client_that_stops_reading_while_it_waits_takes_no_turn() -> None:
    turns, stuck = EntryTurns(), Reader()
    first = await begun(turns, Reader(), ENTRY_TURNS_MAX)
    ((_, waiting),) = await begun(turns, stuck, 1)
    stuck.is_reading.clear()
    first[0][0].end()
    ((_, other),) = await begun(turns, Reader(), 1)
    assert (waiting.done(), other.done()) == (False, True)
    waiting.cancel()


async def test_an_operation_without_an_entry_takes_no_turn() -> None:
    turns = EntryTurns()
    turns.turn(Reader()).end()  # type: ignore[arg-type]
    tasks = await begun(turns, Reader(), ENTRY_TURNS_MAX + 1)
    assert [task.done() for _, task in tasks] == [True] * ENTRY_TURNS_MAX + [False]
    tasks[-1][1].cancel()
