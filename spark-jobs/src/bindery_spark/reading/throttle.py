"""Limit the rate at which all readers read from one bookie: by slots in ZooKeeper, a byte budget, and latency.

| limit             | rule                                                                                             |
|-------------------|--------------------------------------------------------------------------------------------------|
| ReaderSlots       | a reader holds one of `slots` ephemeral nodes of its bookie; without one it waits                |
| Budget            | the holders of slots of a bookie share its bytes/s evenly, in bursts of up to BURST_S            |
| Pressure          | a reader pauses between requests if the bookie answers slowly                                    |

Nodes: /bindery/audit/readers/<bookie>/slot-<n>, n from 0. The slots are advisory: a client that does not take
one is not limited, and a reader that loses its session finishes its task.
"""

import asyncio
import contextlib
from collections import defaultdict
from statistics import median
from typing import Final

from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown, NoSuchNode, TryAgain
from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.stores.ephemerals import delete_own
from bindery_metadata.stores.store import MetadataStore

BURST_S: Final = 0.25
"""Maximum burst after a pause, in seconds at the allowed rate."""
WINDOW: Final = 16
"""Number of responses per median."""
SLOW_FACTOR: Final = 3.0
"""Multiple of the baseline latency above which responses are slow. A second reader alone may double the latency."""
SLOW_MARGIN_S: Final = 0.005
"""Margin in seconds that is added to SLOW_FACTOR times the baseline."""
SIZE_CLASS_BITS: Final = 3
"""Width of a class of response sizes, as a power of two."""
PRESSURE_MAX: Final = 16.0
"""Maximum of `Pressure.pressure`."""
SLOT_POLL_S: Final = 2.0
"""Interval in seconds at which slots are polled, because a watch may miss a change."""


class NoReaderSlot(TryAgain):
    """Other readers hold all slots of a bookie."""

    code = "no_reader_slot"


class Budget:
    """A token bucket that fills at `rate` bytes per second. `rate` 0: no limit."""

    def __init__(self, rate: float, *, now: float) -> None:
        assert rate >= 0
        self._rate = rate
        self._free = rate * BURST_S
        self._at = now

    def set_rate(self, rate: float, *, now: float) -> None:
        """Change the rate from `now` on."""
        self._free += (now - self._at) * self._rate
        self._at, self._rate = now, rate

    def take(self, size: float, *, now: float) -> float:
        """Take `size` bytes; the balance may become negative. Return the seconds to wait before the request is sent."""
        if not self._rate:
            return 0.0
        self._free = min(self._rate * BURST_S, self._free + (now - self._at) * self._rate) - size
        self._at = now
        return max(0.0, -self._free / self._rate)


class Pressure:
    """Computes pauses for a bookie that answers more slowly than when this reader began.

    Latencies are compared within classes of responses of similar size (each SIZE_CLASS_BITS binary orders wide). The
    baseline of a class is the lowest median of WINDOW latencies. After each further WINDOW responses, the pressure
    doubles, up to PRESSURE_MAX, if their median exceeds SLOW_FACTOR times the baseline plus SLOW_MARGIN_S; otherwise
    it halves, down to 1. Between two requests the reader waits (pressure - 1) times the latest median, so at pressure
    2 it is idle half of the time.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[int, list[float]] = defaultdict(list)
        self._baseline: dict[int, float] = {}
        self._median = 0.0
        self.pressure = 1.0

    def observe(self, latency_s: float, *, size: int) -> None:
        """Record a response of `size` bytes that took `latency_s`."""
        kind = size.bit_length() // SIZE_CLASS_BITS
        seen = self._seen[kind]
        seen.append(latency_s)
        if len(seen) < WINDOW:
            return
        self._median = median(seen)
        seen.clear()
        baseline = self._baseline[kind] = min(self._median, self._baseline.get(kind, self._median))
        if self._median > SLOW_FACTOR * baseline + SLOW_MARGIN_S:
            self.pressure = min(PRESSURE_MAX, self.pressure * 2)
        else:
            self.pressure = max(1.0, self.pressure / 2)

    def pause(self) -> float:
        """Seconds to wait before the next request."""
        return (self.pressure - 1) * self._median


class ReaderSlot:
    """A slot that was acquired."""

    def __init__(self, store: MetadataStore, path: str, session_id: int) -> None:
        self.path = path
        self._store = store
        self._session_id = session_id

    async def release(self) -> None:
        """Delete the node. If ZooKeeper is unavailable, the end of the session deletes it."""
        with contextlib.suppress(TryAgain, MetadataOutcomeUnknown):
            await delete_own(self._store, self.path, self._session_id)


class ReaderSlots:
    """Slots of bookies, shared by all readers of a cluster."""

    def __init__(self, store: MetadataStore, *, slots: int, layout: BinderyLayout | None = None) -> None:
        assert slots >= 1
        self._store = store
        self._slots = slots
        self._layout = layout or BinderyLayout()

    async def acquire(self, bookie_id: BookieId, *, reader: str, timeout_s: float) -> ReaderSlot:
        """Wait for a free slot and take it. `reader`: content of the node, so that operators can identify the holder.

        Raises NoReaderSlot after `timeout_s`, MetadataUnavailable.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        parent = f"{self._layout.audit_readers}/{bookie_id}"
        while True:
            changed = asyncio.Event()
            with contextlib.suppress(NoSuchNode):
                await self._store.children(parent, watch=changed.set)
            for number in range(self._slots):
                slot = await self._try(self._layout.audit_reader_slot(bookie_id, number), reader)
                if slot is not None:
                    return slot
            left = deadline - loop.time()
            if left <= 0:
                raise NoReaderSlot(
                    "other readers hold all slots of this bookie",
                    bookie_id=bookie_id,
                    slots=self._slots,
                    waited_s=timeout_s,
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, SLOT_POLL_S)):
                    await changed.wait()

    async def share(self, bookie_id: BookieId, budget: Budget, *, rate: float) -> None:
        """Set the rate of `budget` to its share of `rate` when the number of slot holders changes, until cancelled."""
        loop = asyncio.get_running_loop()
        parent = f"{self._layout.audit_readers}/{bookie_id}"
        while rate:
            changed = asyncio.Event()
            with contextlib.suppress(NoSuchNode, TryAgain):
                held = await self._store.children(parent, watch=changed.set)
                budget.set_rate(rate / max(1, len(held)), now=loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOT_POLL_S):
                    await changed.wait()

    async def _try(self, path: str, reader: str) -> ReaderSlot | None:
        try:
            await self._store.create(path, reader.encode(), ephemeral=True, make_parents=True)
        except AlreadyExists:
            return None
        except MetadataOutcomeUnknown:
            await self._store.sync(path)
        stat = await self._store.exists(path)
        if stat is None or stat.ephemeral_owner != self._store.session_id:
            return None
        return ReaderSlot(self._store, path, stat.ephemeral_owner)
