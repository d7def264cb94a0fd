"""ReadTurns: the number of reads per turn, and the order of the connections."""

import asyncio
from functools import partial

from bindery_bookie.server.read_turns import READ_SHARE_COUNT_MAX, READ_TURN_COUNT_MAX, ReadTurns

ALL = READ_TURN_COUNT_MAX // READ_SHARE_COUNT_MAX
"""Number of connections that get a whole share in one turn."""


async def test_a_single_read_neither_waits_nor_schedules_a_turn() -> None:
    turns = ReadTurns()
    for _ in range(READ_TURN_COUNT_MAX // 2 - 1):
        assert turns.share() > 0
        turns.spend(1)
    assert not turns._is_scheduled
    turns.spend(1)
    assert turns._is_scheduled
    await asyncio.sleep(0)
    assert turns.share() == READ_SHARE_COUNT_MAX


async def test_all_connections_get_their_shares_in_turn() -> None:
    turns = ReadTurns()
    served: list[tuple[int, int]] = []
    turn = 0

    def issue(who: int, share: int) -> None:
        served.append((turn, who))
        turns.spend(share)
        turns.queue(partial(issue, who))

    for who in range(2 * ALL + 1):
        turns.queue(partial(issue, who))
    for _ in range(4):
        turn += 1
        await asyncio.sleep(0)
    for one in range(1, 5):
        assert len([who for at, who in served if at == one]) == ALL
    assert [who for _, who in served] == [place % (2 * ALL + 1) for place in range(4 * ALL)], "in the order they wait"


async def test_a_new_connection_queues_while_others_wait() -> None:
    turns = ReadTurns()
    assert turns.share() == READ_SHARE_COUNT_MAX
    turns.queue(lambda share: turns.spend(share))
    assert turns.share() == 0
    await asyncio.sleep(0)
    assert turns.share() == READ_SHARE_COUNT_MAX


async def test_a_connection_that_fails_does_not_stop_the_others() -> None:
    turns = ReadTurns()
    served: list[int] = []
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
    turns.queue(lambda share: served.append(1 // 0))
    turns.queue(served.append)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(told) == 1
    assert served == [READ_SHARE_COUNT_MAX]
