"""Write the subscription log of one cursor to one cursor ledger, and decide when a snapshot or a new ledger is due.

| due          | condition                                                                                      |
|--------------|------------------------------------------------------------------------------------------------|
| a snapshot   | the changes after the last one have `cursor_changes_size_max` bytes and twice its bytes        |
| a new ledger | `cursor_entries_max` records, or `cursor_age_s_max` seconds, or `cursor_size_max` bytes and    |
|              | eight times those of the last snapshot                                                         |

So at most about a third of the bytes written are snapshots, and loading reads about three times the state at most.
"""

import asyncio
from typing import Final

from bindery_client.ledger.api import WriteHandle
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.subscription_log import CursorChange, encode_change, encode_snapshot

from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited

SNAPSHOT_FACTOR: Final = 2
"""Minimum bytes of the changes before a snapshot, in bytes of the snapshot before them."""
LEDGER_FACTOR: Final = 8
"""Minimum bytes of a ledger that is replaced for its size, in bytes of its last snapshot."""
RECORD_OVERHEAD: Final = 64
"""Bytes that a change counts in addition to its payload: reading it takes time, however short it is."""


class LogWriter:
    """Writes one cursor ledger. After an error it must not be used again: the outcome of the record is unknown."""

    def __init__(self, handle: WriteHandle, settings: ManagedLedgerSettings) -> None:
        self.handle = handle
        self.records = 0
        """Number of records written."""
        self.size = 0
        """Bytes of these records."""
        self.ends_with_snapshot = False
        """Whether the last record completes a snapshot, so that a broker of Pulsar reads the same state."""
        self.opened_at = asyncio.get_running_loop().time()
        """Loop time of the creation, in seconds."""
        self.written_at = self.opened_at
        """Loop time of the last record, in seconds."""
        self._settings = settings
        self._snapshot_entry = 0
        self._snapshot_size = 0
        self._changes_size = 0

    @property
    def is_too_old(self) -> bool:
        """Whether the ledger has reached its maximum age."""
        return asyncio.get_running_loop().time() - self.opened_at >= self._settings.cursor_age_s_max

    @property
    def is_unused(self) -> bool:
        """Whether nothing was written for so long that the ledger is ended."""
        return asyncio.get_running_loop().time() - self.written_at >= self._settings.inactive_s_max

    @property
    def unused_in_s(self) -> float:
        """Seconds until the ledger is unused or too old, if nothing is written meanwhile."""
        ends_at = min(self.written_at + self._settings.inactive_s_max, self.opened_at + self._settings.cursor_age_s_max)
        return max(0.0, ends_at - asyncio.get_running_loop().time())

    @property
    def is_roll_due(self) -> bool:
        """Whether the log should continue in a new ledger."""
        return (
            self.records >= self._settings.cursor_entries_max
            or self.size >= max(self._settings.cursor_size_max, LEDGER_FACTOR * self._snapshot_size)
            or self.is_too_old
        )

    @property
    def is_snapshot_due(self) -> bool:
        """Whether the next record should be a snapshot."""
        return self._changes_size >= max(self._settings.cursor_changes_size_max, SNAPSHOT_FACTOR * self._snapshot_size)

    async def add_change(self, change: CursorChange) -> None:
        """Add a change of the state in the ledger, which must have a snapshot. It is encoded before the first wait.

        Errors as `WriteHandle.add_many`, and TryAgain at the timeout.
        """
        for record in encode_change(change, snapshot_entry=self._snapshot_entry, entry_id=self.records):
            await self._add(record)
            self._changes_size += len(record) + RECORD_OVERHEAD
        self.ends_with_snapshot = False

    async def add_snapshot(self, state: CursorState) -> None:
        """Add a snapshot. `state` must not change meanwhile. Errors as `add_change`."""
        first, size = self.records, self.size
        for record in encode_snapshot(state, entry_id=first):
            await self._add(record)
        self._snapshot_entry, self._snapshot_size = first, self.size - size
        self._changes_size = 0
        self.ends_with_snapshot = True

    async def close(self) -> None:
        """Close the ledger. Errors as `WriteHandle.close`, and TryAgain at the timeout."""
        async with limited(self._settings.operation_timeout_s, "close a cursor ledger"):
            await self.handle.close()

    async def _add(self, record: bytes) -> None:
        async with limited(self._settings.operation_timeout_s, "write a cursor record"):
            entry_id = await self.handle.add(record)
        assert entry_id == self.records, "a record names its own place in the ledger"
        self.records += 1
        self.size += len(record)
        self.written_at = asyncio.get_running_loop().time()
