"""Keep closed ledgers of a topic open for reading; the least recently used one is released first."""

import asyncio

from bindery_client.ledger.api import LedgerClient, ReadHandle
from bindery_core.ids import LedgerId

from bindery_broker.managed_ledger.topic_metadata import limited


class ReadHandles:
    """Invariant: at most `count_max` handles once no call is in progress; a ledger is opened once at a time."""

    def __init__(self, client: LedgerClient, *, count_max: int, timeout_s: float) -> None:
        self._client = client
        self._count_max = count_max
        self._timeout_s = timeout_s
        self._handles: dict[int, ReadHandle] = {}
        """The least recently used one first."""
        self._opening = asyncio.Lock()
        self._used: dict[int, None] = {}
        """Ledgers that were read since the last round."""

    def __len__(self) -> int:
        return len(self._handles)

    async def get(self, ledger_id: int) -> ReadHandle:
        """Return the handle of a ledger. Raises NoSuchLedger, TryAgain.

        The ledger is opened without recovery, because it is closed or this broker writes it.
        """
        handle = self._handles.get(ledger_id)
        if handle is not None:
            self._handles[ledger_id] = self._handles.pop(ledger_id)
            self._used[ledger_id] = None
            return handle
        async with self._opening:
            handle = self._handles.get(ledger_id)
            if handle is None:
                async with limited(self._timeout_s, "open a ledger for reading"):
                    handle = await self._client.open(LedgerId(ledger_id), recover=False)
                await self.put(handle)
            return handle

    async def put(self, handle: ReadHandle) -> None:
        """Keep a handle that was opened elsewhere."""
        await self.drop(handle.ledger_id)
        self._handles[handle.ledger_id] = handle
        self._used[handle.ledger_id] = None
        while len(self._handles) > self._count_max:
            await self._handles.pop(next(iter(self._handles))).release()

    async def next_round(self) -> None:
        """Release the handles that were not used since the last call."""
        used, self._used = self._used, {}
        for ledger_id in [ledger_id for ledger_id in self._handles if ledger_id not in used]:
            await self.drop(ledger_id)

    async def drop(self, ledger_id: int) -> None:
        handle = self._handles.pop(ledger_id, None)
        if handle is not None:
            await handle.release()

    async def release(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            await handle.release()
