"""Store the state of one cursor, in its znode or in a cursor ledger, and order the writes.

| when                            | znode                                  | cursor ledger                        |
|---------------------------------|----------------------------------------|--------------------------------------|
| created                         | no ledger, the state                   | none                                 |
| after the first acknowledgement | its id, the state at that time         | a snapshot, then a change per commit |
| no ledger can be written        | no ledger, the state (if short enough) | the old one is deleted               |
| closed cleanly, or not changed  | no ledger, the state                   | deleted                              |
| for long, short state           |                                        |                                      |
| the same, long state            | its id                                 | ends with a snapshot, and is closed  |

A commit adds a change, whose size does not depend on the state (`bindery_pulsar.subscription_log`). Once the changes
are larger than the last snapshot, a commit adds a snapshot instead, so that loading takes little longer than reading
the state. A new ledger replaces one that has reached its maximum number of records, bytes or age.

A new cursor ledger gets its snapshot before the znode names it, and the old one is deleted after that: at every
moment the znode leads to the newest durable state. Fencing the cursor ledger at the next open keeps a stale owner from
adding to it; the transaction in `TopicMetadata` keeps it from pointing the znode elsewhere.

After a failed add the ledger gets no more records, because the outcome is unknown: a new one starts with a snapshot.

If recovery fences or closes a cursor ledger while the topic is owned by this broker, the ledger is treated as failed:
the present state, which includes everything that was in flight, goes into a new one.

A cursor ledger that the znode names and that is missing, or has lost its last record, is damage. An empty one is not:
Pulsar's `ManagedCursorImpl` stores the state in the znode when the first record of a new cursor ledger fails
(`persistPositionToLedger`), treats that as success and then names the empty ledger (`switchToNewLedger`). The state in
the znode is then the newest one, and Pulsar continues from it too (`recoverFromLedger`: "No entries in ledger").
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import structlog
from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import (
    BinderyError,
    Corrupt,
    LostOwnership,
    NoSuchLedger,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import LedgerId
from bindery_pulsar.managed_ledger_codec import NO_LEDGER, CursorInfo, CursorState, decode_cursor, encode_cursor

from bindery_broker.managed_ledger.cursors.ack_state import AckState
from bindery_broker.managed_ledger.cursors.changes import Changes
from bindery_broker.managed_ledger.cursors.cursor_log import read_log
from bindery_broker.managed_ledger.cursors.log_writer import LogWriter
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import OwnedNode, TopicMetadata, limited

LEDGER_RETRY_S: Final = 5.0
"""Seconds before another cursor ledger is tried; meanwhile the state is stored in the znode."""

INLINE_ITEMS_MAX: Final = 1_000
"""Maximum number of ranges, batches and entries with redelivery counts, each, in the znode. Source: Pulsar's
managedLedgerMaxUnackedRangesToPersistInMetadataStore."""

log = structlog.get_logger()


class Unstored(NamedTuple):
    """What a record must contain."""

    state: AckState
    changes: Changes | None
    """The difference to the last record; None: unknown, so a snapshot is needed."""


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
        self._log: LogWriter | None = None
        """The writer of the cursor ledger; None: the next record needs a new one."""
        self._found_snapshot = False
        """Whether the ledger that was loaded ends with a snapshot, and is still the one that the znode names."""
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
    def state_size_max(self) -> float:
        """Maximum bytes of the stored state."""
        return self._settings.cursor_state_size_max

    @property
    def last_record(self) -> int:
        """Entry id of the last record; -1: this broker wrote none."""
        return self._log.records - 1 if self._log is not None else -1

    @property
    def is_too_old(self) -> bool:
        """Whether the cursor ledger has reached its maximum age."""
        return self._log is not None and self._log.is_too_old

    @property
    def is_unused(self) -> bool:
        """Whether the cursor ledger is open, and nothing was written to it for long."""
        return self._log is not None and self._log.is_unused

    @property
    def unused_in_s(self) -> float:
        """Seconds until the open cursor ledger is unused or too old, if nothing is written; infinite: there is none."""
        return math.inf if self._log is None else self._log.unused_in_s

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
        facts = {"cursor": self._name, "ledger_id": info.ledger_id}
        try:
            async with limited(self._settings.operation_timeout_s, "open a cursor ledger"):
                reader = await self._client.open(LedgerId(info.ledger_id), recover=True)
        except NoSuchLedger as error:
            log.error("cursor_ledger_missing", **facts)
            raise Corrupt("the cursor ledger is missing", **facts) from error
        try:
            loaded = await read_log(reader, timeout_s=self._settings.operation_timeout_s)
        except Corrupt as error:
            log.error("cursor_ledger_damaged", **facts, error=str(error))
            raise Corrupt(error.message, **{**facts, **error.facts}) from error
        finally:
            await reader.release()
        if loaded is None:
            log.warning("cursor_ledger_empty", **facts)
            return info.state
        self._found_snapshot = loaded.is_snapshot
        return loaded.state

    async def write(self, unstored: Callable[[], Unstored]) -> None:
        """Make the present state durable.

        `unstored` is called again before each attempt, so that a later state may be stored instead. Raises
        TooManyRequests if the state is too large, TopicFenced, or TryAgain/OutcomeUnknown if it can be stored neither
        in a cursor ledger nor in the znode: `may_be_stored` is then True if the next open may find it nevertheless.
        """
        self.may_be_stored = False
        present = unstored()
        if (size := present.state.size) > self.state_size_max:
            raise TooManyRequests(
                "the subscription has too many scattered acknowledgements to store; acknowledge its oldest messages",
                cursor=self._name,
                size=size,
                size_max=self.state_size_max,
            )
        if self._log is not None and not self._log.is_roll_due and await self._append(self._log, present):
            return
        error: BinderyError | None = None
        if asyncio.get_running_loop().time() >= self._retry_at:
            try:
                await self._start_ledger(unstored)
            except (TryAgain, OutcomeUnknown) as caught:
                error = caught
                self.may_be_stored = self.may_be_stored or isinstance(caught, OutcomeUnknown)
                self._retry_at = asyncio.get_running_loop().time() + LEDGER_RETRY_S
                log.warning("cursor_ledger_not_started", cursor=self._name, error=str(caught))
            else:
                return
        if self._log is not None and await self._append(self._log, unstored()):
            return  # the roll failed, but the old cursor ledger works
        data = self._inline(NO_LEDGER, unstored().state.stored())
        if data is None:
            raise error or TryAgain("no cursor ledger can be written now", cursor=self._name)
        await self._metadata.write_cursor(self._node, data)
        await self._retire_ledger(NO_LEDGER)

    async def close(self, state: AckState) -> None:
        """Leave the state, which is durable, in the form of Pulsar: in the znode, or if it is too long for it, in the
        last record of the cursor ledger, which is closed."""
        if self._named_ledger_id == NO_LEDGER:
            return
        data = self._inline(NO_LEDGER, state.stored())
        if data is not None:
            await self._metadata.write_cursor(self._node, data)
            await self._retire_ledger(NO_LEDGER)
            return
        is_exact = self._log.ends_with_snapshot if self._log is not None else self._found_snapshot
        whole = Unstored(state, None)
        if not is_exact and (self._log is None or not await self._append(self._log, whole)):
            await self._start_ledger(lambda: whole)
        writer, self._log = self._log, None
        if writer is not None:
            await writer.close()

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
        writer, self._log = self._log, None
        if writer is not None:
            try:
                await writer.handle.abandon()
            except BinderyError as error:
                log.warning("cursor_ledger_not_abandoned", cursor=self._name, error=str(error))

    async def delete_ledger(self) -> None:
        """Delete the cursor ledger of a cursor whose znode is deleted."""
        await self._retire_ledger(NO_LEDGER)

    async def _append(self, writer: LogWriter, present: Unstored) -> bool:
        """Add a change or a snapshot. Returns False if the cursor ledger failed; the ledger is then abandoned.

        If another process has fenced the ledger, raises TopicFenced if this broker no longer owns the topic, TryAgain
        if the owner cannot be determined.
        """
        try:
            if present.changes is None or writer.is_snapshot_due:
                await writer.add_snapshot(present.state.frozen())
            else:
                await writer.add_change(present.state.change(present.changes))
        except BinderyError as error:
            self.may_be_stored = True
            if isinstance(error, LostOwnership) and not await self._ownership.holds():
                raise TopicFenced("another broker has taken the topic over", cursor=self._name) from error
            log.warning("cursor_ledger_failed", cursor=self._name, ledger_id=writer.handle.ledger_id, error=str(error))
            await self.abandon()
            return False
        return True

    async def _start_ledger(self, unstored: Callable[[], Unstored]) -> None:
        """Create a ledger, write a snapshot, name the ledger in the znode, delete the old one."""
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
        writer = LogWriter(handle, settings)
        named = False
        try:
            present = unstored().state.frozen()
            data = self._inline(handle.ledger_id, present)
            if data is None:  # the position alone suffices
                data = encode_cursor(self._info(handle.ledger_id, CursorState(mark_delete=present.mark_delete)))
            await writer.add_snapshot(present)
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
        self._log = writer

    async def _retire_ledger(self, successor: int) -> None:
        """The znode names `successor` now: delete the ledger that it named before."""
        old, self._named_ledger_id = self._named_ledger_id, successor
        self._found_snapshot = False
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

    def _inline(self, ledger_id: int, state: CursorState) -> bytes | None:
        """Return the value of the znode with the state; None: it would be too long."""
        if (
            max(len(state.batches), len(state.redelivery_counts), state.acked.ranges_count) > INLINE_ITEMS_MAX
            or sum(map(len, state.blobs.values())) > self._settings.cursor_inline_size_max
        ):
            return None
        data = encode_cursor(self._info(ledger_id, state))
        return data if len(data) <= self._settings.cursor_inline_size_max else None

    def _info(self, ledger_id: int, state: CursorState) -> CursorInfo:
        return CursorInfo(
            ledger_id=ledger_id,
            state=state,
            cursor_properties=self.cursor_properties,
            last_active_ms=self._clock(),
        )
