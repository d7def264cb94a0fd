"""PortLimits: what all connections of the ledger port share, so that together they hold a limited amount of memory.

| what                                         | limit                         | above it                              |
|----------------------------------------------|-------------------------------|---------------------------------------|
| connections: in all, and of one address      | `connections_max`,            | another one makes room (`room`); if   |
|                                              | `connections_per_address_max` | none can, the new one is closed       |
| seconds until the first complete request     | `first_request_timeout_s`     | closed                                |
| bytes of incomplete frames, over all         | `unfinished_size_max`         | the connection whose frame has been   |
| connections                                  |                               | incomplete longest is closed          |
| the same while the bookie does not read the  | PAUSED_FACTOR times           | the connection that is paused longest |
| rest, because of frames, adds or operations  | `unfinished_size_max`         | is closed                             |
| of all                                       |                               |                                       |
| seconds until a frame is complete            | `transfer_grace_s`, and its   | closed                                |
|                                              | bytes at `transfer_rate_min`  |                                       |
| seconds until responses are read             | the same                      | closed                                |
| bytes of unread responses, except those that | `unread_size_max`             | the connection whose responses have   |
| `reads_size_max` counts                      |                               | been unread longest is closed, of     |
|                                              |                               | those that do not read at all         |
| TLS handshakes in progress                   | `handshakes_max`              | the oldest of the address with the    |
|                                              |                               | most is ended (`handshakes`)          |
| connections with TLS                         | `secured_connections_max`     | as connections                        |

Each connection that ends because of a limit is counted by its reason, and logged at most once per second and reason.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from bindery_kit.limits.held_bytes import HeldBytes, Holder
from bindery_kit.limits.memory_release import MemoryRelease
from bindery_kit.limits.minimum_rate import MinimumRate
from bindery_kit.observability.quiet_log import QuietLog

from bindery_bookie.memory import SECURED_SIZE
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.first_reads import FirstReads
from bindery_bookie.server.handshakes import Handshakes
from bindery_bookie.server.room import Occupant, Room
from bindery_bookie.settings import ServerSettings

UNREAD_MARK: Final = 16 * 1024
"""Bytes of responses in a connection's buffer above which they count as unread."""
KERNEL_UNREAD_SIZE: Final = 64 * 1024
"""Bytes of unsent responses that the kernel keeps per connection (TCP_NOTSENT_LOWAT); they count as unread, too."""
PAUSED_FACTOR: Final = 2
"""How many times the bytes of other incomplete frames those may take whose rest the bookie does not read. When the
journal is slow, each of many well-behaved writers has one."""
MEMORY_CHECK_S: Final = 1.0
"""Seconds between two checks whether memory can be returned to the system."""
MEMORY_RELEASE_REPEATS: Final = 2
"""Number of further releases after one. A handshake that was aborted may keep its memory for its whole timeout."""
CONNECTION_SIZE: Final = 4 * 1024
"""Approximate memory of a connection without requests, in bytes."""


class Reader(Holder, Protocol):
    """A connection with unread responses, or an incomplete frame."""

    def is_stalled(self) -> bool:
        """Whether its frame has not gone on for a while."""
        ...

    def has_read(self) -> bool:
        """Whether the client has read UNREAD_MARK bytes since the last call that returned True."""
        ...


class LimitedConnection(Occupant, Reader, Protocol):
    """A connection, as its limits see it."""


class PortLimits:
    """`clock`: monotonic seconds."""

    def __init__(self, settings: ServerSettings, metrics: BookieMetrics, *, clock: Callable[[], float]) -> None:
        per_address_max = settings.connections_per_address_max or max(1, settings.connections_max // 2)
        self.room = Room(connections_max=settings.connections_max, per_address_max=per_address_max, clock=clock)
        self.rate = MinimumRate(grace_s=settings.transfer_grace_s, bytes_per_s=settings.transfer_rate_min)
        self.unfinished = HeldBytes("unfinished", max(settings.unfinished_size_max, settings.frame_size_max))
        self.paused = HeldBytes("paused", PAUSED_FACTOR * self.unfinished.limit)
        """Incomplete frames whose rest the bookie does not read now, so that others cannot outlast them."""
        self.first_reads = FirstReads()
        self.unread = HeldBytes("unread", settings.unread_size_max)
        self.handshakes = Handshakes(settings.handshakes_max)
        secured_max = min(settings.secured_connections_max, settings.connections_max)
        self.secured = Room(
            connections_max=secured_max,
            per_address_max=max(1, secured_max * per_address_max // settings.connections_max),
            clock=clock,
            reason="secured",
        )
        """Connections with TLS."""
        self.ends: Counter[str] = Counter()
        """Number of connections that ended because of a limit, by reason. Reasons are constants of the code."""
        self.clock = clock
        self._log = QuietLog(__name__, clock=clock)
        held = (self.unfinished, self.paused, self.unread)
        metrics.figure(
            "bindery_bookie_held_bytes",
            "gauge",
            "Bytes of incomplete frames and of unread responses.",
            lambda: [({"kind": one.kind}, one.used) for one in held],
        )
        metrics.figure(
            "bindery_bookie_held_bytes_max",
            "gauge",
            "Limit of these bytes.",
            lambda: [({"kind": one.kind}, one.limit) for one in held],
        )
        metrics.figure(
            "bindery_bookie_connections_ended_total",
            "counter",
            "Connections that a limit refused or ended.",
            lambda: [({"reason": reason}, count) for reason, count in sorted(self.ends.items())],
        )

    @property
    def needed_size(self) -> int:
        """Approximate bytes of memory that connections need now, without their requests in progress."""
        connections = CONNECTION_SIZE * len(self.room) + SECURED_SIZE * (len(self.secured) + self.handshakes.count)
        return connections + self.unfinished.used + self.paused.used + self.unread.used

    def know(self, connection: Occupant) -> None:
        """Record that a connection is of a client: it has sent a request."""
        self.room.know(connection)
        self.secured.know(connection)

    def close(self, connection: LimitedConnection) -> None:
        """Free everything that a connection holds. Idempotent."""
        self.room.close(connection)
        self.secured.close(connection)
        self.handshakes.end(connection)
        for held in (self.unfinished, self.paused, self.unread):
            held.release(connection)

    def end_stalled_frame(self) -> None:
        """End the connection whose frame has been incomplete longest if it does not go on."""
        oldest = self.unfinished.oldest
        if oldest is not None and cast(Reader, oldest).is_stalled():
            held_size = self.unfinished.held_by(oldest)
            self.unfinished.release(oldest)
            oldest.evict(self.unfinished.kind, held_size)

    def hold_unread(self, reader: Reader, size: int) -> None:
        """Set the bytes of unread responses of a connection. Those that are being read are ended last."""
        unread = self.unread
        while unread.used - unread.held_by(reader) + size > unread.limit:
            oldest = unread.oldest
            if oldest is None or not cast(Reader, oldest).has_read():
                break
            unread.defer(oldest)
        unread.hold(reader, size)

    async def release_memory(self) -> None:
        """Return memory to the system after the clients that needed it have gone. Runs until it is cancelled."""
        memory = MemoryRelease(repeats=MEMORY_RELEASE_REPEATS)
        while True:
            memory.check(self.needed_size, now_s=self.clock())
            await asyncio.sleep(MEMORY_CHECK_S)

    def ended(self, reason: str, **fields: Any) -> None:
        """Count and log that a connection ends because of a limit. `reason`: a constant of the code."""
        self.ends[reason] += 1
        self._log.warning("connection_ended_" + reason, **fields)
