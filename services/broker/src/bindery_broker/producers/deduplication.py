"""Keep what is known of the producers of one loaded topic, durably.

The tables (`sequences`, `keys`) are in memory. The cursor `pulsar.dedup` has a snapshot of them, and what follows its
position is read again when the topic is loaded: entries say which producer and request they belong to
(`bindery_pulsar.message_codec.EntryOrigin`). The cursor is created with the first request that needs it, and deleted
once there is nothing left to remember.

| event                                | consequence                                                              |
|--------------------------------------|--------------------------------------------------------------------------|
| the topic is loaded, it has a cursor | a task reads the entries after the snapshot, PIECE at a time; meanwhile  |
|                                      | the topic works, and only requests that need the tables wait             |
| that takes long                      | a snapshot after each REPLAYED_PER_SNAPSHOT entries, so that the next    |
|                                      | load continues there                                                     |
| 1,000 entries, 64 MiB or 120 s       | a snapshot, at most once a second                                        |
| a write has an unknown outcome       | the next request waits until it is decided, and reads what was stored    |
| the topic is closed                  | a snapshot                                                               |

Invariant: the position of a snapshot is never beyond the beginning of a write whose outcome is not in the tables.
Source: Pulsar's MessageDeduplication has cursor, properties and limits; it reads the entries again before it loads a
topic, and therefore fails to load one with too many.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError, Corrupt, TryAgain
from bindery_pulsar.message_codec import CorruptMessage, EntryOrigin, UnreadableMessage, read_origin
from bindery_pulsar.message_id import EARLIEST, LATEST, Position

from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger, WallClock
from bindery_broker.producers.keys import KeyBudget, KeyTable, RequestKey, Run
from bindery_broker.producers.sequences import Place, SequenceTable
from bindery_broker.producers.snapshot_codec import (
    KEYS_BLOB,
    PRODUCERS_BLOB,
    decode_records,
    decode_times,
    encode_record,
    encode_times,
)

CURSOR: Final = "pulsar.dedup"
"""Name of the cursor. Source: Pulsar."""
PIECE: Final = 250
"""Maximum number of entries that are read again in one turn of the event loop, some milliseconds."""
PIECE_BYTES: Final = 4 * 2**20
REPLAYED_PER_SNAPSHOT: Final = 50_000
"""Number of entries after which a load that takes long stores how far it is."""
ENTRIES_MAX: Final = 1_000
"""Number of entries after which a snapshot is stored. Source: Pulsar's brokerDeduplicationEntriesInterval."""
BYTES_MAX: Final = 64 * 2**20
"""Bytes of entries after which a snapshot is stored."""
CHECK_S: Final = 1.0
"""Seconds between two looks whether a snapshot is due, and minimum seconds between two snapshots."""
IDLE_CHECK_S: Final = 300.0
"""The same for a topic without new entries."""
LOADED_S_MAX: Final = 5.0
"""Maximum seconds that a request waits for the tables. Then it fails with 503, and the loading goes on."""
BLOB_SIZE_MAX: Final = 512 * 2**10
"""Bytes above which a blob with keys is not extended. A cursor accepts blobs of 1 MiB."""
BLOBS_MAX: Final = 48
"""Maximum number of blobs with keys. A cursor accepts 64 blobs."""
RETRY: Final = Backoff(0.5, 30.0)
"""Delay of another attempt to read, or to store a snapshot, by the number of failures."""
DEFAULT_NAME: Final = "http-"
"""Beginning of the names that a broker gives to clients without one. They have no sequence ids."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeduplicationLimits:
    keys_max: int = 100_000
    """Maximum number of idempotency keys that a broker remembers."""
    window_s: int = 300
    """Seconds for which a key is remembered."""


class Deduplication:
    """The producers of one loaded topic, until `close` or `end`."""

    def __init__(
        self,
        ledger: ManagedLedger,
        *,
        topic: str,
        clock: WallClock,
        budget: KeyBudget,
        turns: asyncio.Semaphore,
        limits: DeduplicationLimits,
        is_on: Callable[[], bool],
        snapshot_s: Callable[[], float],
    ) -> None:
        """`budget`: of all topics. `turns`: held while entries are read again, to limit how many topics do so. `is_on`:
        the policy of the topic: whether all named producers count. `snapshot_s`: maximum seconds between snapshots."""
        self.sequences = SequenceTable()
        self.keys = KeyTable(budget, window_ms=limits.window_s * 1000)
        self._ledger = ledger
        self._topic = topic
        self._clock = clock
        self._turns = turns
        self._is_on = is_on
        self._snapshot_s = snapshot_s
        self._lock = asyncio.Lock()
        """Held while the cursor is created or deleted, while a snapshot is stored, and while outcomes are settled."""
        self._cursor: ManagedCursor | None = ledger.system_cursor(CURSOR)
        self._loading: asyncio.Task[None] | None = None
        self._replayed = 0
        self._writes: dict[int, Position] = {}
        """For each write in progress, the last entry before it began."""
        self._writes_count = 0
        self._unknown: Position | None = None
        """The last entry before the first write whose outcome is unknown; None: there is none."""
        self._unsaved: dict[bytes, None] = {}
        """Keys whose records have changed since the last snapshot, in order."""
        self._blobs: dict[str, tuple[int, int]] = {}
        """Size and youngest time of each stored blob with keys, in order."""
        self._blob_number = 0
        self._snapshot_at = 0.0
        """Loop time of the last snapshot."""
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        """Whether the timer is that of a topic without new entries."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False
        self._remove_listener: Callable[[], None] | None = None
        if self._cursor is not None or CURSOR in ledger.damaged_cursors:
            self._loading = self._spawn(self._load())

    @property
    def is_loaded(self) -> bool:
        """Whether the tables have everything that is stored."""
        return self._loading is None

    @property
    def is_stored(self) -> bool:
        """Whether there is a cursor."""
        return self._cursor is not None

    # -- requests ------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return once the tables are complete and everything that is stored next will be found by the next load.

        Call it within `write`. Raises TryAgain if that takes too long, or the errors of `ManagedLedger.open_cursor`.
        """
        await self._complete()
        if self._cursor is None:
            async with self._lock:
                if self._cursor is None:
                    self._cursor = await self._ledger.open_cursor(CURSOR, start=LATEST)
                    self._snapshot_at = asyncio.get_running_loop().time()
                    self._watch()

    async def last_sequence_id(self, producer: str) -> int:
        """Return the highest sequence id of a producer that is stored; -1: none, or the producer is forgotten.

        Raises TryAgain if that is not known in time.
        """
        await self._complete()
        return self.sequences.last_persisted(producer)

    async def _complete(self) -> None:
        """Return once the tables are complete."""
        if self._loading is not None:
            await asyncio.wait([self._loading], timeout=LOADED_S_MAX)
            if self._loading is not None:
                raise TryAgain(
                    "the topic's producers are still being loaded; retry",
                    topic=self._topic,
                    entries_read=self._replayed,
                )
        if self._unknown is not None:
            async with self._lock:
                await self._settle()

    @contextmanager
    def write(self) -> Iterator[Position]:
        """The block calls `ready`, writes entries, and puts those that are stored into the tables.

        Its value is for `unknown_since`, which must be called before the end of the block if an outcome is unknown.
        """
        number = self._writes_count = self._writes_count + 1
        began = self._writes[number] = self._ledger.last_confirmed
        try:
            yield began
        finally:
            del self._writes[number]

    def unknown_since(self, position: Position) -> None:
        """A write that began after this entry has an unknown outcome."""
        self._unknown = position if self._unknown is None else min(position, self._unknown)

    def stored(
        self, place: Place, *, producer: str | None, request: RequestKey | None, first: int, count: int, now_ms: int
    ) -> None:
        """An entry is durable. `producer`: None, if it has no sequence ids. `first`, `count`: of the request."""
        if producer is not None:
            self.sequences.persist(producer, place, now_ms=now_ms)
        if request is not None:
            run = Run(first, *place.position, 1, place.size)
            self.keys.stored(request, run, count=count, now_ms=now_ms)
            self._unsaved[request.key] = None

    async def _settle(self) -> None:
        """Find out what was stored by writes whose outcome is unknown. The caller holds the lock.

        Raises TryAgain if that cannot be known now.
        """
        if self._unknown is None:
            return
        await self._ledger.decided()
        began, upto = self._unknown, self._ledger.last_confirmed
        await self._scan(began, upto)
        if self._unknown == began:
            self._unknown = None
        log.info("outcomes_of_produce_settled", topic=self._topic, after=str(began), upto=str(upto))

    # -- reading again -------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        failures = 0
        try:
            upto = self._ledger.last_confirmed
            while True:
                try:
                    async with self._turns:
                        await self._load_once(upto)
                    break
                except BinderyError as error:
                    if not self._ledger.is_open:
                        return
                    failures += 1
                    log.warning("producers_not_loaded", topic=self._topic, error=str(error))
                    await asyncio.sleep(RETRY.delay_s(failures))
            self._loading = None
            self._snapshot_at = asyncio.get_running_loop().time()
            self._watch()
            self._arm()
            if self._replayed:
                log.info("producers_loaded", topic=self._topic, entries=self._replayed, producers=len(self.sequences))
        finally:
            if self._loading is not None and self._loading is asyncio.current_task():
                self._is_closed = True  # the topic is lost, or this was cancelled

    async def _load_once(self, upto: Position) -> None:
        if self._cursor is None:
            log.error("producers_damaged", topic=self._topic)
            self._cursor = await self._ledger.reset_cursor(CURSOR, start=EARLIEST)
        cursor = self._cursor
        if not self._replayed:
            self._read_snapshot(cursor)
        position = cursor.mark_delete
        while position < upto:
            before = self._replayed
            position = await self._scan(position, upto, entries_max=REPLAYED_PER_SNAPSHOT)
            if self._replayed == before:
                break
            if position < upto:
                await self._store(position)

    def _read_snapshot(self, cursor: ManagedCursor) -> None:
        now_ms = self._clock()
        persisted = dict(cursor.position_properties)
        times = decode_times(cursor.blobs.get(PRODUCERS_BLOB, b""), persisted)
        self.sequences.load(persisted, times, now_ms=now_ms)
        for name in sorted(cursor.blobs):
            if not name.startswith(KEYS_BLOB):
                continue
            blob = cursor.blobs[name]
            youngest = 0
            try:
                for key, record in decode_records(blob):
                    youngest = max(youngest, record.stored_ms)
                    self.keys.put(key, record)
            except Corrupt as error:
                log.error("idempotency_keys_damaged", topic=self._topic, blob=name, error=str(error))
            self._blobs[name] = (len(blob), youngest)
            with suppress(ValueError):
                self._blob_number = max(self._blob_number, int(name.removeprefix(KEYS_BLOB)))
        self.keys.expire(now_ms)

    async def _scan(self, after: Position, upto: Position, *, entries_max: int | None = None) -> Position:
        """Put at most `entries_max` entries in (after, upto] into the tables. Returns the last one that was read."""
        position = after
        count = 0
        while position < upto and (entries_max is None or count < entries_max):
            start = self._ledger.next_position(position)
            entries = await self._ledger.read(start, entries_max=PIECE, size_max=PIECE_BYTES)
            if not entries:
                break
            for at, payload in entries:
                if at > upto:
                    return position
                self._observe(at, payload)
                position = at
                count += 1
                self._replayed += 1
            await asyncio.sleep(0)  # entries from the cache are read without a wait
        return position

    def _observe(self, position: Position, payload: bytes) -> None:
        try:
            origin = read_origin(payload)
        except (CorruptMessage, UnreadableMessage):
            return
        if origin.is_marker or origin.is_partial:
            return
        mark = origin.mark
        producer = origin.producer_name if self._counts(origin) else None
        request = RequestKey(mark.key, mark.content) if mark is not None and mark.HasField("key") else None
        now_ms = min(origin.publish_time_ms, self._clock())
        if request is not None and now_ms <= self._clock() - self.keys.window_ms:
            request = None
        if producer is None and request is None:
            return
        place = Place(origin.first_sequence_id, origin.last_sequence_id, position, max(origin.messages_count, 1))
        first, count = (mark.first, mark.count) if mark is not None else (0, 0)
        self.stored(place, producer=producer, request=request, first=first, count=count, now_ms=now_ms)

    def _counts(self, origin: EntryOrigin) -> bool:
        """Whether the sequence id of an entry counts."""
        if origin.mark is not None:
            return origin.mark.sequenced
        return self._is_on() and not origin.producer_name.startswith(DEFAULT_NAME)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._remove_listener is None:
            self._remove_listener = self._ledger.on_new_entries(self._arm)

    def _stop_watching(self) -> None:
        if self._remove_listener is not None:
            self._remove_listener()
            self._remove_listener = None

    def _arm(self) -> None:
        """Look soon whether a snapshot is due."""
        if self._is_idle and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and not self._is_closed:
            self._is_idle = False
            delay_s = CHECK_S if not self._failures else RETRY.delay_s(self._failures)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._is_closed or self._cursor is None:
            return
        loop = asyncio.get_running_loop()
        entries, size = self._cursor.backlog
        is_old = loop.time() - self._snapshot_at >= self._snapshot_s()
        if entries >= ENTRIES_MAX or size >= BYTES_MAX or (is_old and (entries or self._is_expired())):
            self._spawn(self._snapshot_in_background())
        elif entries:
            self._arm()
        else:  # nothing is new, but producers and keys expire
            self._is_idle = True
            self._timer = loop.call_later(IDLE_CHECK_S, self._look)

    def _is_expired(self) -> bool:
        """Whether something expired since the last snapshot, or nothing is left."""
        now_ms = self._clock()
        expired = self.sequences.expire(now_ms) + self.keys.expire(now_ms)
        return bool(expired) or not (len(self.sequences) or len(self.keys))

    async def _snapshot_in_background(self) -> None:
        try:
            await self.snapshot()
            self._failures = 0
        except BinderyError as error:
            self._failures += 1
            log.warning("producers_not_stored", topic=self._topic, error=str(error))
        finally:
            if self._cursor is not None:
                self._arm()

    async def snapshot(self) -> None:
        """Store a snapshot, or delete the cursor if nothing must be remembered. Errors as `ManagedCursor.ack_many`."""
        async with self._lock:
            if self._cursor is None or self._loading is not None:
                return
            now_ms = self._clock()
            self.sequences.expire(now_ms)
            self.keys.expire(now_ms)
            is_needed = self._writes or self._unknown is not None or len(self.sequences) or len(self.keys)
            if not is_needed and not self._is_on():
                await self._delete()
                return
            position = min([self._ledger.last_confirmed, *self._writes.values()])
            await self._store(position if self._unknown is None else min(position, self._unknown))
            self._snapshot_at = asyncio.get_running_loop().time()

    async def _delete(self) -> None:
        """Delete the cursor, which would keep entries. A request that comes meanwhile waits, and creates it again."""
        self._cursor = None
        try:
            await self._ledger.delete_cursor(CURSOR)
        except BinderyError:
            self._cursor = self._ledger.system_cursor(CURSOR)
            raise
        self._blobs.clear()
        self._unsaved.clear()
        self._stop_watching()

    async def _store(self, position: Position) -> None:
        """Store the tables, which have every entry up to `position`."""
        cursor = self._cursor
        assert cursor is not None
        persisted = self.sequences.persisted()
        put: dict[str, bytes] = {}
        remove: list[str] = []
        if persisted or PRODUCERS_BLOB in cursor.blobs:
            put[PRODUCERS_BLOB] = encode_times({name: self.sequences.active_ms(name) for name in persisted})
        unsaved, self._unsaved = self._unsaved, {}
        former = dict(self._blobs)
        self._collect_keys(unsaved, put, remove)
        calls = [cursor.put_blobs(put, remove), cursor.set_position_properties(persisted)]
        if position > cursor.mark_delete:
            calls.append(cursor.ack_cumulative(position))  # last: its record has the others, too
        try:
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            self._unsaved = {**unsaved, **self._unsaved}
            self._blobs = {**former, **self._blobs}
            raise

    def _collect_keys(self, unsaved: dict[bytes, None], put: dict[str, bytes], remove: list[str]) -> None:
        """Put the records that changed into another blob; remove the blobs whose records are all over."""
        over = self._clock() - self.keys.window_ms
        for name, (_, youngest) in list(self._blobs.items()):
            if youngest <= over:
                remove.append(name)
                del self._blobs[name]
        records = dict(self.keys.records())
        changed = [(key, records[key]) for key in unsaved if key in records]
        if len(self._blobs) >= BLOBS_MAX and changed:  # replace them by as few as possible
            remove += self._blobs
            self._blobs.clear()
            changed = list(records.items())
        parts: list[bytes] = []
        size = youngest = 0
        for number, (key, record) in enumerate(changed):
            part = encode_record(key, record)
            parts.append(part)
            size += len(part)
            youngest = max(youngest, record.stored_ms)
            if size >= BLOB_SIZE_MAX or number == len(changed) - 1:
                self._blob_number += 1
                name = f"{KEYS_BLOB}{self._blob_number:08}"
                put[name] = b"".join(parts)
                self._blobs[name] = (size, youngest)
                parts, size, youngest = [], 0, 0

    # -- end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Store a snapshot, if possible, so that the next load need not read entries again."""
        if self._loading is None and self._cursor is not None and not self._is_closed:
            try:
                await self.snapshot()
            except BinderyError as error:
                log.warning("producers_not_stored", topic=self._topic, error=str(error))
        self.end()

    def end(self) -> None:
        """Stop at once: the topic is closed, or lost."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stop_watching()
        for task in self._tasks:
            task.cancel()
        self.keys.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("producers_broken", topic=self._topic, error=repr(error))
