"""BookieConnection: one client's connection. Bytes in, requests to the operations, answers out, and no more than fits.

Nothing is read from the socket while one of these holds; each is a reason of its own, and TCP passes the pressure on:

| reason     | since                                                     | until                                |
|------------|-----------------------------------------------------------|--------------------------------------|
| unsent     | the client does not read: `unsent_size_max` bytes wait    | a quarter of that waits              |
| adds       | this connection sent adds while the budget was used up    | the budget is low                    |
| reads      | PENDING_READS_MAX reads wait for room                     | half of them do                      |
| operations | `operations_max` other operations are under way           | half of them are                     |
| securing   | START_TLS was answered                                    | the handshake is over                |

Until the gate is open a frame may have CLEAR_FRAME_SIZE_MAX bytes.

Both protocols are spoken on the one port (`bindery_core.wire.detection`); an answer goes out in the protocol of its
request. Until the gate is open (`gate`), requests are answered by it and get no further.

Plain reads are issued in batches of a third of what waits, and of about READ_BATCH_SIZE bytes at most by the running
average of what entries were, so that a thousand reads of large entries do not become gigabytes. What the caches hold is
answered in the same turn of the event loop, as far as `read_turns` allows. The bytes of each batch are charged to the
budget of reads from its issue until its answer left the process, or, while the client reads, until it was handed to the
transport. A client that takes hardly anything for `unsent_time_max_s` is cut off once others wait for the bytes that it
holds: a few stopped processes would end all reads of the bookie otherwise.

Securing: START_TLS is answered in clear; all that is written afterwards waits for the handshake and goes out encrypted.
It must be the last thing that its client sends in clear: bytes behind it end the connection, so that nobody on the way
can slip requests in before the encryption which are carried out after it. All but AUTH, for Apache's client sends its
first one behind START_TLS without waiting (AuthHandler.ClientSideHandler.channelActive): where TLS is not required, and
a token in clear is thus good enough, it is looked at once the connection is secured.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from bindery_core.errors import BadRequest, BinderyError, TooManyRequests, Unauthorized
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec, RequestDecoder
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    AuthRequest,
    BatchReadRequest,
    ReadRequest,
    Request,
    StartTlsRequest,
    StartTlsResponse,
    Status,
)

from bindery_bookie.access.authentication import certificate_names
from bindery_bookie.access.clear_frames import CLEAR_FRAME_SIZE_MAX, frames_before_handshake
from bindery_bookie.access.security import Security
from bindery_bookie.server.operations import Operations
from bindery_bookie.settings import ServerSettings

READ_BATCH_SIZE: Final = 1024 * 1024
READ_BATCH_COUNT_MAX: Final = 512
READ_BATCH_COUNT_MIN: Final = 32
"""As far as reads wait and bytes allow. A third of what waits is a batch, so that the client takes the first answers
while the next are made."""
READ_BATCHES_MAX: Final = 4
"""Batches of one connection under way at a time: while one waits for the disk, the next may come from a cache."""
PENDING_READS_MAX: Final = 10_000
TLS_SHUTDOWN_TIMEOUT_S: Final = 1.0
"""How long the end of a secured connection waits for the client to say that it heard of it."""
_FIRST_ENTRY_SIZE_GUESS = 64 * 1024


class ConnectionOwner(Protocol):
    """The server, as its connections see it."""

    settings: ServerSettings
    security: Security
    operations: Operations

    def opened(self, connection: "BookieConnection") -> bool:
        """False: one too many, close."""

    def closed(self, connection: "BookieConnection", error: Exception | None) -> None: ...

    def refused(self, connection: "BookieConnection", error: BinderyError) -> None:
        """Its bytes were no requests, or, Unauthorized, its client did not show who it is. It is being closed, but for
        one with a certificate that is not enough, to which the gate stays shut. TooManyRequests: it does not take its
        answers while others wait."""

    def keep(self, task: asyncio.Task[None]) -> None:
        """Own `task`: hold it, and await it at the end."""


class BookieConnection(asyncio.Protocol):
    """Invariants: `_reasons` is empty exactly while the socket is read; after `connection_lost` nothing is written and
    every byte charged to a budget was given back."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._operations = owner.operations
        self._settings = owner.settings
        self._gate = owner.security.gate()
        """None once it is open."""
        frame_size_max = owner.settings.frame_size_max
        if self._gate is not None:  # nobody knows yet whose bytes these are, and no budget counts half a frame
            frame_size_max = min(frame_size_max, CLEAR_FRAME_SIZE_MAX)
        self._decoder = FrameDecoder(frame_size_max=frame_size_max)
        self._requests = RequestDecoder()
        self._gate_timer: asyncio.TimerHandle | None = None
        self._tls_request: StartTlsRequest | None = None
        self._is_securing = False
        self._is_secure = False
        self._held_answers: list[bytes] = []
        """Written while the handshake goes on."""
        self._upgrading: asyncio.Task[None] | None = None
        self._is_waiting_in_clear = False
        """The handshake has not begun; its task holds the socket too, and has to be told when the connection goes."""
        self._hasty: list[tuple[Sequence[Request], Codec]] = []
        """AUTH that came in clear behind START_TLS."""
        self._early: list[bytes] = []
        """Decrypted before we heard that the handshake was over."""
        self._transport: asyncio.Transport | None = None
        self.peer_name = "?"
        self._reasons: set[str] = set()
        self._unsent = False
        self._is_lost = False
        self._held_size = 0
        """Bytes of read answers that the transport could not get rid of yet."""
        self._unsent_timer: asyncio.TimerHandle | None = None
        """Once begun it runs on while answers are unsent, and ends when it finds none: pauses come by the thousand."""
        self._unsent_before: int | None = None
        """Bytes unsent when it last looked, if they were above the low mark ever since."""
        self._pending_reads: deque[ReadRequest | BatchReadRequest] = deque()
        self._pending_v3 = 0
        """How many of them, the foremost, are to be answered in v3."""
        self._read_batches = 0
        self._is_issuing = False
        self._is_queued = False
        """For a turn of its own, and holds a byte of the budget, so that nobody takes the reads for answered."""
        self._waiting_for_room = False
        self._entry_size = float(_FIRST_ENTRY_SIZE_GUESS)
        self._operation_count = 0
        self._cancelled_when_gone: set[asyncio.Task[None]] = set()

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer_name = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        high = self._settings.unsent_size_max
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        if not self._owner.opened(self):
            self._transport.abort()
        elif self._gate is not None:
            timeout_s = self._owner.security.auth_timeout_s
            self._gate_timer = asyncio.get_running_loop().call_later(timeout_s, self._gate_expired)

    def data_received(self, data: bytes) -> None:
        if self._is_securing:
            self._early.append(data)
            return
        try:
            in_v3, in_v2 = self._requests.decode(self._decoder.feed(data))
        except BinderyError as error:
            self._refuse(error)
            return
        if in_v3:
            if self._owner.security.tls is not None and not self._is_secure:
                at = _start_tls_index(in_v3)
                if at is not None and (at < len(in_v3) - 1 or in_v2 or self._decoder.buffered_size):
                    if reason := self._reason_to_refuse([*in_v3[at + 1 :], *in_v2]):
                        self._refuse(reason)
                        return
                    self._hasty = [(in_v3[at + 1 :], v3), (in_v2, v2)]
                    in_v3, in_v2 = in_v3[: at + 1], []
            self._handle(in_v3, v3)
            if self._tls_request is not None:
                self._secure()
                return
        if in_v2:
            self._handle(in_v2, v2)

    def _handle(self, requests: Sequence[Request], codec: Codec) -> None:
        if self._gate is not None:
            verdict = self._gate.admit(requests, version=codec.VERSION)
            if verdict.answers:
                self.send(codec.encode_responses(verdict.answers))
            if verdict.close is not None:
                self._owner.refused(self, verdict.close)
                self.close()
                return
            requests = verdict.passed
            self._look_at_gate()
        if requests and self._transport is not None and not self._transport.is_closing():
            self._operations.handle(self, requests, codec)

    def eof_received(self) -> bool:
        return False  # nobody half-closes; the answers under way would have no reader

    def pause_writing(self) -> None:
        self._unsent = True
        self._unsent_before = None
        if self._unsent_timer is None and not self._is_lost:
            self._watch_unsent()
        self._pause("unsent")

    def resume_writing(self) -> None:
        self._unsent = False
        self._give_held()
        self._resume("unsent")
        self._issue_reads()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_lost:
            return  # the transport in clear and the encrypted one may both tell
        self._is_lost = True
        self._transport = None
        if self._upgrading is not None and self._is_waiting_in_clear:
            self._upgrading.cancel()
        self._operations.pending_reads -= len(self._pending_reads)
        self._pending_reads.clear()
        self._pending_v3 = 0
        self._held_answers.clear()
        if self._waiting_for_room:
            self._waiting_for_room = False
            self._operations.reads_budget.forget(self._room_for_reads)
        self._give_held()
        for timer in (self._gate_timer, self._unsent_timer):
            if timer is not None:
                timer.cancel()
        for task in self._cancelled_when_gone:
            task.cancel()
        self._owner.closed(self, error)

    # --- operations.Peer ------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._is_securing:
            self._held_answers.append(data)
        elif self._transport is not None:
            self._transport.write(data)

    def spawn(self, work: Coroutine[Any, Any, None], *, until_gone: bool = False) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._owner.keep(task)
        self._operation_count += 1
        task.add_done_callback(self._operation_done)
        if until_gone:
            self._cancelled_when_gone.add(task)
            task.add_done_callback(self._cancelled_when_gone.discard)
        if self._operation_count >= self._settings.operations_max:
            self._pause("operations")
        return task

    def wait_for_adds(self) -> None:
        if "adds" not in self._reasons:
            self._pause("adds")
            self._operations.adds_budget.when_low(self._adds_are_low)

    def enqueue_reads(self, reads: Sequence[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        self._pending_reads.extend(reads)
        if codec.VERSION == v3.VERSION:
            self._pending_v3 += len(reads)  # none in v2 can be in front of them
        if len(self._pending_reads) >= PENDING_READS_MAX:
            self._pause("reads")
        self._issue_reads()

    def start_tls(self, request: StartTlsRequest) -> None:
        if self._owner.security.tls is None or self._is_secure:
            self.send(v3.encode_response(StartTlsResponse(request.txn_id, Status.BAD_REQUEST)))
        else:
            self._tls_request = request  # `data_received` goes on with it, once all of the batch was handed on

    # --- the server's side ----------------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Take no further requests and end long polls; other answers under way are still sent."""
        if self._is_securing:
            self.abort()  # nothing was promised through it yet
        self._pause("stopping")
        for task in self._cancelled_when_gone:
            task.cancel()

    def close(self) -> None:
        """Send what is written, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is unsent is lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _refuse(self, error: BinderyError) -> None:
        self._owner.refused(self, error)
        self.abort()

    def _reason_to_refuse(self, behind: Sequence[Request]) -> BinderyError | None:
        """Why a connection ends that sent these requests, and perhaps half of one, in clear behind START_TLS."""
        if self._decoder.buffered_size or any(type(request) is not AuthRequest for request in behind):
            return BadRequest("bytes in clear behind START_TLS")
        if self._owner.security.tls_required:
            return Unauthorized("a token was sent in clear: TLS is required")
        return None

    async def _take_hasty(self, transport: asyncio.Transport) -> None:
        """AUTH that was sent with START_TLS and came later than it. Raises BadRequest, TooLarge, OSError."""
        self._is_waiting_in_clear = True
        try:
            frames = await frames_before_handshake(transport)
        finally:
            self._is_waiting_in_clear = False
        messages = self._decoder.feed(b"".join(frames))
        in_v3, in_v2 = self._requests.decode(messages)
        reason = self._reason_to_refuse([*in_v3, *in_v2])
        if reason is not None:
            raise reason
        self._hasty += [(requests, codec) for requests, codec in ((in_v3, v3), (in_v2, v2)) if requests]

    def _look_at_gate(self) -> None:
        if self._gate is not None and self._gate.is_open:
            self._gate = None
            self._decoder.allow(self._settings.frame_size_max)
            if self._gate_timer is not None:
                self._gate_timer.cancel()

    def _gate_expired(self) -> None:
        self._refuse(Unauthorized("no authentication in time", timeout_s=self._owner.security.auth_timeout_s))

    def _secure(self) -> None:
        """Answer START_TLS and begin the handshake."""
        request, self._tls_request = self._tls_request, None
        transport = self._transport
        if request is None or transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size():
            self._refuse(BadRequest("START_TLS while answers are unread"))
            return
        transport.write(v3.encode_response(StartTlsResponse(request.txn_id, Status.OK)))
        self._pause("securing")
        self._is_securing = True
        self._upgrading = asyncio.get_running_loop().create_task(self._upgrade(transport))
        self._owner.keep(self._upgrading)

    async def _upgrade(self, transport: asyncio.Transport) -> None:
        security = self._owner.security
        assert security.tls is not None
        try:
            if self._gate is not None and not security.tls_required:
                async with asyncio.timeout(security.handshake_timeout_s):
                    await self._take_hasty(transport)
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                security.tls,
                server_side=True,
                ssl_handshake_timeout=security.handshake_timeout_s,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
            )
        except BinderyError as error:
            self._refuse(error)
            return
        except (OSError, TimeoutError) as error:
            self._owner.refused(self, Unauthorized("TLS handshake failed", cause=_handshake_error(error)))
            transport.abort()
            self.connection_lost(error)
            return
        if secured is None or secured.is_closing() or self._is_lost:
            # Aborted meanwhile: asyncio's loops end such a handshake without an error, and tell the protocol nothing.
            transport.abort()
            self.connection_lost(None)
            return
        self._transport = secured
        high = self._settings.unsent_size_max
        secured.set_write_buffer_limits(high=high, low=high // 4)
        self._is_securing = False
        self._is_secure = True
        self._reasons.discard("securing")
        if self._reasons:
            secured.pause_reading()
        if self._gate is not None:
            try:
                self._gate.secured(certificate_names(secured.get_extra_info("peercert")))
            except Unauthorized as error:
                # As BookKeeper's bookies do: one more answer to START_TLS, and a gate that stays shut.
                self._owner.refused(self, error)
                self.send(v3.encode_response(StartTlsResponse(0, Status.IO_ERROR)))
            self._look_at_gate()
        held, self._held_answers = self._held_answers, []
        if held:
            self.send(b"".join(held))
        hasty, self._hasty = self._hasty, []
        for requests, codec in hasty:
            self._handle(requests, codec)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)
        self._issue_reads()

    def _issue_reads(self) -> None:
        if not self._is_issuing and not self._is_queued:  # else it goes on by itself
            self._issue_up_to(self._operations.read_turns.share())

    def _issue_in_turn(self, share: int) -> None:
        self._is_queued = False
        self._issue_up_to(share)
        self._operations.reads_budget.give(1)

    def _issue_up_to(self, share: int) -> None:
        turns = self._operations.read_turns
        self._is_issuing = True
        try:
            while self._may_issue_reads():
                if share <= 0:
                    self._is_queued = True
                    self._operations.reads_budget.take(1)
                    turns.queue(self._issue_in_turn)
                    break
                issued = self._issue_batch(share)
                share -= issued
                turns.spend(issued)
        finally:
            self._is_issuing = False
        if len(self._pending_reads) <= PENDING_READS_MAX // 2:
            self._resume("reads")

    def _may_issue_reads(self) -> bool:
        if not self._pending_reads or self._unsent or self._is_securing or self._read_batches >= READ_BATCHES_MAX:
            return False
        budget = self._operations.reads_budget
        if budget.is_over:
            if not self._waiting_for_room:
                self._waiting_for_room = True
                budget.when_low(self._room_for_reads)
            return False
        return True

    def _issue_batch(self, count_max: int) -> int:
        """The reads in it, at most `count_max`."""
        budget = self._operations.reads_budget
        pending = self._pending_reads
        codec: Codec = v3 if self._pending_v3 else v2
        self._read_batches += 1
        head = pending[0]
        if type(head) is BatchReadRequest:
            pending.popleft()
            self._taken(1)
            count_max, size_max = self._operations.batch_limits(head)
            guess = int(max(self._entry_size, min(count_max * self._entry_size, size_max)))
            budget.take(guess)
            sent = partial(self._batch_sent, guess)
            self._operations.read_batch(self, head, codec, self._entry_size, sent)
            return 1
        wanted = len(pending)
        if wanted > 1:
            wanted = min(
                max(READ_BATCH_COUNT_MIN, wanted // 3),
                READ_BATCH_COUNT_MAX,
                count_max,
                max(1, int(READ_BATCH_SIZE / self._entry_size)),
                self._pending_v3 or wanted,
                wanted,
            )
        batch: list[ReadRequest] = []
        while len(batch) < wanted and type(read := pending[0]) is ReadRequest:
            batch.append(read)
            pending.popleft()
        guess = int(len(batch) * self._entry_size)
        self._taken(len(batch))
        budget.take(guess)
        self._operations.read(self, batch, codec, partial(self._reads_sent, len(batch), guess))
        return len(batch)

    def _taken(self, count: int) -> None:
        self._operations.pending_reads -= count
        self._pending_v3 = max(0, self._pending_v3 - count)

    def _batch_sent(self, guess: int, size: int, count: int) -> None:
        self._reads_sent(count, guess, size)

    def _reads_sent(self, count: int, guess: int, size: int) -> None:
        self._read_batches -= 1
        seen = size / max(1, count)  # up at once, down slowly: a reader of several ledgers changes between sizes
        self._entry_size = max(64.0, seen, 0.8 * self._entry_size + 0.2 * seen)
        budget = self._operations.reads_budget
        if self._unsent and self._transport is not None:
            budget.take(size)
            self._held_size += size
        budget.give(guess)
        self._issue_reads()

    def _room_for_reads(self) -> None:
        self._waiting_for_room = False
        self._issue_reads()

    def _give_held(self) -> None:
        held, self._held_size = self._held_size, 0
        self._operations.reads_budget.give(held)

    def _watch_unsent(self) -> None:
        seconds = self._settings.unsent_time_max_s
        self._unsent_timer = asyncio.get_running_loop().call_later(seconds, self._look_at_unsent)

    def _look_at_unsent(self) -> None:
        """Cut the client off if it took next to nothing since the last look, and others wait for what it holds."""
        self._unsent_timer = None
        if not self._unsent or self._transport is None:
            return
        before, now = self._unsent_before, self._transport.get_write_buffer_size()
        self._unsent_before = now
        # More than before: answers that were under way came. They are few, for nothing is read from it now.
        is_stuck = before is not None and 0 <= before - now < self._settings.unsent_size_max // 2
        others = self._operations.reads_budget.waiting - self._waiting_for_room
        if is_stuck and self._held_size and others:
            seconds = self._settings.unsent_time_max_s
            error = TooManyRequests("answers are not taken while others wait", unsent_size=now, seconds=seconds)
            self._refuse(error)
        else:
            self._watch_unsent()

    def _adds_are_low(self) -> None:
        self._resume("adds")

    def _operation_done(self, _: asyncio.Task[None]) -> None:
        self._operation_count -= 1
        if self._operation_count <= self._settings.operations_max // 2:
            self._resume("operations")

    def _pause(self, reason: str) -> None:
        if not self._reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._reasons.add(reason)  # while securing the handshake reads, and "securing" is the reason

    def _resume(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.discard(reason)
            if not self._reasons and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()


def _start_tls_index(requests: Sequence[Request]) -> int | None:
    """Where the first START_TLS is."""
    return next((at for at, request in enumerate(requests) if type(request) is StartTlsRequest), None)


def _handshake_error(error: BaseException) -> str:
    """What OpenSSL says, without its source line."""
    return getattr(error, "reason", None) or str(error) or type(error).__name__
