"""The entries of a topic, as one sequence over a series of ledgers, and its cursors.

| step of opening                                         | what it guarantees                                       |
|---------------------------------------------------------|----------------------------------------------------------|
| 1 read the topic's znode, remember its version          |                                                          |
| 2 open the last ledger with recovery, unless its record | the former owner confirms no more entries in it          |
|   says that it is closed                                |                                                          |
| 3 write the znode at that version                       | the former owner writes no znode of this topic again,    |
|                                                         | so it starts no ledger either                            |
| 4 read the cursors, their ledgers with recovery         | the former owner stores no acknowledgement after this    |

No ledger is created: the first add starts one (`writing`), after a write of the znode at the version of step 3. See
docs/adr/0029. Only if the last ledger is missing, one is created in step 3, because cursors may be ahead of the others.

Invariants
- Every position returned by any owner names the same entry until it is trimmed.
- Readers see acknowledged entries only, in order, without gaps.
- A ledger is deleted only after the metadata no longer names it, and only if no durable cursor needs it.
Source: Pulsar's ManagedLedgerImpl for the znodes and the order of steps.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import structlog
from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import (
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    NoSuchTopic,
    TooLarge,
    TopicFenced,
    TryAgain,
)
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.managed_ledger_codec import TopicInfo, decode_topic, encode_topic
from bindery_pulsar.message_id import Position

from bindery_broker.errors import NotOwner, TopicTerminated
from bindery_broker.managed_ledger.caching.entry_cache import EntryCache
from bindery_broker.managed_ledger.cursors.cursor import ManagedCursor
from bindery_broker.managed_ledger.cursors.cursor_table import CursorTable
from bindery_broker.managed_ledger.cursors.transient_cursor import TransientCursor
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.new_entries import Listeners, NewEntries
from bindery_broker.managed_ledger.opening import recover_ledgers
from bindery_broker.managed_ledger.ownership_proof import OwnershipCheck, OwnershipProof
from bindery_broker.managed_ledger.read_handles import ReadHandles
from bindery_broker.managed_ledger.reader import EntryReader
from bindery_broker.managed_ledger.retention import SYSTEM_CURSORS, LedgerVerdict, RetentionRule
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.stats import internal_stats
from bindery_broker.managed_ledger.topic_metadata import TopicMetadata
from bindery_broker.managed_ledger.trimming import Trimmer
from bindery_broker.managed_ledger.writing.writer import TopicWriter
from bindery_broker.statistics.entries import EntryStatistics

ADD_ENTRIES_MAX: Final = 100_000
"""Maximum number of entries in one `add_many`."""
OPEN_ATTEMPTS_MAX: Final = 3
"""Maximum number of attempts to open a topic while another broker writes to it."""
WallClock = Callable[[], int]
"""Returns the wall time in milliseconds since 1970."""

log = structlog.get_logger()


class Environment(NamedTuple):
    """Dependencies and settings of a managed ledger."""

    client: LedgerClient
    clock: WallClock
    settings: ManagedLedgerSettings
    cache: EntryCache
    is_owner: OwnershipCheck | None
    retention: Callable[[], RetentionRule | None]
    statistics: EntryStatistics


class ManagedLedger:
    """The entries and cursors of one topic, or of one partition, that this broker owns. Created by `open`."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        *,
        metadata: TopicMetadata,
        info: TopicInfo,
        records: Sequence[LedgerRecord],
    ) -> None:
        client, clock, settings, cache, is_owner, retention, statistics = environment
        self.name = name
        """`tenant/namespace/persistent/encTopic` (`TopicName.managed_ledger_name`)."""
        self._client = client
        self._metadata = metadata
        self._terminated = info.terminated
        self._properties = dict(info.properties)
        self._clock = clock
        self._settings = settings
        self._cache = cache.topic()
        self.statistics = statistics
        self._ownership = OwnershipProof(is_owner, timeout_s=settings.operation_timeout_s)
        self._ledgers = LedgerList(records)
        self._handles = ReadHandles(client, count_max=settings.read_handles_max, timeout_s=settings.operation_timeout_s)
        self._writer: TopicWriter | None = None
        self._reader = EntryReader(
            ledgers=self._ledgers,
            handles=self._handles,
            cache=self._cache,
            write_handle=lambda: self._writer.handle if self._writer is not None else None,
            timeout_s=settings.operation_timeout_s,
            statistics=statistics,
        )
        self._ledgers_lock = asyncio.Lock()
        """Held while the list of ledgers is stored, so that trimming and rolling do not overwrite each other."""
        self._cursors = CursorTable(
            source=self,
            ledgers=self._ledgers,
            ledgers_lock=self._ledgers_lock,
            metadata=metadata,
            client=client,
            settings=settings,
            clock=clock,
            cache=self._cache,
            ownership=self._ownership,
            check_open=self._raise_if_ended,
            on_moved=self._trim_soon,
            on_fenced=self._fence,
        )
        self._trimmer = Trimmer(
            topic=name,
            ledgers=self._ledgers,
            ledgers_lock=self._ledgers_lock,
            cursors=self._cursors,
            client=client,
            handles=self._handles,
            settings=settings,
            clock=clock,
            retention=retention,
            write_ledgers=self._write_ledgers,
            is_ledger_open=lambda: self._writer is not None and self._writer.handle is not None,
            check_open=self._raise_if_ended,
            on_fenced=self._fence,
        )
        self._terminating = asyncio.Lock()
        self._end: BinderyError | None = None
        self._fenced_listeners = Listeners()
        self._new_entries = NewEntries()

    # --- opening

    @classmethod
    async def open(
        cls,
        name: str,
        *,
        client: LedgerClient,
        store: MetadataStore,
        clock: WallClock,
        settings: ManagedLedgerSettings | None = None,
        cache: EntryCache | None = None,
        create: bool = True,
        is_owner: OwnershipCheck | None = None,
        retention: Callable[[], RetentionRule | None] = lambda: None,
        statistics: EntryStatistics | None = None,
    ) -> Self:
        """Take the topic over: fence and recover its last ledger, load its cursors. Creates no ledger.

        `create`: create the topic if it does not exist, else NoSuchTopic. `cache`: shared by the broker's topics.
        `is_owner` is called when another process has fenced or closed a ledger of this topic: if it returns True, the
        topic continues in a new ledger; without it, or if it returns False, the topic is lost. `retention`: returns the
        rule in force at present; None stands for the settings. `statistics`: counts what is written and read.
        Raises TopicFenced if another broker repeatedly takes the same topic, Corrupt if its metadata cannot be read,
        TryAgain or OutcomeUnknown if bookies or ZooKeeper do not answer; the open can then be retried.
        """
        settings = settings or ManagedLedgerSettings()
        cache = cache if cache is not None else EntryCache(size_max=settings.cache_size_max)
        statistics = statistics or EntryStatistics(asyncio.get_running_loop().time)
        environment = Environment(client, clock, settings, cache, is_owner, retention, statistics)
        for attempt in range(OPEN_ATTEMPTS_MAX):
            try:
                return await cls._open(name, environment, store, create=create)
            except TopicFenced as error:
                # The former owner wrote the znode (it rolled or trimmed) between the read and the write of this broker.
                log.info("topic_opening_again", topic=name, attempt=attempt, error=str(error))
                last = error
        raise last

    @classmethod
    async def _open(cls, name: str, environment: Environment, store: MetadataStore, *, create: bool) -> Self:
        settings = environment.settings
        metadata = TopicMetadata(store, name, timeout_s=settings.operation_timeout_s, pause_s=settings.retry_pause_s)
        info = decode_topic(await metadata.load(create=create))
        records, recovered, is_last_missing = await recover_ledgers(
            name, info, client=environment.client, timeout_s=settings.operation_timeout_s, clock=environment.clock
        )
        known = records
        if not records and info.terminated is not None:
            # A terminated topic without entries names the ledger that it had: if it is stored, an open finds that it is
            # missing.
            known = [LedgerRecord(ledger_id=info.terminated.ledger_id)]
        self = cls(name, environment, metadata=metadata, info=info, records=known)
        try:
            if info.terminated is None:
                self._writer = self._make_writer()
            if self._writer is not None and is_last_missing:
                await self._writer.start_after(records)
            else:
                await self._write_ledgers(records, is_unique=False)
            if recovered is not None:
                await self._handles.put(recovered)
            await self._cursors.load()
        except BaseException:
            await self.crash()
            raise
        self._trimmer.start()
        return self

    def _make_writer(self) -> TopicWriter:
        return TopicWriter(
            topic=self.name,
            client=self._client,
            ledgers=self._ledgers,
            settings=self._settings,
            clock=self._clock,
            cache=self._cache,
            custom_metadata={
                "application": b"pulsar",
                "component": b"managed-ledger",
                "pulsar/managed-ledger": self.name.encode(),
            },
            ownership=self._ownership,
            store_ledgers=self._store_ledgers,
            on_confirmed=self._new_entries.announce,
            on_fenced=self._fence,
            on_recovered=self._handles.put,
            statistics=self.statistics,
        )

    async def _store_ledgers(self, records_of: Callable[[], Sequence[LedgerRecord]]) -> None:
        """Store the list of ledgers. Called by the writer, which alone changes the end of the list."""
        async with self._ledgers_lock:
            records = records_of()
            LedgerList(records)  # asserts the invariants
            await self._write_ledgers(records)
            self._ledgers.assign(records)
        self._trim_soon()  # the close may have made the ledger trimmable without a cursor moving

    async def _write_ledgers(self, records: Sequence[LedgerRecord], *, is_unique: bool = True) -> None:
        info = TopicInfo(ledgers=tuple(records), terminated=self._terminated, properties=self._properties)
        await self._metadata.write_topic(encode_topic(info), is_unique=is_unique)

    # --- state

    @property
    def is_open(self) -> bool:
        """False once the topic is closed, fenced or deleted. It must then be opened again."""
        return self._end is None

    @property
    def is_terminated(self) -> bool:
        """Whether the topic permanently accepts no more entries. Reading and acknowledging continue."""
        return self._terminated is not None

    @property
    def terminated(self) -> Position | None:
        """What `terminate` returned; None: the topic accepts entries."""
        return self._terminated

    @property
    def properties(self) -> Mapping[str, str]:
        return self._properties

    async def set_properties(self, changes: Mapping[str, str | None]) -> None:
        """Change properties of the topic, durably; None removes one.

        Raises MetadataUnavailable (nothing has changed), MetadataOutcomeUnknown (the properties have changed here, and
        are stored with the next write), or TopicFenced.
        """
        async with self._ledgers_lock:
            self._raise_if_ended()
            before = self._properties
            kept = {**before, **changes}
            self._properties = {key: value for key, value in kept.items() if value is not None}
            try:
                await self._write_ledgers(self._ledgers.stored, is_unique=self._properties != before)
            except MetadataOutcomeUnknown:
                raise
            except TopicFenced as error:
                self._fence(error)
                raise
            except BaseException:
                self._properties = before
                raise

    @property
    def metadata_version(self) -> int:
        """The version of the topic's znode after the last write of this owner; those of later owners are higher."""
        assert self._metadata.node.version is not None
        return self._metadata.node.version

    @property
    def cache(self) -> EntryCache:
        return self._cache.shared

    def next_cache_round(self) -> None:
        """Let cursors that make no progress keep no entries in the cache. Call it from a timer, once a minute."""
        self._cache.next_round()

    async def next_handles_round(self) -> None:
        """Release the closed ledgers that were not read since the last call. Call it from a timer, once a minute."""
        await self._handles.next_round()

    def maintenance_in_s(self) -> float:
        """Return the seconds until a trim, a round of the cache or the handles, or the renewal of a cursor ledger has
        anything to do, unless the topic is used before; 0: in the next round."""
        if self._trimmer.deletable or self._cursors.has_unsettled or len(self._handles) or self._cache.needs_round:
            return 0.0
        waits = [self._trimmer.next_release_in_s()]
        waits += [cursor.store.unused_in_s for cursor in self._cursors.cursors.values()]
        return min(waits)

    def on_fenced(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in the loop, once, when the topic is lost to another broker.

        Returns a function that removes the listener.
        """
        return self._fenced_listeners.add(listener)

    def _raise_if_ended(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message, **self._end.facts)

    def _fence(self, error: TopicFenced) -> None:
        """The topic is lost: every later call fails."""
        if self._end is not None:
            return
        self._finish(error)
        if self._writer is not None:
            self._writer.fence(error)
        self._fenced_listeners.call()

    def _finish(self, error: BinderyError) -> None:
        self._end = error
        self._cursors.end(error)
        self._new_entries.wake()

    # --- adding

    async def add_many(self, payloads: Sequence[bytes]) -> list[Position]:
        """Store the entries in order; return their positions once all are durable (Qa fsyncs each).

        Calls overlap, are pipelined and complete in the order they were made. `payloads` must not change afterwards.
        Errors: TopicFenced (entries in flight may be stored), TooManyRequests and other TryAgain (nothing was stored),
        AddTimeout (unknown), TooLarge (nothing was stored), TopicTerminated (likewise). A cancelled call may still
        store the entries that were already sent.
        """
        if not payloads:
            self._raise_if_ended()
            return []
        return await self.submit_many(payloads)

    def submit_many(self, payloads: Sequence[bytes]) -> "asyncio.Future[list[Position]]":
        """Like `add_many` for at least one entry, but raise the error at once if the call is refused.

        Nothing is stored by a refused call. Otherwise returns a future for the result. For callers that must not send
        more after a refusal.
        """
        self._raise_if_ended()
        if self._writer is None:
            raise TopicTerminated.of(self.name)
        if len(payloads) > ADD_ENTRIES_MAX:
            raise TooLarge("too many entries at once", count=len(payloads), count_max=ADD_ENTRIES_MAX)
        if len(largest := max(payloads, key=len)) > ENTRY_SIZE_MAX:
            raise TooLarge("entry is too large", size=len(largest), size_max=ENTRY_SIZE_MAX)
        return self._writer.submit_many(payloads)

    async def terminate(self) -> Position:
        """Accept no more entries, for good and durably. Returns the last entry of the last ledger; -1: it is empty.

        Idempotent. Adds in progress are completed first. Adds that come meanwhile fail with TryAgain, later ones with
        TopicTerminated. Errors: TopicFenced, NoSuchTopic, TryAgain, OutcomeUnknown. After an error, or if the call is
        cancelled, this object is fenced, because its last ledger is closed: open the topic again, which then is
        terminated or continues in a new ledger.
        Source: Pulsar's ManagedLedgerImpl.asyncTerminate.
        """
        async with self._terminating:
            self._raise_if_ended()
            if self._terminated is not None:
                return self._terminated
            assert self._writer is not None
            if self._ledgers.is_empty:
                await self._writer.start()
                self._raise_if_ended()
                if self._ledgers.is_empty:
                    raise TryAgain("no ledger can be written now, and a topic ends with one", topic=self.name)
            try:
                await self._writer.close()
                async with self._ledgers_lock:
                    self._raise_if_ended()
                    return await self._store_end()
            except BaseException:
                self._fence(TopicFenced("the topic could not be terminated and is opened again", topic=self.name))
                raise

    async def _store_end(self) -> Position:
        """Store that the topic ends with the last entry of its current ledger, to which nothing is written any more."""
        # The close of the writer does not tell how many entries the ledger has if it failed, or if an add was pending.
        info = TopicInfo(ledgers=tuple(self._ledgers), terminated=self._ledgers.last_confirmed)
        records, handle, is_last_missing = await recover_ledgers(
            self.name, info, client=self._client, timeout_s=self._settings.operation_timeout_s, clock=self._clock
        )
        if is_last_missing:
            raise TopicFenced("the topic's ledger was deleted", topic=self.name)
        last = records[-1]
        assert last.entries >= self._ledgers.current.entries, "acknowledged entries never vanish"
        if handle is not None:
            await self._handles.put(handle)
        self._terminated = Position(last.ledger_id, last.entries - 1)
        await self._write_ledgers(records)
        self._ledgers.assign(records)
        self._writer = None
        self._new_entries.announce()
        return self._terminated

    # --- positions

    @property
    def last_confirmed(self) -> Position:
        """The last acknowledged entry; entry -1 of the first ledger if there is none."""
        return self._ledgers.last_confirmed

    @property
    def first_position(self) -> Position:
        """The oldest entry that still exists, or the position of the first add."""
        return self._ledgers.first_position

    @property
    def entries_count(self) -> int:
        return self._ledgers.entries_count

    @property
    def size(self) -> int:
        """Payload bytes of all entries."""
        return self._ledgers.size

    def next_position(self, position: Position) -> Position:
        """Return the first existing entry after `position`; after the last entry, the position of the next add."""
        return self._ledgers.next(position)

    def contains(self, position: Position) -> bool:
        """Return whether `position` is an acknowledged entry that still exists."""
        return self._ledgers.contains(position)

    def has_ledger(self, ledger_id: int) -> bool:
        """Return whether this is one of the topic's ledgers, which were not trimmed."""
        return self._ledgers.holds(ledger_id)

    def record(self, ledger_id: int) -> LedgerRecord | None:
        """Return the record of one of the topic's ledgers; None: it is none, or was trimmed."""
        return self._ledgers.get(ledger_id) if self._ledgers.holds(ledger_id) else None

    def clamp(self, position: Position) -> Position:
        """Return the first existing entry >= `position`, or the position of the next add.

        EARLIEST and LATEST are accepted.
        """
        return self._ledgers.clamp(position)

    def position_at(self, index: int) -> Position:
        """Return the existing entry with this index, from 0; for larger ones, the position of the next add."""
        return self._ledgers.nth(index) if index < self._ledgers.entries_count else self._ledgers.end

    def size_after(self, position: Position) -> int:
        """Return the payload bytes of the entries after `position`; an estimate within its ledger."""
        return self._ledgers.after(position)[1]

    def entries_between(self, *, after: Position, upto: Position) -> int:
        """Return the number of entries in (after, upto]."""
        return self._ledgers.entries_between(after=after, upto=upto)

    # --- reading

    async def read(self, position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        """Return acknowledged entries from `position` (inclusive, clamped) on, in order, across ledgers.

        Returns at most `entries_max` entries and `size_max` payload bytes, but at least one entry if there is one; an
        empty list if there is none yet. Errors: NoSuchEntry, NoSuchLedger (lost), Corrupt, TryAgain, TopicFenced.
        """
        self._raise_if_ended()
        return await self._reader.read(position, entries_max=entries_max, size_max=size_max)

    async def read_some(
        self, positions: Sequence[Position], *, size_max: int
    ) -> tuple[list[tuple[Position, bytes]], Sequence[Position]]:
        """Return those of `positions`, which ascend, that exist; and the last ones, which were not read.

        Returns about `size_max` payload bytes, but at least one entry unless none exists. Wherever the entries of a
        ledger are, they are read in few requests. Errors as `read`.
        """
        self._raise_if_ended()
        return await self._reader.read_some(positions, size_max=size_max)

    async def decided(self) -> None:
        """Return once no `add_many` that has ended may still store an entry, as it may after AddTimeout.

        Waits at most `operation_timeout_s`. Raises TryAgain if that is not known then, or TopicFenced.
        """
        self._raise_if_ended()
        if self._writer is not None:
            await self._writer.decided(timeout_s=self._settings.operation_timeout_s)

    async def find_published(self, at_ms: int) -> Position:
        """Return the first entry published at `at_ms` (ms since 1970) or later; the position of the next add if none.

        Reads about as many entries as the number of entries of one ledger has binary digits, and up to 100 before the
        result. `time_search` describes what is returned if the publish times are not in order. Damaged and lost entries
        are passed over. Errors: TryAgain, TopicFenced.
        """
        return await self._reader.find_published(at_ms, check_open=self._raise_if_ended)

    def on_new_entries(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in the loop each time `last_confirmed` advances. The listener must not raise.

        Returns a function that removes the listener.
        """
        return self._new_entries.listeners.add(listener)

    async def wait_for_entry(self, position: Position, *, timeout_s: float) -> bool:
        """Return True once `last_confirmed` >= `position`, False at the timeout or if the topic ends before it.

        Raises TopicFenced if the topic is lost.
        """

        def is_decided() -> bool:
            self._raise_if_ended()
            return self.is_terminated or self.last_confirmed >= position

        await self._new_entries.wait_until(is_decided, timeout_s=timeout_s)
        return self.last_confirmed >= position

    # --- cursors

    @property
    def cursors(self) -> Mapping[str, ManagedCursor]:
        """Cursors by subscription name, without those of brokers."""
        return {name: cursor for name, cursor in self._cursors.cursors.items() if name not in SYSTEM_CURSORS}

    def system_cursor(self, name: str) -> ManagedCursor | None:
        """Return one of the cursors of brokers, SYSTEM_CURSORS; None: it does not exist."""
        assert name in SYSTEM_CURSORS
        return self._cursors.cursors.get(name)

    @property
    def damaged_cursors(self) -> Mapping[str, Corrupt]:
        """Errors of the cursors whose stored state cannot be read, by subscription name. See `CursorTable`."""
        return self._cursors.damaged

    async def open_cursor(
        self, name: str, *, start: Position, properties: Mapping[str, str] | None = None
    ) -> ManagedCursor:
        """Return the cursor of subscription `name`, and create it durably if it is missing.

        The next entry of a new cursor is `start` (clamped; EARLIEST, LATEST). An existing cursor keeps its position and
        properties. Raises Corrupt if the cursor exists and its stored state cannot be read.
        """
        return await self._cursors.open(name, start=start, properties=properties or {})

    async def open_transient_cursor(self, name: str, *, start: Position) -> TransientCursor:
        """Return the cursor `name` that is stored nowhere (Pulsar: non-durable), and create it if it is missing.

        The next entry of a new cursor is `start` (clamped; EARLIEST, LATEST). The cursor does not keep entries from
        being trimmed. It exists until `TransientCursor.close` or the end of this object. Raises Conflict if there is a
        durable cursor of this name.
        """
        return await self._cursors.open_transient(name, start=start)

    @property
    def transient_cursors(self) -> Mapping[str, TransientCursor]:
        """The cursors that are stored nowhere, by name. The caller must not change the mapping."""
        return self._cursors.transient

    def check_cursor(self, name: str) -> None:
        """Raise Corrupt if the cursor exists and its stored state cannot be read."""
        self._cursors.check_undamaged(name)

    async def reset_cursor(self, name: str, *, start: Position) -> ManagedCursor:
        """Replace the state of a damaged cursor, durably: its next entry is `start`. It keeps its properties.

        Raises Conflict if the cursor is not damaged, NoSuchSubscription if there is none.
        """
        cursor = await self._cursors.reset(name, start=start)
        self._trim_soon()
        return cursor

    async def delete_cursor(self, name: str) -> None:
        """Delete a cursor, durably. Raises NoSuchSubscription if there is none."""
        await self._cursors.delete(name)
        self._trim_soon()

    # --- keeping and ending

    async def roll(self) -> None:
        """End the current ledger, if it is open and holds anything, and continue in a new one."""
        self._raise_if_ended()
        if self._writer is not None:
            await self._writer.roll()

    async def renew_cursor_ledgers(self) -> None:
        """Replace the cursor ledgers that have reached their maximum age, and end those that are not used any more.
        Errors as `ManagedCursor.ack_many`, raised after the other cursors have had their turn."""
        problem: BinderyError | None = None
        for cursor in list(self._cursors.cursors.values()):
            try:
                await cursor.renew_ledger()
            except BinderyError as error:
                problem = error
        if problem is not None:
            raise problem

    async def trim(self) -> int:
        """Delete the oldest ledgers that are no longer needed. Returns the number of ledgers removed from the list.

        Call it from a timer; it also runs when a cursor moves to another ledger. A ledger that cannot be deleted now is
        deleted by a later call. If nothing needs the last ledger, and it is closed, one is started after it: the list
        of a topic that has had entries is never empty.
        """
        self._raise_if_ended()
        if self._writer is not None and self._writer.is_resting and self._trimmer.releases_last:
            await self._writer.start()
            self._raise_if_ended()
        return await self._trimmer.trim()

    def explain_retention(self) -> list[LedgerVerdict]:
        """Return for each ledger, the oldest first, whether it is kept and why. Reads nothing."""
        return self._trimmer.explain()

    def retains_entries(self, *, idle_s: float) -> bool:
        """Return whether anything would be kept if the current ledger had been closed `idle_s` seconds ago."""
        return self._trimmer.retains_entries(idle_s=idle_s)

    @property
    def retention(self) -> RetentionRule:
        """The retention in force, by policy or by the settings."""
        return self._trimmer.rule

    @property
    def age_s(self) -> float:
        """Seconds since the current ledger was opened; 0: the last ledger of the topic is closed."""
        return self._writer.age_s if self._writer is not None else 0.0

    async def roll_if_older(self, age_s: float) -> None:
        """As `roll`, if the current ledger holds anything, is older than `age_s` and than the setting `age_s_min`."""
        if self._ledgers.current.entries and self.age_s >= max(age_s, self._settings.age_s_min):
            await self.roll()

    def older_in_s(self, age_s: float) -> float:
        """Return the seconds until `roll_if_older` rolls; infinite: not unless entries are added."""
        if not self._ledgers.current.entries or self._writer is None or self._writer.handle is None:
            return math.inf
        return max(0.0, max(age_s, self._settings.age_s_min) - self.age_s)

    async def close(self) -> None:
        """Complete adds in flight, store the cursors, close the ledger, so that the next open is quick. Idempotent."""
        if self._end is None:
            closed = NotOwner("the topic is closed here", topic=self.name)
            if self._writer is not None:
                await self._writer.close()
            await self._cursors.close(closed)
            if self._end is None:
                self._finish(closed)
                await self._trimmer.delete_remaining()
        await self._release()

    async def delete(self) -> None:
        """Remove the topic with all cursors (from metadata at once and as a whole), then its ledgers.

        After an error the topic may or may not exist, and this object is closed: open it again.
        """
        deleted = NoSuchTopic("the topic was deleted", topic=self.name)
        async with self._cursors.lock, self._cursors.trim_lock, self._ledgers_lock:
            self._raise_if_ended()
            self._finish(deleted)
            try:
                if self._writer is not None:
                    self._writer.stop(deleted)
                await self._cursors.quiesce()
                await self._metadata.delete_topic(self._cursors.nodes)
                await self._cursors.delete_ledgers()
                for ledger_id in [*self._trimmer.deletable, *(record.ledger_id for record in self._ledgers.stored)]:
                    await self._trimmer.delete_ledger(ledger_id)
            finally:
                await self._release()

    async def crash(self) -> None:
        """Release everything without a write, like the end of the process.

        For tests, for a failed open or close, and for a topic that was lost.
        """
        if self._end is None:
            self._finish(TryAgain("this broker stopped serving the topic", topic=self.name))
        if self._writer is not None:
            self._writer.stop(TryAgain("this broker stopped serving the topic", topic=self.name))
        await self._release()

    async def _release(self) -> None:
        self._trimmer.stop()
        self._cache.close()
        await self._cursors.release()
        if self._writer is not None:
            await self._writer.finished()
        await self._handles.release()

    def internal_stats(self) -> dict[str, Any]:
        """Return Pulsar's `internalStats` JSON, without the ensembles."""
        return internal_stats(
            writer=self._writer, ledgers=self._ledgers, cursors=self._cursors.cursors, properties=self._properties
        )

    def _trim_soon(self) -> None:
        if self._end is None:
            self._trimmer.trim_soon()
