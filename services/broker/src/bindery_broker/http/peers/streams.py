"""The end of a stream of server-sent events that the broker ends, not the client.

A client that gets MOVED_EVENT connects again, to whichever broker it reaches, and the stream continues at the owner. It
is sent between two events only: a reader of server-sent events drops an incomplete last one, which is delivered again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from bindery_broker.http.exchange import MOVED_EVENT

END_OF_EVENT: Final = b"\n\n"


async def until_stop(chunks: AsyncIterator[bytes], stops: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a stream that another broker sends. Once `stops` is set, end with MOVED_EVENT after the event
    that is in progress."""
    stopping = asyncio.ensure_future(stops.wait())
    coming: asyncio.Future[bytes | None] | None = None
    end = END_OF_EVENT
    try:
        while not (stopping.done() and end == END_OF_EVENT):
            coming = coming or asyncio.ensure_future(_next(chunks))
            awaited: list[asyncio.Future[Any]] = [coming] if stopping.done() else [coming, stopping]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                chunk, coming = coming.result(), None
                if chunk is None:
                    return
                end = (end + chunk)[-2:]
                yield chunk
        yield MOVED_EVENT
    finally:
        stopping.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
