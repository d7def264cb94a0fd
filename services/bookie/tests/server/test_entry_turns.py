"""EntryTurns: how many operations hold an entry at a time, and who waits."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.server.entry_turns import ENTRY_TURNS_MAX, ClientGone, EntryTurn, EntryTurns


class Reader:
    """A client that reads its responses while `is_reading` is set."""

    def __init__(self, group: str = "10.0.0.1") -> None:
        self.group = group
        self.is_gone = False
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


async def test_addresses_have_turns_alternately() -> None:
    """Thousands of operations of one address delay one of another address by one turn each."""
    turns = EntryTurns()
    first = await begun(turns, Reader("a"), ENTRY_TURNS_MAX)
    many, few = await begun(turns, Reader("a"), 3), await begun(turns, Reader("b"), 2)
    order = [many[0], few[0], many[1], few[1], many[2]]
    for (ended, _), (_, next_one) in zip([first[0], *order], order, strict=False):
        ended.end()
        await asyncio.wait_for(next_one, 30)
        assert turns.count == ENTRY_TURNS_MAX
    for turn, _ in [*first[1:], order[-1]]:
        turn.end()
    assert turns.count == 0


async def test_operations_that_are_cancelled_leave_their_turns_to_others() -> None:
    turns = EntryTurns()
    first = await begun(turns, Reader(), ENTRY_TURNS_MAX)
    (_, waiting), (_, passed_on), (last, done) = await begun(turns, Reader(), 3)
    waiting.cancel()
    first[0][0].end()  # before `waiting` has run
    passed_on.cancel()
    await asyncio.wait_for(done, 30)
    assert (waiting.cancelled(), passed_on.cancelled(), turns.count) == (True, True, ENTRY_TURNS_MAX)
    for turn in (last, *(turn for turn, _ in first[1:])):
        turn.end()
    assert turns.count == 0


async def test_an_operation_without_an_entry_takes_no_turn() -> None:
    turns = EntryTurns()
    turns.turn(Reader()).end()  # type: ignore[arg-type]
    tasks = await begun(turns, Reader(), ENTRY_TURNS_MAX + 1)
    assert [task.done() for _, task in tasks] == [True] * ENTRY_TURNS_MAX + [False]
    tasks[-1][1].cancel()


async def test_an_operation_whose_client_has_gone_before_its_turn_ends() -> None:
    turns, gone = EntryTurns(), Reader()
    first = await begun(turns, Reader(), ENTRY_TURNS_MAX)
    waiting = await begun(turns, gone, 1000)
    ((last, other),) = await begun(turns, Reader(), 1)
    gone.is_gone = True
    first[0][0].end()
    await asyncio.wait_for(other, 30)
    for _, task in waiting:
        with pytest.raises(ClientGone):
            await task
    for turn in (last, *(turn for turn, _ in first[1:])):
        turn.end()
    assert turns.count == 0
    with pytest.raises(ClientGone):
        await turns.turn(gone).begin()  # type: ignore[arg-type]
    assert turns.count == 0


async def test_a_turn_whose_client_goes_lasts_until_it_ends() -> None:
    """The storage reads the entry nevertheless."""
    turns, gone = EntryTurns(), Reader()
    first = await begun(turns, gone, ENTRY_TURNS_MAX)
    gone.is_gone = True
    ((_, waiting),) = await begun(turns, Reader(), 1)
    assert not waiting.done()
    first[0][0].end()
    await asyncio.wait_for(waiting, 30)
