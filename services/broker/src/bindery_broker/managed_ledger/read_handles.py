"""Keep closed ledgers of a topic open for reading; the least recently used one is released first."""

import asyncio
from collections import OrderedDict

from bindery_client.ledger.api import LedgerClient, ReadHandle
from bindery_core.ids import LedgerId

from bindery_broker.managed_ledger.topic_metadata import limited


class ReadHandles:
    """Invariant: at most `count_max` handles once no call is in progress; a ledger is opened once at a time."""

    def __init__(self, client: LedgerClient, *, count_max: int, timeout_s: float) -> None:
        self._client = client
        self._count_max = count_max
        self._timeout_s = timeout_s
        self._handles: OrderedDict[int, ReadHandle] = OrderedDict()
        self._opening = asyncio.Lock()

    async def get(self, ledger_id: int) -> ReadHandle:
        """Return the handle of a ledger. Raises NoSuchLedger, TryAgain.

        The ledger is opened without recovery, because it is closed or this broker writes it.
        """
        handle = self._handles.get(ledger_id)
        if handle is not None:
            self._handles.move_to_end(ledger_id)
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
        while len(self._handles) > self._count_max:
            _, oldest = self._handles.popitem(last=False)
            await oldest.release()

    async def drop(self, ledger_id: int) -> None:
        handle = self._handles.pop(ledger_id, None)
        if handle is not None:
            await handle.release()

    async def release(self) -> None:
        handles, self._handles = self._handles, OrderedDict()
        for handle in handles.values():
            await handle.release()
