"""The durable position of a subscription in a topic.

An acknowledgement changes the state in memory at once; the call returns when a record with that change is durable.
Records are written one at a time. Acknowledgements that arrive during a write share the next record (group commit), so
a single acknowledgement waits for one write, and concurrent ones wait for at most two. So do redelivery counts and
blobs. A record holds what changed since the last one that was written, so its size does not depend on the state.

Invariants
- The next owner of the topic finds every acknowledgement that returned.
- `durable_mark_delete` is never ahead of the stored state: trimming relies on it.
- A change that could not be stored stays in memory; the next record includes it, and a repeated call waits for that.
- A failed seek is undone in memory: no later record includes it. Hence other changes wait while a seek is stored. The
  next record is a snapshot, because the last one may or may not contain the seek.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import structlog
from bindery_core.errors import BadRequest, BinderyError, NoSuchSubscription, OutcomeUnknown, TopicFenced, TryAgain
from bindery_pulsar.cursor_fields import Counts
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.caching.tail import TailReader
from bindery_broker.managed_ledger.cursors.ack_state import AckState, BatchAck, Redelivered
from bindery_broker.managed_ledger.cursors.changes import Changes
from bindery_broker.managed_ledger.cursors.cursor_store import Unstored
from bindery_broker.managed_ledger.ledger_list import LedgerList

log = structlog.get_logger()

RANGES_SHOWN_MAX = 100
"""Maximum number of acknowledged ranges in statistics. A cursor may have a million."""


class EntrySource(Protocol):
    """The source of a cursor's entries: `ManagedLedger`."""

    async def read(self, position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]: ...


class StateStore(Protocol):
    """Where a cursor's state is stored: `CursorStore`."""

    cursor_properties: Mapping[str, str]
    may_be_stored: bool

    @property
    def ledger_id(self) -> int: ...

    @property
    def state_size_max(self) -> float:
        """Maximum bytes of the stored state."""

    @property
    def last_record(self) -> int: ...

    @property
    def is_too_old(self) -> bool: ...

    @property
    def is_unused(self) -> bool: ...

    @property
    def unused_in_s(self) -> float: ...

    async def write(self, unstored: Callable[[], Unstored]) -> None: ...

    async def close(self, state: AckState) -> None: ...

    async def delete(self) -> None: ...

    async def abandon(self) -> None: ...


class _Nothing:
    """Awaitable that is complete."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


_NOTHING_TO_STORE: Final = _Nothing()
_NO_WAITERS: Final[deque[tuple[int, "asyncio.Future[None]"]]] = deque(maxlen=0)
"""Stands for an empty queue until something is added: most topics are idle, and an empty deque takes 760 bytes."""


class UnackedEntry(NamedTuple):
    position: Position
    payload: bytes
    remaining: int | None
    """Bit i set: message i of the batch is not acknowledged. None: the whole entry is not acknowledged."""


class UnackedRead(NamedTuple):
    entries: list[UnackedEntry]
    next_position: Position
    """The start of the next read."""


class ManagedCursor:
    """Acknowledgements of one subscription: the mark-delete position, entries after it, parts of batches; redelivery
    counts; and blobs, which the subscription stores with them.

    Created by `ManagedLedger.open_cursor`.
    """

    def __init__(
        self,
        name: str,
        *,
        source: EntrySource,
        ledgers: LedgerList,
        ledgers_lock: asyncio.Lock,
        stored: CursorState,
        store: StateStore,
        tail_reader: TailReader,
        on_moved: Callable[[], None],
        on_fenced: Callable[[TopicFenced], None],
    ) -> None:
        """`ledgers_lock`: held while ledgers are removed from `ledgers`, which must not be those that a seek moves to.
        `tail_reader`: receives the position of the reads. `on_moved`: the durable mark-delete position reached another
        ledger, so something may be trimmed."""
        self.name = name
        """The subscription's name, as users write it."""
        self._source = source
        self._ledgers = ledgers
        self._ledgers_lock = ledgers_lock
        self._state = AckState(ledgers, stored)
        self._store = store
        self._tail_reader = tail_reader
        self._on_moved = on_moved
        self._on_fenced = on_fenced
        self._unstored = Changes()
        """What changed before the last call of `_commit` for it and is not known to be durable."""
        self._needs_snapshot = False
        """Whether the difference to the last record is unknown."""
        self._version = 0
        self._durable_version = 0
        self._durable_mark_delete = stored.mark_delete
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = _NO_WAITERS
        self._committer: asyncio.Task[None] | None = None
        self._end: BinderyError | None = None
        self._alone_ends: asyncio.Event | None = None
        """Set at the end of a change that must be alone, because it may have to be undone; None: there is none."""
        self.commits = 0
        """Number of records written. Together with the number of acknowledgements it shows how many share a record."""

    # --- questions

    @property
    def mark_delete(self) -> Position:
        """This entry and all before it are acknowledged."""
        return self._state.mark_delete

    @property
    def durable_mark_delete(self) -> Position:
        """The lower of the present and the stored `mark_delete`."""
        return min(self._durable_mark_delete, self._state.mark_delete)

    @property
    def properties(self) -> Mapping[str, str]:
        """Subscription properties, fixed at the creation of the cursor."""
        return self._store.cursor_properties

    @property
    def position_properties(self) -> Mapping[str, int]:
        """Numbers that are stored with the position, for use by the subscription."""
        return self._state.properties

    @property
    def backlog_entries(self) -> int:
        """Confirmed entries that are not completely acknowledged."""
        return self._state.backlog[0]

    @property
    def backlog(self) -> tuple[int, int]:
        """`backlog_entries`, and their payload bytes; an estimate, as if the entries of a ledger had the same size."""
        return self._state.backlog

    def partly_acked(self) -> tuple[int, int]:
        """Return the number of batches of which a part is acknowledged, and of their unacknowledged messages."""
        return self._state.partly_acked()

    @property
    def store(self) -> StateStore:
        return self._store

    def is_acked(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged (or trimmed)."""
        return self._state.is_acked(position)

    def has_acked(self, ledger_id: int, first: int, last: int) -> bool:
        """Whether any of the entries first..last of a ledger is acknowledged. Much faster than asking for each."""
        return self._state.has_acked(ledger_id, first, last)

    def remaining(self, position: Position) -> int | None:
        """Return the unacknowledged indexes, as bits; None: the entry is no partly acknowledged batch."""
        return self._state.remaining(position)

    def next_unacked(self, position: Position) -> Position:
        """Return the first position >= `position` that is not acknowledged, possibly the position of the next add."""
        return self._state.next_unacked(position)

    def redelivery_count(self, position: Position, index: int = 0) -> int:
        """Return how often the message was delivered before, as far as recorded; 0: never, or it is acknowledged.

        `index`: of the message in its batch; 0 for an entry that is no batch.
        """
        return self._state.redelivery_count(position, index)

    def counts_of(self, position: Position, /) -> Counts:
        """Return the redelivery counts of an entry's messages: pairs (count, bits), without a message in common."""
        return self._state.counts.get(position, ())

    def redelivery_counts(self) -> Iterator[tuple[Position, Counts]]:
        """Iterate over the entries with redelivery counts, in order: pairs (count, bits of the messages) of each.

        The cursor must not be changed before the end of the iteration.
        """
        return iter(self._state.counts.items())

    @property
    def blobs(self) -> Mapping[str, bytes]:
        """The blobs by name, including those that are not durable yet."""
        return MappingProxyType(self._state.blobs)

    async def read_unacked(self, start: Position, *, entries_max: int, size_max: int) -> UnackedRead:
        """Return up to `entries_max` unacknowledged entries from `start` on; sizes and errors as `ManagedLedger.read`.

        None of the entries is acknowledged when the call returns.
        """
        version = self._version
        entries: list[UnackedEntry] = []
        position = self.next_unacked(start)
        self._tail_reader.move(position)
        size = 0
        while len(entries) < entries_max and (not entries or size < size_max):
            found = await self._source.read(
                position, entries_max=entries_max - len(entries), size_max=max(size_max - size, 1)
            )
            if not found:
                break
            for at, payload in found:
                if not self.is_acked(at):
                    if entries and size + len(payload) > size_max:
                        return UnackedRead(self._still_unacked(entries, version), at)
                    entries.append(UnackedEntry(at, payload, self.remaining(at)))
                    size += len(payload)
            position = self.next_unacked(self._ledgers.next(found[-1][0]))
        return UnackedRead(self._still_unacked(entries, version), position)

    def reading_from(self, position: Position) -> None:
        """Record that the subscription reads from `position` next: the cache need not keep the entries before it."""
        self._tail_reader.move(position)

    def _still_unacked(self, entries: list[UnackedEntry], version: int) -> list[UnackedEntry]:
        """Return those of `entries`, collected since `version` of the state, that are still unacknowledged."""
        if version == self._version:
            return entries
        return [
            UnackedEntry(position, payload, self.remaining(position))
            for position, payload, _ in entries
            if not self.is_acked(position)
        ]

    def individually_acked(self) -> str:
        """Return the first RANGES_SHOWN_MAX acknowledged ranges after `mark_delete`, in the format of Pulsar."""
        return self._state.acked.text(ranges_max=RANGES_SHOWN_MAX)

    @property
    def ranges_count(self) -> int:
        return self._state.acked.ranges_count

    # --- changes

    async def ack_many(self, positions: Sequence[Position], *, batches: Sequence[BatchAck] = ()) -> list[Position]:
        """Acknowledge entries and parts of batches. Returns when that is durable; many calls share one record.

        Returns the entries that this call completed, including a batch whose last index it acknowledged. A repeated
        call is harmless and waits for durability as well. Raises BadRequest, and changes nothing, if one of the
        positions is not an entry of this topic. After any other error the acknowledgements may or may not be durable:
        repeat the call, or deliver the messages again.
        """
        if self._end is not None or self._alone_ends is not None:
            await self._turn()
        for position in positions:
            self._state.check(position)
        for batch in batches:
            self._state.check(batch.position)
            self._state.check_batch(batch)
        changed, completed = self._state.ack(positions, batches)
        await self._make_durable(changed)
        return completed

    async def ack_cumulative(self, position: Position, *, batch: BatchAck | None = None) -> None:
        """Acknowledge everything up to and including `position`, durably.

        `batch`: indexes of the batch at `position`. If it is given, the entries before `position` and these indexes are
        acknowledged, instead of the whole entry. Errors as `ack_many`.
        """
        await self._turn()
        self._state.check(position)
        if batch is None:
            changed = self._state.ack_upto(position)
        else:
            assert batch.position == position
            self._state.check_batch(batch)
            changed = self._state.ack_upto(self._ledgers.previous(position))
            changed = self._state.ack((), (batch,))[0] or changed
        await self._make_durable(changed)

    async def ack_cumulative_with(
        self, position: Position, *, properties: Mapping[str, int], put: Mapping[str, bytes]
    ) -> None:
        """Acknowledge everything up to `position`, replace `position_properties` and set blobs: all in one record.

        Durable when it returns. Errors as `ack_many` and `put_blobs`. After an error other than those that change
        nothing, all of it is in force in memory, and may be durable.
        """
        await self._turn()
        self._state.check(position)
        self._state.check_blobs(put, (), size_max=self._store.state_size_max)
        self._state.ack_upto(position)
        self._state.properties = dict(properties)
        self._state.put_blobs(put, ())
        await self._make_durable(True)

    async def clear_backlog(self) -> None:
        """Acknowledge all confirmed entries, durably. Errors as `ack_many`."""
        await self._turn()
        await self._make_durable(self._state.ack_upto(self._ledgers.last_confirmed))

    async def ack_upto_entry_before(self, position: Position) -> None:
        """Acknowledge all entries before `position`, durably. Errors as `ack_many`."""
        await self._turn()
        await self._make_durable(self._state.ack_upto(self._ledgers.previous(self._ledgers.clamp(position))))

    async def skip(self, entries: int) -> None:
        """Acknowledge the first `entries` unacknowledged entries, or all if there are fewer, and everything before.

        Durable when it returns. Errors as `ack_many`; BadRequest if `entries` is not positive.
        """
        if entries < 1:
            raise BadRequest("the number of entries to skip must be positive", entries=entries)
        await self._turn()
        await self._make_durable(self._state.ack_upto(self._state.after_unacked(entries)))

    async def record_redeliveries(self, changes: Sequence[Redelivered]) -> None:
        """Raise the redelivery counts of messages to at least those given. Durable when it returns.

        Acknowledged and trimmed messages are left out. Acknowledging a message forgets its count, and so does `seek`.
        Raises BadRequest, and changes nothing, if a position, a count or the bits are not valid, TooManyRequests if
        more than a million entries would have counts, or if the state would be too large to store; other errors as
        `ack_many`.
        """
        await self._turn()
        self._state.check_redelivered(changes, size_max=self._store.state_size_max)
        await self._make_durable(self._state.record_redeliveries(changes))

    async def put_blobs(self, put: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        """Set and remove blobs, all or none of them. Durable when it returns.

        At most 64 blobs of 1 MiB each, with names of 1 to 255 bytes. Removing a missing blob changes nothing. `seek`
        removes all blobs. A broker of Pulsar that takes the topic over does so, too. Raises BadRequest or TooLarge, and
        changes nothing, if a name, a size or the number of blobs is not valid, TooManyRequests if the state would be
        too large to store; other errors as `ack_many`.
        """
        await self._turn()
        self._state.check_blobs(put, remove, size_max=self._store.state_size_max)
        await self._make_durable(self._state.put_blobs(put, remove))

    async def seek(self, position: Position, *, passed: BatchAck | None = None) -> Position:
        """Continue with `position` (clamped; EARLIEST, LATEST), durably.

        Forgets all acknowledgements, redelivery counts and blobs.
        `passed`: messages of the batch at `position` that count as acknowledged, if the entry still exists.
        Returns the position that comes next. After an error the cursor keeps its former position in memory. After
        TryAgain the stored position is unchanged too. After other errors the stored position may have moved; the next
        record corrects it.
        """
        if passed is not None:
            assert passed.position == position
            self._state.check_batch(passed)
        async with self._alone():
            async with self._ledgers_lock:
                self._raise_if_ended()
                target = self._ledgers.clamp(position)
                before = self._state.copy()
                self._state.seek(target)
                if passed is not None and position == target:
                    self._state.ack((), (passed,))
            sought, version = self._state.mark_delete, self._version + 1
            try:
                await self._make_durable(True)
            except BaseException as error:
                if self._durable_version >= version:  # cancelled too late
                    raise
                self._go_back(before)
                if isinstance(error, TryAgain) and not self._store.may_be_stored:
                    raise
                self._durable_mark_delete = min(self._durable_mark_delete, sought)
                if isinstance(error, TryAgain):
                    raise OutcomeUnknown("the cursor may have moved", cursor=self.name, cause=str(error)) from error
                raise
            return target

    def _go_back(self, before: AckState) -> None:
        """Undo a change that was not stored. A record in progress must not count as containing `before`."""
        self._state = before
        self._needs_snapshot = True
        self._version += 1
        if self._waiters:
            self._waiters = deque((self._version, waiter) for _, waiter in self._waiters)

    async def set_position_properties(self, properties: Mapping[str, int]) -> None:
        """Replace `position_properties`, durably."""
        await self._turn()
        changed = dict(properties) != self._state.properties
        self._state.properties = dict(properties)
        await self._make_durable(changed)

    async def renew_ledger(self) -> None:
        """End the cursor ledger if nothing was written to it for long; the next change starts another one. Continue in
        a new cursor ledger if the present one has reached its maximum age. Errors as `ack_many`.

        The next change would do the latter, too. But while a ledger is open, recovery cannot decide whether entries
        that its writer wrote without one of the bookies are missing there, so that the open cursor ledger of an idle
        subscription would count as under-replicated until the next acknowledgement.
        """
        if self._end is not None or self._committer is not None or self._alone_ends is not None:
            return
        if self._store.is_unused:
            async with self._alone():
                await self._rest()
        elif self._store.is_too_old:
            await self._make_durable(True)

    async def _rest(self) -> None:
        """Leave the state as a clean close does, and continue."""
        try:
            await self._store.close(self._state)
        except BaseException as error:
            # The znode may name no ledger: nothing may be added to the present one.
            await self._store.abandon()
            if isinstance(error, TopicFenced):
                self._on_fenced(error)
            raise

    async def _turn(self) -> None:
        """Return once the state may be changed."""
        while self._alone_ends is not None:
            await self._alone_ends.wait()
        self._raise_if_ended()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Prevent other calls from changing the state while the context is open."""
        await self._turn()
        ends = self._alone_ends = asyncio.Event()
        try:
            yield
        finally:
            self._alone_ends = None
            ends.set()

    # --- durability

    def _make_durable(self, changed: bool) -> Awaitable[None]:
        """Begin to store the state. Return what completes when it is durable, with an error if it may not be."""
        if changed:
            self._version += 1
        if self._durable_version >= self._version:
            return _NOTHING_TO_STORE
        loop = asyncio.get_running_loop()
        durable: asyncio.Future[None] = loop.create_future()
        if self._waiters is _NO_WAITERS:
            self._waiters = deque()
        self._waiters.append((self._version, durable))
        if self._committer is None:
            self._committer = loop.create_task(self._commit())
            self._committer.add_done_callback(self._committed)
        return durable

    async def _commit(self) -> None:
        while self._waiters:
            version = self._version
            mark_delete = self._state.mark_delete
            snapshot = False

            def present() -> Unstored:
                nonlocal version, mark_delete, snapshot
                version, mark_delete = self._version, self._state.mark_delete
                self._unstored = self._unstored.add(self._state.take_changes())
                snapshot, self._needs_snapshot = snapshot or self._needs_snapshot, False
                return Unstored(self._state, None if snapshot else self._unstored)

            try:
                await self._store.write(present)
            except BinderyError as error:
                self._needs_snapshot = self._needs_snapshot or snapshot
                if isinstance(error, TopicFenced):
                    self._on_fenced(error)
                self._answer(self._version if isinstance(error, TopicFenced) else version, error)
                continue
            self.commits += 1
            self._unstored = Changes()
            self._durable_version = version
            following, before = self._ledgers.next(mark_delete), self._ledgers.next(self._durable_mark_delete)
            moved = following.ledger_id != before.ledger_id
            self._durable_mark_delete = mark_delete
            self._answer(version, None)
            if moved:
                self._on_moved()
        self._committer = None  # immediately, so that the next change starts another task

    def _answer(self, version: int, error: BinderyError | None) -> None:
        """Answer the calls that wait for `version` or an earlier one."""
        while self._waiters and self._waiters[0][0] <= version:
            _, waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(type(error)(error.message, **error.facts))

    def _committed(self, task: "asyncio.Task[None]") -> None:
        if self._committer is task:
            self._committer = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("cursor_broken", cursor=self.name, error=repr(error))
            self._on_fenced(TopicFenced("the subscription's cursor is broken", cursor=self.name))
        if self._waiters and self._committer is None:
            self._answer(self._version, self._end or TryAgain("the cursor was not stored", cursor=self.name))

    # --- ending

    def _raise_if_ended(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message, **self._end.facts)

    def end(self, error: BinderyError) -> None:
        """Refuse every later call: the topic is lost, closed or deleted."""
        if self._end is None:
            self._end = error
            self._tail_reader.close()
            self._answer(self._version, error)

    async def quiesce(self) -> None:
        """Return once no record is being written."""
        if self._committer is not None:
            await asyncio.wait([self._committer])

    async def close(self, error: BinderyError) -> None:
        """Store what is not stored yet, close the cursor ledger, refuse later calls with `error`."""
        try:
            await self._turn()
        except BinderyError:
            return
        try:
            await self._make_durable(False)
            self.end(error)
            await self.quiesce()
            await self._store.close(self._state)
        except BinderyError as failure:
            log.warning("cursor_not_closed", cursor=self.name, error=str(failure))
            self.end(error)
            await self.quiesce()
            await self._store.abandon()

    async def delete(self) -> None:
        """Delete the subscription, durably. After an error it still exists and works."""
        async with self._alone():
            await self.quiesce()
            await self._store.delete()
            self.end(NoSuchSubscription("no such subscription", subscription=self.name))
