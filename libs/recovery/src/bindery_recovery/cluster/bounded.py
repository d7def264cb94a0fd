"""Much asked at once, but not too much: results in order, a bounded number of questions under way."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def in_order(
    source: AsyncIterator[T], work: Callable[[T], Awaitable[R]], *, limit: int
) -> AsyncGenerator[R, None]:
    """`work` of each item of `source`, in its order, at most `limit` begun and not yet taken.

    An error of the source or of a piece of work ends the iteration with it, once what came before was given. Close the
    generator (`contextlib.aclosing`) when you leave it early: what is under way is then cancelled.
    """
    assert limit >= 1
    waiting: deque[asyncio.Task[R]] = deque()
    try:
        async for item in source:
            if len(waiting) == limit:
                yield await waiting.popleft()
            waiting.append(asyncio.ensure_future(work(item)))
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
