"""Operations: what each request of the ledger protocol does to the store, and how it is answered.

A batch is the requests of one socket read. Its adds go to the store as one group, and its plain reads as another,
without a task, future or closure per entry. Every other request is answered by a task of its own: batch reads here, the
rest in `single_operations`.

Order: the adds of a batch are passed to the store before its other requests, so a force or a read that was sent after
an add finds it. Responses are sent in any order: clients match them by transaction id, in v2 by operation and ids.

Limits: back-pressure comes first: a connection is not read while its requests exceed a budget. Very many connections
can exceed the budgets together; adds beyond twice `adds_size_max`, reads beyond `pending_reads_max`, and other
operations beyond twice `operations_total_max`, are therefore answered with TOO_MANY_REQUESTS.

An add is answered with OK after the store has reported it, which means that its journal record is synced
(DEFERRED_SYNC: written). Source: BookKeeper's request processors, observed on 4.17.2.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, cast

from bindery_core.errors import BinderyError
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
    Status,
)
from bindery_core.wire.status import of_error
from bindery_kit.observability.logs import error_fields
from bindery_kit.observability.quiet_log import QuietLog

from bindery_bookie.access.roles import OPERATION_OF
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.back_pressure import BackPressureBudget
from bindery_bookie.server.peer import Peer
from bindery_bookie.server.read_turns import ReadTurns
from bindery_bookie.server.refusals import failed
from bindery_bookie.server.single_operations import SingleOperations, read_some
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import EntryStore

OK: Final = int(Status.OK)
ADD_OVERHEAD: Final = 512
"""Memory of an add in progress in bytes, in addition to its body: request, queue entries, response."""
PENDING_READS_FREE_COUNT: Final = 16
"""Number of waiting reads that a connection may have whatever others have, so that they cannot keep it from reading."""
READ_ANSWER_SIZE_MAX: Final = 2 * 1024 * 1024
"""Bytes of entries after which the answer to a group of reads ends. Entries may be much larger than expected, and one
entry may be requested many times."""
BATCH_STEP_COUNT_MAX: Final = 256
"""Maximum number of entries that a batch read requests from the store at once. Only their sizes show how many fit into
the response."""


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
        self.reads_budget = BackPressureBudget(settings.reads_size_max, serves_idle_groups=True)
        self.operations_budget = BackPressureBudget(settings.operations_total_max)
        """Counts operations other than adds and plain reads, without long polls."""
        self.read_turns = ReadTurns()
        self._single = SingleOperations(
            store, state, metrics, settings, budget=self.operations_budget, clock=clock, log=self._log
        )
        self.pending_reads = 0
        """Number of plain and batch reads of all connections that are not issued yet; the connections decrement it."""

    @property
    def long_polls(self) -> int:
        """Number of long polls in progress."""
        return self._single.long_polls

    def handle(self, peer: Peer, requests: Sequence[Request], codec: Codec = v3) -> None:
        """Start all `requests`. Responses are encoded by `codec` and sent to `peer` as they become available."""
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
        if others:
            try:
                for request in others:
                    self._start(peer, request, codec)
            finally:
                self._single.send_refused(peer, codec)

    def allowed(
        self,
        peer: Peer,
        requests: Sequence[Request],
        forbidden: Collection[type[Request]],
        codec: Codec,
        *,
        peer_name: str,
    ) -> Sequence[Request]:
        """Answer requests of the types `forbidden` with UNAUTHORIZED, and return the others. `peer_name`: for the log.

        Source: BookKeeper's EUA, which its clients report as UnauthorizedAccess.
        """
        refused = [request for request in requests if type(request) in forbidden]
        if not refused:
            return requests
        peer.send(codec.encode_responses([failed(request, Status.UNAUTHORIZED) for request in refused]))
        self._metrics.forbidden += len(refused)
        self._log.warning(
            "operation_forbidden",
            peer=peer_name,
            operation=OPERATION_OF[type(refused[0])].name,
            hint="the client lacks the role: auth.client_roles or auth.recovery_roles",
        )
        return [request for request in requests if type(request) not in forbidden]

    def _start(self, peer: Peer, request: Request, codec: Codec) -> None:
        match request:
            case BatchReadRequest():
                self._enqueue(peer, [request], codec)
            case ReadRequest() if request.flag != ReadFlag.FENCE_LEDGER and request.previous_lac is None:
                self._enqueue(peer, [request], codec)  # ENTRY_PIGGYBACK without a previous LAC is a plain read
            case _:
                self._single.start(peer, request, codec)

    def _enqueue(self, peer: Peer, reads: list[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        room = self._settings.pending_reads_max - self.pending_reads
        if len(reads) > room:
            room = max(0, room, PENDING_READS_FREE_COUNT - peer.pending_read_count)
        if len(reads) > room:
            refused, reads = reads[room:], reads[:room]
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
        peer.adds_in_progress += 1
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
                peer.adds_in_progress -= 1
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
        except Exception as error:  # some may be stored; IO_ERROR does not exclude that
            self._log.warning("operation_broken", operation="ADD_ENTRY", **error_fields(error))
            done([int(Status.IO_ERROR)] * count)
        if self.adds_budget.is_over:
            peer.wait_for_adds()

    def _refuse_writes(self, peer: Peer, adds: list[AddRequest], codec: Codec) -> list[AddRequest]:
        """Answer adds that are refused with READ_ONLY, and return the adds that are accepted nevertheless."""
        accepted = [add for add in adds if self._state.accepts_add(priority=add.priority)]
        refused = [add for add in adds if not self._state.accepts_add(priority=add.priority)]
        if refused:
            self._refuse(peer, refused, Status.READ_ONLY, codec)
        return accepted

    def _refuse(self, peer: Peer, adds: list[AddRequest], status: Status, codec: Codec) -> None:
        peer.send(codec.encode_add_responses(adds, [int(status)] * len(adds)))
        self._metrics.operations["ADD_ENTRY"].observe(0.0, ok=False, count=len(adds))

    # --- plain reads --------------------------------------------------------------------------------------------------

    def read(self, peer: Peer, reads: Sequence[ReadRequest], codec: Codec, sent: Callable[[int, int], None]) -> None:
        """Answer plain reads with the body and, in v3, the ledger's LAC; then call `sent(bytes, number of answers)`.

        Entries in the caches are answered before this returns. The first reads are answered, exactly once, even after
        an error: all of them, or as many as have READ_ANSWER_SIZE_MAX bytes, and at least one.
        """
        started = self._clock()
        self._metrics.reads_in_progress += len(reads)
        is_answered = False

        def done(results: Sequence[bytes | int]) -> None:
            nonlocal is_answered
            if is_answered:
                return
            is_answered = True
            size, count = 0, len(reads)
            try:
                size, count = self._answer_reads(peer, reads, results, started, codec)
            except Exception as error:
                self._log.warning("operation_broken", operation="READ_ENTRY", **error_fields(error))
                peer.send(codec.encode_responses([failed(read, Status.IO_ERROR) for read in reads]))
            finally:
                self._metrics.reads_in_progress -= len(reads)
                sent(size, count)

        try:
            self._store.read_many([(read.ledger_id, read.entry_id) for read in reads], done)
        except Exception as error:
            self._log.warning("operation_broken", operation="READ_ENTRY", **error_fields(error))
            done([int(Status.IO_ERROR)] * len(reads))

    def _answer_reads(
        self, peer: Peer, reads: Sequence[ReadRequest], results: Sequence[bytes | int], started: float, codec: Codec
    ) -> tuple[int, int]:
        """Return the number of bytes sent and of reads answered."""
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
            if read_bytes >= READ_ANSWER_SIZE_MAX:
                break
        data = codec.encode_read_responses(responses)
        peer.send(data)
        self._metrics.read_bytes += read_bytes
        latency_s = self._clock() - started
        if ok_count:
            self._metrics.operations["READ_ENTRY"].observe(latency_s, ok=True, count=ok_count)
        if ok_count < len(responses):
            self._metrics.operations["READ_ENTRY"].observe(latency_s, ok=False, count=len(responses) - ok_count)
        return len(data), len(responses)

    def _lac_or_none(self, ledger_id: int) -> int | None:
        """Return the LAC, which is optional in a response: if it cannot be read, the entry is sent without it."""
        try:
            return self._store.last_add_confirmed(ledger_id)
        except (BinderyError, OSError):
            return None

    # --- batch reads --------------------------------------------------------------------------------------------------

    def batch_limits(self, request: BatchReadRequest) -> tuple[int, int]:
        """Return the maximum numbers of entries and of bytes of the response."""
        size_max = min(request.size_max, self._settings.batch_read_size_max)
        return (request.count_max if request.count_max > 0 else 2**31 - 1), size_max

    def read_batch(
        self, peer: Peer, request: BatchReadRequest, codec: Codec, entry_size: float, sent: Callable[[int, int], None]
    ) -> None:
        """Answer with consecutive entries; then call `sent(bytes of the response, number of its entries)`.

        The first entry is sent whatever its size, the others while the response does not exceed its limits. An entry
        that is missing or cannot be read ends the batch; only if it is the first, the response is an error.
        `entry_size`: expected bytes per entry.
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
        """Append the entries of the batch to `bodies` and return the status of the response."""
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
            for found in await read_some(self._store, [(request.ledger_id, first + n) for n in range(count)]):
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
