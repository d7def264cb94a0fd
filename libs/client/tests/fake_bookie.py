"""FakeBookie: a bookie in this process that speaks protocols v3 and v2 and stores entries in memory.

It implements the operations of the protocol that a client uses: fencing, master keys, LACs, long polls. Tests make it
fail by `stop` and `start`, `freeze` (it receives requests and answers none), `refuse` (it answers a status), or by
changing its entries.
"""

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from bindery_core.entry import peek_ids, peek_lac
from bindery_core.errors import BinderyError
from bindery_core.formats import availability
from bindery_core.ids import BookieId
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec, RequestDecoder
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    AddRequest,
    AddResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadFlag,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)


def _bound_socket(port: int) -> socket.socket:
    """A socket on this port of the loopback address; 0: on any free port. It refuses connections until it listens."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


class Ledger:
    def __init__(self, master_key: bytes) -> None:
        self.master_key = master_key
        self.entries: dict[int, bytes] = {}
        self.fenced = False
        self.lac = -1
        self.explicit_packet: bytes | None = None
        self.polls: list[tuple[ReadRequest, Callable[[], None]]] = []


class FakeBookie:
    def __init__(self, bookie_id: str) -> None:
        self.bookie_id = BookieId(bookie_id)
        self.ledgers: dict[int, Ledger] = {}
        self.port = 0
        self.requests: dict[str, int] = defaultdict(int)
        """Number of received requests by the name of their class."""
        self.add_batches: list[int] = []
        """Number of adds in each socket read."""
        self.batch_count_max = 3
        """Maximum number of entries of a batch read; 0: an old bookie, which closes the connection at a batch read."""
        self.free_disk_space: int | None = None
        self.info_requested: list[int] = []
        self.total_disk_space: int | None = None
        self.wire_versions: dict[str, set[int]] = defaultdict(set)
        """Wire versions of received requests by the name of their class."""
        self.write_flags: set[int] = set()
        self.batch_reads_refused = 0
        self.batch_reads: list[tuple[int, int]] = []
        """(first entry, requested number of entries) of each batch read."""
        self._refused: dict[str, int] = {}
        self._frozen = False
        self._held: list[tuple[_Connection, Request, Codec]] = []
        self._server: asyncio.Server | None = None
        self._reserved: socket.socket | None = None
        """Socket that reserves the port of a stopped bookie, so that no other connection gets it."""
        self.connections: set[_Connection] = set()

    async def start(self) -> None:
        """Listen, on the same port as before after a `stop`."""
        loop = asyncio.get_running_loop()
        listening = _bound_socket(self.port)
        self._server = await loop.create_server(lambda: _Connection(self), sock=listening)
        self.port = listening.getsockname()[1]
        self._release_port()

    async def stop(self) -> None:
        """Stop as in a crash: connections are reset and requests are not answered; stored entries are kept."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._reserved = _bound_socket(self.port)
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop permanently and release the port."""
        await self.stop()
        self._release_port()

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def freeze(self) -> None:
        """Receive requests without processing them."""
        self._frozen = True

    def thaw(self) -> None:
        """End `freeze`: process and answer the requests that were received meanwhile."""
        self._frozen = False
        held, self._held = self._held, []
        for connection, request, codec in held:
            connection.carry_out(request, codec)

    def drop_held(self) -> None:
        """End `freeze`, but never answer the requests that were received meanwhile."""
        self._frozen = False
        self._held.clear()

    def refuse(self, request: type, status: Status | None) -> None:
        """Answer every request of this class with `status`; None: process such requests again."""
        if status is None:
            self._refused.pop(request.__name__, None)
        else:
            self._refused[request.__name__] = int(status)

    def corrupt(self, ledger_id: int, entry_id: int) -> None:
        """Flip a bit in the payload of a stored entry."""
        frame = bytearray(self.ledgers[ledger_id].entries[entry_id])
        frame[-1] ^= 1
        self.ledgers[ledger_id].entries[entry_id] = bytes(frame)

    def take(self, connection: "_Connection", request: Request, codec: Codec) -> Response | None:
        """Process one request; None: it is answered later, or never."""
        name = type(request).__name__
        self.requests[name] += 1
        self.wire_versions[name].add(codec.VERSION)
        if self._frozen:
            self._held.append((connection, request, codec))
            return None
        return self.answer(connection, request)

    def answer(self, connection: "_Connection", request: Request) -> Response | None:
        refused = self._refused.get(type(request).__name__)
        match request:
            case AddRequest():
                return AddResponse(
                    request.txn_id,
                    self._add(request) if refused is None else refused,
                    request.ledger_id,
                    request.entry_id,
                )
            case ReadRequest():
                if refused is not None:
                    return ReadResponse(request.txn_id, refused, request.ledger_id, request.entry_id)
                return self._read(connection, request)
            case BatchReadRequest():
                return self._read_batch(connection, request)
            case ForceLedgerRequest():
                return ForceLedgerResponse(request.txn_id, refused or Status.OK, request.ledger_id)
            case BookieInfoRequest():
                self.info_requested.append(request.requested)
                return BookieInfoResponse(
                    request.txn_id,
                    Status.OK,
                    total_disk_capacity=self.total_disk_space if request.requested & 1 else None,
                    free_disk_space=self.free_disk_space if request.requested & 2 else None,
                )
            case ListEntriesRequest():
                return self._list_entries(request)
            case WriteLacRequest():
                ledger = self._ledger(request.ledger_id, request.master_key)
                ledger.explicit_packet = request.body
                self._raise_lac(ledger, request.lac)
                return WriteLacResponse(request.txn_id, Status.OK, request.ledger_id)
            case ReadLacRequest():
                return self._read_lac(request)
            case _:
                raise AssertionError(f"not expected from this client: {request}")

    def _ledger(self, ledger_id: int, master_key: bytes) -> Ledger:
        return self.ledgers.setdefault(ledger_id, Ledger(master_key))

    def _add(self, request: AddRequest) -> int:
        ledger_id, entry_id = peek_ids(request.body)
        ledger = self._ledger(ledger_id, request.master_key)
        if ledger.master_key != request.master_key:
            return Status.UNAUTHORIZED
        if ledger.fenced and not request.recovery:
            return Status.FENCED
        ledger.entries[entry_id] = request.body
        self.write_flags.add(request.write_flags)
        self._raise_lac(ledger, peek_lac(request.body))
        return Status.OK

    def _raise_lac(self, ledger: Ledger, lac: int) -> None:
        if lac > ledger.lac:
            ledger.lac = lac
            self._wake(ledger)

    def _wake(self, ledger: Ledger) -> None:
        polls, ledger.polls = ledger.polls, []
        for _request, wake in polls:
            wake()

    def _read(self, connection: "_Connection", request: ReadRequest) -> Response | None:
        if request.flag == ReadFlag.FENCE_LEDGER:
            ledger = self._ledger(request.ledger_id, request.master_key or b"")
            if ledger.master_key != request.master_key:
                return ReadResponse(request.txn_id, Status.UNAUTHORIZED, request.ledger_id, request.entry_id)
            ledger.fenced = True
            self._wake(ledger)
        found = self.ledgers.get(request.ledger_id)
        if found is None:
            return ReadResponse(request.txn_id, Status.NO_LEDGER, request.ledger_id, request.entry_id)
        if request.previous_lac is not None and request.flag != ReadFlag.FENCE_LEDGER:
            if found.lac <= request.previous_lac and request.timeout_ms:
                connection.park(found, request)
                return None
            return self.poll_answer(found, request)
        entry_id = max(found.entries, default=-1) if request.entry_id == -1 else request.entry_id
        body = found.entries.get(entry_id)
        max_lac = None if request.flag == ReadFlag.FENCE_LEDGER else found.lac
        status = Status.OK if body is not None else Status.NO_ENTRY
        return ReadResponse(request.txn_id, status, request.ledger_id, request.entry_id, body, max_lac)

    def _read_batch(self, connection: "_Connection", request: BatchReadRequest) -> Response | None:
        if not self.batch_count_max:
            self.batch_reads_refused += 1
            connection.transport.close()
            return None
        self.batch_reads.append((request.entry_id, request.count_max))
        ledger = self.ledgers.get(request.ledger_id)
        status, bodies = Status.NO_LEDGER, []
        if ledger is not None:
            for entry_id in range(request.entry_id, request.entry_id + min(self.batch_count_max, request.count_max)):
                if entry_id not in ledger.entries:
                    break
                bodies.append(ledger.entries[entry_id])
            status = Status.OK if bodies else Status.NO_ENTRY
        return BatchReadResponse(
            request.txn_id, status, request.ledger_id, request.entry_id, request.request_id, tuple(bodies)
        )

    def _list_entries(self, request: ListEntriesRequest) -> Response:
        ledger = self.ledgers.get(request.ledger_id)
        if ledger is None:
            return ListEntriesResponse(request.txn_id, Status.NO_LEDGER, request.ledger_id)
        runs: list[tuple[int, int]] = []
        for entry_id in sorted(ledger.entries):
            if runs and sum(runs[-1]) == entry_id:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((entry_id, 1))
        return ListEntriesResponse(request.txn_id, Status.OK, request.ledger_id, availability.encode(runs))

    @staticmethod
    def poll_answer(ledger: Ledger, request: ReadRequest) -> Response:
        assert request.previous_lac is not None
        if ledger.lac <= request.previous_lac:
            return ReadResponse(request.txn_id, Status.OK, request.ledger_id, -1, None, ledger.lac)
        entry_id = request.previous_lac + 1
        return ReadResponse(
            request.txn_id, Status.OK, request.ledger_id, entry_id, ledger.entries.get(entry_id), ledger.lac, 1
        )

    def _read_lac(self, request: ReadLacRequest) -> Response:
        ledger = self.ledgers.get(request.ledger_id)
        if ledger is None or (not ledger.entries and ledger.explicit_packet is None):
            return ReadLacResponse(request.txn_id, Status.NO_ENTRY, request.ledger_id)
        last = ledger.entries[max(ledger.entries)] if ledger.entries else None
        status = Status.OK if last is not None else Status.IO_ERROR
        return ReadLacResponse(request.txn_id, status, request.ledger_id, ledger.explicit_packet, last)


class _Connection(asyncio.Protocol):
    def __init__(self, bookie: FakeBookie) -> None:
        self.bookie = bookie
        self.decoder = FrameDecoder()
        self.requests = RequestDecoder()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self.bookie.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bookie.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            in_v3, in_v2 = self.requests.decode(self.decoder.feed(data))
        except BinderyError:
            self.transport.abort()
            return
        adds = sum(type(request) is AddRequest for request in [*in_v3, *in_v2])
        if adds:
            self.bookie.add_batches.append(adds)
        codecs: tuple[tuple[list[Request], Codec], ...] = ((in_v3, v3), (in_v2, v2))
        for requests, codec in codecs:
            responses = [self.bookie.take(self, request, codec) for request in requests]
            self.send([response for response in responses if response is not None], codec)

    def carry_out(self, request: Request, codec: Codec) -> None:
        response = self.bookie.answer(self, request)
        if response is not None:
            self.send([response], codec)

    def send(self, responses: list[Response], codec: Codec = v3) -> None:
        if responses and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write(codec.encode_responses(responses))

    def park(self, ledger: Ledger, request: ReadRequest) -> None:
        assert request.timeout_ms

        def answer() -> None:
            timer.cancel()
            self.send([FakeBookie.poll_answer(ledger, request)])

        def expire() -> None:
            ledger.polls.remove(poll)
            answer()

        poll = (request, answer)
        timer = asyncio.get_running_loop().call_later(request.timeout_ms / 1000, expire)
        ledger.polls.append(poll)
