"""Read the entries of many fragments from one bookie, within a byte budget. Failures become rows, not exceptions.

The reader never fences, recovers or writes. It sends plain and batch reads of wire version 2, WINDOW_BYTES in flight.

| entries | what is read of a fragment                                                                        |
|---------|---------------------------------------------------------------------------------------------------|
| all     | every entry                                                                                       |
| listed  | the bookie's list of entries, the first and the last entry; every entry if the bookie cannot list |
| ends    | the first and last entry of each bookie's share, if they are also in this bookie's share          |

| the bookie's response                        | the rows of the requested entries                                 |
|----------------------------------------------|-------------------------------------------------------------------|
| an entry frame                               | present; verified here                                            |
| NO_ENTRY, NO_LEDGER                          | not present, after the metadata is read again: see `_Absent`      |
| UNKNOWN_LEDGER_STATE                         | error `limbo`                                                     |
| TOO_MANY_REQUESTS                            | retried until `timeout_s`, then error `busy`                      |
| another status                               | error, the name of the status in lower case, as in `io_error`     |
| none within the timeout                      | error `timeout`                                                   |
| the connection is refused or lost            | retried until `timeout_s`, then error `unreachable`               |
| (the bookie is not registered)               | error `unreachable`, at once                                      |

After TIMEOUTS_MAX timeouts in a row, or an outage of `timeout_s`, the reader sends no more requests to this bookie. The
remaining rows get the same error.
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
"""Target size of a batch read in bytes. Larger reads delay the bookie's other clients."""
REQUEST_ENTRIES_MAX: Final = 1_000
"""Maximum number of entries of a batch read."""
WINDOW_BYTES: Final = 4 * REQUEST_BYTES
"""Estimated size in bytes of the jobs in flight at which no more are started."""
WINDOW_REQUESTS: Final = 32
"""Maximum number of jobs in flight."""
BUSY_PAUSE_S: Final = 0.05
"""Pause in seconds after the response TOO_MANY_REQUESTS."""
RETRY_PAUSE_S: Final = 0.25
"""Pause in seconds before a failed request, or one for missing entries, is repeated."""
TIMEOUTS_MAX: Final = 3
"""Number of consecutive timeouts after which no more requests are sent."""
REREAD_MAX: Final = 1_000
"""Maximum number of missing entries of an open ledger that are requested a second time before they count as absent."""
LISTING_BYTES: Final = 1024
"""Size in bytes at which a list of entries is charged to the budget."""
LISTING_ENTRIES_MAX: Final = 1_000_000
"""Maximum number of entries of one job that lists entries."""
_ABSENT: Final = (int(Status.NO_ENTRY), int(Status.NO_LEDGER))
_UNANSWERED: Final = "unanswered: the bookie answered for other entries"


class MetadataReader(Protocol):
    """Reads the current metadata of a ledger."""

    async def read(self, ledger_id: LedgerId) -> LedgerMetadata:
        """Raises NoSuchLedger, MetadataUnavailable, or Corrupt if the metadata cannot be decoded."""
        ...


class Sink(Protocol):
    """Builds rows from what a reader receives, fragment by fragment: `rows.EntryRows` and `blocks.Blocks`, which
    documents the methods."""

    def __len__(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    def add_frames(self, fragment: Fragment, entry_ids: Sequence[int], frames: Sequence[bytes]) -> None: ...

    def add_listed(self, fragment: Fragment, entry_ids: Sequence[int]) -> None: ...

    def add_absent(self, fragment: Fragment, entry_ids: Sequence[int]) -> None: ...

    def add_error(self, fragment: Fragment, entry_ids: Sequence[int], error: str) -> None: ...

    def add_unexpected(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None: ...

    def add_unlisted(self, ledger_id: int, segment: int, error: str) -> None: ...

    def complete(self, fragment: Fragment, upto: int, *, is_last: bool) -> None:
        """Process that all entries of the fragment before `upto` were added. `is_last`: the fragment is complete."""
        ...

    def take(self) -> pa.RecordBatch: ...


class _Failed(Exception):
    """A request got no response. `text`: the error of the rows."""

    def __init__(self, text: str, *, is_timeout: bool = False, ended_by_peer: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_timeout = is_timeout
        self.ended_by_peer = ended_by_peer


class _Request:
    """Collects `count` responses. `done` returns all of them, or raises _Failed."""

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
        text = f"{error.message}: {cause}" if cause else error.message
        ended = cause == CLOSED_BY_PEER or cause.startswith("ConnectionResetError")
        self._fail(_Failed(f"unreachable: {text}", ended_by_peer=ended))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._fail(_Failed("timeout: no answer in time", is_timeout=True))

    def _fail(self, error: _Failed) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True)
class _JobResult:
    """Result of one job."""

    present: list[int] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    listed: Sequence[int] = ()
    absent: list[int] = field(default_factory=list)
    errors: dict[str, list[int]] = field(default_factory=dict)
    unlisted: Sequence[int] = ()
    """Entries to read instead, because the bookie cannot list. The other fields are then empty."""

    def take(self, entry_id: int, status: int, frame: bytes | None) -> None:
        if status == Status.OK and frame is not None:
            self.present.append(entry_id)
            self.frames.append(frame)
        elif status in _ABSENT:
            self.absent.append(entry_id)
        else:
            self.errors.setdefault(_error_text(status), []).append(entry_id)


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of a fragment that is requested together."""

    fragment: Fragment
    entry_ids: Sequence[int]
    """Ascending. A range is read with one batch read."""
    is_last: bool
    """Whether this is the last job of its fragment."""
    is_listing: bool = False
    """Whether the entries are listed, and only the first and the last entry read."""

    @property
    def size(self) -> int:
        if self.is_listing:
            return 2 * (self.fragment.ledger.entry_size + FRAME_OVERHEAD) + LISTING_BYTES
        return len(self.entry_ids) * (self.fragment.ledger.entry_size + FRAME_OVERHEAD)


@dataclass(slots=True)
class _Absent:
    """Entries of a fragment that the bookie does not have. They are reported at the fragment's end, after the ledger's
    metadata is read again: if the ledger was deleted or moved to other bookies after planning, nothing is missing."""

    entry_ids: list[int] = field(default_factory=list)


class BookieReader:
    """Reads fragments of one bookie. Used from one event loop."""

    def __init__(
        self,
        pool: BookiePool,
        metadata: MetadataReader,
        bookie_id: BookieId,
        *,
        budget: Budget,
        timeout_s: float,
        rows: Sink | None = None,
    ) -> None:
        """`rows`: builds the rows from responses. None: one row per entry."""
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
        """The error after which no more requests are sent. Empty: requests are sent."""
        self._timeouts = 0
        self._out_since: float | None = None

    async def read(self, fragments: Sequence[Fragment], *, entries: str = "all") -> AsyncIterator[pa.RecordBatch]:
        """Yield batches of rows. `entries`: all, listed or ends. No request is in flight when a batch is yielded, so a
        slow caller causes no timeouts."""
        async with aclosing(self._read(_jobs(fragments, entries=entries))) as batches:
            async for batch in batches:
                yield batch
        if len(self._rows):
            yield self._rows.take()

    async def _read(self, jobs: Iterator[_Job]) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield full batches. The remaining rows stay in the sink."""
        running: deque[tuple[_Job, asyncio.Task[_JobResult]]] = deque()
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
                    # Wait for all running jobs: rows stay in order, and no request is in flight during these reads.
                    await asyncio.wait([task, *(each for _, each in running)])
                    async with aclosing(self._read(_pieces(job, found.unlisted))) as batches:
                        async for batch in batches:
                            yield batch
                    is_draining = self._rows.is_full
                    continue
                self._charge(sum(map(len, found.frames)) - job.size)
                await self._report(job, found)
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
        """Charge the budget for `beyond` bytes by which the entries exceeded the estimate."""
        if beyond > 0:
            self._budget.take(beyond, now=self._loop.time())

    # -- results -------------------------------------------------------------------------------------------------------

    async def _report(self, job: _Job, found: _JobResult) -> None:
        fragment = job.fragment
        self._report_found(fragment, found)
        limit = -1 if fragment.ledger.limit is None else fragment.ledger.limit
        self._absent.entry_ids += [entry_id for entry_id in found.absent if entry_id <= limit]
        if job.is_last and self._absent.entry_ids:
            absent, self._absent = self._absent, _Absent()
            await self._report_absent(fragment, absent.entry_ids)
        if job.is_last or not self._absent.entry_ids:
            self._rows.complete(fragment, job.entry_ids[-1] + 1, is_last=job.is_last)

    def _report_found(self, fragment: Fragment, found: _JobResult) -> None:
        if found.listed:
            self._rows.add_listed(fragment, found.listed)
        if found.present:
            self._rows.add_frames(fragment, found.present, found.frames)
        for text, entry_ids in found.errors.items():
            self._rows.add_error(fragment, entry_ids, text)

    async def _report_absent(self, fragment: Fragment, absent: list[int]) -> None:
        ledger = fragment.ledger
        try:
            metadata = await self._metadata.read(ledger.ledger_id)
        except (NoSuchLedger, Corrupt):
            return
        absent = [entry_id for entry_id in absent if is_expected(metadata, self._bookie_id, entry_id)]
        if not ledger.is_closed and absent:
            # An ack quorum confirmed these entries; this bookie may receive its copies a moment later.
            again, rest = absent[:REREAD_MAX], absent[REREAD_MAX:]
            await asyncio.sleep(RETRY_PAUSE_S)
            found = await self._run(_Job(fragment, again, is_last=True))
            self._report_found(fragment, found)
            absent = [*found.absent, *rest]
        if absent:
            self._rows.add_absent(fragment, absent)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> _JobResult:
        found = _JobResult()
        if job.fragment.ledger.limit is None:
            text = "unreachable: too few bookies of the ensemble reported the end of the ledger"
            found.errors[text] = list(job.entry_ids)
            return found
        left = list(job.entry_ids)
        if job.is_listing:
            left = await self._list(job, found)
            if len(left) > _step(job.fragment) and not self._given_up:
                return _JobResult(unlisted=left)
        while left:
            if self._given_up:
                found.errors.setdefault(self._given_up, []).extend(left)
                break
            try:
                left = await self._request(job.fragment.ledger.ledger_id, left, found)
            except _Failed as error:
                await self._after_failure(error)
        return found

    async def _request(self, ledger_id: LedgerId, left: list[int], found: _JobResult) -> list[int]:
        """Request the entries `left`, at least the first of them. Return those that are still to be requested."""
        is_run = left[-1] - left[0] == len(left) - 1 and len(left) > 1
        if not is_run or self._bookie_id in self._pool.without_batch_reads:
            return await self._read_singly(ledger_id, left, found)
        try:
            response = await self._read_batch(ledger_id, left[0], len(left))
        except _Failed as error:
            if error.ended_by_peer and self._out_since is None and not await self._supports_batch_reads(ledger_id):
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
            return await self._read_singly(ledger_id, left, found)
        # The first entry is missing or unreadable. The others are requested singly, all at once.
        found.take(left[0], response.status, None)
        return await self._read_singly(ledger_id, left[1:], found) if len(left) > 1 else []

    async def _list(self, job: _Job, found: _JobResult) -> list[int]:
        """Request the bookie's list of the job's entries. Return the entries that still have to be read."""
        fragment, wanted = job.fragment, job.entry_ids
        ledger_id = fragment.ledger.ledger_id
        while not self._given_up:
            try:
                response = await self._request_list(ledger_id)
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
                found.errors.setdefault(_error_text(response.status), []).extend(wanted)
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

    async def _request_list(self, ledger_id: LedgerId) -> ListEntriesResponse:
        request = ListEntriesRequest(self._pool.txn_id(), ledger_id)
        sink = _Request(1)
        connection = self._pool.connection(self._bookie_id, 3)
        connection.send(v3.encode_request(request), (request.txn_id,), sink, timeout_s=self._timeout_s)
        (response,) = await sink.done
        # Bookies without this request answer with an error that names no operation.
        return response if isinstance(response, ListEntriesResponse) else ListEntriesResponse(0, -1, ledger_id)

    async def _read_batch(self, ledger_id: LedgerId, first: int, count: int) -> BatchReadResponse:
        request = BatchReadRequest(v2.VERSION, ledger_id, first, self._pool.txn_id(), count, 2 * REQUEST_BYTES)
        sink = _Request(1)
        began = self._loop.time()
        self._send(v2.encode_request(request), [v2.key_of(request)], sink)
        (response,) = await sink.done
        assert isinstance(response, BatchReadResponse)
        self._pressure.observe(self._loop.time() - began, size=sum(map(len, response.bodies)))
        return response

    async def _read_singly(self, ledger_id: LedgerId, left: list[int], found: _JobResult) -> list[int]:
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

    async def _supports_batch_reads(self, ledger_id: LedgerId) -> bool:
        """Probe a bookie that closed the connection: without support for batch reads it still answers a plain read."""
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
                return is_plain or not error.ended_by_peer  # after a failed plain read, the probe proves nothing
        return True

    # -- failures ------------------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self._timeouts = 0
        self._out_since = None

    async def _after_failure(self, error: _Failed) -> None:
        """Pause before the request is repeated, or stop sending requests to this bookie."""
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
            self._given_up = "busy: the bookie accepts no more requests"
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
    """Number of entries per batch read."""
    return max(1, min(REQUEST_ENTRIES_MAX, REQUEST_BYTES // (fragment.ledger.entry_size + FRAME_OVERHEAD)))


def _pieces(job: _Job, entry_ids: Sequence[int]) -> Iterator[_Job]:
    """Jobs that read these entries, because the bookie did not list them. Each job is charged to the budget."""
    step = _step(job.fragment)
    for start in range(0, len(entry_ids), step):
        is_end = start + step >= len(entry_ids)
        yield _Job(job.fragment, entry_ids[start : start + step], is_end and job.is_last)


def _held(runs: Sequence[tuple[int, int]], wanted: Sequence[int]) -> set[int]:
    """Return the entries of `wanted` (ascending) that are in `runs`."""
    held: set[int] = set()
    for first, count in runs:
        held.update(wanted[bisect_left(wanted, first) : bisect_left(wanted, first + count)])
    return held


def _error_text(status: int) -> str:
    if status == Status.UNKNOWN_LEDGER_STATE:
        return "limbo: the bookie lost data, perhaps this entry"
    return f"{status_name(status).lower()}: the bookie could not read it"
