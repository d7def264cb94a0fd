"""Limit the load that recovery puts on bookies, so that clients are not slowed down.

Everything in the process that copies or checks shares two limits: bytes per second (a token bucket that may go into
debt, because the size of an entry is known only after it was read), and the number of entries in flight.

The byte rate follows the latency of bookies. Each response time is recorded, and once per period
    99th percentile above the target  -> the rate is halved
    at or below it                    -> the rate grows by a fixed step
The rate stays between a minimum, so that recovery never stops, and a maximum. TCP shares a link in the same way: fast
down, slowly up.

Invariants: bytes_per_s_min <= bytes_per_s <= bytes_per_s_max; over any time span, the bytes paid for are at most span *
bytes_per_s_max + burst + one payment; entries in flight <= entries_in_flight_max, except for a larger batch that runs
alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

MIB: Final = 2**20
PERIOD_S: Final = 1.0
"""Interval in seconds at which the rate is adjusted."""
SAMPLES_MIN: Final = 3
"""Minimum number of responses for an adjustment; fewer are carried over to the next period. The slowest response is
always left out: one slow response among ten is not a 99th percentile."""
SAMPLES_MAX: Final = 1_000
"""Maximum number of response times kept for the next adjustment; the oldest are dropped."""
BURST_S: Final = 0.1
"""Maximum unused budget, in seconds at the present rate."""
START_PART: Final = 0.25
"""Initial rate, as a share of the maximum rate."""
STEP_PART: Final = 1 / 16
"""Increase per period at or below the target latency, as a share of the maximum rate."""
STALE_S: Final = 10.0
"""Seconds without a response after which the latency is unknown."""


class RepairBudget:
    """The budget of one process. Use it from one event loop."""

    def __init__(
        self,
        *,
        bytes_per_s_max: float = 64 * MIB,
        bytes_per_s_min: float = MIB,
        entries_in_flight_max: int = 100,
        target_ms: float = 50.0,
    ) -> None:
        """`target_ms`: target for the 99th percentile of response times of bookies, in ms."""
        assert 0 < bytes_per_s_min <= bytes_per_s_max
        assert entries_in_flight_max >= 1
        self.bytes_per_s_max: Final = bytes_per_s_max
        self.bytes_per_s_min: Final = bytes_per_s_min
        self.entries_in_flight_max: Final = entries_in_flight_max
        self.target_ms: Final = target_ms
        self.entries_in_flight = 0
        self.bytes_paid = 0
        """Bytes paid for since the process started."""
        self._rate = max(bytes_per_s_min, START_PART * bytes_per_s_max)
        self._loop = asyncio.get_running_loop()
        self._free_at = self._loop.time()
        """Loop time from which `pay` does not wait."""
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._period_ends_at = self._loop.time() + PERIOD_S
        self._p99_ms: float | None = None
        self._heard_at = self._loop.time()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def bytes_per_s(self) -> float:
        """The present rate in bytes per second."""
        return self._rate

    @property
    def foreground_p99_ms(self) -> float | None:
        """99th percentile of response times in the last period with enough responses, in ms; None: no recent
        response."""
        return None if self._loop.time() - self._heard_at > STALE_S else self._p99_ms

    # --- bytes ----------------------------------------------------------------------------------------------------

    async def pay(self, size: int) -> None:
        """Wait until `size` more bytes may be transferred. Calls are served in order."""
        now = self._loop.time()
        self._free_at = max(self._free_at, now - BURST_S)
        wait_s = self._free_at - now
        self._free_at += size / self._rate
        self.bytes_paid += size
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    # --- entries --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def entries(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` more entries may be in flight, and count them until the context ends."""
        await self._enter(count)
        try:
            yield
        finally:
            self.entries_in_flight -= count
            self._let_in()

    async def _enter(self, count: int) -> None:
        if not self._waiters and self._has_room(count):
            self.entries_in_flight += count
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((count, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.entries_in_flight -= count
            else:
                self._waiters.remove((count, waiter))
            self._let_in()
            raise

    def _has_room(self, count: int) -> bool:
        return not self.entries_in_flight or self.entries_in_flight + count <= self.entries_in_flight_max

    def _let_in(self) -> None:
        while self._waiters and self._has_room(self._waiters[0][0]):
            count, waiter = self._waiters.popleft()
            if not waiter.done():
                self.entries_in_flight += count
                waiter.set_result(None)

    # --- latency --------------------------------------------------------------------------------------------------

    def observe(self, latency_s: float) -> None:
        """Record a bookie's response time in seconds, to a request of this process or to a client's request."""
        now = self._loop.time()
        self._heard_at = now
        self._samples.append(latency_s * 1000)
        if now >= self._period_ends_at and len(self._samples) >= SAMPLES_MIN:
            self._decide(now)

    def _decide(self, now: float) -> None:
        ordered = sorted(self._samples)
        self._p99_ms = ordered[-1 - max(1, len(ordered) // 100)]
        self._samples.clear()
        self._period_ends_at = now + PERIOD_S
        before = self._rate
        if self._p99_ms > self.target_ms:
            self._rate = max(self.bytes_per_s_min, before / 2)
        else:
            self._rate = min(self.bytes_per_s_max, before + STEP_PART * self.bytes_per_s_max)
        if self._free_at > now:  # a debt is paid off at the new rate
            self._free_at = now + (self._free_at - now) * before / self._rate
