"""Store the state of one cursor, in its znode or in a cursor ledger, and order the writes.

| when                            | znode                                  | cursor ledger                        |
|---------------------------------|----------------------------------------|--------------------------------------|
| created                         | no ledger, the state                   | none                                 |
| after the first acknowledgement | its id, the state at that time         | one record per commit, last one wins |
| no ledger can be written        | no ledger, the state (if short enough) | the old one is deleted               |
| closed cleanly                  | no ledger, the state (if short enough) | deleted                              |

A new cursor ledger gets its first record before the znode names it, and the old one is deleted after that: at every
moment the znode leads to the newest durable state. Fencing the cursor ledger at the next open keeps a stale owner from
adding to it; the transaction in `TopicMetadata` keeps it from pointing the znode elsewhere.

If recovery fences or closes a cursor ledger while the topic is owned by this broker, the ledger is treated as failed:
the present state, which includes everything that was in flight, goes into a new one.

A cursor ledger that the znode names and that is missing, or has lost its last record, is damage. An empty one is not:
Pulsar's `ManagedCursorImpl` stores the state in the znode when the first record of a new cursor ledger fails
(`persistPositionToLedger`), treats that as success and then names the empty ledger (`switchToNewLedger`). The state in
the znode is then the newest one, and Pulsar continues from it too (`recoverFromLedger`: "No entries in ledger").
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from bindery_client.ledger.api import LedgerClient, WriteHandle
from bindery_core.errors import (
    BinderyError,
    Corrupt,
    LostOwnership,
    NoSuchEntry,
    NoSuchLedger,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import EntryId, LedgerId
from bindery_pulsar.managed_ledger_codec import (
    NO_LEDGER,
    CursorInfo,
    CursorState,
    decode_cursor,
    decode_position,
    encode_cursor,
    encode_position,
)

from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import OwnedNode, TopicMetadata, limited

LEDGER_RETRY_S: Final = 5.0
"""Seconds before another cursor ledger is tried; meanwhile the state is stored in the znode."""

log = structlog.get_logger()


class CursorStore:
    """Stores one cursor. Calls must not overlap: the cursor's committer is the only caller."""

    def __init__(
        self,
        name: str,
        *,
        node: OwnedNode,
        metadata: TopicMetadata,
        client: LedgerClient,
        settings: ManagedLedgerSettings,
        clock: Callable[[], int],
        ownership: OwnershipProof,
    ) -> None:
        self._name = name
        self._node = node
        self._metadata = metadata
        self._client = client
        self._settings = settings
        self._clock = clock
        self._ownership = ownership
        self._handle: WriteHandle | None = None
        self._records = 0
        self._opened_at = 0.0
        self._named_ledger_id = NO_LEDGER
        """The cursor ledger that the znode names; it may be an old one without a writer."""
        self._orphans: list[int] = []
        """Ledgers to delete with the next switch: the outcome of the write that named them is unknown."""
        self._retry_at = 0.0
        self.may_be_stored = False
        """Whether an attempt of the last `write` had an unknown outcome. The next open may find the state it wrote."""
        self.cursor_properties: Mapping[str, str] = {}

    @property
    def node(self) -> OwnedNode:
        return self._node

    @property
    def ledger_id(self) -> int:
        """Id of the cursor ledger; NO_LEDGER: none."""
        return self._named_ledger_id

    @property
    def last_record(self) -> int:
        return self._records - 1

    @property
    def is_too_old(self) -> bool:
        """Whether the cursor ledger has reached its maximum age."""
        return self._handle is not None and self._age_s() >= self._settings.cursor_age_s_max

    async def create(self, state: CursorState, cursor_properties: Mapping[str, str]) -> None:
        """Create the cursor, durably. Raises TopicFenced, TryAgain, OutcomeUnknown."""
        self.cursor_properties = dict(cursor_properties)
        await self._metadata.write_cursor(self._node, encode_cursor(self._info(NO_LEDGER, state)))

    async def replace(self, state: CursorState) -> None:
        """Store `state` in the znode instead of the state there or in the cursor ledger, and delete that ledger."""
        await self._metadata.write_cursor(self._node, encode_cursor(self._info(NO_LEDGER, state)))
        await self._retire_ledger(NO_LEDGER)

    async def load(self, data: bytes) -> CursorState | None:
        """Return the newest durable state. `data`: the value of the znode.

        Returns None if no state was ever stored, which only a cursor created by Pulsar can cause. Fences the writer of
        the cursor ledger. Raises Corrupt if the state was stored and cannot be read, also if the cursor ledger is
        missing: the older state in the znode must not replace it. Raises TryAgain if it cannot be read now.
        """
        info = decode_cursor(data)
        self.cursor_properties = info.cursor_properties
        self._named_ledger_id = info.ledger_id
        if info.ledger_id < 0:
            return info.state
        try:
            async with limited(self._settings.operation_timeout_s, "read a cursor ledger"):
                reader = await self._client.open(LedgerId(info.ledger_id), recover=True)
                last = EntryId(reader.last_add_confirmed)
                records = await reader.read(last, last) if last >= 0 else []
                await reader.release()
        except NoSuchLedger as error:
            log.error("cursor_ledger_missing", cursor=self._name, ledger_id=info.ledger_id)
            raise Corrupt("the cursor ledger is missing", cursor=self._name, ledger_id=info.ledger_id) from error
        except NoSuchEntry as error:
            log.error("cursor_ledger_missing", cursor=self._name, ledger_id=info.ledger_id, error=str(error))
            raise Corrupt(
                "the cursor ledger lost its last record", cursor=self._name, ledger_id=info.ledger_id
            ) from error
        if not records:
            log.warning("cursor_ledger_empty", cursor=self._name, ledger_id=info.ledger_id)
            return info.state
        try:
            return decode_position(records[-1].payload)
        except Corrupt as error:
            raise Corrupt(error.message, cursor=self._name, ledger_id=info.ledger_id, entry_id=last) from error

    async def write(self, state: Callable[[], CursorState]) -> None:
        """Make the present state durable.

        `state` is called again before each attempt, so that a later state may be stored instead. Raises TooManyRequests
        if the state is too large, TopicFenced, or TryAgain/OutcomeUnknown if it can be stored neither in a cursor
        ledger nor in the znode: `may_be_stored` is then True if the next open may find it nevertheless.
        """
        self.may_be_stored = False
        record = encode_position(state())
        if len(record) > self._settings.cursor_record_size_max:
            raise TooManyRequests(
                "the subscription has too many scattered acknowledgements to store",
                cursor=self._name,
                size=len(record),
                size_max=self._settings.cursor_record_size_max,
            )
        if self._handle is not None and not self._roll_due() and await self._append(self._handle, record):
            return
        error: BinderyError | None = None
        if asyncio.get_running_loop().time() >= self._retry_at:
            try:
                await self._start_ledger(state)
            except (TryAgain, OutcomeUnknown) as caught:
                error = caught
                self.may_be_stored = self.may_be_stored or isinstance(caught, OutcomeUnknown)
                self._retry_at = asyncio.get_running_loop().time() + LEDGER_RETRY_S
                log.warning("cursor_ledger_not_started", cursor=self._name, error=str(caught))
            else:
                return
        if self._handle is not None and await self._append(self._handle, encode_position(state())):
            return  # the roll failed, but the old cursor ledger works
        data = encode_cursor(self._info(NO_LEDGER, state()))
        if len(data) > self._settings.cursor_inline_size_max:
            raise error or TryAgain("no cursor ledger can be written now", cursor=self._name)
        await self._metadata.write_cursor(self._node, data)
        await self._retire_ledger(NO_LEDGER)

    async def close(self, state: CursorState) -> None:
        """Move the state, which is durable, to the znode if it is short enough, so that the next open is quick."""
        handle = self._handle
        if self._named_ledger_id == NO_LEDGER:
            return
        data = encode_cursor(self._info(NO_LEDGER, state))
        if len(data) <= self._settings.cursor_inline_size_max:
            await self._metadata.write_cursor(self._node, data)
            await self._retire_ledger(NO_LEDGER)
        elif handle is not None:
            self._handle = None
            async with limited(self._settings.operation_timeout_s, "close a cursor ledger"):
                await handle.close()

    async def delete(self) -> None:
        """Delete the znode, then the ledger. After an error the cursor stays in use.

        After OutcomeUnknown the next record goes into a new cursor ledger, because the znode that named the old one may
        be deleted. The znode is created again if it is missing.
        """
        try:
            await self._metadata.delete_cursor(self._node)
        except TryAgain:
            raise
        except (BinderyError, asyncio.CancelledError):
            await self.abandon()
            raise
        await self._retire_ledger(NO_LEDGER)

    async def abandon(self) -> None:
        """Release the cursor ledger's writer: the topic is lost or is being deleted."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                await handle.abandon()
            except BinderyError as error:
                log.warning("cursor_ledger_not_abandoned", cursor=self._name, error=str(error))

    async def delete_ledger(self) -> None:
        """Delete the cursor ledger of a cursor whose znode is deleted."""
        await self._retire_ledger(NO_LEDGER)

    def _roll_due(self) -> bool:
        return self._records >= self._settings.cursor_entries_max or self.is_too_old

    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._opened_at

    async def _append(self, handle: WriteHandle, record: bytes) -> bool:
        """Add a record. Returns False if the cursor ledger failed; the ledger is then abandoned.

        If another process has fenced the ledger, raises TopicFenced if this broker no longer owns the topic, TryAgain
        if the owner cannot be determined.
        """
        try:
            async with limited(self._settings.operation_timeout_s, "write a cursor record"):
                await handle.add(record)
        except BinderyError as error:
            self.may_be_stored = True
            if isinstance(error, LostOwnership) and not await self._ownership.holds():
                raise TopicFenced("another broker has taken the topic over", cursor=self._name) from error
            log.warning("cursor_ledger_failed", cursor=self._name, ledger_id=handle.ledger_id, error=str(error))
            await self.abandon()
            return False
        self._records += 1
        return True

    async def _start_ledger(self, state: Callable[[], CursorState]) -> None:
        """Create a ledger, write the first record, name the ledger in the znode, delete the old one."""
        settings = self._settings
        async with limited(settings.operation_timeout_s, "create a cursor ledger"):
            handle = await self._client.create(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                custom={
                    "application": b"pulsar",
                    "component": b"managed-ledger",
                    "pulsar/managed-ledger": self._metadata.name.encode(),
                    "pulsar/cursor": self._name.encode(),
                },
            )
        named = False
        try:
            present = state()
            record = encode_position(present)
            data = encode_cursor(self._info(handle.ledger_id, present))
            if len(data) > settings.cursor_inline_size_max:  # the position alone suffices
                data = encode_cursor(self._info(handle.ledger_id, CursorState(mark_delete=present.mark_delete)))
            async with limited(settings.operation_timeout_s, "write a cursor record"):
                await handle.add(record)
            named = True
            await self._metadata.write_cursor(self._node, data)
        except BinderyError as error:
            await handle.abandon()
            if named and not isinstance(error, TopicFenced):
                # The znode may name either ledger: write neither until a later write of the znode has settled it.
                self._orphans.append(handle.ledger_id)
                await self.abandon()
            else:
                await self._delete(handle.ledger_id)
            if isinstance(error, LostOwnership) and not isinstance(error, TopicFenced):
                raise TryAgain("a new cursor ledger was fenced", cursor=self._name) from error
            raise
        await self._retire_ledger(handle.ledger_id)
        self._handle = handle
        self._records = 1
        self._opened_at = asyncio.get_running_loop().time()

    async def _retire_ledger(self, successor: int) -> None:
        """The znode names `successor` now: delete the ledger that it named before."""
        old, self._named_ledger_id = self._named_ledger_id, successor
        await self.abandon()
        if old != NO_LEDGER:
            await self._delete(old)
        while self._orphans:
            await self._delete(self._orphans.pop())

    async def _delete(self, ledger_id: int) -> None:
        """Delete a cursor ledger. An error is only logged: the ledger is small, and no znode names it."""
        try:
            async with limited(self._settings.operation_timeout_s, "delete a cursor ledger"):
                await self._client.delete(LedgerId(ledger_id))
        except BinderyError as error:
            log.warning("cursor_ledger_not_deleted", cursor=self._name, ledger_id=ledger_id, error=str(error))

    def _info(self, ledger_id: int, state: CursorState) -> CursorInfo:
        return CursorInfo(
            ledger_id=ledger_id,
            state=state,
            cursor_properties=self.cursor_properties,
            last_active_ms=self._clock(),
        )
