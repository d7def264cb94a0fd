"""A sink that records the responses of a connection, for tests."""

import asyncio

from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId
from bindery_core.wire.messages import Response

LIMIT_S = 30.0


class Sink:
    """Records responses and errors, and lets a test wait for them."""

    def __init__(self) -> None:
        self.batches: list[list[Response]] = []
        self.errors: list[BinderyError] = []
        self.expiries: list[BinderyError] = []
        self._news = asyncio.Event()

    def answered(self, bookie_id: BookieId, responses: list[Response]) -> None:
        self.batches.append(responses)
        self._news.set()

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self.errors.append(error)
        self._news.set()

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        self.expiries.append(error)
        self._news.set()

    @property
    def txn_ids(self) -> list[int]:
        return [response.txn_id for batch in self.batches for response in batch]

    async def news(self) -> None:
        await asyncio.wait_for(self._news.wait(), LIMIT_S)
        self._news.clear()

    async def all_answered(self, count: int) -> None:
        while len(self.txn_ids) < count:
            await self.news()
