"""Load one subscription with messages of many keys, while its consumers join, leave, are killed and return messages.

A topic, a subscription, and `OrderingSettings.consumers` slots. In each slot, one consumer after the other lives for
some seconds and ends in one of these ways:

| end    | what it does                                                           | its messages are free     |
|--------|------------------------------------------------------------------------|---------------------------|
| leave  | acknowledges what it holds, and leaves (DELETE)                        | at once                   |
| close  | leaves with the messages of its last response                          | at once                   |
| kill   | is cancelled in any request; a moment later, another client removes it | when it is removed        |
| vanish | is cancelled in any request, and never calls again                     | when its leases end       |

Meanwhile a consumer returns some messages, with or without a delay, and with or without the later messages of the key
that it holds; acknowledges in one or two requests; is slow at times; and seldom keeps messages until their leases end.

Storms and calms alternate, because a key may wait while a consumer that could own it has no demand, and in a storm
there is always one that is ending, slow or gone. A calm begins with the end of about half of the consumers. The others
then receive without a pause, none joins or leaves, and no consumer that vanished still has a session: every key must be
delivered within 2 s.

Each key belongs to one producer, and a producer has one request in flight, so the messages of a key are in the order of
their sequences. The key number n is used as often as 1 / (n + 1): some keys always have messages in flight, and of most
keys, no new message comes for seconds, which would free a key that is stuck. Some requests are batches, which contain
messages of several keys.

Consumers never set `redeliver` or `request_id`, which the rules of `judging.consuming` exclude. A consumer's name is
used again only after it was removed.
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.traffic.clients import Clients, Place, TrafficError
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, Endpoint
from bindery_e2e.traffic.producing import produce

ORDERS: Final = {"key_shared": "key", "exclusive": "topic", "failover": "topic", "shared": "none"}
"""Type of the subscription -> the order that it promises."""
ENDS: Final = ("leave", "close", "kill", "vanish")
LIMITS: Final = ("max", "ack_timeout_ms", "session_ttl_ms")
"""Fields of a receive that the history needs."""
GONE_MARGIN_S: Final = 1.2
"""Seconds after which the session of a consumer that vanished has certainly ended; more than `consuming.LATE_NS`."""


@dataclass(frozen=True, slots=True)
class OrderingSettings:
    """The load. The same seed plays the same lives with the same messages, at times that differ."""

    seed: int = 0
    seconds: float = 60.0
    """Duration in seconds, without the time to drain the subscription."""
    kind: str = "key_shared"
    order: str = ""
    """The order to judge: key, topic or none. Empty: the order that the type promises."""
    topic: str = "public/default/ordering"
    """`tenant/namespace/name`; the topic must be empty."""
    subscription: str = "ordered"
    keys: int = 200
    producers: int = 4
    messages_per_s: float = 500.0
    """Rate of all producers together."""
    batch_share: float = 0.5
    """Share of the produce requests that store their messages as one entry."""
    consumers: int = 5
    """Slots; an exclusive subscription has one."""
    storm_s: float = 7.5
    calm_s: float = 4.5
    life_s: tuple[float, float] = (0.3, 4.0)
    """Seconds of a life in a storm."""
    pause_s: tuple[float, float] = (0.05, 1.5)
    """Seconds between two lives in a slot."""
    receive_max: tuple[int, ...] = (10, 100, 500)
    """Messages per receive: a consumer of a storm has one of these limits; in calms, all have the last one."""
    receive_wait_ms: int = 250
    ack_timeout_ms: int = 10_000
    """Much more than the 2 s after which a key is stuck: leases that nobody ends are not mistaken for quick ones."""
    short_ack_timeout_ms: int = 2_000
    """Of all consumers that vanish, and of some others, so that leases end during a run."""
    short_share: float = 0.3
    """Share of the consumers with a short timeout, besides those that vanish."""
    session_ttl_ms: int = 1_000
    nack_share: float = 0.03
    """Share of the messages that consumers return."""
    slow_share: float = 0.02
    """Share of the responses that a consumer takes up to a second to process."""
    late_share: float = 0.01
    """Share of the responses whose messages a consumer with a short timeout keeps until their leases end."""
    request_timeout_s: float = 15.0
    drain_timeout_s: float = 60.0

    @property
    def place(self) -> Place:
        return Place(self.topic, self.subscription, self.kind)

    @property
    def slots(self) -> int:
        return 1 if self.kind == "exclusive" else self.consumers


class Phases:
    """The times of storms and calms, in seconds of the event loop's clock."""

    def __init__(self, settings: OrderingSettings, *, began: float) -> None:
        self._settings = settings
        self._cycle_s = settings.storm_s + settings.calm_s
        self._began = began

    def calm_of(self, at: float) -> tuple[float, float]:
        """Begin and end of the calm at `at`, or of the next one."""
        began = self._began + (at - self._began) // self._cycle_s * self._cycle_s
        return began + self._settings.storm_s, began + self._cycle_s

    def allows(self, at: float, *, until: float) -> bool:
        """Whether there is a storm from `at` to `until`."""
        return self.calm_of(at)[0] > until

    def end_of_life(self, at: float, slot: int, rng: random.Random) -> tuple[float, str]:
        """Draw when and how a life ends that begins at `at`. The first slot lives through each calm."""
        settings = self._settings
        begin, end = self.calm_of(at)
        ends_at, how = at + rng.uniform(*settings.life_s), rng.choice(ENDS)
        if ends_at >= begin:
            is_first = slot == 0 or at >= begin
            ends_at = end + rng.uniform(0, 1) if is_first or rng.random() < 0.5 else begin + rng.uniform(0, 0.1)
        gone_s = max(settings.short_ack_timeout_ms, settings.session_ttl_ms) / 1000 + GONE_MARGIN_S
        if how == "vanish" and not self.allows(ends_at, until=ends_at + gone_s):
            how = "close"
        return ends_at, how


class Ordering:
    """One run of the load; `play` returns when everything is acknowledged and the topic was read back."""

    def __init__(self, history: History, endpoint: Endpoint, settings: OrderingSettings) -> None:
        self.settings = settings
        self.ends: Counter[str] = Counter()
        """Number of lives by their end."""
        self._history = history
        self.clients = Clients(history, endpoint, timeout_s=settings.request_timeout_s)
        self.phases = Phases(settings, began=0.0)
        self.ending = asyncio.Event()
        """Set when nothing is produced any more: consumers then live until the end and return nothing."""
        self.over = asyncio.Event()

    async def play(self) -> None:
        """Raises TrafficError if the broker refuses the subscription, or a client fails."""
        settings, place = self.settings, self.settings.place
        await self.clients.create([place])
        await self._probe()
        order = settings.order or ORDERS[settings.kind]
        self._history.observe("subscribed", **place.fields, kind=place.kind, order=order)
        self.phases = Phases(settings, began=asyncio.get_running_loop().time())
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in range(settings.slots):
                    tasks.create_task(self._slot(slot, random.Random(f"{settings.seed} consumer {slot}")))
                producers = [tasks.create_task(self._produce(number)) for number in range(settings.producers)]
                await asyncio.wait(producers, timeout=settings.seconds)
                self.ending.set()
                await asyncio.gather(*producers)
                await self._drain()
                self.over.set()
        except* TrafficError as errors:
            raise TrafficError(str(errors.exceptions[0])) from errors
        await self.clients.read(settings.topic, 1, timeout_s=settings.drain_timeout_s)

    async def _produce(self, number: int) -> None:
        rng = random.Random(f"{self.settings.seed} producer {number}")
        await produce(self.clients, self.settings, number, rng, until=self.ending)

    async def _probe(self) -> None:
        """Check that the broker accepts the type of the subscription."""
        place = self.settings.place
        async with self.clients.access.client() as http:
            await self.clients.access.base_url()
            body = {"consumer": "probe", "type": place.kind, "initial": "earliest", "wait_ms": 0}
            outcome = await self.clients.access.call(http, "POST", f"{place.path}/receive", json=body)
            if outcome.kind != "ok":
                raise TrafficError(f"the broker refuses a consumer of a {place.kind} subscription: {outcome.error}")
            await self.clients.until_ok(http, "DELETE", f"{place.path}/consumers/probe")

    async def _drain(self) -> None:
        settings = self.settings
        complete = await self.clients.drained([settings.place], timeout_s=settings.drain_timeout_s)
        self._history.observe("drained", **settings.place.fields, complete=complete)

    # -- consuming -----------------------------------------------------------------------------------------------------

    async def _slot(self, slot: int, rng: random.Random) -> None:
        """Play the lives of a slot, one after the other."""
        life, name, loop = 0, f"c{slot}", asyncio.get_running_loop()
        await asyncio.sleep(rng.uniform(0, self.settings.life_s[0]))
        while not self.over.is_set():
            ends_at, how = self.phases.end_of_life(loop.time(), slot, rng)
            await self._live(name, how, ends_at - loop.time(), rng)
            life += 1
            name = f"c{slot}.{life}" if how == "vanish" or rng.random() < 0.5 else name
            next_at = loop.time() + rng.uniform(*self.settings.pause_s)
            begin, end = self.phases.calm_of(next_at)
            if slot and next_at >= begin - 0.5:
                next_at = end + rng.uniform(0, 0.5)
            await self._sleep(next_at - loop.time(), until=self.ending)

    async def _live(self, name: str, how: str, seconds: float, rng: random.Random) -> None:
        """One life. It ends after `seconds` as `how` says, or at the end of the run."""
        place = self.settings.place
        is_short = how == "vanish" or rng.random() < self.settings.short_share
        timeout_ms = self.settings.short_ack_timeout_ms if is_short else self.settings.ack_timeout_ms
        consumer = Consumer(self, name, timeout_ms, rng)
        living = asyncio.create_task(consumer.run())
        async with self.clients.access.client() as http:
            try:
                ending = asyncio.create_task(self.ending.wait())
                await asyncio.wait((living, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if living.done() or self.ending.is_set():
                    await living
                    return
                if how in ("leave", "close"):
                    consumer.last = how
                    await asyncio.wait((living,))
                    living.result()
                else:
                    living.cancel()
                    await asyncio.wait((living,))
                    if how == "kill":
                        await asyncio.sleep(rng.uniform(0, 0.1))
            finally:
                living.cancel()
                await asyncio.wait((living,))
            if how != "vanish":
                while not await self.clients.leave(http, name, place):
                    await asyncio.sleep(RETRY_PAUSE_S)
        self.ends[how] += 1
        self._history.observe("note", text=f"{name}: {how}")

    async def _sleep(self, seconds: float, *, until: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), seconds)


class Consumer:
    """One consumer. `last`: set to "leave" or "close" to end its life; it then returns from `run`."""

    def __init__(self, ordering: Ordering, name: str, ack_timeout_ms: int, rng: random.Random) -> None:
        self.last = ""
        self._ordering = ordering
        self._clients = ordering.clients
        self._settings = settings = ordering.settings
        self._name = name
        self._rng = rng
        self._max = rng.choice(settings.receive_max)
        self._is_short = ack_timeout_ms == settings.short_ack_timeout_ms
        self._body = {
            "wait_ms": settings.receive_wait_ms,
            "ack_timeout_ms": ack_timeout_ms,
            "session_ttl_ms": settings.session_ttl_ms,
        }

    async def run(self) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        async with self._clients.access.client(longer_s=settings.receive_wait_ms / 1000) as http:
            while not self._ordering.over.is_set() and self.last != "leave":
                await self._clients.access.base_url()
                is_calm = not self._ordering.phases.allows(loop.time(), until=loop.time())
                body = {**self._body, "max": settings.receive_max[-1] if is_calm else self._max}
                messages = await self._clients.receive(http, self._name, settings.place, body, recorded=LIMITS)
                if self.last == "close":
                    return
                if messages is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
                elif messages:
                    await self._process(http, messages)

    async def _process(self, http: httpx.AsyncClient, messages: list[dict[str, Any]]) -> None:
        settings, rng, place = self._settings, self._rng, self._settings.place
        if not self._ordering.ending.is_set():
            now = asyncio.get_running_loop().time()
            pause_s = rng.uniform(0, 0.02)
            if self._is_short and rng.random() < settings.late_share:
                pause_s = settings.short_ack_timeout_ms / 1000 * rng.uniform(0.9, 1.3)
            elif rng.random() < settings.slow_share:
                pause_s = rng.uniform(0.1, 1.0)
            await asyncio.sleep(pause_s if self._ordering.phases.allows(now, until=now + pause_s) else 0.0)
        kept, returned = self._choose(messages)
        cut = rng.randint(0, len(kept)) if rng.random() < 0.3 else len(kept)
        if kept[:cut] and not await self._clients.ack(http, self._name, place, kept[:cut]):
            return  # the leases end
        if returned:
            delay_ms = rng.choice((0, 0, 0, 200))
            await self._clients.nack(http, self._name, place, returned, delay_ms=delay_ms)
        if kept[cut:]:
            await self._clients.ack(http, self._name, place, kept[cut:])

    def _choose(self, messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
        """Divide the messages into those to acknowledge and those to return."""
        kept: list[str] = []
        returned: list[str] = []
        followed: set[str] = set()
        """Keys of which the later messages are returned, too."""
        for message in messages:
            key = message.get("key", "")
            if not self._ordering.ending.is_set() and (
                key in followed or self._rng.random() < self._settings.nack_share
            ):
                returned.append(message["message_id"])
                if self._rng.random() < 0.5:
                    followed.add(key)
            else:
                kept.append(message["message_id"])
        return kept, returned
