"""Load two subscriptions that retry messages, while their brokers and bookies are killed and started again.

With several brokers, each request goes to another one. So a topic, its retry topic and its dead-letter topic belong to
different brokers in general, and others after each kill.

What a consumer does with a message is decided by the seed, the subscription and the message, so that each consumer that
gets it does the same:

| plan    | what the consumer does                                                                                     |
|---------|------------------------------------------------------------------------------------------------------------|
| ack     | acknowledge at once                                                                                        |
| retry   | retry 1 to 3 times, then acknowledge                                                                       |
| dead    | retry with max_redeliver LIMIT until it is a dead letter                                                   |
| return  | return it until the `dead_letter` of the receives makes it a dead letter; half of them after one retry     |

A call without an answer is repeated or not: then the message is delivered again when its lease ends. A kill comes at a
random moment of the load. At most one bookie is down at a time. At the end the load continues until nothing is left,
a broker is killed once more, and all topics are read.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.traffic.clients import READ_MAX, Clients, Place, TrafficError, row_of, topic_path
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, Endpoint
from bindery_e2e.traffic.kills import BrokerProcess
from bindery_e2e.traffic.producing import produce

KINDS: Final = ("shared", "key_shared")
LIMIT: Final = 2
"""`max_redeliver` of all receives, and of the retries of messages that shall be dead letters."""
NO_LIMIT: Final = 16
NOTHING_S: Final = 1.5
"""Seconds in which nothing may come at the end."""
REPEATS_MAX: Final = 3
COPIED: Final = ("RECONSUMETIMES", "ORIGIN_MESSAGE_ID", "REAL_SUBSCRIPTION", "REAL_TOPIC")
"""Properties of the rows in the history."""
SET: Final = frozenset({*COPIED, "ORIGIN_MESSAGE_IDY_TIME", "DELAY_TIME", "producer", "sequence"})


class BookieProcess(BrokerProcess, Protocol):
    """A bookie that is killed."""

    async def ready(self) -> None:
        """Wait until it serves. Raises TrafficError."""


@dataclass(frozen=True, slots=True)
class RetriesSettings:
    """The load. The same seed plays the same choices, at times that differ."""

    seed: int = 0
    kills: int = 20
    topic: str = "public/default/jobs"
    """`tenant/namespace/name`; the topic must be empty. With this name, the retry and dead-letter topics of its
    subscriptions are in three other bundles, so that other brokers may own them."""
    keys: int = 12
    producers: int = 2
    messages_per_s: float = 60.0
    batch_share: float = 0.5
    consumers: int = 2
    """Consumers of each subscription."""
    bookie_share: float = 0.4
    """Share of the kills that end a bookie."""
    up_s: tuple[float, float] = (0.2, 3.0)
    """Seconds from the first answers after a kill to the next one."""
    bookie_down_s: tuple[float, float] = (0.0, 3.0)
    receive_max: tuple[int, ...] = (1, 10, 50)
    receive_wait_ms: int = 250
    ack_timeout_ms: tuple[int, ...] = (3_000, 8_000)
    session_ttl_ms: int = 5_000
    delay_ms: tuple[int, ...] = (0, 0, 300)
    """Delays of retries."""
    repeat_share: float = 0.5
    """Share of the calls without an answer that are repeated."""
    gap_s_max: float = 60.0
    """Maximum seconds until all subscriptions answer after a kill."""
    request_timeout_s: float = 15.0
    drain_timeout_s: float = 300.0

    @property
    def places(self) -> list[Place]:
        return [Place(self.topic, kind, kind) for kind in KINDS]


def retry_place(place: Place) -> Place:
    """The subscription of the retry topic."""
    return Place(f"{place.topic}-{place.subscription}-RETRY", place.subscription, place.kind)


def dead_letter_topic(place: Place) -> str:
    return f"{place.topic}-{place.subscription}-DLQ"


class RetryClients(Clients):
    """Requests whose records have what the broker adds to copies (`judging.retries`)."""

    async def get(
        self, http: httpx.AsyncClient, consumer: str, place: Place, body: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Return the messages of one receive; None: it did not succeed."""
        n = self._history.invoke("receive", consumer, **place.fields, kind=place.kind, max_redeliver=LIMIT)
        request = {"consumer": consumer, "type": place.kind, "dead_letter": {"max_redeliver": LIMIT}, **body}
        outcome = await self._recorded(n, self.access.call(http, "POST", f"{place.path}/receive", json=request))
        if outcome.kind != "ok":
            self._refused(n, outcome)
            return None
        messages: list[dict[str, Any]] = outcome.body["messages"]
        rows = [[*wide_row(message), message.get("redelivery_count", 0)] for message in messages]
        self._history.ok(n, messages=rows)
        return messages

    async def retry(
        self, http: httpx.AsyncClient, consumer: str, place: Place, ids: list[str], *, max_redeliver: int, delay_ms: int
    ) -> bool:
        """Move messages to the retry topic or the dead-letter topic. Returns whether there was an answer to that."""
        body = {"message_ids": ids, "max_redeliver": max_redeliver, "delay_ms": delay_ms}
        n = self._history.invoke(
            "retry", consumer, **place.fields, ids=ids, max_redeliver=max_redeliver, delay_ms=delay_ms
        )
        call = self.access.call(http, "POST", f"{place.path}/retry", json={**body, "consumer": consumer})
        outcome = await self._recorded(n, call)
        if outcome.kind != "ok":
            self._refused(n, outcome)
            return False
        moved = [
            [one["message_id"], one["topic"], one["copy_id"], one["reconsume_times"]] for one in outcome.body["moved"]
        ]
        failed = [[one["message_id"], one["error"]["status"]] for one in outcome.body["failed"]]
        self._history.ok(n, moved=moved, acknowledged=outcome.body["acknowledged"], failed=failed)
        return True

    async def read_copies(self, topic: str, *, timeout_s: float) -> None:
        """Read a topic from earliest to its end. The history records a timeout by a missing end."""
        start = "earliest"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.access.client() as http:
                while True:
                    await self.access.base_url()
                    n = self._history.invoke("read", "reader", topic=topic, start=start, round=1)
                    params = {"start": start, "max": READ_MAX}
                    call = self.access.call(http, "GET", f"{topic_path(topic)}/messages", params=params)
                    outcome = await self._recorded(n, call)
                    if outcome.status == 404:  # no message was moved there
                        self._history.ok(n, messages=[], end=True)
                        return
                    if outcome.kind != "ok":
                        self._refused(n, outcome)
                        await asyncio.sleep(RETRY_PAUSE_S)
                        continue
                    rows = [wide_row(message) for message in outcome.body["messages"]]
                    self._history.ok(n, messages=rows, end=not rows)
                    if not rows:
                        return
                    start = outcome.body["next"]


def wide_row(message: dict[str, Any]) -> list[Any]:
    """The row of a message, as `judging.retries` defines it."""
    properties: dict[str, str] = message.get("properties", {})
    copied = [properties.get(name, "") for name in COPIED]
    others = sorted(properties.keys() - SET)
    return [*row_of(message), message["publish_time"], message.get("key", ""), *copied, others]


class RetryRun:
    """One run; `play` returns when everything is acknowledged and all topics were read."""

    def __init__(
        self,
        history: History,
        endpoint: Endpoint,
        brokers: Sequence[BrokerProcess],
        bookies: Sequence[BookieProcess],
        settings: RetriesSettings,
    ) -> None:
        self.settings = settings
        self.clients = RetryClients(history, endpoint, timeout_s=settings.request_timeout_s, is_kept=len(brokers) == 1)
        self.ending = asyncio.Event()
        """Set when nothing is produced any more."""
        self.over = asyncio.Event()
        self._history = history
        self._brokers = brokers
        self._bookies = bookies
        self._rng = random.Random(f"{settings.seed} retries")
        self._answered: set[str] = set()
        """Subscriptions that have answered a receive since the set was cleared."""
        self._all_answered = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        """Starts the bookie that was killed last, and waits until it serves."""

    async def play(self) -> None:
        """Raises TrafficError if a topic is not empty, or a client or the supervisor of the processes fails."""
        settings = self.settings
        await self.clients.create(settings.places)
        async with self.clients.access.client() as http:
            for place in settings.places:  # the keepers of the retry topics
                path = f"{topic_path(retry_place(place).topic)}/subscriptions/keeper"
                await self.clients.until_ok(http, "PUT", path, json={"initial": "earliest"})
                names = {"retry": retry_place(place).topic, "dead_letters": dead_letter_topic(place)}
                self._history.observe("retries", **place.fields, **names)
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in settings.places:
                    for number in range(settings.consumers):
                        tasks.create_task(Consumer(self, place, number).run())
                producers = [tasks.create_task(self._produce(number)) for number in range(settings.producers)]
                await self._kill_often()
                self.ending.set()
                await asyncio.gather(*producers)
                self._history.observe("ending")
                await self._drain()
                await self._kill_broker()
                await asyncio.sleep(NOTHING_S)
                self.over.set()
        except* TrafficError as errors:
            raise TrafficError(str(errors.exceptions[0])) from errors
        for topic in self._topics():
            await self.clients.read_copies(topic, timeout_s=settings.drain_timeout_s)

    def answered(self, place: Place) -> None:
        """A receive of this subscription has succeeded."""
        self._answered.add(place.subscription)
        if len(self._answered) == len(KINDS):
            self._all_answered.set()

    def _topics(self) -> list[str]:
        places = self.settings.places
        return [self.settings.topic, *(retry_place(one).topic for one in places), *map(dead_letter_topic, places)]

    async def _produce(self, number: int) -> None:
        rng = random.Random(f"{self.settings.seed} producer {number}")
        await produce(self.clients, self.settings, number, rng, until=self.ending)

    # -- kills ---------------------------------------------------------------------------------------------------------

    async def _kill_often(self) -> None:
        """Kill a process all but once: the last kill, of the broker, follows the drain."""
        settings, rng = self.settings, self._rng
        await self._all_answered.wait()
        for _ in range(settings.kills - 1):
            await asyncio.sleep(rng.uniform(*settings.up_s))
            if rng.random() < settings.bookie_share:
                await self._kill_bookie(rng.choice(self._bookies), rng.uniform(*settings.bookie_down_s))
            else:
                await self._kill_broker()
        await asyncio.sleep(rng.uniform(*settings.up_s))
        await self._until_started()

    async def _kill_broker(self) -> None:
        broker = self._rng.choice(self._brokers)
        with self._history.fault("kill -9", broker.name, gap_s_max=self.settings.gap_s_max) as fault:
            await broker.kill()
            fault.measured(killed_at=time.monotonic_ns())
            self._answered.clear()
            self._all_answered.clear()
            await broker.start()
            try:
                async with asyncio.timeout(self.settings.gap_s_max):
                    await self._all_answered.wait()
            except TimeoutError:
                gap = f"{self.settings.gap_s_max:.0f} s"
                raise TrafficError(f"not all subscriptions answered within {gap} after the broker was killed") from None

    async def _kill_bookie(self, bookie: BookieProcess, down_s: float) -> None:
        """Kill it as soon as all bookies serve. It starts in the background, so that the broker is killed meanwhile."""
        await self._until_started()
        with self._history.fault("kill -9", bookie.name) as fault:
            await bookie.kill()
            fault.measured(killed_at=time.monotonic_ns())
        self._starting = asyncio.create_task(self._start_bookie(bookie, down_s))

    async def _start_bookie(self, bookie: BookieProcess, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await bookie.start()
        await bookie.ready()

    async def _until_started(self) -> None:
        if self._starting is not None:
            await self._starting
            self._starting = None

    async def _drain(self) -> None:
        for place in self.settings.places:
            both = [place, retry_place(place)]
            complete = await self.clients.drained(both, timeout_s=self.settings.drain_timeout_s)
            self._history.observe("drained", **place.fields, complete=complete)


class Consumer:
    def __init__(self, run: RetryRun, place: Place, number: int) -> None:
        self._run = run
        self._clients = run.clients
        self._place = place
        self._name = f"{place.kind}-{number}"
        self._rng = random.Random(f"{run.settings.seed} {self._name}")

    async def run(self) -> None:
        settings, rng = self._run.settings, self._rng
        async with self._clients.access.client(longer_s=settings.receive_wait_ms / 1000) as http:
            while not self._run.over.is_set():
                await self._clients.access.base_url()
                body: dict[str, Any] = {
                    "max": rng.choice(settings.receive_max),
                    "wait_ms": settings.receive_wait_ms,
                    "ack_timeout_ms": rng.choice(settings.ack_timeout_ms),
                    "session_ttl_ms": settings.session_ttl_ms,
                }
                messages = await self._clients.get(http, self._name, self._place, body)
                if messages is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                self._run.answered(self._place)
                await self._process(http, messages)

    async def _process(self, http: httpx.AsyncClient, messages: Sequence[dict[str, Any]]) -> None:
        """Do what is planned with each message, in an order of the kinds of calls that is random."""
        settings, rng = self._run.settings, self._rng
        clients, name, place = self._clients, self._name, self._place
        wanted: dict[str, list[str]] = {}
        for message in messages:
            wanted.setdefault(step_of(settings.seed, place.subscription, message), []).append(message["message_id"])
        steps = list(wanted)
        rng.shuffle(steps)
        for step in steps:
            ids = wanted[step]
            each = max(1, rng.choice((1, len(ids), len(ids))))
            for some in (ids[first : first + each] for first in range(0, len(ids), each)):
                match step:
                    case "ack":
                        await self._sent(partial(clients.ack, http, name, place, some))
                    case "nack":
                        await self._sent(partial(clients.nack, http, name, place, some))
                    case _:
                        limit, delay_ms = LIMIT if step == "dead" else NO_LIMIT, rng.choice(settings.delay_ms)
                        retry = partial(clients.retry, max_redeliver=limit, delay_ms=delay_ms)
                        await self._sent(partial(retry, http, name, place, some))

    async def _sent(self, call: Callable[[], Awaitable[bool]]) -> None:
        """Send a request; if it did not succeed, repeat it or not."""
        for _ in range(REPEATS_MAX):
            if await call() or self._rng.random() >= self._run.settings.repeat_share:
                return
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._clients.access.base_url()


def step_of(seed: int, subscription: str, message: dict[str, Any]) -> str:
    """What is to be done with a message now: "ack", "retry", "dead" or "nack"."""
    properties = message["properties"]
    rng = random.Random(f"{seed} {subscription} {properties.get('producer')} {properties.get('sequence')}")
    times = int(properties.get("RECONSUMETIMES", "0"))
    plan = rng.choices(("ack", "retry", "dead", "return"), (30, 40, 15, 15))[0]
    match plan:
        case "retry":
            return "retry" if times < rng.randint(1, 3) else "ack"
        case "return":
            return "retry" if times < rng.choice((0, 1)) else "nack"
        case _:
            return plan
