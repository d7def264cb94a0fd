"""RepairBudget: how much healing may take from the bookies, so that nobody else feels it.

Two limits, shared by everything in the process that copies or checks: bytes a second (a token bucket that may go into
debt, because the size of an entry is known only once it was read) and entries under way at a time.

The bytes follow what the others would feel: each answer's latency is noted, and once a period
    99th percentile above the target  -> the rate is halved
    at or below it                    -> the rate grows by a fixed step
between a least rate, so that healing never stands still, and a largest one. That is how TCP shares a line: down fast,
up slowly.

Invariants: bytes_per_s_min <= bytes_per_s <= bytes_per_s_max; over any span the bytes paid for are at most
span * bytes_per_s_max + burst + one payment; entries in flight <= entries_in_flight_max, but for one batch let through
alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

MIB: Final = 2**20
PERIOD_S: Final = 1.0
"""How often the rate is decided anew."""
SAMPLES_MIN: Final = 3
"""Fewer answers in a period say nothing; they count in the next one. Of however few, the slowest is left out: one slow
answer among ten is no 99th percentile."""
SAMPLES_MAX: Final = 1_000
BURST_S: Final = 0.1
"""What was not used is kept for this long at the present rate."""
START_PART: Final = 0.25
"""Of the largest rate, to begin with."""
STEP_PART: Final = 1 / 16
"""Of the largest rate, added in a period without complaint."""
STALE_S: Final = 10.0
"""Without an answer for so long, nothing is known about latency."""


class RepairBudget:
    """Used from one event loop, whose clock it goes by."""

    def __init__(
        self,
        *,
        bytes_per_s_max: float = 64 * MIB,
        bytes_per_s_min: float = MIB,
        entries_in_flight_max: int = 100,
        target_ms: float = 50.0,
    ) -> None:
        """`target_ms`: the latency that others should not have to exceed (99th percentile)."""
        assert 0 < bytes_per_s_min <= bytes_per_s_max
        assert entries_in_flight_max >= 1
        self.bytes_per_s_max: Final = bytes_per_s_max
        self.bytes_per_s_min: Final = bytes_per_s_min
        self.entries_in_flight_max: Final = entries_in_flight_max
        self.target_ms: Final = target_ms
        self.entries_in_flight = 0
        self.bytes_paid = 0
        """Since the start."""
        self._rate = max(bytes_per_s_min, START_PART * bytes_per_s_max)
        self._loop = asyncio.get_running_loop()
        self._free_at = self._loop.time()
        """When what was paid so far is worked off at the rates that held."""
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._period_ends_at = self._loop.time() + PERIOD_S
        self._p99_ms: float | None = None
        self._heard_at = self._loop.time()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def bytes_per_s(self) -> float:
        """The rate that holds now."""
        return self._rate

    @property
    def foreground_p99_ms(self) -> float | None:
        """Of the last period with enough answers; None: nobody answered lately."""
        return None if self._loop.time() - self._heard_at > STALE_S else self._p99_ms

    # --- bytes ----------------------------------------------------------------------------------------------------

    async def pay(self, size: int) -> None:
        """Return when `size` more bytes may be moved. Calls are served in the order in which they were made."""
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
        """Hold `count` entries in flight, as soon as there is room for them."""
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

    # --- what others feel -----------------------------------------------------------------------------------------

    def observe(self, latency_s: float) -> None:
        """One answer of a bookie took this long: of our own requests, or told by whoever measures foreground ones."""
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
        if self._free_at > now:  # a debt is worked off at the rate that holds now
            self._free_at = now + (self._free_at - now) * before / self._rate
