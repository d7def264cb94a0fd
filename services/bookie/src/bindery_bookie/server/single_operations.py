"""SingleOperations: the requests that are answered by a task of their own, because they are rare or wait.

These are fencing reads, long polls, LACs, forces, lists of entries and bookie info. Adds and plain reads are handled in
groups (`operations`).

What a response guarantees:
- fencing read: `store.fence` has returned, so the fence is durable before the entry is looked up;
- write LAC OK: the record of the LAC is durable;
- force OK: every entry that was added before this request is durable.
Source: BookKeeper's request processors, observed on 4.17.2.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from bindery_core.errors import BinderyError, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec
from bindery_core.wire.messages import ReadFlag, ReadRequest, ReadResponse, Request, Response, Status
from bindery_core.wire.status import of_error
from bindery_kit.observability.logs import error_fields
from bindery_kit.observability.quiet_log import QuietLog

from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.back_pressure import BackPressureBudget
from bindery_bookie.server.entry_turns import ClientGone, EntryTurn, EntryTurns
from bindery_bookie.server.long_polls import LongPoll, LongPolls
from bindery_bookie.server.peer import Peer
from bindery_bookie.server.refusals import failed, refuse_other
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.store import EntryStore

OK: Final = int(Status.OK)
OPERATIONS_FREE_COUNT: Final = 2
"""Number of operations that a connection may have whatever others have, so that they cannot keep it from fencing."""
POLL_ANSWERS_DIVISOR: Final = 8
"""Of the long polls allowed, one in so many may be being answered when another one makes room for a new one: an answer
takes several times the memory of a wait, and one read of a socket could begin ten thousand."""
RequestT = TypeVar("RequestT", bound=Request)
Work = Callable[[RequestT, EntryTurn], Coroutine[Any, Any, Response]]
"""Returns the response to a request; begins its turn before it reads an entry. Raises BinderyError, which determines
the status of an error response."""


class SingleOperations:
    """Shared by all connections of a bookie. `budget` counts the operations in progress; the peers charge it. `clock`:
    monotonic seconds."""

    def __init__(
        self,
        store: EntryStore,
        state: BookieState,
        metrics: BookieMetrics,
        settings: ServerSettings,
        *,
        budget: BackPressureBudget,
        clock: Callable[[], float],
        log: QuietLog,
    ) -> None:
        self._store = store
        self._state = state
        self._metrics = metrics
        self._settings = settings
        self._budget = budget
        self._clock = clock
        self._log = log
        self._turns = EntryTurns()
        self._refused: list[Response] = []
        """Refusals of the peer whose requests are being started."""
        self._polls = LongPolls(store, self._answer_poll, timeout_max_s=settings.long_poll_timeout_max_s)
        self._polls_answered = 0
        """Number of long polls that are being answered."""

    @property
    def long_polls(self) -> int:
        """Number of long polls in progress."""
        return len(self._polls) + self._polls_answered

    def start(self, peer: Peer, request: Request, codec: Codec) -> None:
        """Start `request`, which is neither an add nor a plain read nor a batch read. Call `send_refused` after the
        last one."""
        match request:
            case ReadRequest() if request.flag == ReadFlag.FENCE_LEDGER:
                self._spawn(peer, "READ_ENTRY_FENCE", self._fence_read, request, codec)
            case ReadRequest():
                self._start_long_poll(peer, request)
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
                # Authentication is off, or is complete: BookKeeper's clients take this plugin name as "done".
                txn_id = request.txn_id if codec.VERSION == v3.VERSION else v2.VERSION
                peer.send(codec.encode_response(m.AuthResponse(txn_id, OK, v3.AUTH_DISABLED_PLUGIN)))
            case m.StartTlsRequest():
                peer.start_tls(request)
            case m.OtherRequest():
                peer.send(codec.encode_response(refuse_other(request, codec)))

    def _spawn(self, peer: Peer, name: str, work: Work[RequestT], request: RequestT, codec: Codec = v3) -> None:
        is_over = self._budget.used >= 2 * self._budget.limit  # one read of a socket could start ten thousand
        if is_over and peer.operation_count >= OPERATIONS_FREE_COUNT:
            self._refuse(name, request)
        else:
            peer.spawn(self._answer(peer, name, work, request, codec))

    def send_refused(self, peer: Peer, codec: Codec) -> None:
        """Send the refusals of requests that `start` was called for: there may be thousands, and each write of its own
        would take many times its size if the client does not read."""
        if self._refused:
            refused, self._refused = self._refused, []
            peer.send(codec.encode_responses(refused))

    def _refuse(self, name: str, request: Request) -> None:
        self._refused.append(failed(request, Status.TOO_MANY_REQUESTS))
        self._metrics.operations[name].observe(0.0, ok=False)

    async def _answer(
        self,
        peer: Peer,
        name: str,
        work: Work[RequestT],
        request: RequestT,
        codec: Codec,
        *,
        started_s: float | None = None,
    ) -> None:
        started = self._clock() if started_s is None else started_s
        turn = self._turns.turn(peer)
        try:
            try:
                response = await work(request, turn)
            except ClientGone:
                return
            except BinderyError as error:
                response = failed(request, of_error(error))
                if response.status in (Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE):
                    self._log.warning("operation_failed", operation=name, **error_fields(error))
            except Exception as error:
                # A defect must fail one request, not the connection.
                self._log.warning("operation_broken", operation=name, **error_fields(error))
                response = failed(request, Status.IO_ERROR)
            peer.send(codec.encode_response(response))
        finally:
            turn.end()
        self._metrics.operations[name].observe(self._clock() - started, ok=response.status == OK)

    async def _read_one(self, ledger_id: int, entry_id: int, turn: EntryTurn) -> bytes | int:
        await turn.begin()
        return (await read_some(self._store, [(ledger_id, entry_id)]))[0]

    async def _fence_read(self, request: ReadRequest, turn: EntryTurn) -> Response:
        if request.master_key is None:
            return failed(request, Status.UNAUTHORIZED)
        await self._store.fence(request.ledger_id, request.master_key)
        result = await self._read_one(request.ledger_id, request.entry_id, turn)
        if isinstance(result, int):
            return failed(request, result)
        return ReadResponse(request.txn_id, OK, request.ledger_id, request.entry_id, result)

    def _start_long_poll(self, peer: Peer, request: ReadRequest) -> None:
        if request.flag == ReadFlag.ENTRY_PIGGYBACK and request.entry_id != -1:
            peer.send(v3.encode_response(failed(request, Status.BAD_REQUEST)))
        elif self.long_polls >= self._settings.long_polls_max and not self._make_room():
            self._metrics.reads_rejected += 1
            self._refuse("READ_ENTRY_LONG_POLL", request)
        else:
            self._polls.wait(peer, request, started_s=self._clock())

    def _make_room(self) -> bool:
        """Answer the long poll that has waited longest. Return False if none waits, or too many are being answered."""
        answers_max = max(1, self._settings.long_polls_max // POLL_ANSWERS_DIVISOR)
        return self._polls_answered < answers_max and self._polls.answer_oldest()

    def _answer_poll(self, poll: LongPoll) -> None:
        self._polls_answered += 1
        work = self._answer(
            poll.peer, "READ_ENTRY_LONG_POLL", self._long_poll, poll.request, v3, started_s=poll.started_s
        )
        task = poll.peer.spawn(work, is_long_poll=True)
        task.add_done_callback(self._poll_answered)  # also when it is cancelled before its first step

    def _poll_answered(self, _: asyncio.Task[None]) -> None:
        self._polls_answered -= 1

    async def _long_poll(self, request: ReadRequest, turn: EntryTurn) -> Response:
        previous = request.previous_lac
        assert previous is not None
        lac = self._store.last_add_confirmed(request.ledger_id)
        ledger_id, entry_id = request.ledger_id, request.entry_id
        if request.flag != ReadFlag.ENTRY_PIGGYBACK:
            result = await self._read_one(ledger_id, entry_id, turn)
            if isinstance(result, int):
                return failed(request, result)
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, result, lac)
        if lac <= previous:
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, None, lac)
        updated_at_ms = self._store.lac_updated_at_ms(ledger_id) or None
        result = await self._read_one(ledger_id, previous + 1, turn)
        if not isinstance(result, int):
            return ReadResponse(request.txn_id, OK, ledger_id, previous + 1, result, lac, updated_at_ms)
        if result == Status.NO_ENTRY:
            # In a striped ledger the next entry may be stored on other bookies only.
            return ReadResponse(request.txn_id, OK, ledger_id, entry_id, None, lac, updated_at_ms)
        return failed(request, result)

    async def _write_lac(self, request: m.WriteLacRequest, _: EntryTurn) -> Response:
        if not self._state.accepts_add(priority=0):
            return failed(request, Status.READ_ONLY)
        await self._store.write_lac(request.ledger_id, request.master_key, request.lac, request.body)
        return m.WriteLacResponse(request.txn_id, OK, request.ledger_id)

    async def _read_lac(self, request: m.ReadLacRequest, turn: EntryTurn) -> Response:
        await turn.begin()
        try:
            lac = await self._store.read_lac(request.ledger_id)
        except NoSuchLedger:
            return failed(request, Status.NO_ENTRY)
        if lac.last_entry is not None:
            status = Status.OK
        elif lac.explicit_packet is not None:
            status = Status.IO_ERROR  # as BookKeeper answers for a ledger with an explicit LAC and no entry
        else:
            status = Status.NO_ENTRY
        return m.ReadLacResponse(request.txn_id, status, request.ledger_id, lac.explicit_packet, lac.last_entry)

    async def _force(self, request: m.ForceLedgerRequest, _: EntryTurn) -> Response:
        await self._store.force(request.ledger_id)
        return m.ForceLedgerResponse(request.txn_id, OK, request.ledger_id)

    async def _list_entries(self, request: m.ListEntriesRequest, turn: EntryTurn) -> Response:
        await turn.begin()  # its list may be as large
        encoded = availability.encode(await self._store.entry_ids(request.ledger_id))
        return m.ListEntriesResponse(request.txn_id, OK, request.ledger_id, encoded)

    async def _bookie_info(self, request: m.BookieInfoRequest, _: EntryTurn) -> Response:
        total, free = self._store.disk_usage()
        return m.BookieInfoResponse(
            request.txn_id, OK, total if request.requested & 1 else None, free if request.requested & 2 else None
        )


async def read_some(store: EntryStore, keys: Sequence[tuple[int, int]]) -> Sequence[bytes | int]:
    """Return the body or the error status of each (ledger id, entry id)."""
    answer: asyncio.Future[Sequence[bytes | int]] = asyncio.get_running_loop().create_future()

    def done(results: Sequence[bytes | int]) -> None:
        if not answer.done():
            answer.set_result(results)

    store.read_many(keys, done)
    return await answer
