"""Topics are opened a few at a time, those first for which most requests wait, and none waits for ever."""

import asyncio
from collections.abc import Mapping

from bindery_broker.topics.upkeep.turns import FAIR_EACH, Turns


class Openings:
    """Topics that are opened, each until `finish`."""

    def __init__(self, count_max: int, weights: Mapping[str, int]) -> None:
        self.turns: Turns[str] = Turns(count_max, weight_of=lambda name: weights.get(name, 0))
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._open(name))
        await settled()

    async def finish(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def _open(self, name: str) -> None:
        async with self.turns.hold(name):
            self.begun.append(name)
            await self._ends[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_than_the_maximum_are_opened_at_a_time() -> None:
    openings = Openings(2, {})
    await openings.begin("a", "b", "c", "d")
    assert openings.begun == ["a", "b"]
    assert openings.turns.waiting_count == 2
    await openings.finish("a")
    assert openings.begun == ["a", "b", "c"]
    for name in ("b", "c", "d"):
        await openings.finish(name)
    await openings.begin("e", "f")
    assert openings.begun == ["a", "b", "c", "d", "e", "f"]


async def test_the_topic_with_most_requests_is_opened_first() -> None:
    openings = Openings(1, {"hot": 40, "warm": 7})
    await openings.begin("first", *(f"cold-{n}" for n in range(50)), "warm", "hot")
    await openings.finish("first")
    await openings.finish("hot")
    assert openings.begun == ["first", "hot", "warm"]


async def test_the_topic_that_waits_longest_has_its_turn() -> None:
    openings = Openings(1, {f"hot-{n}": 9 for n in range(10)})
    await openings.begin("first", "cold", *(f"hot-{n}" for n in range(10)))
    for _ in range(FAIR_EACH):
        await openings.finish(openings.begun[-1])
    assert openings.begun[-1] == "cold"


async def test_a_cancelled_topic_takes_no_turn() -> None:
    openings = Openings(1, {})
    await openings.begin("a", "b", "c")
    openings.tasks["b"].cancel()
    await openings.finish("a")
    assert openings.begun == ["a", "c"]
    await openings.finish("c")
    await openings.begin("d")
    assert openings.begun == ["a", "c", "d"]


async def test_a_turn_that_was_given_and_cancelled_is_passed_on() -> None:
    openings = Openings(1, {})
    await openings.begin("a", "b", "c")
    openings._ends["a"].set()
    while openings.turns.waiting_count == 2:
        await asyncio.sleep(0)
    openings.tasks["b"].cancel()  # in the turn in which it was granted
    await settled()
    assert openings.begun[-1] == "c"
