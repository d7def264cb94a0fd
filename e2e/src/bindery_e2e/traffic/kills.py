"""Load three subscriptions of a topic while their broker is killed and started again.

| subscription | consumers | acknowledge                                                                               |
|--------------|-----------|-------------------------------------------------------------------------------------------|
| shared       | 3         | messages and indexes of batches: all in one request, each in its own, or with a receive   |
| key_shared   | 3         | the same                                                                                  |
| exclusive    | 1         | everything up to a message of the response, or some messages of it                        |

Consumers also return messages and let leases end, so that redelivery counts rise. Half of the requests of the producers
store their messages as one entry. A kill comes at a random moment of the load; some come while the broker starts.

At the end, consumers acknowledge everything, the broker is killed once more, and the consumers ask again: nothing may
come. No consumer uses `redeliver` or `request_id`, as in `ordering`.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx

from bindery_e2e.judging.history import Fault, History
from bindery_e2e.traffic.clients import Clients, Place, TrafficError
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, Endpoint
from bindery_e2e.traffic.ordering import LIMITS, ORDERS
from bindery_e2e.traffic.producing import produce

KINDS: Final = ("shared", "key_shared", "exclusive")
NOTHING_S: Final = 1.5
"""Seconds in which nothing may come at the end."""


class BrokerProcess(Protocol):
    """The broker that is killed."""

    name: str

    async def kill(self) -> None:
        """End it with SIGKILL; return when it is dead. It is not started again before `start`."""

    async def start(self) -> None:
        """Begin to start it; do not wait until it is ready."""


@dataclass(frozen=True, slots=True)
class KillsSettings:
    """The load. The same seed plays the same choices, at times that differ."""

    seed: int = 0
    kills: int = 50
    topic: str = "public/default/kills"
    """`tenant/namespace/name`; the topic must be empty."""
    keys: int = 12
    """Few: a batch has messages of one key."""
    producers: int = 3
    messages_per_s: float = 300.0
    batch_share: float = 0.5
    consumers: int = 3
    """Consumers of each subscription; an exclusive one has one."""
    up_s: tuple[float, float] = (0.1, 3.0)
    """Seconds from the first answers after a start to the next kill."""
    start_share: float = 0.15
    """Share of the kills that come while the broker starts."""
    start_s: tuple[float, float] = (0.2, 2.0)
    """Seconds from the start of a broker to its kill, for these."""
    receive_max: tuple[int, ...] = (1, 20, 100)
    receive_wait_ms: int = 250
    ack_timeout_ms: tuple[int, ...] = (1_500, 8_000)
    session_ttl_ms: int = 5_000
    nack_share: float = 0.05
    """Share of the messages that consumers return; of the responses, on the exclusive subscription."""
    kept_share: float = 0.01
    """Share of the messages that consumers neither acknowledge nor return: their leases end."""
    gap_s_max: float = 60.0
    """Maximum seconds without a successful produce because of a kill."""
    request_timeout_s: float = 15.0
    drain_timeout_s: float = 90.0

    @property
    def places(self) -> list[Place]:
        return [Place(self.topic, kind, kind) for kind in KINDS]


class Kills:
    """One run; `play` returns when everything is acknowledged and the topic was read back."""

    def __init__(self, history: History, endpoint: Endpoint, broker: BrokerProcess, settings: KillsSettings) -> None:
        self.settings = settings
        self.clients = Clients(history, endpoint, timeout_s=settings.request_timeout_s)
        self.ending = asyncio.Event()
        """Set when nothing is produced any more: consumers then acknowledge everything."""
        self.over = asyncio.Event()
        self._history = history
        self._broker = broker
        self._rng = random.Random(f"{settings.seed} kills")
        self._answered: set[str] = set()
        """Subscriptions that have answered a receive since the set was cleared."""
        self._all_answered = asyncio.Event()

    async def play(self) -> None:
        """Raises TrafficError if the topic is not empty, or a client or the broker's supervisor fails."""
        settings = self.settings
        await self.clients.create(settings.places)
        for place in settings.places:
            self._history.observe("subscribed", **place.fields, kind=place.kind, order=ORDERS[place.kind])
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in settings.places:
                    for number in range(1 if place.kind == "exclusive" else settings.consumers):
                        tasks.create_task(Consumer(self, place, number).run())
                producers = [tasks.create_task(self._produce(number)) for number in range(settings.producers)]
                await self._kill_often()
                self.ending.set()
                await asyncio.gather(*producers)
                await self._drain()
                await self._kill(until_answered=True)
                await asyncio.sleep(NOTHING_S)
                self.over.set()
        except* TrafficError as errors:
            raise TrafficError(str(errors.exceptions[0])) from errors
        await self.clients.read(settings.topic, 1, timeout_s=settings.drain_timeout_s)

    def answered(self, place: Place) -> None:
        """A receive of this subscription has succeeded."""
        self._answered.add(place.subscription)
        if len(self._answered) == len(KINDS):
            self._all_answered.set()

    async def _produce(self, number: int) -> None:
        rng = random.Random(f"{self.settings.seed} producer {number}")
        await produce(self.clients, self.settings, number, rng, until=self.ending)

    async def _kill_often(self) -> None:
        """Kill the broker all but once: the last kill follows the drain."""
        settings, rng = self.settings, self._rng
        await self._all_answered.wait()
        await asyncio.sleep(rng.uniform(*settings.up_s))
        for left in range(settings.kills - 2, -1, -1):
            is_short = left > 0 and rng.random() < settings.start_share
            await self._kill(until_answered=not is_short)
            await asyncio.sleep(rng.uniform(*(settings.start_s if is_short else settings.up_s)))

    async def _kill(self, *, until_answered: bool) -> None:
        with self._history.fault("kill -9", self._broker.name, gap_s_max=self.settings.gap_s_max) as fault:
            await self._broker.kill()
            fault.measured(killed_at=time.monotonic_ns())
            self._answered.clear()
            self._all_answered.clear()
            await self._broker.start()
            if until_answered:
                await self._wait_for_answers(fault)

    async def _wait_for_answers(self, fault: Fault) -> None:
        try:
            async with asyncio.timeout(self.settings.gap_s_max):
                await self._all_answered.wait()
        except TimeoutError:
            silent = ", ".join(kind for kind in KINDS if kind not in self._answered)
            raise TrafficError(f"no answer from {silent} within {self.settings.gap_s_max:g} s of a kill") from None
        fault.measured(detail="all subscriptions answered again")

    async def _drain(self) -> None:
        for place in self.settings.places:
            complete = await self.clients.drained([place], timeout_s=self.settings.drain_timeout_s)
            self._history.observe("drained", **place.fields, complete=complete)


class Consumer:
    def __init__(self, kills: Kills, place: Place, number: int) -> None:
        self._kills = kills
        self._clients = kills.clients
        self._place = place
        self._name = f"{place.kind}-{number}"
        self._rng = random.Random(f"{kills.settings.seed} {self._name}")
        self._with_receive: list[str] = []
        """Ids to acknowledge with the next receive."""

    async def run(self) -> None:
        settings, rng = self._kills.settings, self._rng
        async with self._clients.access.client(longer_s=settings.receive_wait_ms / 1000) as http:
            while not self._kills.over.is_set():
                await self._clients.access.base_url()
                body: dict[str, Any] = {
                    "max": rng.choice(settings.receive_max),
                    "wait_ms": settings.receive_wait_ms,
                    "ack_timeout_ms": rng.choice(settings.ack_timeout_ms),
                    "session_ttl_ms": settings.session_ttl_ms,
                }
                if self._with_receive:
                    body["ack"] = self._with_receive
                    self._with_receive = []
                messages = await self._clients.receive(http, self._name, self._place, body, recorded=LIMITS)
                if messages is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                self._kills.answered(self._place)
                if messages and self._place.kind == "exclusive":
                    await self._process_in_order(http, [message["message_id"] for message in messages])
                elif messages:
                    await self._process(http, [message["message_id"] for message in messages])

    async def _process(self, http: httpx.AsyncClient, ids: list[str]) -> None:
        settings, rng = self._kills.settings, self._rng
        if self._kills.ending.is_set():
            await self._clients.ack(http, self._name, self._place, ids)
            return
        acked: list[str] = []
        returned: list[str] = []
        for message_id in ids:
            draw = rng.random()
            if draw < settings.nack_share:
                returned.append(message_id)
            elif draw >= settings.nack_share + settings.kept_share:
                acked.append(message_id)
        if returned:
            delay_ms = rng.choice((0, 0, 200))
            await self._clients.nack(http, self._name, self._place, returned, delay_ms=delay_ms)
        match rng.choice(("together", "each", "with receive")):
            case "together" if acked:
                await self._clients.ack(http, self._name, self._place, acked)
            case "each":
                for message_id in acked[:5]:
                    await self._clients.ack(http, self._name, self._place, [message_id])
                self._with_receive = acked[5:]
            case _:
                self._with_receive = acked

    async def _process_in_order(self, http: httpx.AsyncClient, ids: list[str]) -> None:
        settings, rng = self._kills.settings, self._rng
        is_ending = self._kills.ending.is_set()
        draw = rng.random()
        if not is_ending and draw < settings.nack_share:
            await self._clients.nack(http, self._name, self._place, [rng.choice(ids)])
        elif is_ending or draw < 0.7:
            last = ids[-1] if is_ending else rng.choice(ids)
            await self._clients.ack_cumulative(http, self._name, self._place, last)
        else:
            some = [message_id for message_id in ids if rng.random() < 0.7]
            if some:
                await self._clients.ack(http, self._name, self._place, some)
