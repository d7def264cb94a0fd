"""Requests that run in a task of their own, for a peer in memory and a simulated clock."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.back_pressure import BackPressureBudget
from bindery_bookie.server.peer import Wait
from bindery_bookie.server.single_operations import OPERATIONS_FREE_COUNT, SingleOperations, read_some
from bindery_bookie.settings import ServerSettings
from bindery_bookie.state import BookieState
from bindery_core.errors import DamagedStorage, LedgerStateUnknown
from bindery_core.formats import availability
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import ReadFlag, ReadRequest, ReadResponse, Request, Response, Status
from bindery_kit.observability.quiet_log import QuietLog

KEY = b"k" * 20


def entry(entry_id: int, *, lac: int = -1) -> bytes:
    return b"".join(number.to_bytes(8, "big", signed=True) for number in (1, entry_id, lac, 0)) + b"payload"


class MemoryPeer:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.adds_in_progress = self.pending_read_count = self.operation_count = 0
        self.group = "10.0.0.1"
        self.is_unsent = self.is_gone = False
        self.sent: list[bytes] = []
        self.tls: list[m.StartTlsRequest] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.polls: list[Wait] = []
        self.dropped = asyncio.Event()
        """Whether a long poll has ended since the last one began."""

    def send(self, data: bytes) -> None:
        self.sent += FrameDecoder().feed(data)

    def enqueue_reads(self, reads: Sequence[ReadRequest | m.BatchReadRequest], codec: Codec) -> None:
        raise AssertionError

    async def until_read(self) -> None: ...

    def start_tls(self, request: m.StartTlsRequest) -> None:
        self.tls.append(request)

    def spawn(self, work: Coroutine[Any, Any, None], *, is_long_poll: bool = False) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def hold_poll(self, poll: Wait) -> None:
        self.polls.append(poll)
        self.dropped.clear()

    def drop_poll(self, poll: Wait) -> None:
        self.polls.remove(poll)
        self.dropped.set()

    def wait_for_adds(self) -> None:
        raise AssertionError

    def disconnect(self) -> None:
        for poll in tuple(self.polls):
            poll.end()
        self.is_gone = True


class World:
    def __init__(self, store: Any, **settings: Any) -> None:
        self.store = store
        self.state = BookieState()
        clock = asyncio.get_running_loop().time
        self.metrics = BookieMetrics(clock=clock)
        limits = ServerSettings(**settings)
        self.budget = BackPressureBudget(limits.operations_total_max)
        self.operations = SingleOperations(
            store,
            self.state,
            self.metrics,
            limits,
            budget=self.budget,
            clock=clock,
            log=QuietLog(__name__, clock=clock),
        )
        self.peer = MemoryPeer()

    def start(self, request: Request, codec: Codec = v3) -> None:
        self.operations.start(self.peer, request, codec)
        self.operations.send_refused(self.peer, codec)

    def responses(self, codec: Codec = v3) -> list[Response]:
        """Return what was sent since the last call."""
        sent, self.peer.sent = self.peer.sent, []
        return [codec.decode_response(one) for one in sent]

    async def ask(self, request: Request, codec: Codec = v3) -> Response:
        self.start(request, codec)
        while self.peer.polls:
            await self.peer.dropped.wait()
        await asyncio.gather(*self.peer.tasks)
        (response,) = self.responses(codec)
        return response

    def put(self, entry_id: int, *, lac: int = -1) -> bytes:
        body = entry(entry_id, lac=lac)
        statuses: list[Sequence[int]] = []
        self.store.add_many([m.AddRequest(0, 1, entry_id, KEY, body)], statuses.append)
        assert statuses == [[0]]
        return body

    def counts(self, name: str) -> tuple[int, int]:
        """Return how often the operation succeeded and failed."""
        operation = self.metrics.operations[name]
        return operation.success.count, operation.failure.count


@pytest.fixture
async def world(memory_store: Any) -> World:
    return World(memory_store)


# --- fences


def fence(entry_id: int = -1, key: bytes | None = KEY, txn_id: int = 7) -> ReadRequest:
    return ReadRequest(txn_id, 1, entry_id, flag=ReadFlag.FENCE_LEDGER, master_key=key)


async def test_a_fencing_read_fences_and_returns_the_entry(world: World) -> None:
    body = world.put(0)
    assert await world.ask(fence()) == ReadResponse(7, 0, 1, -1, body)
    assert world.store.ledgers[1].fenced
    assert world.counts("READ_ENTRY_FENCE") == (1, 0)


async def test_a_fencing_read_of_a_missing_entry_fences_nevertheless(world: World) -> None:
    world.put(0)
    assert await world.ask(fence(5)) == ReadResponse(7, Status.NO_ENTRY, 1, 5)
    assert world.store.ledgers[1].fenced
    assert world.counts("READ_ENTRY_FENCE") == (0, 1)


async def test_a_fence_without_the_key_is_unauthorized(world: World) -> None:
    world.put(0)
    for key in (None, b"wrong"):
        assert await world.ask(fence(key=key)) == ReadResponse(7, Status.UNAUTHORIZED, 1, -1)
    assert not world.store.ledgers[1].fenced


async def test_a_fencing_read_answers_once_the_fence_is_durable(world: World) -> None:
    body = world.put(0)
    world.store.hold()
    world.start(fence())
    await asyncio.sleep(5)
    assert world.responses() == []
    world.store.release()
    await asyncio.sleep(0.01)
    assert world.responses() == [ReadResponse(7, 0, 1, -1, body)]
    success = world.metrics.operations["READ_ENTRY_FENCE"].success
    assert success.count == 1


async def test_a_fencing_read_in_v2_is_answered_in_v2(world: World) -> None:
    body = world.put(0)
    response = await world.ask(fence(0), v2)
    assert isinstance(response, ReadResponse)
    assert (response.status, response.body) == (0, body)


# --- long polls


def poll(
    previous: int = -1,
    timeout_ms: int | None = 60_000,
    *,
    txn_id: int = 7,
    entry_id: int = -1,
    flag: int | None = None,
) -> ReadRequest:
    flag = int(ReadFlag.ENTRY_PIGGYBACK) if flag is None else flag
    return ReadRequest(txn_id, 1, entry_id, flag=flag, previous_lac=previous, timeout_ms=timeout_ms)


async def test_a_long_poll_returns_the_next_entry_once_the_lac_exceeds_it(world: World) -> None:
    body = world.put(0)
    world.start(poll())
    await asyncio.sleep(10)
    assert world.responses() == []
    assert world.operations.long_polls == 1
    assert world.peer.tasks == [], "a long poll that waits takes the memory of a task"
    world.put(1, lac=0)
    await asyncio.sleep(0.01)
    assert world.responses() == [ReadResponse(7, 0, 1, 0, body, 0, 1_700_000_000_000)]
    assert world.operations.long_polls == 0
    assert world.store.ledgers[1].watchers == []
    assert world.counts("READ_ENTRY_LONG_POLL") == (1, 0)


async def test_a_long_poll_for_an_older_lac_is_answered_at_once(world: World) -> None:
    world.put(0)
    second = world.put(1, lac=0)
    world.put(2, lac=1)
    assert await world.ask(poll(0)) == ReadResponse(7, 0, 1, 1, second, 1, 1_700_000_000_001)


async def test_a_long_poll_that_times_out_has_no_body(world: World) -> None:
    world.put(0)
    began = asyncio.get_running_loop().time()
    assert await world.ask(poll(timeout_ms=2500)) == ReadResponse(7, 0, 1, -1, None, -1)
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.5)
    assert world.store.ledgers[1].watchers == []


async def test_a_long_poll_waits_no_longer_than_the_limit(memory_store: Any) -> None:
    world = World(memory_store, long_poll_timeout_max_s=3.0)
    world.put(0)
    began = asyncio.get_running_loop().time()
    assert await world.ask(poll(timeout_ms=2**40)) == ReadResponse(7, 0, 1, -1, None, -1)
    assert asyncio.get_running_loop().time() - began == pytest.approx(3.0)


@pytest.mark.parametrize("timeout_ms", [None, 0, -5])
async def test_a_long_poll_without_a_timeout_does_not_wait(world: World, timeout_ms: int | None) -> None:
    world.put(0)
    began = asyncio.get_running_loop().time()
    assert await world.ask(poll(timeout_ms=timeout_ms)) == ReadResponse(7, 0, 1, -1, None, -1)
    assert asyncio.get_running_loop().time() == began


async def test_a_long_poll_of_the_shortest_timeout_waits(world: World) -> None:
    world.put(0)
    began = asyncio.get_running_loop().time()
    await world.ask(poll(timeout_ms=1))
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.001)


async def test_a_fence_wakes_a_long_poll(world: World) -> None:
    world.put(0)
    world.start(poll())
    await asyncio.sleep(1)
    await world.store.fence(1, KEY)
    await asyncio.sleep(0.01)
    assert world.responses() == [ReadResponse(7, 0, 1, -1, None, -1)]


async def test_a_lac_that_advances_before_the_watch_is_set_is_not_missed(world: World) -> None:
    body = world.put(0)
    watch = world.store.watch_lac

    def late(ledger_id: int, wake: Any) -> Any:
        world.put(1, lac=0)
        return watch(ledger_id, wake)

    world.store.watch_lac = late
    began = asyncio.get_running_loop().time()
    assert await world.ask(poll()) == ReadResponse(7, 0, 1, 0, body, 0, 1_700_000_000_000)
    assert asyncio.get_running_loop().time() == began
    assert world.store.ledgers[1].watchers == []


async def test_a_long_poll_whose_next_entry_is_on_other_bookies_has_no_body(world: World) -> None:
    world.put(1, lac=0)
    assert await world.ask(poll()) == ReadResponse(7, 0, 1, -1, None, 0, 1_700_000_000_000)


async def test_an_unknown_time_of_the_lac_is_not_sent(world: World) -> None:
    world.put(1, lac=0)
    world.store.ledgers[1].lac_updated_at_ms = 0
    assert await world.ask(poll()) == ReadResponse(7, 0, 1, -1, None, 0, None)


async def test_a_long_poll_whose_next_entry_cannot_be_read_fails(world: World) -> None:
    world.put(1, lac=0)
    world.store.ledgers[1].entries[0] = Status.IO_ERROR
    assert await world.ask(poll()) == ReadResponse(7, Status.IO_ERROR, 1, -1)


async def test_a_long_poll_without_piggyback_reads_the_entry_it_names(world: World) -> None:
    body = world.put(0)
    world.put(1, lac=0)
    assert await world.ask(poll(entry_id=0, flag=0)) == ReadResponse(7, 0, 1, 0, body, 0)
    assert await world.ask(poll(entry_id=9, flag=0)) == ReadResponse(7, Status.NO_ENTRY, 1, 9)


async def test_a_piggyback_long_poll_with_an_entry_id_is_a_bad_request(world: World) -> None:
    world.put(0)
    assert await world.ask(poll(entry_id=5)) == ReadResponse(7, Status.BAD_REQUEST, 1, 5)
    assert world.peer.tasks == []


async def test_a_long_poll_of_an_unknown_ledger_is_answered_at_once(world: World) -> None:
    assert await world.ask(poll()) == ReadResponse(7, Status.NO_LEDGER, 1, -1)


async def test_a_long_poll_of_a_ledger_that_cannot_be_read_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails one request, not the connection."""

    def broken(ledger_id: int) -> int:
        raise OSError("index: closed")

    monkeypatch.setattr(world.store, "last_add_confirmed", broken)
    assert await world.ask(poll()) == ReadResponse(7, Status.IO_ERROR, 1, -1)


async def test_long_polls_are_bounded(memory_store: Any) -> None:
    world = World(memory_store, long_polls_max=2)
    world.put(0)
    for txn_id in range(5):
        world.start(poll(txn_id=txn_id))
    assert world.responses() == [ReadResponse(n, Status.TOO_MANY_REQUESTS, 1, -1) for n in (3, 4)]
    assert world.metrics.reads_rejected == 2
    await asyncio.sleep(0.01)
    assert world.responses() == [ReadResponse(0, 0, 1, -1, None, -1)]
    assert world.operations.long_polls == 2


async def test_above_the_limit_the_long_poll_that_has_waited_longest_is_answered(memory_store: Any) -> None:
    world = World(memory_store, long_polls_max=2)
    world.put(0)
    for txn_id in (1, 2, 3):
        world.start(poll(txn_id=txn_id))
        await asyncio.sleep(0.01)
    assert world.responses() == [ReadResponse(1, 0, 1, -1, None, -1)]
    assert world.operations.long_polls == 2
    assert world.metrics.reads_rejected == 0


async def test_operations_beyond_twice_the_limit_are_refused(memory_store: Any) -> None:
    world = World(memory_store, operations_total_max=3)
    world.put(0)
    world.budget.take(6)
    world.peer.operation_count = OPERATIONS_FREE_COUNT
    world.start(m.ForceLedgerRequest(7, 1))
    assert world.responses() == [m.ForceLedgerResponse(7, Status.TOO_MANY_REQUESTS, 1)]
    world.budget.give(1)
    assert await world.ask(m.ForceLedgerRequest(8, 1)) == m.ForceLedgerResponse(8, 0, 1)
    assert world.counts("FORCE_LEDGER") == (1, 1)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_long_poll_that_ends_with_its_connection_makes_room(world: World, is_begun: bool) -> None:
    world.put(0)
    world.start(poll())
    if is_begun:
        await asyncio.sleep(1)
    world.peer.disconnect()
    await asyncio.sleep(0.01)
    assert world.operations.long_polls == 0
    assert world.store.ledgers[1].watchers == []
    assert world.responses() == []


# --- LACs, forces, lists, info


async def test_a_lac_is_written(world: World) -> None:
    assert await world.ask(m.WriteLacRequest(7, 1, 4, KEY, b"packet")) == m.WriteLacResponse(7, 0, 1)
    assert (world.store.ledgers[1].lac, world.store.ledgers[1].explicit_packet) == (4, b"packet")
    assert await world.ask(m.WriteLacRequest(7, 1, 4, b"x", b"p")) == m.WriteLacResponse(7, Status.UNAUTHORIZED, 1)
    assert world.counts("WRITE_LAC") == (1, 1)


async def test_a_read_only_bookie_writes_no_lac(world: World) -> None:
    world.state.set_read_only("disk", "full")
    world.state.high_priority_writes = True
    assert await world.ask(m.WriteLacRequest(7, 1, 4, KEY, b"p")) == m.WriteLacResponse(7, Status.READ_ONLY, 1)
    assert world.store.ledgers == {}


async def test_the_status_of_a_read_lac_is_that_of_its_entry(world: World) -> None:
    """A ledger with an explicit LAC and no entry is answered as BookKeeper does."""
    assert await world.ask(m.ReadLacRequest(7, 1)) == m.ReadLacResponse(7, Status.NO_ENTRY, 1)
    await world.store.fence(1, KEY)
    assert await world.ask(m.ReadLacRequest(7, 1)) == m.ReadLacResponse(7, Status.NO_ENTRY, 1)
    world.store.ledgers[1].explicit_packet = b"packet"
    assert await world.ask(m.ReadLacRequest(7, 1)) == m.ReadLacResponse(7, Status.IO_ERROR, 1, b"packet")
    body = world.put(0) if not world.store.ledgers[1].fenced else entry(0)
    world.store.ledgers[1].entries[0] = body
    assert await world.ask(m.ReadLacRequest(7, 1)) == m.ReadLacResponse(7, 0, 1, b"packet", body)
    assert world.counts("READ_LAC") == (1, 3)


async def test_a_force_is_answered_once_it_is_durable(world: World) -> None:
    world.store.hold()
    world.start(m.ForceLedgerRequest(7, 1))
    await asyncio.sleep(2)
    assert (world.store.forces, world.responses()) == (1, [])
    world.store.release()
    await asyncio.sleep(0.01)
    assert world.responses() == [m.ForceLedgerResponse(7, 0, 1)]
    forces = world.metrics.operations["FORCE_LEDGER"].success
    assert forces.count == 1
    assert forces.sum == pytest.approx(2000.0)


async def test_the_entries_of_a_ledger_are_listed(world: World) -> None:
    for entry_id in (0, 1, 3):
        world.put(entry_id)
    listed = availability.encode([(0, 2), (3, 1)])
    assert await world.ask(m.ListEntriesRequest(7, 1)) == m.ListEntriesResponse(7, 0, 1, listed)
    assert await world.ask(m.ListEntriesRequest(7, 2)) == m.ListEntriesResponse(7, Status.NO_LEDGER, 2)
    assert world.counts("GET_LIST_OF_ENTRIES_OF_LEDGER") == (1, 1)


@pytest.mark.parametrize(
    ("requested", "total", "free"), [(0, None, None), (1, 1000, None), (2, None, 400), (3, 1000, 400)]
)
async def test_bookie_info_has_what_was_requested(
    world: World, requested: int, total: int | None, free: int | None
) -> None:
    assert await world.ask(m.BookieInfoRequest(7, requested)) == m.BookieInfoResponse(7, 0, total, free)


# --- answered at once


async def test_auth_is_answered_as_disabled_with_the_transaction_of_each_version(world: World) -> None:
    assert await world.ask(m.AuthRequest(7, "Some", b"token")) == m.AuthResponse(7, 0, "AuthDisabledPlugin")
    world.start(m.AuthRequest(7, "Some", b"token"), v2)
    (response,) = world.responses(v2)
    assert isinstance(response, m.AuthResponse)
    assert (response.status, response.plugin) == (0, "AuthDisabledPlugin")


async def test_start_tls_is_passed_to_the_connection(world: World) -> None:
    world.start(m.StartTlsRequest(7))
    assert world.peer.tls == [m.StartTlsRequest(7)]
    assert world.responses() == []


async def test_other_requests_are_refused(world: World) -> None:
    assert await world.ask(m.OtherRequest(7, 3, 3)) == m.ErrorResponse(7, 3, Status.BAD_REQUEST)


# --- errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DamagedStorage("bad"), Status.IO_ERROR),
        (LedgerStateUnknown(ledger_id=1), Status.UNKNOWN_LEDGER_STATE),
        (ZeroDivisionError(), Status.IO_ERROR),
    ],
    ids=["damage", "limbo", "defect"],
)
async def test_a_failed_operation_has_the_status_of_its_error(world: World, error: Exception, status: int) -> None:
    async def fail(ledger_id: int) -> None:
        raise error

    world.store.force = fail
    assert await world.ask(m.ForceLedgerRequest(7, 1)) == m.ForceLedgerResponse(7, status, 1)
    assert world.counts("FORCE_LEDGER") == (0, 1)


async def test_reads_of_several_keys_are_answered_in_order(world: World) -> None:
    body = world.put(0)
    assert await read_some(world.store, [(1, 0), (1, 9), (2, 0)]) == [body, Status.NO_ENTRY, Status.NO_LEDGER]


async def test_a_result_after_the_reader_is_gone_is_dropped(world: World) -> None:
    answers: list[Any] = []
    world.store.read_many = lambda keys, done: answers.append(done)
    task = asyncio.create_task(read_some(world.store, [(1, 0)]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers[0]([b"late"])
