"""FakeBookie: a bookie in this process, speaking protocol v3 through the product's codec over a dict.

It follows the operations of the protocol as a client sees them: fencing, master keys, LACs, long polls. Tests make it
fail: `stop` and `start`, `freeze` (takes requests, answers nothing), `refuse` a status, and its entries are in reach.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from bindery_core.entry import peek_ids, peek_lac
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    AddRequest,
    AddResponse,
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
        """Requests taken, by the name of their struct."""
        self.add_batches: list[int] = []
        """Adds per socket read."""
        self._refused: dict[str, int] = {}
        self._frozen = False
        self._held: list[tuple[_Connection, Request]] = []
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self) -> None:
        """Listen, on the same port as before after a `stop`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: connections are reset, nothing is answered any more; what was stored stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def freeze(self) -> None:
        """Take requests without carrying them out."""
        self._frozen = True

    def thaw(self) -> None:
        """Carry out and answer what came meanwhile."""
        self._frozen = False
        held, self._held = self._held, []
        for connection, request in held:
            connection.carry_out(request)

    def drop_held(self) -> None:
        """Thaw, but never answer what came meanwhile."""
        self._frozen = False
        self._held.clear()

    def refuse(self, request: type, status: Status | None) -> None:
        """Answer `status` to every such request; None ends it."""
        if status is None:
            self._refused.pop(request.__name__, None)
        else:
            self._refused[request.__name__] = int(status)

    def corrupt(self, ledger_id: int, entry_id: int) -> None:
        """Flip a bit of the payload of what is stored."""
        frame = bytearray(self.ledgers[ledger_id].entries[entry_id])
        frame[-1] ^= 1
        self.ledgers[ledger_id].entries[entry_id] = bytes(frame)

    def take(self, connection: "_Connection", request: Request) -> Response | None:
        """Carry out one request; None: it will be answered later, or never."""
        name = type(request).__name__
        self.requests[name] += 1
        if self._frozen:
            self._held.append((connection, request))
            return None
        return self.answer(connection, request)

    def answer(self, connection: "_Connection", request: Request) -> Response | None:
        refused = self._refused.get(type(request).__name__)
        match request:
            case AddRequest():
                return AddResponse(
                    request.txn_id, self._add(request) if refused is None else refused, request.ledger_id,
                    request.entry_id,
                )  # fmt: skip
            case ReadRequest():
                if refused is not None:
                    return ReadResponse(request.txn_id, refused, request.ledger_id, request.entry_id)
                return self._read(connection, request)
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
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self.bookie.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bookie.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            requests = v3.decode_requests(self.decoder.feed(data))
        except BinderyError:
            self.transport.abort()
            return
        adds = sum(type(request) is AddRequest for request in requests)
        if adds:
            self.bookie.add_batches.append(adds)
        responses = [self.bookie.take(self, request) for request in requests]
        self.send([response for response in responses if response is not None])

    def carry_out(self, request: Request) -> None:
        response = self.bookie.answer(self, request)
        if response is not None:
            self.send([response])

    def send(self, responses: list[Response]) -> None:
        if responses and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write(v3.encode_responses(responses))

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
