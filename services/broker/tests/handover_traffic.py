"""Traffic to a cluster of several brokers while brokers stop, start, die and are drained, and what clients saw of it.

Producers send numbered messages with one key each and sequence ids; consumers of a key_shared subscription use long
polls. Each client keeps to one broker, as through a load balancer: after a response with `Connection: close`, and if
nothing listens, it goes on with the next one, and repeats only a request that was not sent. Every other outcome than
success is a failed call, unless `is_patient`: then the client repeats the same request until it succeeds, as a client
must after a crash.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

AWAY_S = 60.0
"""Maximum seconds for which a client looks for a broker that listens, or repeats a request."""
SUBSCRIPTION = "s"


@dataclass
class Seen:
    """What the clients saw."""

    failures: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    """By key: the number of messages that were answered as stored, from 0 on."""
    first: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By key: the numbers in the order in which they arrived for the first time."""
    repeated: int = 0
    """Number of deliveries of a message that had arrived before."""
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """Of each produce request: when it ended, and its seconds."""
    stored_at: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By topic: when produce requests were answered."""

    def percentile(self, share: float, *, since: float = 0.0, until: float = float("inf")) -> float:
        """Return the seconds within which this share of the produce requests was answered."""
        found = sorted(seconds for at, seconds in self.latencies if since <= at <= until)
        return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0

    def problems(self) -> list[str]:
        """Return what is wrong: failed calls, lost messages, messages out of order."""
        found = list(self.failures)
        for key, count in self.sent.items():
            numbers = self.first[key]
            if missing := sorted(set(range(count)) - set(numbers)):
                found.append(f"{key}: {len(missing)} messages lost, first {missing[0]}")
            if numbers != sorted(numbers):
                found.append(f"{key}: out of order")
        return found


class Client:
    def __init__(self, urls: list[str], number: int, seen: Seen, *, is_patient: bool) -> None:
        self._urls = urls
        self._at = number % len(urls)
        self._seen = seen
        self._is_patient = is_patient
        self._http = httpx.AsyncClient(timeout=60, trust_env=False)

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """Return the JSON of a successful answer; None after a failed call."""
        ends_at = time.monotonic() + AWAY_S
        while True:
            try:
                answer = await self._http.request(method, self._urls[self._at] + path, **options)
                if answer.headers.get("connection") == "close":
                    self._at = (self._at + 1) % len(self._urls)
                if answer.status_code < 300:
                    return answer.json()
                problem = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
            except httpx.ConnectError as error:
                problem = f"{method} {path}: nobody listens ({error!r})"
                self._at = (self._at + 1) % len(self._urls)
                if time.monotonic() < ends_at:
                    await asyncio.sleep(0.02)
                    continue
            except httpx.HTTPError as error:
                problem = f"{method} {path}: {error!r} at {self._urls[self._at]}"
                self._at = (self._at + 1) % len(self._urls)
            if not self._is_patient or time.monotonic() >= ends_at:
                self._seen.failures.append(problem)
                return None
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._http.aclose()


class Traffic:
    """`async with Traffic(urls, ...) as traffic:` runs the clients during the block, then receives what is left."""

    def __init__(
        self,
        urls: list[str],
        *,
        topics: int,
        producers: int,
        consumers: int,
        pause_s: float,
        batch: int = 1,
        is_patient: bool = False,
        name: str = "moving",
    ) -> None:
        """`producers` and `consumers`: of all topics. `pause_s`: between two requests of a producer. `batch`: messages
        per request."""
        self.seen = Seen()
        self._urls, self._pause_s, self._batch, self._is_patient = urls, pause_s, batch, is_patient
        self.topics = [f"/v1/topics/public/default/{name}{number}" for number in range(topics)]
        self._counts = producers, consumers
        self._clients: list[Client] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    def _client(self, number: int) -> Client:
        client = Client(self._urls, number, self.seen, is_patient=self._is_patient)
        self._clients.append(client)
        return client

    async def __aenter__(self) -> "Traffic":
        first = Client(self._urls, 0, self.seen, is_patient=True)
        for topic in self.topics:
            await first.call("PUT", topic, json={})
            await first.call("PUT", f"{topic}/subscriptions/{SUBSCRIPTION}", json={})
        await first.close()
        producers, consumers = self._counts
        for number in range(consumers):
            self._consuming.append(asyncio.create_task(self._consume(number, self._client(number))))
        for number in range(producers):
            self._producing.append(asyncio.create_task(self._produce(number, self._client(number))))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._producing, return_exceptions=kind is not None)
        ends_at = time.monotonic() + AWAY_S
        while kind is None and time.monotonic() < ends_at and not self._is_complete():
            await asyncio.sleep(0.1)
        for task in self._consuming:
            task.cancel()
        await asyncio.gather(*self._consuming, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def _is_complete(self) -> bool:
        return all(len(self.seen.first[key]) >= count for key, count in self.seen.sent.items())

    async def _produce(self, number: int, client: Client) -> None:
        topic = self.topics[number % len(self.topics)]
        key, at = f"key{number}", 0
        path = f"{topic}/messages?producer=p{number}"
        while not self._stop.is_set():
            messages = [{"payload": str(one), "key": key, "sequence_id": one} for one in range(at, at + self._batch)]
            body = messages if len(messages) > 1 else messages[0]
            began = time.monotonic()
            if await client.call("POST", path, json=body) is None:
                return
            ended = time.monotonic()
            self.seen.latencies.append((ended, ended - began))
            self.seen.stored_at[topic].append(ended)
            at += self._batch
            self.seen.sent[key] = at
            await asyncio.sleep(max(0.0, self._pause_s - (ended - began)))

    async def _consume(self, number: int, client: Client) -> None:
        path = f"{self.topics[number % len(self.topics)]}/subscriptions/{SUBSCRIPTION}"
        seen: dict[str, set[int]] = defaultdict(set)
        call = {"consumer": f"c{number}", "type": "key_shared", "max": 100, "wait_ms": 20_000, "ack_timeout_ms": 60_000}
        for serial in itertools.count():
            # A repetition gets the messages of an answer that was lost with the broker that passed it on.
            answer = await client.call("POST", f"{path}/receive", json={**call, "request_id": f"r{serial}"})
            if answer is None:
                return
            for message in answer["messages"]:
                key, value = message["key"], int(message["payload"])
                order = self.seen.first[key]
                if value in seen[key] or value in order[-2000:]:
                    self.seen.repeated += 1
                else:
                    order.append(value)
                seen[key].add(value)
            if answer["messages"]:
                acked = [message["message_id"] for message in answer["messages"]]
                if await client.call("POST", f"{path}/ack", json={"message_ids": acked}) is None:
                    return
