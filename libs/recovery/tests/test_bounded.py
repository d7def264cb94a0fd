"""Order, bound, errors, and what is left when the reader goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from bindery_recovery.cluster.bounded import in_order
from simulated import simulate


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def test_results_come_in_order_and_no_more_than_the_limit_are_under_way() -> None:
    async def scenario() -> None:
        under_way = most = 0

        async def work(number: int) -> int:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1.0 / (number + 1))  # later ones are done earlier
            under_way -= 1
            return number

        assert [result async for result in in_order(numbers(20), work, limit=4)] == list(range(20))
        assert most == 4

    simulate(scenario())


def test_an_error_ends_it_after_what_came_before_and_cancels_the_rest() -> None:
    async def scenario() -> None:
        cancelled: list[int] = []

        async def work(number: int) -> int:
            if number == 2:
                raise ValueError("two")
            if number > 2:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    cancelled.append(number)
                    raise
            return number

        seen: list[int] = []

        async def take() -> None:
            async for result in in_order(numbers(10), work, limit=5):
                await asyncio.sleep(0.1)
                seen.append(result)

        with pytest.raises(ValueError, match="two"):
            await take()
        assert seen == [0, 1]
        assert cancelled == [3, 4, 5], "6 had not begun"

    simulate(scenario())


def test_who_leaves_early_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async def work(number: int) -> int:
            if number:
                await asyncio.sleep(1000)
            return number

        async with contextlib.aclosing(in_order(numbers(10), work, limit=5)) as results:
            async for _ in results:
                break
        assert len(asyncio.all_tasks()) == 1

    simulate(scenario())
