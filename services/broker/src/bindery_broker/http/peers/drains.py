"""Drain this broker: hand over all its bundles, several at a time, and take no others.

    active --start--> draining --nothing left--> drained     a bundle that this broker must take nevertheless, because
       ^                 |  ^-------------------------'      no other one can, is handed over as soon as one can
       `-----cancel------'--'

A broker drains when it stops, and when an operator asks for it (`POST /v1/brokers/{broker}/drain`). It goes on
answering requests, and passes on those for topics that it no longer has. Its record tells the other brokers not to
give it bundles. At most `drain_bundles_max` bundles move at the same time, each of which closes and opens a bounded
number of topics at a time, so that a drain of many topics takes longer and does not overload the others.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger

from bindery_broker.broker import Broker
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.peers.handovers import HandOvers
from bindery_broker.http.proxy import Proxy
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.running import DrainStatus

LOOK_AGAIN_S: Final = 0.5
"""Seconds until bundles that could not be handed over, or were taken since, are tried again."""

log = get_logger(__name__)


class Drain:
    def __init__(self, broker: Broker, proxy: Proxy, handovers: HandOvers) -> None:
        self.on_change: Callable[[bool], None] = lambda _draining: None
        """Called when a drain begins (True), and when it is cancelled."""
        self._broker = broker
        self._proxy = proxy
        self._handovers = handovers
        self._task: asyncio.Task[None] | None = None
        self._moved = 0
        self._began = 0.0
        self._ended: float | None = None
        self._blocked = False
        self._settled = asyncio.Event()
        """Set while nothing is left that can be handed over."""

    @property
    def name(self) -> str:
        """`host:port` of this broker."""
        return self._handovers.destinations.name

    async def ask(self, exchange: Exchange, broker: str) -> tuple[int, bytes]:
        """Return the answer of another broker, `host:port`, to a request that is for it. Raises NoSuchBroker, NotOwner,
        OutcomeUnknown."""
        url = self._handovers.destinations.url(broker)
        path = exchange.raw_path.decode("ascii")
        body = None if exchange.method in ("GET", "HEAD") else await exchange.body()
        return await self._proxy.call("GET" if body is None else "POST", url, path, body, client=exchange.principal)

    @property
    def status(self) -> DrainStatus:
        left = len(self._broker.ownership.held)
        if self._task is None:
            return DrainStatus("active", self._moved, left, 0.0, 0.0, False)
        state = "draining" if left or not self._settled.is_set() else "drained"
        now = asyncio.get_running_loop().time()
        seconds = (now if self._ended is None else self._ended) - self._began
        rate = self._moved / seconds if seconds > 0 else 0.0
        return DrainStatus(state, self._moved, left, round(rate, 2), round(seconds, 2), self._blocked)

    async def start(self) -> None:
        """Begin, unless a drain is in progress."""
        if self._task is not None:
            return
        loop = asyncio.get_running_loop()
        self._moved, self._began, self._ended, self._blocked = 0, loop.time(), None, False
        self._settled.clear()
        self._task = loop.create_task(self._run())
        self.on_change(True)
        log.info("drain_started", bundles=len(self._broker.ownership.held))

    async def cancel(self) -> bool:
        """End the drain: this broker takes bundles again. Bundles that are moving move. Returns whether one was in
        progress."""
        task, self._task = self._task, None
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        await self._handovers.destinations.mark(draining=False)
        self.on_change(False)
        log.info("drain_cancelled", moved=self._moved)
        return True

    async def run(self, *, timeout_s: float) -> None:
        """Drain, and return once nothing is left that other brokers can take, or after the timeout."""
        await self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        log.info("drain_ended", moved=self._moved, left=len(self._broker.ownership.held))

    async def close(self) -> None:
        """Stop handing over. The record keeps its mark."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        await self._handovers.destinations.mark(draining=True)
        loop = asyncio.get_running_loop()
        while True:
            held = self._broker.ownership.held
            if held:
                self._ended = None
                done = await self._move_all(held)
                self._blocked = not any(done)
            if not self._broker.ownership.held or self._blocked:
                if self._ended is None:
                    self._ended = loop.time()
                self._settled.set()
                await asyncio.sleep(LOOK_AGAIN_S)
            self._blocked = self._blocked and bool(self._broker.ownership.held)

    async def _move_all(self, bundles: list[Bundle]) -> list[bool]:
        turns = asyncio.Semaphore(self._broker.settings.drain_bundles_max)

        async def move(bundle: Bundle) -> bool:
            async with turns:
                try:
                    moved = await asyncio.shield(asyncio.ensure_future(self._handovers.move(bundle)))
                except BinderyError as error:
                    log.warning("bundle_not_handed_over", bundle=str(bundle), **error_fields(error))
                    return False
                self._moved += moved
                return moved

        return list(await asyncio.gather(*map(move, bundles)))
