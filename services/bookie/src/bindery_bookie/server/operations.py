"""Operations: what each request of the ledger protocol does to the store, and what it is answered.

A batch of requests is what one socket read brought. Its adds go to the store as one group and its plain reads as
another, with no task, future or closure per entry; everything else is rare and gets a task of its own.

Order. The adds of a batch are handed to the store before anything else of it, so a force or a read that was sent behind
an add finds it. Answers come in any order: clients tell them apart by transaction id, in v2 by operation and ids.

Limits. Back-pressure comes first: a connection is not read while what it brings is over a budget. What very many
connections bring at once all the same is bounded by refusals: adds beyond twice `adds_size_max`, and reads beyond
`pending_reads_max`, are answered TOO_MANY_REQUESTS.

What stands behind each answer
- add OK: the store says so, after its journal record was fdatasynced (DEFERRED_SYNC: written);
- fencing read: `store.fence` returned, that is the fence is durable, before the entry is even looked up;
- write LAC OK: its record is durable; force OK: everything added before it is.
Source: BookKeeper's request processors, observed on 4.17.2.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

from bindery_core.errors import BinderyError, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.ids import ID_MAX
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec
from bindery_core.wire.messages import (
    AddRequest,
    BatchReadRequest,
    ReadFlag,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
)
from bindery_core.wire.status import of_error
from bindery_kit.observability.logs import error_fields

from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.back_pressure import BackPressureBudget
from bindery_bookie.server.quiet_log import QuietLog
from bindery_bookie.server.read_turns import ReadTurns
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import EntryStore

OK = int(Status.OK)
RequestT = TypeVar("RequestT", bound=Request)
Work = Callable[[RequestT], Coroutine[Any, Any, Response]]
ADD_OVERHEAD: Final = 512
"""Bytes that an add under way takes beside its body: request, queue entries, its answer."""
BATCH_STEP_COUNT_MAX: Final = 256
"""Entries that a batch read asks the store for at once; how many of them fit is known only afterwards."""


class Peer(Protocol):
    """A connection as the operations see it."""

    def send(self, data: bytes) -> None:
        """Write frames; forgotten when the connection is gone."""

    def enqueue_reads(self, reads: Sequence[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        """Read these when there is room for their answers."""

    def start_tls(self, request: m.StartTlsRequest) -> None:
        """Answer, and secure the connection if that is offered."""

    def spawn(self, work: Coroutine[Any, Any, None], *, until_gone: bool = False) -> asyncio.Task[None]:
        """Run `work` in a task, which the peer's owner holds; `until_gone`: cancel it when the connection goes."""
        ...

    def wait_for_adds(self) -> None:
        """Stop reading from this connection until the budget of adds is low."""


class Operations:
    """Shared by all connections of a bookie. `clock`: monotonic seconds."""

    def __init__(
        self,
        store: EntryStore,
        state: BookieState,
        metrics: BookieMetrics,
        settings: ServerSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._state = state
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._log = QuietLog(__name__, clock=clock)
        self.adds_budget = BackPressureBudget(settings.adds_size_max)
        self.reads_budget = BackPressureBudget(settings.reads_size_max)
        self.read_turns = ReadTurns()
        self.long_polls = 0
        self.pending_reads = 0
        """Plain and batch reads of all connections that were not issued yet; connections count them down."""

    def handle(self, peer: Peer, requests: Sequence[Request], codec: Codec = v3) -> None:
        """Start everything in `requests`; answers go to `peer`, written by `codec`, as they come."""
        adds: list[AddRequest] = []
        reads: list[ReadRequest | BatchReadRequest] = []
        others: list[Request] = []
        for request in requests:
            if type(request) is AddRequest:
                adds.append(request)
            elif type(request) is ReadRequest and request.flag == 0 and request.previous_lac is None:
                reads.append(request)
            else:
                others.append(request)
        if adds:
            self._add(peer, adds, codec)
        if reads:
            self._enqueue(peer, reads, codec)
        for request in others:
            self._start(peer, request, codec)

    def _enqueue(self, peer: Peer, reads: list[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        room = self._settings.pending_reads_max - self.pending_reads
        if len(reads) > room:
            refused, reads = reads[max(room, 0) :], reads[: max(room, 0)]
            peer.send(codec.encode_responses([failed(read, Status.TOO_MANY_REQUESTS) for read in refused]))
            self._metrics.operations["READ_ENTRY"].observe(0.0, ok=False, count=len(refused))
            self._metrics.reads_rejected += len(refused)
        if reads:
            self.pending_reads += len(reads)
            peer.enqueue_reads(reads, codec)

    # --- adds ---------------------------------------------------------------------------------------------------------

    def _add(self, peer: Peer, adds: list[AddRequest], codec: Codec) -> None:
        if self._state.read_only:
            adds = self._refuse_writes(peer, adds, codec)
            if not adds:
                return
        if self.adds_budget.used >= 2 * self.adds_budget.limit:
            self._refuse(peer, adds, Status.TOO_MANY_REQUESTS, codec)
            self._metrics.adds_rejected += len(adds)
            peer.wait_for_adds()
            return
        started = self._clock()
        count = len(adds)
        entry_size = sum([len(add.body) for add in adds])
        size = entry_size + count * ADD_OVERHEAD
        metrics = self._metrics
        self.adds_budget.take(size)
        metrics.adds_in_progress += count
        is_answered = False

        def done(statuses: Sequence[int]) -> None:
            nonlocal is_answered
            if is_answered:
                return
            is_answered = True
            try:
                assert len(statuses) == count
                peer.send(codec.encode_add_responses(adds, statuses))
            except Exception as error:
                self._log.warning("operation_broken", operation="ADD_ENTRY", **error_fields(error))
                statuses = [int(Status.IO_ERROR)] * count
                peer.send(codec.encode_add_responses(adds, statuses))
            finally:
                self.adds_budget.give(size)
                metrics.adds_in_progress -= count
            latency_s = self._clock() - started
            ok_count = sum([status == OK for status in statuses])
            if ok_count:
                metrics.operations["ADD_ENTRY"].observe(latency_s, ok=True, count=ok_count)
            if ok_count == count:
                metrics.write_bytes += entry_size
            else:
                metrics.operations["ADD_ENTRY"].observe(latency_s, ok=False, count=count - ok_count)
                metrics.write_bytes += sum(
                    [len(add.body) for add, status in zip(adds, statuses, strict=True) if status == OK]
                )
                metrics.adds_rejected += sum([status == Status.TOO_MANY_REQUESTS for status in statuses])

        try:
            self._store.add_many(adds, done)
        except Exception as error:  # some may be stored, which IO_ERROR does not deny
            self._log.warning("operation_broken", operation="ADD_ENTRY", **error_fields(error))
            done([int(Status.IO_ERROR)] * count)
        if self.adds_budget.is_over:
            peer.wait_for_adds()

    def _refuse_writes(self, peer: Peer, adds: list[AddRequest], codec: Codec) -> list[AddRequest]:
        """Answer READ_ONLY where it applies; return the adds that are taken all the same."""
        accepted = [add for add in adds if self._state.accepts_add(priority=add.priority)]
        refused = [add for add in adds if not self._state.accepts_add(priority=add.priority)]
        if refused:
            self._refuse(peer, refused, Status.READ_ONLY, codec)
        return accepted

    def _refuse(self, peer: Peer, adds: list[AddRequest], status: Status, codec: Codec) -> None:
        peer.send(codec.encode_add_responses(adds, [int(status)] * len(adds)))
        self._metrics.operations["ADD_ENTRY"].observe(0.0, ok=False, count=len(adds))

    # --- plain reads --------------------------------------------------------------------------------------------------

    def read(self, peer: Peer, reads: Sequence[ReadRequest], codec: Codec, sent: Callable[[int], None]) -> None:
        """Answer plain reads with body and, in v3, the ledger's LAC; then `sent(bytes of the answers)`.

        What the caches hold is answered before this returns. Each is answered once, whatever breaks.
        """
        started = self._clock()
        self._metrics.reads_in_progress += len(reads)
        is_answered = False

        def done(results: Sequence[bytes | int]) -> None:
            nonlocal is_answered
            if is_answered:
                return
            is_answered = True
            size = 0
            try:
                size = self._answer_reads(peer, reads, results, started, codec)
            except Exception as error:
                self._log.warning("operation_broken", operation="READ_ENTRY", **error_fields(error))
                peer.send(codec.encode_responses([failed(read, Status.IO_ERROR) for read in reads]))
            finally:
                self._metrics.reads_in_progress -= len(reads)
                sent(size)

        try:
            self._store.read_many([(read.ledger_id, read.entry_id) for read in reads], done)
        except Exception as error:
            self._log.warning("operation_broken", operation="READ_ENTRY", **error_fields(error))
            done([int(Status.IO_ERROR)] * len(reads))

    def _answer_reads(
        self, peer: Peer, reads: Sequence[ReadRequest], results: Sequence[bytes | int], started: float, codec: Codec
    ) -> int:
        """The bytes sent."""
        with_lac = codec.VERSION == v3.VERSION
        responses: list[ReadResponse] = []
        answer = responses.append
        lac_of = -1
        lac: int | None = None
        ok_count = read_bytes = 0
        for read, result in zip(reads, results, strict=True):
            ledger_id = read.ledger_id
            if type(result) is not bytes:
                answer(ReadResponse(read.txn_id, cast(int, result), ledger_id, read.entry_id))
                continue
            if with_lac and ledger_id != lac_of:
                lac_of, lac = ledger_id, self._lac_or_none(ledger_id)
            answer(ReadResponse(read.txn_id, OK, ledger_id, read.entry_id, result, lac))
            ok_count += 1
            read_bytes += len(result)
        data = codec.encode_read_responses(responses)
        peer.send(data)
        self._metrics.read_bytes += read_bytes
        latency_s = self._clock() - started
        if ok_count:
            self._metrics.operations["READ_ENTRY"].observe(latency_s, ok=True, count=ok_count)
        if ok_count < len(reads):
            self._metrics.operations["READ_ENTRY"].observe(latency_s, ok=False, count=len(reads) - ok_count)
        return len(data)

    def _lac_or_none(self, ledger_id: int) -> int | None:
        """The LAC beside a body is a courtesy; an entry that was read is worth answering without it."""
        try:
            return self._store.last_add_confirmed(ledger_id)
        except (BinderyError, OSError):
            return None

    # --- batch reads --------------------------------------------------------------------------------------------------

    def batch_limits(self, request: BatchReadRequest) -> tuple[int, int]:
        """(entries at most, bytes at most) of the answer."""
        size_max = min(request.size_max, self._settings.batch_read_size_max)
        return (request.count_max if request.count_max > 0 else 2**31 - 1), size_max

    def read_batch(
        self, peer: Peer, request: BatchReadRequest, codec: Codec, entry_size: float, sent: Callable[[int, int], None]
    ) -> None:
        """Answer with consecutive entries; then `sent(bytes of the answer, entries in it)`.

        The first entry comes whatever its size; the rest while the answer fits. What is missing or cannot be read ends
        the batch, and is an error of the whole only if it is the first. `entry_size`: what entries are likely to have.
        Source: BookKeeper BatchedReadEntryProcessor.
        """
        peer.spawn(self._answer_batch(peer, request, codec, entry_size, sent))

    async def _answer_batch(
        self, peer: Peer, request: BatchReadRequest, codec: Codec, entry_size: float, sent: Callable[[int, int], None]
    ) -> None:
        started = self._clock()
        metrics = self._metrics
        metrics.reads_in_progress += 1
        bodies: list[bytes] = []
        data = b""
        try:
            try:
                status = await self._collect_batch(request, bodies, entry_size)
            except BinderyError as error:
                status = of_error(error)
            except Exception as error:
                self._log.warning("operation_broken", operation="BATCH_READ_ENTRY", **error_fields(error))
                status = int(Status.IO_ERROR)
            response = m.BatchReadResponse(
                request.txn_id, status, request.ledger_id, request.entry_id, request.request_id, tuple(bodies)
            )
            data = codec.encode_response(response)
            peer.send(data)
        finally:
            metrics.reads_in_progress -= 1
            sent(len(data), len(bodies))
        metrics.read_bytes += sum(map(len, bodies))
        metrics.operations["READ_ENTRY"].observe(self._clock() - started, ok=status == OK)

    async def _collect_batch(self, request: BatchReadRequest, bodies: list[bytes], entry_size: float) -> int:
        """Append the batch's entries to `bodies`; the answer's status."""
        if request.flag == ReadFlag.FENCE_LEDGER:
            if request.master_key is None:
                return int(Status.UNAUTHORIZED)
            await self._store.fence(request.ledger_id, request.master_key)
        count_max, size_max = self.batch_limits(request)
        size = v2.BATCH_OVERHEAD
        while len(bodies) < count_max:
            likely = int((size_max - size) / (entry_size + v2.BATCH_ENTRY_OVERHEAD)) + 1
            first = request.entry_id + len(bodies)
            count = max(1, min(likely, BATCH_STEP_COUNT_MAX, count_max - len(bodies), ID_MAX - first + 1))
            if first > ID_MAX:
                return OK
            for found in await self._read_some([(request.ledger_id, first + n) for n in range(count)]):
                if isinstance(found, int):
                    return OK if bodies else found
                size += len(found) + v2.BATCH_ENTRY_OVERHEAD
                if bodies and size > size_max:
                    return OK
                bodies.append(found)
            entry_size = max(1.0, (size - v2.BATCH_OVERHEAD) / len(bodies) - v2.BATCH_ENTRY_OVERHEAD)
            if size >= size_max:
                return OK
        return OK

    # --- everything else ----------------------------------------------------------------------------------------------

    def _start(self, peer: Peer, request: Request, codec: Codec) -> None:
        match request:
            case ReadRequest() if request.flag == ReadFlag.FENCE_LEDGER:
                self._spawn(peer, "READ_ENTRY_FENCE", self._fence_read, request, codec)
            case BatchReadRequest():
                self._enqueue(peer, [request], codec)
            case ReadRequest() if request.previous_lac is not None:
                self._start_long_poll(peer, request)
            case ReadRequest():
                self._enqueue(peer, [request], codec)  # ENTRY_PIGGYBACK without a previous LAC is a plain read
            case m.WriteLacRequest():
                self._spawn(peer, "WRITE_LAC", self._write_lac, request)
            case m.ReadLacRequest():
                self._spawn(peer, "READ_LAC", self._read_lac, request)
            case m.ForceLedgerRequest():
                self._spawn(peer, "FORCE_LEDGER", self._force, request)
            case m.ListEntriesRequest():
                self._spawn(peer, "GET_LIST_OF_ENTRIES_OF_LEDGER", self._list_entries, request)
            case m.BookieInfoRequest():
                self._spawn(peer, "GET_BOOKIE_INFO", self._bookie_info, request)
            case m.AuthRequest():
                # Nobody is asked to authenticate, or no longer: BookKeeper's clients take this name as "done".
                txn_id = request.txn_id if codec.VERSION == v3.VERSION else v2.VERSION
                peer.send(codec.encode_response(m.AuthResponse(txn_id, OK, v3.AUTH_DISABLED_PLUGIN)))
            case m.StartTlsRequest():
                peer.start_tls(request)
            case m.OtherRequest():
                peer.send(codec.encode_response(refuse_other(request, codec)))

    def _spawn(
        self,
        peer: Peer,
        name: str,
        work: Work[RequestT],
        request: RequestT,
        codec: Codec = v3,
        *,
        until_gone: bool = False,
    ) -> asyncio.Task[None]:
        return peer.spawn(self._answer(peer, name, work, request, codec), until_gone=until_gone)

    async def _answer(self, peer: Peer, name: str, work: Work[RequestT], request: RequestT, codec: Codec) -> None:
        started = self._clock()
        try:
            response = await work(request)
        except BinderyError as error:
            response = failed(request, of_error(error))
            if response.status in (Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE):
                self._log.warning("operation_failed", operation=name, **error_fields(error))
        except Exception as error:
            # A fault of ours must cost one request, not the connection's other thousand.
            self._log.warning("operation_broken", operation=name, **error_fields(error))
            response = failed(request, Status.IO_ERROR)
        peer.send(codec.encode_response(response))
        self._metrics.operations[name].observe(self._clock() - started, ok=response.status == OK)

    async def _read_some(self, keys: Sequence[tuple[int, int]]) -> Sequence[bytes | int]:
        answer: asyncio.Future[Sequence[bytes | int]] = asyncio.get_running_loop().create_future()

        def done(results: Sequence[bytes | int]) -> None:
            if not answer.done():
                answer.set_result(results)

        self._store.read_many(keys, done)
        return await answer

    async def _read_one(self, ledger_id: int, entry_id: int) -> bytes | int:
        return (await self._read_some([(ledger_id, entry_id)]))[0]

    async def _fence_read(self, request: ReadRequest) -> Response:
        if request.master_key is None:
            return failed(request, Status.UNAUTHORIZED)
        await self._store.fence(request.ledger_id, request.master_key)
        result = await self._read_one(request.ledger_id, request.entry_id)
        if isinstance(result, int):
            return failed(request, result)
        return ReadResponse(request.txn_id, OK, request.ledger_id, request.entry_id, result)

    def _start_long_poll(self, peer: Peer, request: ReadRequest) -> None:
        if request.flag == ReadFlag.ENTRY_PIGGYBACK and request.entry_id != -1:
            peer.send(v3.encode_response(failed(request, Status.BAD_REQUEST)))
        elif self.long_polls >= self._settings.long_polls_max:
            self._metrics.reads_rejected += 1
            peer.send(v3.encode_response(failed(request, Status.TOO_MANY_REQUESTS)))
        else:
            self.long_polls += 1
            task = self._spawn(peer, "READ_ENTRY_LONG_POLL", self._long_poll, request, until_gone=True)
            task.add_done_callback(self._long_poll_ended)  # also when it is cancelled before its first step

    def _long_poll_ended(self, _: asyncio.Task[None]) -> None:
        self.long_polls -= 1

    async def _long_poll(self, request: ReadRequest) -> Response:
        previous = request.previous_lac
        assert previous is not None
        lac = await self._wait_for_lac(request.ledger_id, previous, request.timeout_ms)
        ledger_id, entry_id = request.ledger_id, request.entry_id
        if request.flag != ReadFlag.ENTRY_PIGGYBACK:
            result = await self._read_one(ledger_id, entry_id)
            if isinstance(result, int):
                return failed(request, result)
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, result, lac)
        if lac <= previous:
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, None, lac)
        updated_at_ms = self._store.lac_updated_at_ms(ledger_id) or None
        result = await self._read_one(ledger_id, previous + 1)
        if not isinstance(result, int):
            return ReadResponse(request.txn_id, OK, ledger_id, previous + 1, result, lac, updated_at_ms)
        if result == Status.NO_ENTRY:
            # Striped ledgers: the next entry may well be on other bookies only.
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, None, lac, updated_at_ms)
        return failed(request, result)

    async def _wait_for_lac(self, ledger_id: int, previous: int, timeout_ms: int | None) -> int:
        """The LAC, once it is above `previous`, the time is over, or the ledger was fenced. Raises NoSuchLedger."""
        lac = self._store.last_add_confirmed(ledger_id)
        if lac > previous or not timeout_ms or timeout_ms < 0:
            return lac
        woken = asyncio.Event()
        cancel = self._store.watch_lac(ledger_id, woken.set)
        try:
            lac = self._store.last_add_confirmed(ledger_id)  # it may have moved before we watched
            if lac <= previous:
                timeout_s = min(timeout_ms / 1000, self._settings.long_poll_timeout_max_s)
                try:
                    async with asyncio.timeout(timeout_s):
                        await woken.wait()
                except TimeoutError:
                    pass
                lac = self._store.last_add_confirmed(ledger_id)
        finally:
            cancel()
        return lac

    async def _write_lac(self, request: m.WriteLacRequest) -> Response:
        if not self._state.accepts_add(priority=0):
            return failed(request, Status.READ_ONLY)
        await self._store.write_lac(request.ledger_id, request.master_key, request.lac, request.body)
        return m.WriteLacResponse(request.txn_id, OK, request.ledger_id)

    async def _read_lac(self, request: m.ReadLacRequest) -> Response:
        try:
            lac = await self._store.read_lac(request.ledger_id)
        except NoSuchLedger:
            return failed(request, Status.NO_ENTRY)
        if lac.last_entry is not None:
            status = Status.OK
        elif lac.explicit_packet is not None:
            status = Status.IO_ERROR  # what BookKeeper answers for a ledger with an explicit LAC but no entry
        else:
            status = Status.NO_ENTRY
        return m.ReadLacResponse(request.txn_id, status, request.ledger_id, lac.explicit_packet, lac.last_entry)

    async def _force(self, request: m.ForceLedgerRequest) -> Response:
        await self._store.force(request.ledger_id)
        return m.ForceLedgerResponse(request.txn_id, OK, request.ledger_id)

    async def _list_entries(self, request: m.ListEntriesRequest) -> Response:
        encoded = availability.encode(await self._store.entry_ids(request.ledger_id))
        return m.ListEntriesResponse(request.txn_id, OK, request.ledger_id, encoded)

    async def _bookie_info(self, request: m.BookieInfoRequest) -> Response:
        total, free = self._store.disk_usage()
        return m.BookieInfoResponse(
            request.txn_id, OK, total if request.requested & 1 else None, free if request.requested & 2 else None
        )


def failed(request: Request, status: int) -> Response:
    """`request` answered with `status` in both places, ids echoed."""
    match request:
        case AddRequest():
            return m.AddResponse(request.txn_id, status, request.ledger_id, request.entry_id)
        case ReadRequest():
            return ReadResponse(request.txn_id, status, request.ledger_id, request.entry_id)
        case BatchReadRequest():
            return m.BatchReadResponse(request.txn_id, status, request.ledger_id, request.entry_id, request.request_id)
        case m.WriteLacRequest():
            return m.WriteLacResponse(request.txn_id, status, request.ledger_id)
        case m.ReadLacRequest():
            return m.ReadLacResponse(request.txn_id, status, request.ledger_id)
        case m.ForceLedgerRequest():
            return m.ForceLedgerResponse(request.txn_id, status, request.ledger_id)
        case m.ListEntriesRequest():
            return m.ListEntriesResponse(request.txn_id, status, request.ledger_id)
        case m.BookieInfoRequest():
            return m.BookieInfoResponse(request.txn_id, status)
        case m.StartTlsRequest():
            return m.StartTlsResponse(request.txn_id, status)
        case m.AuthRequest():
            return m.AuthResponse(request.txn_id, status)
        case m.OtherRequest():
            return m.ErrorResponse(request.txn_id, request.operation, status)


def refuse_other(request: m.OtherRequest, codec: Codec = v3) -> Response:
    """BAD_VERSION in the operation's own answer for versions 1 and 2 (in v2: above 2), else BAD_REQUEST without one."""
    txn_id, ledger_id, status = request.txn_id, request.ledger_id, int(Status.BAD_VERSION)
    if request.version != v3.VERSION or codec.VERSION == v2.VERSION:
        match request.operation:
            case m.Operation.ADD_ENTRY:
                return m.AddResponse(txn_id, status, ledger_id, request.entry_id)
            case m.Operation.READ_ENTRY:
                return ReadResponse(txn_id, status, ledger_id, request.entry_id)
            case m.Operation.BATCH_READ_ENTRY if codec.VERSION == v2.VERSION:
                return m.BatchReadResponse(txn_id, status, ledger_id, request.entry_id, request.request_id)
            case m.Operation.WRITE_LAC:
                return m.WriteLacResponse(txn_id, status, ledger_id)
            case m.Operation.READ_LAC:
                return m.ReadLacResponse(txn_id, status, ledger_id)
            case m.Operation.FORCE_LEDGER:
                return m.ForceLedgerResponse(txn_id, status, ledger_id)
            case m.Operation.GET_LIST_OF_ENTRIES_OF_LEDGER:
                return m.ListEntriesResponse(txn_id, status, ledger_id)
            case m.Operation.GET_BOOKIE_INFO:
                return m.BookieInfoResponse(txn_id, status)
    return m.ErrorResponse(txn_id, request.operation, Status.BAD_REQUEST)
