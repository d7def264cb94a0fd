"""BookieConnection: one client's connection. It decodes bytes, passes requests to the operations, and sends responses.

While one of these reasons holds, nothing is read from the socket, and TCP passes the back pressure on to the client:

| reason     | begins                                                    | ends                                 |
|------------|-----------------------------------------------------------|--------------------------------------|
| first      | its first bytes arrived                                   | its turn comes (`first_reads`)       |
| unsent     | `unsent_size_max` bytes of responses are unread           | a quarter of UNREAD_MARK is unread   |
| adds       | this connection sent adds, or a part of one, while the    | the budget is low                    |
|            | budget was used up                                        |                                      |
| frames     | it sent a part of a large frame while half of             | less is, or after two seconds        |
|            | `unfinished_size_max` was used, or resumes after adds     |                                      |
| reads      | PENDING_READS_MAX reads wait for the budget               | half of them wait                    |
| operations | `operations_max` other operations are in progress         | half of them are in progress         |
| all        | it started an operation while `operations_total_max`      | half of them are in progress, or     |
| operations | were in progress, and has more than OPERATIONS_FREE_COUNT | OPERATIONS_FREE_COUNT of its own     |
| securing   | START_TLS was answered                                    | the handshake is over                |

Both protocols are served on one port (`bindery_core.wire.detection`); a response has the protocol of its request. Until
the gate (`access.authentication`) is open, it answers all requests, and a frame has at most CLEAR_FRAME_SIZE_MAX bytes.
`access.tls_upgrade` decides about START_TLS; this class only carries out what it decides.

Plain reads are issued in batches: a third of the waiting reads, and about READ_BATCH_SIZE bytes at most, estimated by
the running average of the entry size, so that a thousand reads of large entries do not take gigabytes. If the entries
are larger than that, the first READ_ANSWER_SIZE_MAX bytes are sent, and the other reads wait again. Entries in the
caches are answered in the same turn of the event loop, as far as `read_turns` allows. The bytes of each batch are
charged to the budget of reads from its issue until its response left the process, or, while the client reads, until it
was passed to the transport. Batch reads are charged with the most that they can return. A client that reads almost
nothing for `unsent_time_max_s` is disconnected if others wait for the bytes or operations that it holds: otherwise a
few stopped clients could block all reads of the bookie. Connections wait for the budget by turns of their addresses,
and one whose address holds nothing of it does not wait while little more than the budget is used.

When the client's credentials expire or are taken back (`access.sessions`), long polls end and new requests get
UNAUTHORIZED. The connection is closed once its operations are answered and the client sends nothing more, and after
`drain_timeout_s` at the latest.

`port_limits` has the limits on what a client may occupy, whether others need it or not. They cost little while they are
not near: a frame that is incomplete after a read of the socket, or unread responses, start a timer if none runs. It
does not end with its reason; when it fires, it checks whether it still has one.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from bindery_core.errors import BinderyError, TooManyRequests, Unauthorized
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec, RequestDecoder
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    BatchReadRequest,
    ReadRequest,
    Request,
    StartTlsRequest,
    StartTlsResponse,
    Status,
)
from bindery_identity.tls import PeerCertificate
from bindery_kit.limits.address_counts import NO_ADDRESS, group_of

from bindery_bookie.access.authentication import certificate_names, refusals
from bindery_bookie.access.clear_frames import CLEAR_FRAME_SIZE_MAX, frames_before_handshake
from bindery_bookie.access.security import Security
from bindery_bookie.access.sessions import Session
from bindery_bookie.access.tls_upgrade import TlsState, TlsUpgrade
from bindery_bookie.server.operations import Operations
from bindery_bookie.server.peer import Wait
from bindery_bookie.server.port_limits import KERNEL_UNREAD_SIZE, UNREAD_MARK, PortLimits
from bindery_bookie.server.read_turns import READ_UNIT_SIZE
from bindery_bookie.server.room import BUSY, IDLE, POLLING, WAITING
from bindery_bookie.server.single_operations import OPERATIONS_FREE_COUNT
from bindery_bookie.settings import ServerSettings

READ_BATCH_SIZE: Final = 1024 * 1024
"""Approximate maximum size in bytes of a batch of reads."""
READ_BATCH_COUNT_MAX: Final = 512
"""Maximum number of reads in a batch."""
READ_BATCH_COUNT_MIN: Final = 32
"""Minimum number of reads in a batch, if as many wait and the bytes allow it. A batch is a third of the waiting reads,
so that the client reads the first responses while the next are prepared."""
READ_BATCHES_MAX: Final = 4
"""Maximum number of concurrent batches of one connection: while one waits for the disk, the next may be cached."""
PENDING_READS_MAX: Final = 10_000
"""Number of waiting reads at which the connection is no longer read."""
UNSENT_CHECKS: Final = 4
"""Number of checks in `unsent_time_max_s` whether a client reads its responses."""
ADD_SIZE_MIN: Final = 4096
"""Bytes of an incomplete frame from which on it counts as an add; other requests are smaller."""
TLS_SHUTDOWN_TIMEOUT_S: Final = 1.0
"""Seconds that closing a secured connection waits for the client's close_notify."""
_FIRST_ENTRY_SIZE_GUESS = 64 * 1024
ENDING_CHECK_S: Final = 0.1
"""Seconds between two checks whether a connection without accepted credentials can be closed, and for which no request
has arrived then: bytes that arrive after the close would make the kernel drop responses that are on their way."""
LARGE_FRAME_SIZE: Final = 64 * 1024
"""Bytes of an incomplete frame from which on it waits for those of others."""
FRAMES_CHECK_S: Final = 0.02
"""Seconds between two checks whether there is room for the rest of a large frame."""
FRAMES_WAITS_MAX: Final = 50
"""Number of checks after which one that does not go on with its frame is ended if there is still no room, and half of
those after which the rest is read in any case: clients that do not complete their frames delay others by two seconds
at most."""
FRAME_STEP_SIZE: Final = 16 * 1024
"""Bytes of a frame that must arrive within FRAMES_WAITS_MAX checks if others wait."""
_BECAUSE_OF_OTHERS: Final = frozenset({"adds", "all operations", "frames"})
"""Reasons not to read from a connection that other clients cause."""


class ConnectionOwner(Protocol):
    """The server, as its connections see it."""

    settings: ServerSettings
    security: Security
    operations: Operations
    limits: PortLimits

    def opened(self, connection: "BookieConnection") -> bool:
        """Register the connection, and count it in `limits`. False: there is no room; close it."""

    def closed(self, connection: "BookieConnection", error: Exception | None) -> None: ...

    def refused(self, connection: "BookieConnection", error: BinderyError) -> None:
        """Log and count why a connection is refused. Unauthorized: the client did not authenticate; TooManyRequests: it
        does not read its responses while others wait; otherwise its bytes are not requests. The connection is being
        closed, except after a certificate that is not allowed: then the gate stays shut."""

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to `task`, and await it at the end."""


class BookieConnection(asyncio.Protocol):
    """Invariants: `_reasons` is empty exactly while the socket is read; after `connection_lost` nothing is written and
    every byte charged to a budget was given back.

    Thousands of clients may connect at once, and a dict of so many fields takes a multiple of slots.
    """

    __slots__ = (
        "_decoder",
        "_ending_timer",
        "_ends_at_s",
        "_entry_size",
        "_first_data",
        "_first_timer",
        "_forbidden",
        "_frame_began_s",
        "_frame_seen_s",
        "_frame_seen_size",
        "_frame_timer",
        "_gate",
        "_has_room",
        "_has_waited",
        "_held_size",
        "_is_charging",
        "_is_ended",
        "_is_expired",
        "_is_first",
        "_is_issuing",
        "_is_known",
        "_is_lost",
        "_is_queued",
        "_is_unread",
        "_limits",
        "_long_poll_count",
        "_operation_count",
        "_operations",
        "_owner",
        "_pending_reads",
        "_pending_v3",
        "_polls",
        "_read_batches",
        "_reasons",
        "_refused_at_s",
        "_requests",
        "_room_timer",
        "_room_waits",
        "_session",
        "_settings",
        "_tls",
        "_transport",
        "_unfinished_size",
        "_unread_began_s",
        "_unread_seen",
        "_unread_timer",
        "_unread_written",
        "_unsent",
        "_unsent_read",
        "_unsent_since_s",
        "_unsent_timer",
        "_until_read",
        "_upgrade_size",
        "_upgrading",
        "_waiting_for_room",
        "_waits_for_operations",
        "adds_in_progress",
        "group",
        "last_request_s",
        "peer_name",
    )

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._operations = owner.operations
        self._settings = owner.settings
        self._limits = owner.limits
        self._gate = owner.security.gate()
        """None once the gate is open."""
        frame_size_max = owner.settings.frame_size_max
        if self._gate is not None:  # the client is unknown
            frame_size_max = min(frame_size_max, CLEAR_FRAME_SIZE_MAX)
        self._forbidden: frozenset[type[Request]] | None = None
        """Requests that the client's roles do not allow; None: it may send all. Set when the gate opens."""
        self._session: Session | None = None
        """Of the credentials, once the gate is open."""
        self._is_expired = False
        """Whether the credentials are not accepted any more: all requests are refused."""
        self._ending_timer: asyncio.TimerHandle | None = None
        """Runs from then on until the connection is closed."""
        self._ends_at_s = 0.0
        """Time of the loop at which it is cut off."""
        self._refused_at_s = 0.0
        """Time of the loop at which a request was refused last."""
        self._decoder = FrameDecoder(frame_size_max=frame_size_max)
        self._requests = RequestDecoder()
        self._first_timer: asyncio.TimerHandle | None = None
        """Ends the connection if the client does not authenticate, or then does not send a request, in time."""
        self._tls = TlsUpgrade(is_offered=owner.security.tls is not None, is_required=owner.security.tls_required)
        self._upgrading: asyncio.Task[None] | None = None
        """Runs the handshake that `_tls` requested."""
        self._transport: asyncio.Transport | None = None
        self.peer_name = "?"
        self.group = NO_ADDRESS
        """Address that the connection counts for."""
        self._is_first = True
        self._first_data = bytearray()
        """The first bytes, while they wait for their turn."""
        self._is_known = False
        """Whether the gate is open and a request was received."""
        self.last_request_s = 0.0
        """When the last request arrived, or the connection."""
        self.adds_in_progress = 0
        """Number of batches of adds that are not answered yet."""
        self._unfinished_size = 0
        """Bytes of the incomplete frame."""
        self._frame_began_s = 0.0
        """When the incomplete frame began, or reading from the socket was resumed within it."""
        self._frame_seen_s = 0.0
        self._frame_seen_size = 0
        """When the last FRAME_STEP_SIZE bytes of it had arrived, and its bytes then."""
        self._frame_timer: asyncio.TimerHandle | None = None
        self._room_timer: asyncio.TimerHandle | None = None
        """Runs while the rest of a large frame waits for those of others."""
        self._room_waits = 0
        self._has_waited = False
        """Whether the incomplete frame has waited for those of others; it does so once."""
        self._reasons: set[str] = set()
        self._unsent = False
        self._is_ended = False
        """Whether this bookie has ended the connection at once; `connection_lost` follows."""
        self._is_lost = False
        self._held_size = 0
        """Bytes of read responses that are in the transport's buffer."""
        self._unsent_timer: asyncio.TimerHandle | None = None
        """Runs until it finds no unsent responses. There is no timer per pause, because there are thousands of
        pauses."""
        self._until_read: list[asyncio.Future[None]] = []
        """Completed when there are no unsent responses any longer."""
        self._unsent_read = 0
        """Of the bytes in `_unread_written`, those that the client had read when it had last read enough of them."""
        self._unsent_since_s = 0.0
        """When that was, at a check."""
        self._is_unread = False
        """Whether more than UNREAD_MARK bytes are in the transport's buffer."""
        self._unread_began_s = 0.0
        self._unread_written = 0
        """Bytes that were in the buffer when this began, and that were written since then."""
        self._unread_seen = 0
        """Bytes of these that had been read when `has_read` was True."""
        self._is_charging = False
        """Whether `_charge_unread` will run in the next turn of the loop."""
        self._upgrade_size = 0
        """Bytes of responses that wait for the end of a TLS handshake."""
        self._unread_timer: asyncio.TimerHandle | None = None
        self._pending_reads: deque[ReadRequest | BatchReadRequest] = deque()
        self._pending_v3 = 0
        """Number of pending reads, from the front, that are answered in v3."""
        self._read_batches = 0
        self._is_issuing = False
        self._is_queued = False
        """Whether this connection waits for its turn in `read_turns`. Meanwhile one byte of the budget is charged, so
        that the reads count as in progress."""
        self._waiting_for_room = False
        self._has_room = False
        """Whether it has waited for room, and may issue one batch before the others that wait."""
        self._entry_size = float(_FIRST_ENTRY_SIZE_GUESS)
        self._operation_count = 0
        self._waits_for_operations = False
        self._polls: dict[Wait, None] = {}
        """Long polls that wait."""
        self._long_poll_count = 0
        """Number of long polls that are being answered."""

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer_name = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        self.group = group_of(name)
        self.last_request_s = self._limits.clock()
        self._set_write_marks(self._transport)
        if not self._owner.opened(self):
            self._transport.abort()
            return
        is_authenticated = self._gate is None
        self._await_first(
            self._settings.first_request_timeout_s if is_authenticated else self._owner.security.auth_timeout_s
        )

    def _hold_first(self, data: bytes) -> None:
        """Keep the first bytes until the turn of this connection comes."""
        if not self._first_data:
            self._pause("first")
            self._limits.first_reads.queue(self._handle_first, group=self.group)
        self._first_data += data
        self._limits.paused.hold(self, len(self._first_data))

    def _handle_first(self) -> None:
        data, self._first_data, self._is_first = bytes(self._first_data), bytearray(), False
        self._limits.paused.release(self)
        self._resume("first")
        if self._transport is not None and not self._transport.is_closing():
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._hold_first(data)
            return
        tls = self._tls
        if tls.is_in_progress:
            tls.hold_data(data)
            return
        try:
            in_v3, in_v2 = self._requests.decode(self._decoder.feed(data))
        except BinderyError as error:
            self._refuse(error)
            return
        unfinished_size = self._decoder.buffered_size
        if unfinished_size or self._unfinished_size:
            self._hold_unfinished(unfinished_size, is_new=bool(in_v3 or in_v2))
            if unfinished_size >= ADD_SIZE_MIN and not self._has_waited and not self._is_ended:
                self._wait_with_frame()
        if tls.may_begin:
            batch = tls.receive(in_v3, in_v2, has_partial_frame=bool(unfinished_size))
            if batch.refuse is not None:
                self._refuse(batch.refuse)
                return
            in_v3, in_v2 = batch.in_v3, batch.in_v2
        if in_v3:
            self._handle(in_v3, v3)
            if tls.state is TlsState.ACCEPTED:
                self._secure()
                return
        if in_v2:
            self._handle(in_v2, v2)

    def _handle(self, requests: Sequence[Request], codec: Codec) -> None:
        if self._is_expired:
            self._refused_at_s = asyncio.get_running_loop().time()
            self.send(codec.encode_responses(refusals(requests, version=codec.VERSION)))
            return
        self.last_request_s = self._limits.clock()
        if self._gate is not None:
            verdict = self._gate.admit(requests, version=codec.VERSION)
            if verdict.answers:
                self.send(codec.encode_responses(verdict.answers))
            if verdict.close is not None:
                self._owner.refused(self, verdict.close)
                self.close()
                return
            requests = verdict.passed
            self._check_gate()
        if self._forbidden is not None:
            requests = self._operations.allowed(self, requests, self._forbidden, codec, peer_name=self.peer_name)
        if requests and self._transport is not None and not self._transport.is_closing():
            self._operations.handle(self, requests, codec)
        if not self._is_known and self._gate is None and not self._tls.is_begun:
            self._know()

    def eof_received(self) -> bool:
        return False  # close: no client half-closes, so nothing would read the responses in progress

    def pause_writing(self) -> None:
        if self._is_lost or self._transport is None:
            return
        loop = asyncio.get_running_loop()
        self._is_unread = True
        self._unread_began_s = loop.time()
        self._unread_written = self._transport.get_write_buffer_size()
        self._unread_seen = 0
        if self._unread_timer is None:
            self._unread_timer = loop.call_later(self._limits.rate.grace_s, self._check_unread)
        self._count_unread(self._unread_written)

    def _count_unread(self, size: int) -> None:
        """Count unread responses, of which `size` bytes are in the transport's buffer.

        They are charged in the next turn of the loop, because by then the budget of reads counts its own.
        """
        if size > self._settings.unsent_size_max and not self._unsent:
            self._unsent = True
            self._unsent_read = self._unread_written - size
            self._unsent_since_s = asyncio.get_running_loop().time()
            if self._unsent_timer is None:
                self._watch_unsent()
            self._pause("unsent")
        if not self._is_charging:
            self._is_charging = True
            asyncio.get_running_loop().call_soon(self._charge_unread)

    def _charge_unread(self) -> None:
        self._is_charging = False
        if self._is_unread and self._transport is not None and not self._is_ended:
            size = self._transport.get_write_buffer_size() - self._held_size
            self._limits.hold_unread(self, max(0, size) + KERNEL_UNREAD_SIZE)

    def has_read(self) -> bool:
        if not self._is_unread or self._transport is None:
            return False
        read = self._unread_written - self._transport.get_write_buffer_size()
        if read - self._unread_seen < UNREAD_MARK:
            return False
        self._unread_seen = read
        return True

    def resume_writing(self) -> None:
        self._is_unread = self._unsent = False
        self._wake_until_read()
        self._limits.unread.release(self)
        self._give_held()
        self._resume("unsent")
        self._issue_reads()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_lost:
            return  # both the transport in clear and the encrypted one may report it
        self._is_lost = True
        self._transport = None
        self._drop_frame()
        if self._upgrading is not None and self._tls.is_draining:
            self._upgrading.cancel()  # it reads a copy of the socket, which does not end with the connection
        self._tls.lose()
        self._operations.pending_reads -= len(self._pending_reads)
        self._pending_reads.clear()
        self._pending_v3 = 0
        if self._waiting_for_room:
            self._waiting_for_room = False
            self._operations.reads_budget.forget(self._room_for_reads, group=self.group)
        if self._waits_for_operations:
            self._waits_for_operations = False
            self._operations.operations_budget.forget(self._operations_are_low, group=self.group)
        if "adds" in self._reasons:
            self._reasons.discard("adds")
            self._operations.adds_budget.forget(self._adds_are_low, group=self.group)
        self._give_held()
        self._wake_until_read()
        self._limits.close(self)
        self._limits.first_reads.forget(self._handle_first, group=self.group)
        self._first_data.clear()
        if self._session is not None:
            self._session.forget()
            self._session = None
        timers = (
            self._first_timer,
            self._frame_timer,
            self._room_timer,
            self._unread_timer,
            self._unsent_timer,
            self._ending_timer,
        )
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self._end_polls()
        self._owner.closed(self, error)

    # --- operations.Peer ------------------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        return self._is_lost

    @property
    def is_unsent(self) -> bool:
        return self._unsent and not self._is_lost

    async def until_read(self) -> None:
        while self.is_unsent:
            future = asyncio.get_running_loop().create_future()
            self._until_read.append(future)
            await future

    @property
    def operation_count(self) -> int:
        return self._operation_count - self._long_poll_count

    @property
    def pending_read_count(self) -> int:
        return len(self._pending_reads)

    def send(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._tls.is_in_progress:
            self._tls.hold_response(data)
            self._upgrade_size += len(data)
            if self._upgrade_size > self._settings.unsent_size_max:  # nothing says whether the client will read them
                self._end("unread", held_size=self._upgrade_size)
            else:
                self._limits.unread.hold(self, self._upgrade_size)
            return
        is_unread = self._is_unread
        transport.write(data)
        if is_unread and self._is_unread:
            self._unread_written += len(data)
            self._count_unread(transport.get_write_buffer_size())

    def spawn(self, work: Coroutine[Any, Any, None], *, is_long_poll: bool = False) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._owner.keep(task)
        self._operation_count += 1
        if is_long_poll:
            self._long_poll_count += 1
            task.add_done_callback(self._poll_answered)
        else:
            task.add_done_callback(self._operation_done)
            budget = self._operations.operations_budget
            budget.take(1)
            if budget.is_over and self.operation_count > OPERATIONS_FREE_COUNT and not self._waits_for_operations:
                self._waits_for_operations = True
                self._pause("all operations")
                budget.when_low(self._operations_are_low, group=self.group)
        self._check_operations()
        return task

    def hold_poll(self, poll: Wait) -> None:
        self._polls[poll] = None
        self._check_operations()

    def drop_poll(self, poll: Wait) -> None:
        del self._polls[poll]
        self._check_operations()

    def wait_for_adds(self) -> None:
        if "adds" not in self._reasons:
            self._pause("adds")
            self._operations.adds_budget.when_low(self._adds_are_low, group=self.group)

    def enqueue_reads(self, reads: Sequence[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        self._pending_reads.extend(reads)
        if codec.VERSION == v3.VERSION:
            self._pending_v3 += len(reads)  # none in v2 can be in front of them
        if len(self._pending_reads) >= PENDING_READS_MAX:
            self._pause("reads")
        self._issue_reads()

    def start_tls(self, request: StartTlsRequest) -> None:
        if not self._tls.accept(request.txn_id):  # if accepted, `data_received` answers it, once its batch was handled
            self.send(v3.encode_response(StartTlsResponse(request.txn_id, Status.BAD_REQUEST)))

    # --- room.Occupant and held_bytes.Holder ------------------------------------------------------------------------

    @property
    def rank(self) -> int | None:
        """How easily this connection makes room for another one (`room`); None if it does not."""
        if self._is_unread:
            return WAITING
        if self.adds_in_progress:
            return None
        if self._pending_reads or self._read_batches or self.operation_count:
            return BUSY
        if self._unfinished_size:
            return WAITING
        return POLLING if self._polls or self._long_poll_count else IDLE

    def give_way(self, reason: str) -> None:
        self._end(reason)

    def evict(self, kind: str, held_size: int) -> None:
        self._end(kind, held_size=held_size)

    # --- the server's side ----------------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Accept no further requests and end long polls; other responses in progress are still sent."""
        if self._tls.is_in_progress:
            self.abort()  # no request has arrived over TLS yet
        self._pause("stopping")
        self._end_polls()

    def close(self) -> None:
        """Send the responses that were written, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent responses are lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _refuse(self, error: BinderyError) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._drop_frame()
            self._owner.refused(self, error)
            self.abort()

    async def _drain_clear_frames(self, transport: asyncio.Transport) -> None:
        """Read AUTH that was sent in clear behind START_TLS and arrived later. Raises BadRequest, TooLarge, OSError."""
        frames = await frames_before_handshake(transport)
        in_v3, in_v2 = self._requests.decode(self._decoder.feed(b"".join(frames)))
        reason = self._tls.drain(in_v3, in_v2, has_partial_frame=bool(self._decoder.buffered_size))
        if reason is not None:
            raise reason

    def _end(self, reason: str, **fields: Any) -> None:
        """End because of a limit."""
        if not self._is_ended:
            self._is_ended = True
            self._drop_frame()
            self._limits.ended(reason, peer=self.peer_name, **fields)
            self.abort()

    def _drop_frame(self) -> None:
        """Free the incomplete frame now: the connection itself may live until cyclic garbage is collected, or its end
        be reported only after a thousand others were read."""
        self._decoder = FrameDecoder(frame_size_max=self._settings.frame_size_max)
        self._unfinished_size = 0

    def _set_write_marks(self, transport: asyncio.Transport) -> None:
        high = min(self._settings.unsent_size_max, UNREAD_MARK)
        transport.set_write_buffer_limits(high=high, low=high // 4)

    def _await_first(self, seconds: float) -> None:
        if self._first_timer is not None:
            self._first_timer.cancel()
        self._first_timer = asyncio.get_running_loop().call_later(seconds, self._first_expired)

    def _know(self) -> None:
        self._is_known = True
        self._limits.know(self)
        if self._first_timer is not None:
            self._first_timer.cancel()
            self._first_timer = None

    def _check_gate(self) -> None:
        if self._gate is not None and self._gate.is_open:
            security, held = self._owner.security, self._gate.held
            self._forbidden = security.roles.forbidden_to(self._gate.who)
            if held is not None and security.sessions is not None:
                self._session = security.sessions.begin(held, self._expire)
            self._gate = None
            self._decoder.allow(self._settings.frame_size_max)
            if self._first_timer is not None:
                self._await_first(self._settings.first_request_timeout_s)

    def _expire(self, reason: Unauthorized) -> None:
        """Refuse new requests, and close once those in progress are answered."""
        self._session = None
        if self._is_ended or self._transport is None or self._transport.is_closing():
            return
        self._owner.refused(self, reason)
        if self._tls.is_in_progress:
            self.abort()  # no request has arrived over TLS yet
            return
        self._is_expired = True
        self._ends_at_s = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
        self._end_polls()
        self._close_if_answered()

    def _close_if_answered(self) -> None:
        self._ending_timer = None
        if self._transport is None or self._transport.is_closing():
            return
        now_s = asyncio.get_running_loop().time()
        is_busy = self.adds_in_progress or self._pending_reads or self._read_batches or self._operation_count
        if now_s >= self._ends_at_s:
            self.abort()
        elif is_busy or self._polls or now_s - self._refused_at_s < ENDING_CHECK_S:
            self._ending_timer = asyncio.get_running_loop().call_later(ENDING_CHECK_S, self._close_if_answered)
        else:
            self.close()

    def _first_expired(self) -> None:
        self._first_timer = None
        if self._gate is not None:
            self._refuse(Unauthorized("no authentication in time", timeout_s=self._owner.security.auth_timeout_s))
        else:
            self._end("first_request_timeout", timeout_s=self._settings.first_request_timeout_s)

    def _hold_unfinished(self, size: int, *, is_new: bool) -> None:
        """Count the `size` bytes of an incomplete frame. `is_new`: it began with the last read of the socket."""
        if size and (is_new or not self._unfinished_size):
            self._limits.unfinished.release(self)  # others have held theirs longer than this new frame
            self._limits.paused.release(self)
            self._has_waited = False
            loop = asyncio.get_running_loop()
            self._frame_began_s = self._frame_seen_s = loop.time()
            self._frame_seen_size = size
            if self._frame_timer is None:
                self._frame_timer = loop.call_later(self._limits.rate.grace_s, self._check_frame)
        elif size - self._frame_seen_size >= FRAME_STEP_SIZE:
            self._frame_seen_s, self._frame_seen_size = asyncio.get_running_loop().time(), size
        self._unfinished_size = size
        self._charge_unfinished()

    def _wait_with_frame(self) -> None:
        """Stop reading within a frame while there is no room for its rest, so that writers go on in turns."""
        if self._operations.adds_budget.is_over:
            self.wait_for_adds()  # otherwise many such adds would exceed twice the budget, and be refused
        elif not self._has_room_for_frame:
            self._pause("frames")
            if self._room_timer is None:
                self._room_waits = 0
                self._check_room_later()

    @property
    def _has_room_for_frame(self) -> bool:
        if self._unfinished_size < LARGE_FRAME_SIZE:
            return True
        unfinished = self._limits.unfinished
        others = unfinished.used - unfinished.held_by(self)
        return not others or others + self._decoder.needed_size <= unfinished.limit // 2

    def _check_room_later(self) -> None:
        self._room_timer = asyncio.get_running_loop().call_later(FRAMES_CHECK_S, self._check_room)

    def _check_room(self) -> None:
        """Go on reading a frame once there is room for it."""
        self._room_timer = None
        self._room_waits += 1
        has_room = self._has_room_for_frame
        if not has_room and self._room_waits >= FRAMES_WAITS_MAX:
            self._limits.end_stalled_frame()
            has_room = self._has_room_for_frame or self._room_waits >= 2 * FRAMES_WAITS_MAX
        if has_room:
            self._has_waited = True
            self._resume("frames")
        else:
            self._check_room_later()

    def is_stalled(self) -> bool:
        return asyncio.get_running_loop().time() - self._frame_seen_s >= FRAMES_WAITS_MAX * FRAMES_CHECK_S

    def _charge_unfinished(self) -> None:
        """Count the incomplete frame, and while the bookie does not read its rest because of other clients, apart."""
        limits = self._limits
        if self._reasons.isdisjoint(_BECAUSE_OF_OTHERS):
            limits.paused.release(self)
            will_arrive = self._has_waited and self._unfinished_size  # no more go on than fit when they are complete
            limits.unfinished.hold(self, self._decoder.needed_size if will_arrive else self._unfinished_size)
        else:
            limits.unfinished.release(self)
            limits.paused.hold(self, self._unfinished_size)

    def _check_frame(self) -> None:
        """End the connection if its frame arrives too slowly."""
        self._frame_timer = None
        if not self._unfinished_size or self._transport is None:
            return
        loop, rate = asyncio.get_running_loop(), self._limits.rate
        now = loop.time()
        is_read = not self._reasons
        due = rate.deadline_s(self._frame_began_s, self._unfinished_size) if is_read else now + rate.grace_s
        if now < due:
            self._frame_timer = loop.call_later(due - now, self._check_frame)
        else:
            self._end("frame_timeout", size=self._unfinished_size, seconds=round(now - self._frame_began_s, 3))

    def _check_unread(self) -> None:
        """End the connection if its responses are read too slowly."""
        self._unread_timer = None
        if not self._is_unread or self._transport is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        size = self._transport.get_write_buffer_size()
        due = self._limits.rate.deadline_s(self._unread_began_s, max(0, self._unread_written - size))
        if now < due:
            self._unread_timer = loop.call_later(due - now, self._check_unread)
        else:
            self._end("unread_timeout", size=size, seconds=round(now - self._unread_began_s, 3))

    def _secure(self) -> None:
        """Answer START_TLS and begin the handshake."""
        transport = self._transport
        is_closing = transport is None or transport.is_closing()
        begun = self._tls.begin(
            is_closing=is_closing,
            has_unsent=transport is not None and transport.get_write_buffer_size() > 0,
            must_authenticate=self._gate is not None,
        )
        if isinstance(begun, BinderyError):
            self._refuse(begun)
        elif begun is not None and transport is not None:
            transport.write(v3.encode_response(StartTlsResponse(begun, Status.OK)))
            self._pause("securing")
            self._limits.handshakes.begin(self)
            self._upgrading = asyncio.get_running_loop().create_task(self._upgrade(transport))
            self._owner.keep(self._upgrading)

    async def _upgrade(self, transport: asyncio.Transport) -> None:
        security = self._owner.security
        assert security.tls is not None
        try:
            if self._tls.is_draining:
                async with asyncio.timeout(security.handshake_timeout_s):
                    await self._drain_clear_frames(transport)
                self._tls.shake()
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
            if not self._is_ended:
                self._owner.refused(self, Unauthorized("TLS handshake failed", cause=_handshake_error(error)))
            transport.abort()
            self.connection_lost(error)
            return
        if secured is None or secured.is_closing() or self._is_lost:
            # Aborted during the handshake: asyncio's loops then raise no error and do not notify the protocol.
            transport.abort()
            self.connection_lost(None)
            return
        self._transport = secured
        self._limits.handshakes.end(self)
        if not self._limits.secured.open(self):
            self._end("secured")
            return
        self._set_write_marks(secured)
        self._upgrade_size = 0
        self._limits.unread.release(self)
        released = self._tls.secured()
        self._reasons.discard("securing")
        if self._reasons:
            secured.pause_reading()
        if self._gate is not None:
            connection = secured.get_extra_info("ssl_object")
            certificate = None if connection is None else PeerCertificate.presented(connection, security.tls_files)
            try:
                self._gate.secured(certificate_names(secured.get_extra_info("peercert")), certificate)
            except Unauthorized as error:
                # As BookKeeper does: a second response to START_TLS, and a gate that stays shut.
                self._owner.refused(self, error)
                self.send(v3.encode_response(StartTlsResponse(0, Status.IO_ERROR)))
            self._check_gate()
        if released.responses:
            self.send(b"".join(released.responses))
        for requests, codec in released.auth:
            self._handle(requests, codec)
        for data in released.data:
            self.data_received(data)
        self._issue_reads()

    def _issue_reads(self) -> None:
        if not self._is_issuing and not self._is_queued:  # otherwise it continues by itself
            self._issue_up_to(self._operations.read_turns.share())

    def _issue_in_turn(self, share: int) -> None:
        self._is_queued = False
        self._operations.reads_budget.give(1, group=self.group)  # first, otherwise its address is not an idle one
        self._issue_up_to(share)

    def _issue_up_to(self, share: int) -> None:
        turns = self._operations.read_turns
        self._is_issuing = True
        try:
            while self._may_issue_reads():
                if share <= 0:
                    self._is_queued = True
                    self._operations.reads_budget.take(1, group=self.group)
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
        if not self._pending_reads or self._unsent or self._tls.is_in_progress:
            return False
        if self._read_batches >= READ_BATCHES_MAX:
            return False
        budget = self._operations.reads_budget
        if budget.used < budget.limit and (not budget.waiting or self._has_room):  # not before those that wait
            return True
        if budget.is_free_for(self.group):
            return True
        if not self._waiting_for_room:
            self._waiting_for_room = True
            budget.when_low(self._room_for_reads, group=self.group)
        return False

    def _issue_batch(self, count_max: int) -> int:
        """Issue one batch of at most `count_max` reads. Return their number, or that of their READ_UNIT_SIZE if it is
        higher."""
        budget = self._operations.reads_budget
        pending = self._pending_reads
        self._has_room = False
        codec: Codec = v3 if self._pending_v3 else v2
        self._read_batches += 1
        head = pending[0]
        if type(head) is BatchReadRequest:
            pending.popleft()
            self._taken(1)
            _, size_max = self._operations.batch_limits(head)
            guess = max(size_max, self._settings.frame_size_max)  # of the first entry, whatever `size_max` is
            budget.take(guess, group=self.group)
            sent = partial(self._reads_sent, guess, None, codec)
            self._operations.read_batch(self, head, codec, self._entry_size, sent)
            return max(1, guess // READ_UNIT_SIZE)
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
        budget.take(guess, group=self.group)
        self._operations.read(self, batch, codec, partial(self._reads_sent, guess, batch, codec))
        return max(len(batch), guess // READ_UNIT_SIZE)

    def _taken(self, count: int) -> None:
        self._operations.pending_reads -= count
        if self._pending_v3:
            self._pending_v3 = max(0, self._pending_v3 - count)

    def _again(self, reads: list[ReadRequest], codec: Codec) -> None:
        """Put reads back in front of those that wait: their entries are larger than expected."""
        if not self._is_lost:
            self._pending_reads.extendleft(reversed(reads))
            self._operations.pending_reads += len(reads)
            if codec.VERSION == v3.VERSION:
                self._pending_v3 += len(reads)

    def _reads_sent(self, guess: int, batch: list[ReadRequest] | None, codec: Codec, size: int, count: int) -> None:
        """`count` entries of `size` bytes were sent, for the first reads of `batch`, or for a batch read if None."""
        if batch is not None and count < len(batch):
            self._again(batch[count:], codec)
        self._read_batches -= 1
        seen = size / max(1, count)  # rises at once, falls slowly: a reader of several ledgers alternates between sizes
        self._entry_size = max(64.0, seen, 0.8 * self._entry_size + 0.2 * seen)
        budget = self._operations.reads_budget
        if self._unsent and self._transport is not None:
            budget.take(size, group=self.group)
            self._held_size += size
        budget.give(guess, group=self.group)
        self._issue_reads()

    def _room_for_reads(self) -> None:
        self._waiting_for_room = False
        self._has_room = True
        self._issue_reads()

    def _wake_until_read(self) -> None:
        futures, self._until_read = self._until_read, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    def _give_held(self) -> None:
        held, self._held_size = self._held_size, 0
        self._operations.reads_budget.give(held, group=self.group)

    def _watch_unsent(self) -> None:
        seconds = self._settings.unsent_time_max_s / UNSENT_CHECKS
        self._unsent_timer = asyncio.get_running_loop().call_later(seconds, self._check_unsent)

    def _check_unsent(self) -> None:
        """Disconnect the client if it reads almost nothing while others wait for bytes or operations that it holds."""
        self._unsent_timer = None
        if not self._unsent or self._transport is None:
            return
        now_s, size = asyncio.get_running_loop().time(), self._transport.get_write_buffer_size()
        read = self._unread_written - size
        if read - self._unsent_read >= self._settings.unsent_size_max // 2:
            self._unsent_read, self._unsent_since_s = read, now_s
        operations, seconds = self._operations, self._settings.unsent_time_max_s
        is_waited_for = (self._held_size and operations.reads_budget.waiting > self._waiting_for_room) or (
            self.operation_count and operations.operations_budget.waiting > self._waits_for_operations
        )
        if is_waited_for and now_s - self._unsent_since_s >= seconds:
            reason = "the client does not read its responses while others wait"
            self._refuse(TooManyRequests(reason, unsent_size=size, seconds=seconds))
        else:
            self._watch_unsent()

    def _adds_are_low(self) -> None:
        if not self._has_room_for_frame:  # all that waited would go on at once
            self._wait_with_frame()
        elif self._unfinished_size >= LARGE_FRAME_SIZE:
            self._has_waited = True
        self._resume("adds")

    def _operations_are_low(self) -> None:
        self._waits_for_operations = False
        self._resume("all operations")

    def _poll_answered(self, _: asyncio.Task[None]) -> None:
        self._operation_count -= 1
        self._long_poll_count -= 1
        self._check_operations()

    def _operation_done(self, _: asyncio.Task[None]) -> None:
        self._operation_count -= 1
        budget = self._operations.operations_budget
        budget.give(1)
        if self._waits_for_operations and self.operation_count <= OPERATIONS_FREE_COUNT:
            budget.forget(self._operations_are_low, group=self.group)
            self._operations_are_low()
        self._check_operations()

    def _check_operations(self) -> None:
        count, count_max = self._operation_count + len(self._polls), self._settings.operations_max
        if count >= count_max:
            self._pause("operations")
        elif count <= count_max // 2:
            self._resume("operations")

    def _end_polls(self) -> None:
        for poll in tuple(self._polls):
            poll.end()

    def _pause(self, reason: str) -> None:
        if not self._reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._reasons.add(reason)  # during a handshake TLS reads the socket, and "securing" is set
        if self._unfinished_size:
            self._charge_unfinished()

    def _resume(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.discard(reason)
            if self._unfinished_size:
                self._charge_unfinished()
            if not self._reasons and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
                if self._unfinished_size:
                    self._frame_began_s = self._frame_seen_s = asyncio.get_running_loop().time()


def _handshake_error(error: BaseException) -> str:
    """Return OpenSSL's reason, without the source line."""
    return getattr(error, "reason", None) or str(error) or type(error).__name__
