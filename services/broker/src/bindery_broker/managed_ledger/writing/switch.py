"""End the current ledger of a topic and start the next one.

- Started (the topic has no open ledger): the ledger is created, and the topic's znode is written, before the first add.
- Ended without a successor (nothing was added for long): as rolled, but nothing is created. The znode is not written:
  it names the ledger already, and the next start writes how many entries it has.
- Rolled (full or old): the next ledger is created while adds continue. Then sending pauses, the adds in flight
  complete, the ledger is closed, the topic's znode is written with both ledgers, and sending continues.
- Failed: sending pauses, the writer is abandoned, and the ledger is recovered, which finally decides how many entries
  it has. Adds in flight below that number are confirmed; the others are certainly not stored and return to the head of
  the queue. Then the znode is written and sending continues as above. Until a ledger can be created, adds wait in the
  queue, each at most `add_timeout_s`.

A ledger that another process fenced or closed is treated as failed if the topic certainly belongs to this broker:
recovery also closes the open ledgers of idle topics. If the topic does not, or if another process has written the
znode, another broker owns the topic and the switch ends with TopicFenced.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

import structlog
from bindery_client.ledger.api import ReadHandle, WriteHandle
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError, LostOwnership, NoSuchLedger, TopicFenced, TryAgain

from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.writing.ledger_operations import LedgerOperations

FENCES_MAX: Final = 5
"""Maximum number of consecutive ledgers without a stored entry that other processes may fence. After that the topic
counts as lost."""

StoreLedgers = Callable[[Callable[[], Sequence[LedgerRecord]]], Coroutine[Any, Any, None]]
"""Calls its argument and stores the result as the topic's ledgers, first in the znode, then in the list of ledgers."""

log = structlog.get_logger()


class Sender(Protocol):
    """The sending of adds to the current ledger, as far as a switch controls it."""

    @property
    def failure(self) -> BinderyError | None:
        """The reason why the current ledger accepts no more entries; None: it accepts them."""
        ...

    def fail(self, error: BinderyError) -> None:
        """Set `failure`."""
        ...

    @property
    def handle(self) -> WriteHandle | None:
        """The current ledger; None: the topic has no open ledger."""
        ...

    @property
    def is_waited_for(self) -> bool:
        """Whether an add is queued."""
        ...

    def pause(self) -> WriteHandle:
        """Stop sending. Returns the handle of the current ledger."""
        ...

    async def drained(self) -> None:
        """Return once no add is in flight or the ledger has failed. Raises TopicFenced if the topic is lost."""
        ...

    def settle(self, entries: int) -> None:
        """Confirm the adds in flight that the closed ledger stores, and queue the others again.

        `entries`: number of entries of the ledger.
        """
        ...

    def expire(self, error: BinderyError) -> None:
        """Fail the adds whose deadline has passed. `error`: the error that delayed them.

        Raises TopicFenced if the topic is lost.
        """
        ...


class LedgerSwitch:
    """Performs the switches of one writer, one at a time."""

    def __init__(
        self,
        topic: str,
        sender: Sender,
        operations: LedgerOperations,
        *,
        ledgers: LedgerList,
        settings: ManagedLedgerSettings,
        clock: Callable[[], int],
        ownership: OwnershipProof,
        store_ledgers: StoreLedgers,
        on_recovered: Callable[[ReadHandle], Coroutine[Any, Any, None]],
    ) -> None:
        self.obstacle: BinderyError | None = None
        """The error that last delayed the switch in progress."""
        self._topic = topic
        self._sender = sender
        self._operations = operations
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._ownership = ownership
        self._store_ledgers = store_ledgers
        self._on_recovered = on_recovered
        self._fences = 0
        """Number of ledgers fenced by other processes since an entry was last stored."""
        self._unused: list[tuple[WriteHandle, bool]] = []
        """New ledgers of switches that ended without them, and whether the topic's znode may name them."""

    def entry_stored(self) -> None:
        """Record that an entry was stored: start counting fenced ledgers again."""
        self._fences = 0

    async def run(self) -> tuple[LedgerRecord | None, WriteHandle] | None:
        """Switch to the next ledger. Returns the one before it, which is closed, if there is one, and the handle of the
        next one.

        Returns None if the next ledger could not be created, and the current one still works or no add waits. Raises
        TopicFenced or NoSuchLedger if the topic is lost.
        """
        if self._sender.handle is None:
            return await self._run_start()
        prepared: WriteHandle | None = None
        if self._sender.failure is None:
            try:
                prepared = await self._operations.create()
            except BinderyError as error:
                if self._sender.failure is None:
                    log.warning("topic_roll_postponed", topic=self._topic, error=str(error))
                    return None
        handle = self._sender.pause()
        try:
            closed = await self._seal(handle)
        except (Exception, asyncio.CancelledError):
            if prepared is not None:
                self._unused.append((prepared, False))
            raise
        successor = await self._start_next(closed, prepared)
        assert successor is not None, "only a start is given up"
        self.obstacle = None
        return closed, successor

    async def end(self) -> None:
        """Close the current ledger without a successor. Raises TopicFenced or NoSuchLedger if the topic is lost."""
        closed = await self._seal(self._sender.pause())
        assert closed.entries >= self._ledgers.current.entries, "acknowledged entries never vanish"
        self._ledgers.assign([*list(self._ledgers)[:-1], closed])

    async def _run_start(self) -> tuple[LedgerRecord | None, WriteHandle] | None:
        behind = None if self._ledgers.is_empty else self._ledgers.current
        handle = await self._start_next(None, None)
        self.obstacle = None
        return None if handle is None else (behind, handle)

    async def discard_unused(self, *, delete: bool) -> None:
        """Release the new ledgers of switches that failed. `delete`: also delete the ledgers that no znode names."""
        while self._unused:
            handle, is_named = self._unused.pop()
            await self._operations.discard(handle, delete=delete and not is_named)

    async def _seal(self, handle: WriteHandle) -> LedgerRecord:
        """Close the current ledger and settle the adds in flight. Returns the ledger's final record."""
        await self._sender.drained()
        entries = size = 0
        if self._sender.failure is None:
            try:
                entries, size = await self._operations.close(handle)
            except BinderyError as error:
                self._sender.fail(error)
        failure = self._sender.failure
        if failure is not None:
            if isinstance(failure, LostOwnership):
                await self._prove_ownership(failure)
            entries, size = await self._recover(handle)
        return LedgerRecord(ledger_id=handle.ledger_id, entries=entries, size=size, closed_ms=self._clock())

    async def _prove_ownership(self, lost: LostOwnership) -> None:
        """Return once it is certain that this broker owns the topic. Raises TopicFenced if it does not."""
        self._fences += 1
        backoff = self._backoff()
        while True:
            try:
                is_owner = self._fences <= FENCES_MAX and await self._ownership.holds()
            except BinderyError as error:
                await self._wait_to_retry(error, backoff)
            else:
                break
        if not is_owner:
            raise taken_over(self._topic) from lost

    async def _recover(self, handle: WriteHandle) -> tuple[int, int]:
        """Recover the failed ledger. Returns the number of its entries and its payload bytes."""
        await handle.abandon()
        backoff = self._backoff()
        while True:
            try:
                reader = await self._operations.recover(handle.ledger_id)
            except NoSuchLedger:
                raise
            except BinderyError as error:
                await self._wait_to_retry(error, backoff)
            else:
                break
        entries = reader.last_add_confirmed + 1
        await self._on_recovered(reader)
        self._sender.settle(entries)
        return entries, reader.metadata.length

    async def _start_next(self, closed: LedgerRecord | None, prepared: WriteHandle | None) -> WriteHandle | None:
        """Store the list of ledgers with `closed` and the next one (`prepared`, else a new one). Returns its handle.

        `closed`: the ledger that was current; None: there was none. Without it, the start is given up, and None
        returned, once no ledger can be created and no add waits. An empty last ledger is dropped from the list.
        """
        if closed is not None:
            assert closed.entries >= self._ledgers.current.entries, "acknowledged entries never vanish"
        handle = prepared
        may_be_named = False
        """Whether the topic's znode may name the new ledger."""

        def with_successor(new: LedgerRecord) -> list[LedgerRecord]:
            nonlocal may_be_named
            may_be_named = True
            records = self._ledgers.stored
            if closed is not None:
                records[-1] = closed
            if records and not records[-1].entries:
                records.pop()
            return [*records, new]

        backoff = self._backoff()
        try:
            while True:
                try:
                    if handle is None:
                        handle = await self._operations.create()
                    await self._store_ledgers(partial(with_successor, LedgerRecord(ledger_id=handle.ledger_id)))
                except TopicFenced:
                    may_be_named = False
                    raise
                except BinderyError as error:
                    may_be_named = may_be_named and not isinstance(error, TryAgain)
                    await self._wait_to_retry(error, backoff)
                    if handle is None and closed is None and not self._sender.is_waited_for:
                        return None
                else:
                    return handle
        except (Exception, asyncio.CancelledError):
            if handle is not None:
                self._unused.append((handle, may_be_named))
            raise

    def _backoff(self) -> Backoff:
        longest_s = self._settings.retry_pause_s_max
        return Backoff(min(self._settings.retry_pause_s, longest_s), longest_s)

    async def _wait_to_retry(self, error: BinderyError, backoff: Backoff) -> None:
        """Sleep, then fail the adds whose deadline has passed."""
        pause_s = backoff.next_delay_s()
        log.warning("topic_writer_waits", topic=self._topic, pause_s=pause_s, error=str(error))
        self.obstacle = error
        await asyncio.sleep(pause_s)
        self._sender.expire(error)


def taken_over(topic: str) -> TopicFenced:
    return TopicFenced("another broker has taken the topic over", topic=topic)
