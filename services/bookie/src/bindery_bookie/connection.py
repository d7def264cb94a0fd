"""BookieConnection: one client's connection. Bytes in, requests to the operations, answers out, and no more than fits.

Nothing is read from the socket while one of these holds; each is a reason of its own, and TCP passes the pressure on:

| reason     | since                                                     | until                                |
|------------|-----------------------------------------------------------|--------------------------------------|
| unsent     | the client does not read: `unsent_size_max` bytes wait    | a quarter of that waits              |
| adds       | this connection sent adds while the budget was used up    | the budget is low                    |
| reads      | PENDING_READS_MAX reads wait for room                     | half of them do                      |
| operations | `operations_max` other operations are under way           | half of them are                     |

Plain reads are issued in batches of about READ_BATCH_SIZE bytes by the running average of what entries were, so that a
thousand reads of large entries do not become gigabytes. The bytes of each batch are charged to the budget of reads from
its issue until its answer left the process, or, while the client reads, until it was handed to the transport.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol, cast

from bindery_core.errors import BinderyError
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import ReadRequest

from bindery_bookie.operations import Operations
from bindery_bookie.settings import ServerSettings

READ_BATCH_SIZE: Final = 1024 * 1024
READ_BATCH_COUNT_MAX: Final = 512
READ_BATCHES_MAX: Final = 4
"""Batches of one connection under way at a time: while one waits for the disk, the next may come from a cache."""
PENDING_READS_MAX: Final = 10_000
_FIRST_ENTRY_SIZE_GUESS = 64 * 1024


class ConnectionOwner(Protocol):
    """The server, as its connections see it."""

    settings: ServerSettings
    operations: Operations

    def opened(self, connection: "BookieConnection") -> bool:
        """False: one too many, close."""

    def closed(self, connection: "BookieConnection", error: Exception | None) -> None: ...

    def refused(self, connection: "BookieConnection", error: BinderyError) -> None:
        """Its bytes were no requests; it is being closed."""

    def keep(self, task: asyncio.Task[None]) -> None:
        """Own `task`: hold it, and await it at the end."""


class BookieConnection(asyncio.Protocol):
    """Invariants: `_reasons` is empty exactly while the socket is read; after `connection_lost` nothing is written and
    every byte charged to a budget was given back."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._operations = owner.operations
        self._settings = owner.settings
        self._decoder = FrameDecoder(frame_size_max=owner.settings.frame_size_max)
        self._transport: asyncio.Transport | None = None
        self.peer_name = "?"
        self._reasons: set[str] = set()
        self._unsent = False
        self._held_size = 0
        """Bytes of read answers that the transport could not get rid of yet."""
        self._pending_reads: deque[ReadRequest] = deque()
        self._read_batches = 0
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

    def data_received(self, data: bytes) -> None:
        try:
            requests = v3.decode_requests(self._decoder.feed(data))
        except BinderyError as error:
            self._owner.refused(self, error)
            self.abort()
            return
        if requests:
            self._operations.handle(self, requests)

    def eof_received(self) -> bool:
        return False  # nobody half-closes; the answers under way would have no reader

    def pause_writing(self) -> None:
        self._unsent = True
        self._pause("unsent")

    def resume_writing(self) -> None:
        self._unsent = False
        self._give_held()
        self._resume("unsent")
        self._issue_reads()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pending_reads.clear()
        self._give_held()
        for task in self._cancelled_when_gone:
            task.cancel()
        self._owner.closed(self, error)

    # --- operations.Peer ------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._transport is not None:
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

    def enqueue_reads(self, reads: Sequence[ReadRequest]) -> None:
        self._pending_reads.extend(reads)
        if len(self._pending_reads) >= PENDING_READS_MAX:
            self._pause("reads")
        self._issue_reads()

    # --- the server's side ----------------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Take no further requests and end long polls; other answers under way are still sent."""
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

    def _issue_reads(self) -> None:
        budget = self._operations.reads_budget
        while self._pending_reads and not self._unsent and self._read_batches < READ_BATCHES_MAX:
            if budget.is_over:
                if not self._waiting_for_room:
                    self._waiting_for_room = True
                    budget.when_low(self._room_for_reads)
                return
            count = max(1, min(READ_BATCH_COUNT_MAX, int(READ_BATCH_SIZE / self._entry_size), len(self._pending_reads)))
            batch = [self._pending_reads.popleft() for _ in range(count)]
            guess = int(count * self._entry_size)
            budget.take(guess)
            self._read_batches += 1
            self._operations.read(self, batch, lambda size, c=count, g=guess: self._reads_sent(c, g, size))  # type: ignore[misc]
        if len(self._pending_reads) <= PENDING_READS_MAX // 2:
            self._resume("reads")

    def _reads_sent(self, count: int, guess: int, size: int) -> None:
        self._read_batches -= 1
        self._entry_size = max(64.0, 0.5 * self._entry_size + 0.5 * size / count)
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

    def _adds_are_low(self) -> None:
        self._resume("adds")

    def _operation_done(self, _: asyncio.Task[None]) -> None:
        self._operation_count -= 1
        if self._operation_count <= self._settings.operations_max // 2:
            self._resume("operations")

    def _pause(self, reason: str) -> None:
        if not self._reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._reasons.add(reason)

    def _resume(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.discard(reason)
            if not self._reasons and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
