"""Produce and consume messages over the broker's HTTP data API, and read all topics at the end.

The traffic is independent of faults. A request is recorded in the history before it is sent, and its outcome
afterwards.

Rules without which the history could not be judged:

- A message is identified by (producer, sequence), which are its properties. The history has its payload's digest.
- A producer has at most one request in flight. Of two of its messages, the one with the lower sequence therefore comes
  first in the topic, unless the outcome of a request was unknown: such a message may be written at any later time.
- **Nothing is sent twice.** After a refusal or an unknown outcome, the next request has new data and new sequences, so
  a second copy of a message is an error of the cluster. (The validators also accept histories that invoke a sequence
  several times: the topic may then have as many copies as there were invocations that did not definitely fail.)
- Subscriptions are created before the first message. An additional subscription, `keeper`, is never read: it keeps
  messages that all other subscriptions have acknowledged from being trimmed before the last reading.
- A consumer that missed a response sets `redeliver` in its next request and first receives the messages of that
  response again.
- The last reading reads the topic without a subscription, from `earliest` to its end. It counts as the topic's content.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.traffic.clients import POLL_S, Clients, Outgoing, Place, TrafficError
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, Endpoint, fixed
from bindery_e2e.traffic.payloads import Payloads, find_files

__all__ = ["Counts", "Endpoint", "Traffic", "TrafficError", "TrafficSettings", "find_files", "fixed"]

BEHIND_S_MAX: Final = 1.0
"""Maximum delay in seconds that a producer makes up for after it fell behind its rate."""


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Producers, messages and consumers. The same seed sends the same data, at different times."""

    seed: int = 0
    topics: tuple[str, ...] = ("public/default/e2e-0", "public/default/e2e-1")
    """`tenant/namespace/name`; the topics must be empty."""
    producers_per_topic: int = 2
    messages_per_s: float = 100.0
    """Rate of all producers together; 0: as fast as responses arrive."""
    batch_share: float = 0.3
    """Share of the requests with several messages."""
    batch_max: int = 20
    subscriptions: tuple[tuple[str, str, int], ...] = (("workers", "shared", 2), ("ledger", "exclusive", 1))
    """(name, "shared" or "exclusive", consumers) on each topic."""
    receive_max: int = 100
    receive_wait_ms: int = 1000
    ack_timeout_ms: int = 15_000
    nack_share: float = 0.01
    """Share of a shared subscription's messages that consumers return, so that redelivery happens."""
    request_timeout_s: float = 15.0


@dataclass(slots=True)
class Counts:
    """Number of messages so far. `delivered` includes repeated deliveries."""

    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    delivered: int = 0
    bytes_acknowledged: int = 0


class Traffic:
    """Traffic that runs within `async with`; await `finish` before the block ends.

    Without `finish`, all clients are cancelled, and the history is judged as incomplete.
    """

    def __init__(
        self,
        history: History,
        endpoint: Endpoint,
        *,
        files: Sequence[Path],
        settings: TrafficSettings = TrafficSettings(),
    ) -> None:
        """`files`: sources of the payloads, see `find_files`. `endpoint`: called again after a lost connection."""
        self.counts = Counts()
        self.settings = settings
        self._history = history
        self._clients = Clients(history, endpoint, timeout_s=settings.request_timeout_s)
        self._files = files
        self._places = [Place(t, name, kind) for t in settings.topics for name, kind, _ in settings.subscriptions]
        self._over = asyncio.Event()
        self._producers: list[asyncio.Task[None]] = []
        self._consumers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._set_up()
        settings = self.settings
        for number, topic in enumerate(t for t in settings.topics for _ in range(settings.producers_per_topic)):
            self._producers.append(asyncio.create_task(self._produce(f"p{number}", topic)))
        consumers = {(name, kind): count for name, kind, count in settings.subscriptions}
        for place in self._places:
            for number in range(consumers[place.subscription, place.kind]):
                name = f"{place.topic.rpartition('/')[2]}-{place.subscription}-{number}"
                self._consumers.append(asyncio.create_task(self._consume(name, place)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._producers, *self._consumers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_acknowledged(self, count: int, *, timeout_s: float) -> None:
        """Wait until `count` more messages are acknowledged. Raises TrafficError at the timeout."""
        wanted = self.counts.acknowledged + count
        began = time.monotonic()
        while self.counts.acknowledged < wanted:
            self._check()
            if time.monotonic() - began > timeout_s:
                missing = wanted - self.counts.acknowledged
                raise TrafficError(f"{missing} of {count} messages were not acknowledged within {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)

    async def stop_producing(self) -> None:
        """Stop the producers after their requests in flight."""
        self._over.set()
        await asyncio.gather(*self._producers)

    async def finish(self, *, timeout_s: float = 180.0) -> None:
        """Stop producing, wait until consumers have drained their subscriptions, and read every topic.

        A timeout raises no error; the history records it and the validators judge it. `timeout_s`: maximum seconds of
        each subscription and of each reading.
        """
        await self.stop_producing()
        self._check()
        await asyncio.gather(*(self._drain(place, timeout_s=timeout_s) for place in self._places))
        self._check()
        for task in self._consumers:
            task.cancel()
        await asyncio.gather(*self._consumers, return_exceptions=True)
        await self.read_back(timeout_s=timeout_s)

    async def read_back(self, *, timeout_s: float, number: int = 1) -> None:
        """Read every topic from earliest to its end, as round `number`."""
        await asyncio.gather(
            *(self._clients.read(topic, number, timeout_s=timeout_s) for topic in self.settings.topics)
        )

    def _check(self) -> None:
        for task in (*self._producers, *self._consumers):
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise TrafficError(f"a client of the traffic failed: {task.exception()!r}") from task.exception()

    # -- setup ---------------------------------------------------------------------------------------------------------

    async def _set_up(self) -> None:
        await self._clients.create(self._places)
        for place in self._places:
            self._history.observe("subscribed", **place.fields, kind=place.kind)

    # -- producing -----------------------------------------------------------------------------------------------------

    async def _produce(self, producer: str, topic: str) -> None:
        rng = random.Random(f"{self.settings.seed} {producer}")
        payloads = Payloads(self._files, seed=rng.getrandbits(32))
        sequence = 0
        due = asyncio.get_running_loop().time()
        async with self._clients.access.client() as http:
            while not self._over.is_set():
                count = rng.randint(2, self.settings.batch_max) if rng.random() < self.settings.batch_share else 1
                due = await self._pace(due, count)
                await self._clients.access.base_url()
                if self._over.is_set():
                    return
                messages = await asyncio.to_thread(take, payloads, sequence, count)
                sequence += count
                if not await self._send(http, producer, topic, messages, rng):
                    await asyncio.sleep(RETRY_PAUSE_S * rng.uniform(0.5, 1.5))

    async def _pace(self, due: float, count: int) -> float:
        """Wait until `due`; return the time at which the next request is due."""
        settings = self.settings
        if settings.messages_per_s <= 0:
            return due
        now = asyncio.get_running_loop().time()
        if now < due:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), due - now)
        producers = len(settings.topics) * settings.producers_per_topic
        return max(due, now - BEHIND_S_MAX) + count * producers / settings.messages_per_s

    async def _send(
        self, http: httpx.AsyncClient, producer: str, topic: str, messages: Outgoing, rng: random.Random
    ) -> bool:
        """Send messages. Returns whether all of them were acknowledged."""
        ids = await self._clients.produce(http, producer, topic, messages, batch=rng.random() < 0.8)
        self._count(ids, [len(payload) for payload in messages.payloads])
        return all(":" in text for text in ids)

    def _count(self, outcomes: Sequence[str], sizes: Sequence[int]) -> None:
        for outcome, size in zip(outcomes, sizes, strict=True):
            if outcome == "failed":
                self.counts.failed += 1
            elif outcome == "unknown":
                self.counts.unknown += 1
            else:
                self.counts.acknowledged += 1
                self.counts.bytes_acknowledged += size

    # -- consuming -----------------------------------------------------------------------------------------------------

    async def _consume(self, consumer: str, place: Place) -> None:
        rng = random.Random(f"{self.settings.seed} {consumer}")
        redeliver = False
        async with self._clients.access.client(longer_s=self.settings.receive_wait_ms / 1000) as http:
            while True:
                await self._clients.access.base_url()
                messages = await self._receive(http, consumer, place, redeliver=redeliver)
                redeliver = messages is None
                if messages is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                ids = [str(message["message_id"]) for message in messages]
                kept = [i for i in ids if place.kind != "shared" or rng.random() >= self.settings.nack_share]
                returned = sorted(set(ids) - set(kept))
                if returned:
                    await self._clients.nack(http, consumer, place, returned)
                if kept and not await self._clients.ack(http, consumer, place, kept):
                    redeliver = True

    async def _receive(
        self, http: httpx.AsyncClient, consumer: str, place: Place, *, redeliver: bool
    ) -> list[dict[str, Any]] | None:
        """The messages of one receive request; None: the request did not succeed."""
        settings = self.settings
        body = {
            "max": settings.receive_max,
            "wait_ms": settings.receive_wait_ms,
            "ack_timeout_ms": settings.ack_timeout_ms,
            "redeliver": redeliver,
        }
        messages = await self._clients.receive(http, consumer, place, body)
        self.counts.delivered += len(messages or ())
        return messages

    # -- completion ----------------------------------------------------------------------------------------------------

    async def _drain(self, place: Place, *, timeout_s: float) -> None:
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._clients.access.client() as http:
                while not await self._clients.is_drained(http, place):
                    self._check()
                    await asyncio.sleep(POLL_S * 2)
                complete = True
        self._history.observe("drained", **place.fields, complete=complete)


def take(payloads: Payloads, sequence: int, count: int) -> Outgoing:
    """Create `count` messages with sequences from `sequence` on. Reads files."""
    taken = Outgoing()
    for number in range(count):
        taken.add(sequence + number, payloads.next())
    return taken
