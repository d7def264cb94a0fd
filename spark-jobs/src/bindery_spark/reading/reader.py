"""BookieReader: reads one bookie's share of many fragments as fast as its budget allows, and never gives up loudly.

Nothing is fenced, recovered or written. Requests are plain and batch reads of wire version 2, WINDOW_BYTES in flight.

| entries | of a fragment                                                                                              |
|---------|------------------------------------------------------------------------------------------------------------|
| all     | every entry is read                                                                                        |
| listed  | the bookie lists what it holds, and the first and the last entry are read; a bookie that cannot list: all  |
| ends    | the first and the last entry of each share of its segment are read, as far as it holds them                |

| the bookie's answer                          | the rows of the entries asked for                                 |
|----------------------------------------------|-------------------------------------------------------------------|
| an entry frame                               | present; verified here                                            |
| NO_ENTRY, NO_LEDGER                          | not present, once metadata were read again: see `_Absent`         |
| UNKNOWN_LEDGER_STATE                         | error `limbo`                                                     |
| TOO_MANY_REQUESTS                            | asked again until `timeout_s`, then error `busy`                  |
| another status                               | error, the status's name in lower case: `io_error`                |
| none in time                                 | error `timeout`                                                   |
| the connection is refused or lost            | asked again until `timeout_s`, then error `unreachable`           |
| (the bookie is not registered)               | error `unreachable`, at once                                      |

After TIMEOUTS_MAX timeouts in a row, or an outage of `timeout_s`, nothing more is asked of this bookie, and the rest of
the rows say so.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import pyarrow as pa
from bindery_client.connection.connection import CLOSED_BY_PEER
from bindery_client.connection.pool import BookiePool
from bindery_client.ledger.replica import status_name
from bindery_core.errors import BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import (
    BatchReadRequest,
    BatchReadResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadRequest,
    ReadResponse,
    Status,
)

from bindery_spark.reading.fragments import FRAME_OVERHEAD, Fragment, is_expected
from bindery_spark.reading.rows import EntryRows
from bindery_spark.reading.throttle import Budget, Pressure

REQUEST_BYTES: Final = 256 * 1024
"""Bytes that one batch read aims at: larger ones hold up the bookie's other clients."""
REQUEST_ENTRIES_MAX: Final = 1_000
WINDOW_BYTES: Final = 4 * REQUEST_BYTES
WINDOW_REQUESTS: Final = 32
BUSY_PAUSE_S: Final = 0.05
RETRY_PAUSE_S: Final = 0.25
TIMEOUTS_MAX: Final = 3
REREAD_MAX: Final = 1_000
"""Entries of a ledger that is not closed which are asked for once more before they count as absent."""
LISTING_BYTES: Final = 1024
"""What a list of entries counts."""
LISTING_ENTRIES_MAX: Final = 1_000_000
_ABSENT: Final = (int(Status.NO_ENTRY), int(Status.NO_LEDGER))
_UNANSWERED: Final = "unanswered: the bookie answered for other entries"


class MetadataReader(Protocol):
    async def read(self, ledger_id: LedgerId) -> LedgerMetadata:
        """Raises NoSuchLedger, MetadataUnavailable; Corrupt, when nobody can say any more what is in it."""
        ...


class Sink(Protocol):
    """Who makes rows of what a reader is told, fragment by fragment: `rows.EntryRows`, `blocks.Blocks`."""

    def __len__(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    def add_frames(self, fragment: Fragment, entry_ids: Sequence[int], frames: Sequence[bytes]) -> None: ...

    def add_listed(self, fragment: Fragment, entry_ids: Sequence[int]) -> None: ...

    def add_absent(self, fragment: Fragment, entry_ids: Sequence[int]) -> None: ...

    def add_error(self, fragment: Fragment, entry_ids: Sequence[int], error: str) -> None: ...

    def add_unexpected(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None: ...

    def add_unlisted(self, ledger_id: int, segment: int, error: str) -> None: ...

    def told(self, fragment: Fragment, upto: int, *, is_last: bool) -> None:
        """Everything of the fragment before entry `upto` was told; `is_last`: all of it."""
        ...

    def take(self) -> pa.RecordBatch: ...


class _Failed(Exception):
    """No answer. `text`: what the rows say."""

    def __init__(self, text: str, *, is_timeout: bool = False, ended_by_peer: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_timeout = is_timeout
        self.ended_by_peer = ended_by_peer


class _Request:
    """The sink of `count` answers. `done` gives them all, or raises _Failed."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._answers: list[Any] = []
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        self._answers += responses
        self._left -= len(responses)
        if self._left <= 0 and not self.done.done():
            self.done.set_result(self._answers)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        cause = str(error.facts.get("cause", ""))
        words = f"{error.message}: {cause}" if cause else error.message
        ended = cause == CLOSED_BY_PEER or cause.startswith("ConnectionResetError")
        self._fail(_Failed(f"unreachable: {words}", ended_by_peer=ended))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._fail(_Failed("timeout: no answer in time", is_timeout=True))

    def _fail(self, error: _Failed) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True)
class _Found:
    """What came of one job."""

    present: list[int] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    listed: Sequence[int] = ()
    absent: list[int] = field(default_factory=list)
    errors: dict[str, list[int]] = field(default_factory=dict)
    unlisted: Sequence[int] = ()
    """The bookie cannot list, and these are to be read instead; nothing else was found."""

    def take(self, entry_id: int, status: int, frame: bytes | None) -> None:
        if status == Status.OK and frame is not None:
            self.present.append(entry_id)
            self.frames.append(frame)
        elif status in _ABSENT:
            self.absent.append(entry_id)
        else:
            self.errors.setdefault(_words(status), []).append(entry_id)


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece of a fragment that is asked for at once."""

    fragment: Fragment
    entry_ids: Sequence[int]
    """Ascending. A range: in one batch read."""
    is_last: bool
    """Of its fragment."""
    is_listing: bool = False
    """All but the ends are not read."""

    @property
    def size(self) -> int:
        if self.is_listing:
            return 2 * (self.fragment.ledger.entry_size + FRAME_OVERHEAD) + LISTING_BYTES
        return len(self.entry_ids) * (self.fragment.ledger.entry_size + FRAME_OVERHEAD)


@dataclass(slots=True)
class _Absent:
    """Entries of a fragment that the bookie denied. They are told at the fragment's end, after another look at the
    ledger: one that was deleted, or moved to other bookies, since the plan was made lacks nothing here."""

    entry_ids: list[int] = field(default_factory=list)


class BookieReader:
    """Reads fragments of one bookie. Used from one event loop."""

    def __init__(
        self, pool: BookiePool, metadata: MetadataReader, bookie_id: BookieId, *, budget: Budget, timeout_s: float,
        rows: Sink | None = None,
    ) -> None:  # fmt: skip
        """`rows`: what the answers become; None: a row for each entry."""
        self._pool = pool
        self._metadata = metadata
        self._bookie_id = bookie_id
        self._budget = budget
        self._pressure = Pressure()
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._rows = EntryRows(bookie_id) if rows is None else rows
        self._absent = _Absent()
        self._given_up = ""
        """Why nothing more is asked; empty: it is."""
        self._timeouts = 0
        self._out_since: float | None = None

    async def read(self, fragments: Sequence[Fragment], *, entries: str = "all") -> AsyncIterator[pa.RecordBatch]:
        """Batches of rows; `entries`: all, listed or ends. Whenever one is given out nothing is in flight: the caller
        may take its time, and no deadline passes meanwhile."""
        async with aclosing(self._read(_jobs(fragments, entries=entries))) as batches:
            async for batch in batches:
                yield batch
        if len(self._rows):
            yield self._rows.take()

    async def _read(self, jobs: Iterator[_Job]) -> AsyncGenerator[pa.RecordBatch, None]:
        """Full batches; what is left stays in the sink."""
        running: deque[tuple[_Job, asyncio.Task[_Found]]] = deque()
        size = 0
        is_draining = False
        try:
            while True:
                while not is_draining and size < WINDOW_BYTES and len(running) < WINDOW_REQUESTS:
                    job = next(jobs, None)
                    if job is None:
                        break
                    await self._admit(job)
                    running.append((job, asyncio.create_task(self._run(job))))
                    size += job.size
                if not running:
                    if not is_draining:
                        return
                    yield self._rows.take()
                    is_draining = False
                    continue
                job, task = running.popleft()
                found = await task
                size -= job.size
                if found.unlisted:
                    # Rows stay in order, and nothing is in flight while it is read.
                    await asyncio.wait([task, *(each for _, each in running)])
                    async with aclosing(self._read(_pieces(job, found.unlisted))) as batches:
                        async for batch in batches:
                            yield batch
                    is_draining = self._rows.is_full
                    continue
                self._charge(sum(map(len, found.frames)) - job.size)
                await self._tell(job, found)
                is_draining = self._rows.is_full
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _admit(self, job: _Job) -> None:
        if self._given_up:
            return
        wait = max(self._budget.take(job.size, now=self._loop.time()), self._pressure.pause())
        if wait > 0:
            await asyncio.sleep(wait)

    def _charge(self, beyond: int) -> None:
        """Entries were that much larger than metadata had it."""
        if beyond > 0:
            self._budget.take(beyond, now=self._loop.time())

    # -- what comes of a job -------------------------------------------------------------------------------------------

    async def _tell(self, job: _Job, found: _Found) -> None:
        fragment = job.fragment
        self._tell_found(fragment, found)
        limit = -1 if fragment.ledger.limit is None else fragment.ledger.limit
        self._absent.entry_ids += [entry_id for entry_id in found.absent if entry_id <= limit]
        if job.is_last and self._absent.entry_ids:
            absent, self._absent = self._absent, _Absent()
            await self._tell_absent(fragment, absent.entry_ids)
        if job.is_last or not self._absent.entry_ids:
            self._rows.told(fragment, job.entry_ids[-1] + 1, is_last=job.is_last)

    def _tell_found(self, fragment: Fragment, found: _Found) -> None:
        if found.listed:
            self._rows.add_listed(fragment, found.listed)
        if found.present:
            self._rows.add_frames(fragment, found.present, found.frames)
        for words, entry_ids in found.errors.items():
            self._rows.add_error(fragment, entry_ids, words)

    async def _tell_absent(self, fragment: Fragment, absent: list[int]) -> None:
        ledger = fragment.ledger
        try:
            metadata = await self._metadata.read(ledger.ledger_id)
        except (NoSuchLedger, Corrupt):
            return
        absent = [entry_id for entry_id in absent if is_expected(metadata, self._bookie_id, entry_id)]
        if not ledger.is_closed and absent:
            # The add that an ack quorum confirmed may just have arrived here, too.
            again, rest = absent[:REREAD_MAX], absent[REREAD_MAX:]
            await asyncio.sleep(RETRY_PAUSE_S)
            found = await self._run(_Job(fragment, again, is_last=True))
            self._tell_found(fragment, found)
            absent = [*found.absent, *rest]
        if absent:
            self._rows.add_absent(fragment, absent)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> _Found:
        found = _Found()
        if job.fragment.ledger.limit is None:
            words = "unreachable: too few bookies of the ensemble reported the end of the ledger"
            found.errors[words] = list(job.entry_ids)
            return found
        left = list(job.entry_ids)
        if job.is_listing:
            left = await self._list(job, found)
            if len(left) > _step(job.fragment) and not self._given_up:
                return _Found(unlisted=left)
        while left:
            if self._given_up:
                found.errors.setdefault(self._given_up, []).extend(left)
                break
            try:
                left = await self._ask(job.fragment.ledger.ledger_id, left, found)
            except _Failed as error:
                await self._after_failure(error)
        return found

    async def _ask(self, ledger_id: LedgerId, left: list[int], found: _Found) -> list[int]:
        """Ask for `left`, at least the first of them; what is still to be asked for."""
        is_run = left[-1] - left[0] == len(left) - 1 and len(left) > 1
        if not is_run or self._bookie_id in self._pool.without_batch_reads:
            return await self._ask_singly(ledger_id, left, found)
        try:
            response = await self._ask_batch(ledger_id, left[0], len(left))
        except _Failed as error:
            if error.ended_by_peer and self._out_since is None and not await self._knows_batch_reads(ledger_id):
                self._pool.without_batch_reads.add(self._bookie_id)
                return left
            raise
        if response.status == Status.TOO_MANY_REQUESTS:
            await self._after_busy()
            return left
        self._answered()
        bodies = response.bodies[: len(left)]
        if bodies:
            found.present += left[: len(bodies)]
            found.frames += bodies
            return left[len(bodies) :]
        if response.status == Status.NO_LEDGER:
            found.absent += left
            return []
        if response.status == Status.OK:
            return await self._ask_singly(ledger_id, left, found)
        # The first one is missing or unreadable: those behind it are asked for one by one, all at once.
        found.take(left[0], response.status, None)
        return await self._ask_singly(ledger_id, left[1:], found) if len(left) > 1 else []

    async def _list(self, job: _Job, found: _Found) -> list[int]:
        """Ask what the bookie holds of the job's entries; those that are to be read all the same."""
        fragment, wanted = job.fragment, job.entry_ids
        ledger_id = fragment.ledger.ledger_id
        while not self._given_up:
            try:
                response = await self._ask_list(ledger_id)
            except _Failed as error:
                await self._after_failure(error)
                continue
            if response.status == Status.TOO_MANY_REQUESTS:
                await self._after_busy()
                continue
            self._answered()
            if response.status in _ABSENT:
                found.absent += wanted
                return []
            if response.status == Status.UNKNOWN_LEDGER_STATE:
                found.errors.setdefault(_words(response.status), []).extend(wanted)
                return []
            try:
                runs = availability.decode(response.availability or b"")
            except BinderyError:
                return list(wanted)
            if response.status != Status.OK:
                return list(wanted)
            if isinstance(wanted, range) and any(f <= wanted[0] and wanted[-1] < f + n for f, n in runs):
                found.listed = wanted[1:-1]
                return sorted({wanted[0], wanted[-1]})
            held = _held(runs, wanted)
            ends = [entry_id for entry_id in fragment.ends() if entry_id in held]
            found.absent += [entry_id for entry_id in wanted if entry_id not in held]
            found.listed = sorted(held.difference(ends))
            return ends
        return list(wanted)

    async def _ask_list(self, ledger_id: LedgerId) -> ListEntriesResponse:
        request = ListEntriesRequest(self._pool.txn_id(), ledger_id)
        sink = _Request(1)
        connection = self._pool.connection(self._bookie_id, 3)
        connection.send(v3.encode_request(request), (request.txn_id,), sink, timeout_s=self._timeout_s)
        (response,) = await sink.done
        # Bookies from before this request answer with an error of no operation.
        return response if isinstance(response, ListEntriesResponse) else ListEntriesResponse(0, -1, ledger_id)

    async def _ask_batch(self, ledger_id: LedgerId, first: int, count: int) -> BatchReadResponse:
        request = BatchReadRequest(v2.VERSION, ledger_id, first, self._pool.txn_id(), count, 2 * REQUEST_BYTES)
        sink = _Request(1)
        began = self._loop.time()
        self._send(v2.encode_request(request), [v2.key_of(request)], sink)
        (response,) = await sink.done
        assert isinstance(response, BatchReadResponse)
        self._pressure.observe(self._loop.time() - began, size=sum(map(len, response.bodies)))
        return response

    async def _ask_singly(self, ledger_id: LedgerId, left: list[int], found: _Found) -> list[int]:
        reads = [ReadRequest(v2.VERSION, ledger_id, entry_id) for entry_id in left]
        sink = _Request(len(reads))
        began = self._loop.time()
        self._send(v2.encode_requests(reads), [v2.key_of(read) for read in reads], sink)
        responses = await sink.done
        self._pressure.observe(self._loop.time() - began, size=sum(len(each.body or b"") for each in responses))
        by_entry: dict[int, ReadResponse] = {each.entry_id: each for each in responses}
        busy = []
        for entry_id in left:
            response = by_entry.get(entry_id)
            if response is not None and response.status == Status.TOO_MANY_REQUESTS:
                busy.append(entry_id)
            elif response is None:
                found.errors.setdefault(_UNANSWERED, []).append(entry_id)
            else:
                found.take(entry_id, response.status, response.body)
        if len(busy) < len(left):
            self._answered()
        if busy:
            await self._after_busy()
        return busy

    def _send(self, frames: bytes, keys: list[Any], sink: _Request) -> None:
        connection = self._pool.connection(self._bookie_id, v2.VERSION)
        connection.send(frames, keys, sink, timeout_s=self._timeout_s)

    async def _knows_batch_reads(self, ledger_id: LedgerId) -> bool:
        """After the bookie ended the connection: an old one that does not know them still answers a plain read."""
        read = ReadRequest(v2.VERSION, ledger_id, 0)
        for is_plain in (True, False):
            sink = _Request(1)
            if is_plain:
                self._send(v2.encode_request(read), [v2.key_of(read)], sink)
            else:
                batch = BatchReadRequest(v2.VERSION, ledger_id, 0, self._pool.txn_id(), 2, REQUEST_BYTES)
                self._send(v2.encode_request(batch), [v2.key_of(batch)], sink)
            try:
                await sink.done
            except _Failed as error:
                return is_plain or not error.ended_by_peer  # it went away altogether: nothing was learnt
        return True

    # -- a bookie in trouble -------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self._timeouts = 0
        self._out_since = None

    async def _after_failure(self, error: _Failed) -> None:
        """Pause before the same is asked again, or give up for good."""
        now = self._loop.time()
        if error.is_timeout:
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_MAX:
                self._given_up = error.text
            return
        if self._out_since is None:
            self._out_since = now
        is_registered = self._pool.directory.address(self._bookie_id) is not None
        if not is_registered or now - self._out_since >= self._timeout_s:
            self._given_up = error.text
            return
        await asyncio.sleep(RETRY_PAUSE_S)

    async def _after_busy(self) -> None:
        if self._out_since is None:
            self._out_since = self._loop.time()
        if self._loop.time() - self._out_since >= self._timeout_s:
            self._given_up = "busy: the bookie takes no more requests"
            return
        await asyncio.sleep(BUSY_PAUSE_S)


def _jobs(fragments: Sequence[Fragment], *, entries: str) -> Iterator[_Job]:
    for fragment in fragments:
        is_known = fragment.ledger.limit is not None
        is_listing = entries == "listed" and is_known
        if entries == "ends" and is_known:
            for entry_id in fragment.shared_ends():
                yield _Job(replace(fragment, first=entry_id, last=entry_id), (entry_id,), is_last=True)
            continue
        entry_ids = fragment.entry_ids()
        step = LISTING_ENTRIES_MAX if is_listing else _step(fragment)
        for start in range(0, len(entry_ids), step):
            yield _Job(fragment, entry_ids[start : start + step], start + step >= len(entry_ids), is_listing)


def _step(fragment: Fragment) -> int:
    """Entries that are read at once."""
    return max(1, min(REQUEST_ENTRIES_MAX, REQUEST_BYTES // (fragment.ledger.entry_size + FRAME_OVERHEAD)))


def _pieces(job: _Job, entry_ids: Sequence[int]) -> Iterator[_Job]:
    """Instead of the listing `job`: these entries are read, a piece at a time, and each is asked of the budget."""
    step = _step(job.fragment)
    for start in range(0, len(entry_ids), step):
        is_end = start + step >= len(entry_ids)
        yield _Job(job.fragment, entry_ids[start : start + step], is_end and job.is_last)


def _held(runs: Sequence[tuple[int, int]], wanted: Sequence[int]) -> set[int]:
    """Those of `wanted` (ascending) that are in `runs`."""
    held: set[int] = set()
    for first, count in runs:
        held.update(wanted[bisect_left(wanted, first) : bisect_left(wanted, first + count)])
    return held


def _words(status: int) -> str:
    if status == Status.UNKNOWN_LEDGER_STATE:
        return "limbo: the bookie lost data and may have held it"
    return f"{status_name(status).lower()}: the bookie could not read it"
